"""What a person mistypes or asks of the wrong machine: one block, exit 2, and nothing has been started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import LAB, Done, Orch, free_port
from tests.faults.conftest import Traces, value_of

Typed = Callable[..., Done]

GOOD = """
    workload: orch_lab:Trivial
    metric: {name: val/loss, mode: min}
    params:
      x: {grid: [0, 1]}
      steps: 2
"""


@pytest.fixture(scope="module")
def known(orch: Orch) -> str:
    """A small sweep that is there."""
    orch("sweep", orch.sweep_file(GOOD, "known_sweep"), "--inline")
    return "known_sweep"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("workload=moe_ruter", "unknown workload 'moe_ruter'; did you mean moe_router?"),
        ("workload=orch_lab:Trivail", "orch_lab has no class 'Trivail'"),
        ("workload=orch_lab:Nested", "has no Config, no metrics, no run"),
        ("workload=no_lab:Trivial", "no module 'no_lab' on the path"),
        ("params.stepz=3", "unknown key params.stepz, did you mean steps?"),
        ("params.steps=many", "'many': Input should be a valid integer"),
        ("params.x={grid: []}", "grid"),
        ("exclude=[{x: 0}, {x: 1}]", "exclude  its entries match every point; nothing would be trained"),
        ("metric.name=val/los", "did you mean val/loss?"),
        ("params.x", "write --set path.of.key=value"),
        ("resources.cpu=-1", "resources.cpu"),
    ],
)
def test_a_wrong_value_is_refused_where_it_was_given(
    orch: Orch, type_here: Typed, name: str, untouched: Traces, override: str, words: str
) -> None:
    refused = type_here("sweep", orch.sweep_file(GOOD, name), "--set", override)
    assert words in refused.err
    assert refused.err.startswith("--set  ")
    assert refused.out == ""


def test_all_mistakes_of_a_file_come_in_one_answer_at_their_lines(
    orch: Orch, type_here: Typed, name: str, untouched: Traces
) -> None:
    text = """
        workload: moe_router
        metric: val/mse
        params:
          steps: 4
          num_experts: 4
          k: 8
    """
    file = orch.sweep_file(text, name)
    refused = type_here("sweep", file)
    assert refused.err == f"{file}:7  params.k  k=8 experts per token, but num_experts=4\n"
    file.write_text(file.read_text().replace("k: 8", "dropout: 0.1") + "resorces: {cpu: 1}\n")
    refused = type_here("sweep", file)
    places = [line.split("  ")[:2] for line in refused.err.splitlines()]
    assert places == [[f"{file}:7", "params.dropout"], [f"{file}:8", "resorces"]]


DRAWN = """
    workload: orch_lab:Whole
    metric: {name: val/loss, mode: min}
    params: {x: {uniform: [0, 1]}, steps: 2}
    search: {algorithm: random, samples: 2}
"""


def test_a_draw_that_the_workload_refuses_is_told_with_its_trial_before_anything_starts(
    orch: Orch, type_here: Typed, name: str, untouched: Traces
) -> None:
    file = orch.sweep_file(DRAWN, name)
    for command in ("plan", "sweep"):
        refused = type_here(command, file).err
        assert refused.startswith(f"{file}:4  params.x  x=0.")
        assert refused.endswith("}; leave such points out by exclude or when\n")
        assert refused.count("\n") == 1


def test_a_draw_that_is_refused_while_the_sweep_runs_ends_it_with_what_it_has(orch: Orch, name: str) -> None:
    file = orch.sweep_file(DRAWN.replace("random", "optuna"), name)
    assert "is no whole number, in the trial {x: 0." in orch("sweep", file, "--inline", expect=2).err
    assert name not in orch("status").out
    done = orch("sweep", file, "--inline", "--set", "search.enqueue=[{x: 1}]", expect=1)
    assert f"{name}: 1/1 finished" in done.out
    assert "is no whole number, in the trial {x: 0." in done.out + done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("path", "words"), [("missing.yaml", "no such file"), (str(LAB), "is a folder; name a YAML file")]
)
def test_what_is_no_file_is_one_line(type_here: Typed, untouched: Traces, path: str, words: str) -> None:
    refused = type_here("sweep", path)
    assert words in refused.err
    assert refused.err.count("\n") == 1


def test_a_workload_whose_module_raises_shows_the_original_traceback_from_the_users_line_on(
    orch: Orch, name: str, untouched: Traces, tmp_path: Path
) -> None:
    (tmp_path / "broken_lab.py").write_text("import json\n\nVALUES = json.loads('{')\n")
    file = orch.sweep_file(GOOD.replace("orch_lab", "broken_lab"), name)
    done = subprocess.run(orch.command("sweep", file), cwd=tmp_path, env=orch_env(orch), capture_output=True, text=True)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert lines[:2] == [f"{file}:2  workload  importing broken_lab failed:", "Traceback (most recent call last):"]
    assert 'broken_lab.py", line 3, in <module>' in lines[2]
    assert "JSONDecodeError" in lines[-1]


def orch_env(orch: Orch) -> dict[str, str]:
    return {**orch.env, "PYTHONPATH": str(LAB.parents[1])}


@pytest.mark.parametrize("command", ["runs", "best", "compare", "status", "rm"])
def test_an_unknown_sweep_names_the_nearest(type_here: Typed, known: str, untouched: Traces, command: str) -> None:
    assert type_here(command, "known_swep").err == "unknown sweep 'known_swep'; did you mean known_sweep?\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("sql", "selct 1"), 'syntax error at or near "selct"\n  selct 1\n  ^\n'),
        (("sql", ""), "the query is empty"),
        (("sql", "select 1; drop view orch.runs"), "one statement at a time"),
        (("sql", "drop view orch.runs"), "orch sql only reads"),
        (("sql", "delete from orch.runs"), "orch sql only reads"),
        (("sql", "select * from runz"), "nearest: runs"),
        (("sql", "select qqqq from runs"), r"'\d VIEW' their columns"),
        (("sql", r"\d runz"), "there is no view runz"),
        (("sql", r"\dt"), r"there are \d and \d VIEW"),
        (("sql", "select val/loss from sweep_known_sweep"), 'nearest: "val/loss"'),
        (("compare", "known_sweep", "--by", "y"), "--by  'y' is not a parameter of sweep known_sweep; known: x"),
        (("compare", "known_sweep", "--metric", "val/los"), "reports 'val/los'; did you mean val/loss?"),
        (("best", "known_sweep", "--metric", "nothing"), "known: a, b, c, train/loss, val/loss"),
        (("runs", "known_sweep", "--sort", "val/los"), "no column 'val/los'; did you mean val/loss?"),
        (("runs", "known_sweep", "--where", "x <"), '--where  syntax error at or near ")"\n  x <\n'),
        (("runs", "known_sweep", "--where", "1=1); drop table x; --"), "--where  syntax error"),
        (("runs", "known_sweep", "--where", "true) limit 1; select (true"), "--where  one statement at a time"),
        (("runs", "known_sweep", "--where", "y = 1"), 'column "y" does not exist\n  y = 1\n'),
        (("runs", "known_sweep", "--limit", "0"), "is not in the range"),
        (("sweep",), "Missing argument 'SPEC'"),
        (("swep", "x.yaml"), "Did you mean sweep?"),
    ],
)
def test_a_wrong_question_is_refused_in_words(
    type_here: Typed, known: str, untouched: Traces, arguments: tuple[str, ...], words: str
) -> None:
    refused = type_here(*arguments)
    assert words in refused.err
    assert refused.out == ""


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://u:hush@127.0.0.1:1/db", "cannot connect"),
        ("mysql://u:hush@127.0.0.1/db", "starts with mysql://; orch needs PostgreSQL"),
        ("/tmp/hush.sqlite", "has no scheme; orch needs PostgreSQL"),
        ("postgresql://u:hu@sh@127.0.0.1/db", "percent-encode"),
    ],
)
def test_a_database_that_is_none_is_told_without_its_password(
    orch: Orch, type_here: Typed, monkeypatch: pytest.MonkeyPatch, name: str, tmp_path: Path, url: str, words: str
) -> None:
    monkeypatch.setenv("ORCH_DATABASE_URL", url)
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / ".orch"))
    for command in (("status",), ("sweep", orch.sweep_file(GOOD, name), "--inline")):
        refused = type_here(*command)
        assert words in refused.err
        assert "hush" not in refused.err
        assert refused.err.count("\n") == 1
    assert not (tmp_path / ".orch").exists()


def test_a_refused_login_is_told_without_its_password(orch: Orch, server_url: str, tmp_path: Path) -> None:
    url = server_url.replace(server_url.split(":")[2].split("@")[0], "not-the-password")
    apart = Orch({**orch.env, "ORCH_DATABASE_URL": url, "ORCH_HOME": str(tmp_path / ".orch")}, tmp_path)
    refused = apart("status", expect=2)
    assert "wrong user or password" in refused.err
    assert "not-the-password" not in refused.err


@pytest.mark.parametrize(
    ("resources", "flags", "words"),
    [
        ("{gpu: 1}", (), "needs 1 GPU, have 0"),
        ("{cpu: 1000}", (), "needs 1000 CPUs"),
        ("{gpu: 1}", ("--inline",), "--inline trains on this process's CPU"),
    ],
)
def test_what_this_machine_never_has_is_refused_before_ray_starts(
    orch: Orch, name: str, untouched: Traces, resources: str, flags: tuple[str, ...], words: str
) -> None:
    started = time.monotonic()
    hidden = Orch({**orch.env, "CUDA_VISIBLE_DEVICES": ""}, orch.folder)
    refused = hidden("sweep", orch.sweep_file(GOOD + f"    resources: {resources}\n", name), *flags, expect=2)
    assert words in refused.err
    assert refused.err.count("\n") == 1
    assert time.monotonic() - started < 10


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that is bound, so that nobody else takes it, and not listened on."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def test_a_cluster_that_is_not_there_is_told_at_once(
    orch: Orch, name: str, untouched: Traces, silent_port: int
) -> None:
    started = time.monotonic()
    file = orch.sweep_file(GOOD, name)
    by_environment = Orch({**orch.env, "RAY_ADDRESS": f"127.0.0.1:{silent_port}"}, orch.folder)
    assert "no Ray cluster answers (Connection refused)" in by_environment("sweep", file, expect=2).err
    assert "write HOST:PORT" in orch("sweep", file, "--address", "nonsense", expect=2).err
    assert time.monotonic() - started < 20


def test_a_foreign_experiment_of_the_sweeps_name_is_left_alone(
    orch: Orch, name: str, server_url: str, untouched: Traces
) -> None:
    value_of(server_url, "insert into public.experiments (name, lifecycle_stage) values (%s, 'active')", name)
    try:
        refused = orch("sweep", orch.sweep_file(GOOD, name), expect=2)
    finally:
        value_of(server_url, "delete from public.experiments where name = %s", name)
    assert "it is not a sweep of orch" in refused.err
    assert "--name NAME" in refused.err


def test_a_deleted_experiment_is_refused_before_ray_starts_with_both_ways_out(
    orch: Orch, name: str, server_url: str
) -> None:
    file = orch.sweep_file(GOOD, name)
    orch("sweep", file, "--inline")
    value_of(server_url, "update public.experiments set lifecycle_stage = 'deleted' where name = %s", name)
    started = time.monotonic()
    refused = orch("sweep", file, expect=2)
    assert time.monotonic() - started < 10
    assert f"MLflow's experiment '{name}' was deleted" in refused.err
    assert "mlflow experiments restore" in refused.err
    assert "--name NAME" in refused.err
    assert "***" in refused.err
    orch("sweep", file, "--inline", "--name", f"{name}_b")
    orch("rm", name)
    orch("sweep", file, "--inline")


def test_folders_that_cannot_be_written_are_named_together_with_their_settings(
    orch: Orch, name: str, untouched: Traces
) -> None:
    places = {"ORCH_JOURNAL_DIR": "/dev/null/journal", "ORCH_ARTIFACT_ROOT": "/dev/null/artifacts"}
    refused = Orch({**orch.env, **places}, orch.folder)("sweep", orch.sweep_file(GOOD, name), "--inline", expect=2)
    assert [line.split("  ")[0] for line in refused.err.splitlines()] == list(places.values())
    assert all(variable in refused.err for variable in places)


def test_a_home_that_cannot_be_made_is_one_line(orch: Orch, name: str) -> None:
    nowhere = Orch({**orch.env, "ORCH_HOME": "/dev/null/home"}, orch.folder)
    for command in (("status",), ("sweep", orch.sweep_file(GOOD, name), "--inline")):
        refused = nowhere(*command, expect=2)
        assert refused.err.startswith("/dev/null/home  cannot be used: Not a directory")
        assert refused.err.count("\n") == 1
    assert "wrong" in nowhere("doctor", expect=1).out


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes a user to whom the folder is closed")
def test_a_home_that_belongs_to_somebody_else_is_one_line(orch: Orch, tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o755)
    as_nobody = "import os, sys; os.setgid(65534); os.setuid(65534); from pathlib import Path\n"
    code = as_nobody + (
        "from orchestrator.settings import Home\n"
        "try: Home(Path(sys.argv[1])).secret('postgres')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    home = "/root/.orch-of-root" if os.access("/root", os.W_OK) else str(folder)
    command = [sys.executable, "-c", "import orchestrator.settings\n" + code, home]
    done = subprocess.run(command, capture_output=True, text=True, env=orch_env(orch), check=True)
    assert done.stdout.startswith(f"PlaceUnusable {home}  cannot be used: Permission denied")


def test_a_full_disk_is_told_before_anything_starts(orch: Orch, name: str, untouched: Traces) -> None:
    limited = [sys.executable, "-c", LIMITED, *map(str, orch.command("sweep", orch.sweep_file(GOOD, name), "--inline"))]
    done = subprocess.run(limited, cwd=LAB, env=orch.env, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "cannot be written: File too large" in done.stderr
    assert "ORCH_JOURNAL_DIR" in done.stderr
    assert "Traceback" not in done.stderr


# A limit on the size of a file acts as a full disk, and needs no file system of its own.
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_an_occupied_port_is_refused_before_the_database_starts(orch: Orch, tmp_path: Path) -> None:
    port = free_port()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port))
        holder.listen()
        apart = Orch({**orch.env, "ORCH_HOME": str(tmp_path / ".orch")}, tmp_path)
        refused = apart("ui", "--port", port, expect=2)
    assert "cannot be used (Address already in use)" in refused.err
    assert not (tmp_path / ".orch").exists()
