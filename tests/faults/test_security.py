"""Who is let in, and what a hostile text can do: nothing but be refused or shown as text."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.database import embedded
from orchestrator.errors import ResourceError
from orchestrator.execution.ray_tune.reachable import asks_for_token
from orchestrator.settings import Home
from orchestrator.tracking.artifacts import store_file
from tests.conftest import Done, Orch, free_port
from tests.faults.conftest import Traces, wait_until

Typed = Callable[..., Done]

STRANGER_UID = 65534
SWEEP = """
    workload: orch_lab:Odd
    metric: {name: val/loss, mode: min}
    params: {x: {grid: [1.0, 2.0]}, steps: 2}
"""


@pytest.fixture(scope="module")
def known(orch: Orch) -> str:
    """A small sweep that is there."""
    orch("sweep", orch.sweep_file(SWEEP, "guarded"), "--inline")
    return "guarded"


# Other users of this machine


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reaches_neither_the_server_nor_a_secret_nor_anything_in_the_home(
    home: Home, server_url: str
) -> None:
    server, secret = embedded.running(home), home.secret_file("postgres")
    assert server is not None
    socket_file = server.socket_folder / ".s.PGSQL.5432"
    assert socket_file.exists()
    for name in ("postgres", "ray_token"):
        assert home.secret_file(name).stat().st_mode & 0o777 == 0o600
    assert refusal_of_a_stranger(lambda: socket.socket(socket.AF_UNIX).connect(str(socket_file))) == "PermissionError"
    assert refusal_of_a_stranger(secret.read_text) == "PermissionError"
    assert refusal_of_a_stranger(lambda: os.listdir(home.path)) == "PermissionError"


def refusal_of_a_stranger(attempt: Callable[[], object]) -> str:
    """The name of the error that `attempt` meets in a process of another user; empty if it meets none."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(STRANGER_UID)
            os.setuid(STRANGER_UID)
            attempt()
        except BaseException as error:
            os.write(write_end, type(error).__name__.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write_end)
    with os.fdopen(read_end) as answer:
        return answer.read()


# Ray


@pytest.fixture
def open_ray() -> Iterator[str]:
    """The address of a Ray that asks nobody for a token."""
    folder, port = Path(tempfile.mkdtemp(prefix="orch-open-", dir="/tmp")), free_port()
    ray = [Path(sys.executable).with_name("ray"), "start", "--head", f"--port={port}", f"--temp-dir={folder}"]
    env = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    with (folder / "log").open("wb") as log:
        options = ["--num-cpus=1", "--include-dashboard=false", "--block"]
        head = subprocess.Popen([*ray, *options], env=env, stdout=log, stderr=log)
    try:
        wait_until(lambda: "Ray runtime started" in (folder / "log").read_text() or head.poll() is not None)
        yield f"127.0.0.1:{port}"
    finally:
        for process in (psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        head.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def test_the_doctor_warns_of_a_cluster_that_lets_everybody_in(orch: Orch, open_ray: str) -> None:
    told = Orch({**orch.env, "RAY_ADDRESS": open_ray}, orch.folder)("doctor", expect=1)
    assert f"{open_ray} lets everybody in" in told.out
    assert "RAY_AUTH_MODE=token" in told.out


def test_what_is_no_ray_neither_asks_nor_lets_in() -> None:
    with pytest.raises(ResourceError, match="no Ray cluster answers"):
        asks_for_token(f"127.0.0.1:{free_port()}")


# Sweep files


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("note: !!python/object/apply:os.system ['touch PWNED']", "tag !!python/object/apply:os.system"),
        ("note: !!python/name:os.system", "tag !!python/name:os.system"),
        ("tags: !<tag:yaml.org,2002:python/object/new:subprocess.Popen> [[touch, PWNED]]", "a sweep file holds plain"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nnote: [*c, *c]", "alias *c: write the value out"),
        ("note: " + "[" * 100_000, "nested more than 32 levels deep"),
        ("note: " + "x" * 2**20, "larger than 1 MiB"),
        ("note: 'a\0b'", "not valid YAML"),
    ],
    ids=["apply", "name", "new", "laughs", "deep", "huge", "nul"],
)
def test_a_sweep_file_runs_nothing_and_cannot_blow_up(
    orch: Orch, type_here: Typed, name: str, untouched: Traces, text: str, words: str
) -> None:
    file = orch.sweep_file(SWEEP, name)
    file.write_text(file.read_text() + text.replace("PWNED", str(file.with_name("pwned"))))
    assert words in type_here("sweep", file).err
    assert not file.with_name("pwned").exists()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("os:system", "is no class but <built-in function system>"),
        ("builtins:eval", "is no class but <built-in function eval>"),
        ("subprocess:Popen", "has no Config, no metrics"),
        ("orch_lab:__builtins__", "names no class; write package.module:Class"),
        ("orch_lab:Odd.__init__", "names no class"),
        ("../planted:Odd", "names no class"),
        ("/tmp/planted:Odd", "names no class"),
        ("..planted:Odd", "names no class"),
        ("planted.py:Odd", "no module 'planted'"),
        ("orch_lab:", "names no class"),
        (":Odd", "names no class"),
        ("orch_lab:Odd;import os", "names no class"),
    ],
)
def test_a_workload_is_a_class_on_the_users_own_path_or_refused(
    orch: Orch, type_here: Typed, name: str, untouched: Traces, address: str, words: str
) -> None:
    refused = type_here("sweep", orch.sweep_file(SWEEP, name), "--set", f"workload='{address}'")
    assert words in refused.err


def test_only_commands_that_train_import_the_users_code(orch: Orch, name: str, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    code = f"open({str(marks)!r}, 'a').write('imported ')\nfrom orch_lab import Odd as Own\n"
    (tmp_path / "own_lab.py").write_text(code)
    beside = Orch({**orch.env, "PYTHONPATH": str(tmp_path)}, tmp_path)
    beside("sweep", beside.sweep_file(SWEEP.replace("orch_lab:Odd", "own_lab:Own"), name), "--inline")
    assert marks.read_text()
    marks.unlink()
    for words in (("status", name), ("runs", name), ("best", name), ("compare", name), ("health", name), ("doctor",)):
        beside(*words)
        assert not marks.exists(), words


# Names that become files


def test_names_and_values_of_a_sweep_lead_to_no_file_of_theirs(orch: Orch, name: str, home: Home) -> None:
    hostile = ["../../../planted", "/tmp/planted", "a\\nb", "x" * 6_001, "$(touch planted)", "<b>planted</b>"]
    hostile.append("\\e[31mplanted")
    values = ", ".join(f'"{value}"' for value in hostile)
    text = SWEEP.replace("x: {grid: [1.0, 2.0]}", f"note: {{grid: [{values}]}}")
    before = everything_around(home, orch.folder)
    file = orch.sweep_file(text, name)
    assert (
        "'../../planted' is no sweep name" in orch("sweep", file, "--inline", "--name", "../../planted", expect=2).err
    )
    said = [orch("sweep", file, "--inline"), *(orch(command, name) for command in ("runs", "best", "compare"))]
    assert all("\x1b" not in done.out and "\\x1b[31mplanted" in done.out for done in (said[0], said[1]))
    assert not any("\x1b" in done.out for done in said)
    assert "planted" not in " ".join(everything_around(home, orch.folder) - before)
    rows = orch.rows(f"select params ->> 'note' as note from runs where sweep = '{name}' order by trial")
    assert [row["note"] for row in rows] == [value.replace("\\n", "\n").replace("\\e", "\x1b") for value in hostile]


def everything_around(home: Home, folder: Path) -> set[str]:
    """Names of what a path that escapes would hit: the home with its artifacts and logs, the folders around it."""
    places = [*home.path.rglob("*"), *home.path.parent.iterdir(), *folder.iterdir(), *Path("/tmp").iterdir()]
    return {str(path) for path in places}


@pytest.mark.parametrize("command", ["status", "runs", "best", "health", "logs"])
def test_a_sweep_is_looked_up_by_name_and_no_path_or_sql(type_here: Typed, known: str, command: str) -> None:
    for wanted in ("../../etc/passwd", "guarded' or '1'='1", 'guarded"; drop view orch.runs; --'):
        assert type_here(command, wanted).err.startswith("unknown sweep")


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/tmp/x", ".", "a/..", "a\0b", "a\nb", "\x1b[2J", "a\u202eb"])
def test_an_artifact_stays_in_its_runs_folder_under_a_name_that_can_be_shown(name: str, tmp_path: Path) -> None:
    (tmp_path / "given").write_text("x")
    folder = tmp_path / "store" / "run"
    with pytest.raises(ValueError, match="artifact name"):
        store_file(folder.as_uri(), tmp_path / "given", name)
    assert not (tmp_path / "store").exists()


def test_an_artifact_replaces_a_link_in_its_place_and_does_not_follow_it(tmp_path: Path) -> None:
    (tmp_path / "given").write_text("new")
    (tmp_path / "precious").write_text("old")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "model").symlink_to(tmp_path / "precious")
    store_file(folder.as_uri(), tmp_path / "given", "model")
    assert (tmp_path / "precious").read_text() == "old"
    assert (folder / "model").read_text() == "new"
    with pytest.raises(OSError, match="too long"):
        store_file(folder.as_uri(), tmp_path / "given", "x" * 300)


# SQL


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("1=1; drop view orch.runs", "syntax error"),
        ("1=1) union select usename, passwd from pg_shadow --", "syntax error"),
        ("1=1) union select count(*) from pg_authid where (true", "permission denied"),
        ("(1=1", "syntax error"),
        ("true /*", "unterminated /* comment"),
        ("exists (select from pg_authid)", "permission denied"),
        ("trial in (select 1 from public.runs)", "permission denied"),
        ("pg_read_file('/etc/passwd') is null", "permission denied"),
        ("lo_create(0) > 0", "denied"),
        ("true into temporary planted", "syntax error"),
    ],
)
def test_a_condition_reads_the_views_or_is_refused(type_here: Typed, known: str, where: str, words: str) -> None:
    refused = type_here("runs", known, "--where", where)
    assert refused.err.startswith("--where  ")
    assert words in refused.err


def test_a_comment_in_a_condition_hides_nothing_of_ours(orch: Orch, known: str) -> None:
    assert [row["trial"] for row in json_rows(orch("runs", known, "--where", "x > 1 --", "--format", "json"))] == [1]


def json_rows(done: Done) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(done.out)
    return rows


def test_a_file_with_a_query_in_another_encoding_is_refused_in_one_line(orch: Orch, tmp_path: Path) -> None:
    file = tmp_path / "query.sql"
    file.write_bytes("select 'é'".encode("latin-1"))
    refused = orch("sql", "-f", file, expect=2)
    assert refused.err == f"{file}  byte 8 is not UTF-8: save the query as UTF-8 and run it again\n"


def test_sql_starts_no_program(type_here: Typed, known: str, tmp_path: Path) -> None:
    for target in (f"program 'touch {tmp_path}/planted'", f"'{tmp_path}/planted'"):
        assert "permission denied" in type_here("sql", f"copy (select 1) to {target}").err
    assert not (tmp_path / "planted").exists()
