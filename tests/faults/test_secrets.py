"""The database's password after a sweep: in nothing that was printed, logged, tagged or left in a file."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote, urlsplit

import psutil
import pytest

from orchestrator.execution.ray_tune.reachable import asks_for_token
from orchestrator.masking import hide, mask
from orchestrator.settings import Home
from tests.conftest import Orch
from tests.faults.conftest import FragileServer, num_points, value_of, wait_until

# One trial raises with the password in its error's text: it read it from a file of its own.
LEAKING = """
    workload: orch_lab:Odd
    metric: {name: val/loss, mode: min}
    params: {do: {grid: [nothing, leak]}, file: FILE, steps: 100, sleep_s: 0.03}
    log_every: 1
    resources: {cpu: 0.5}
"""
TEXTS = (  # every column that may hold what a person, a workload or a library said
    "select value from public.tags union all select value from public.params",
    "select value from public.experiment_tags",
    "select spec::text || source || description from orch_ledger.sweeps",
    "select reason || error from orch_ledger.trials",
    "select error from orch_ledger.attempts",
    "select message || advice from orch_ledger.findings",
    "select line from orch_ledger.logs",
)


def files_with(needles: list[str], folder: Path, *spared: str) -> list[str]:
    """Files below `folder` in which one of the words stands, but for those in the spared folders."""
    texts = [needle.encode() for needle in needles]
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).parts[0] not in spared:
            data = path.read_bytes()
            found += [str(path) for text in texts if text in data]
    return found


def processes_with(needles: list[str], family: list[psutil.Process]) -> list[str]:
    """Processes on whose command line or in whose first environment one of the words stands."""
    told = [(" ".join(one.cmdline()), *one.environ().values()) for one in family]
    return [words[0] for words in told if any(needle in text for text in words for needle in needles)]


def test_a_password_full_of_special_characters_connects_and_shows_nowhere_and_ray_wants_its_token(
    fragile: FragileServer, name: str, tmp_path: Path
) -> None:
    password = "p%40:/?#x" + secrets.token_hex(4)
    fragile.value('drop role if exists "a@b"')
    fragile.value(f"create role \"a@b\" login superuser password '{password}'")
    place = urlsplit(fragile.orch.env["ORCH_DATABASE_URL"])
    url = f"postgresql://a%40b:{quote(password, safe='')}@/{place.path[1:]}?{place.query}"
    home = Home(tmp_path / ".orch")
    orch = Orch({**fragile.orch.env, "ORCH_DATABASE_URL": url, "ORCH_HOME": str(home.path)}, tmp_path)
    needles = [password, quote(password, safe=""), password[-8:]]
    leak = tmp_path / "leak"
    known_by_form = f"{url} or host=h password='{password}' or {{'password': '{password}'}}"
    leak.write_text(f"{known_by_form} or {password}\nor {password}")  # the first line is printed, all is raised

    process = orch.start_warm("sweep", orch.sweep_file(LEAKING.replace("FILE", str(leak)), name), "--json")
    wait_until(lambda: num_points(url, name) > 50, timeout_s=120)
    sessions = home.short_folder.with_name(f"{home.short_folder.name}-ray")
    assert list(sessions.glob("*/session_*/logs/*")), "Ray is writing its logs here"
    family = psutil.Process(process.pid).children(recursive=True)
    while_it_ran = processes_with(needles, family) + files_with(needles, sessions)
    while_it_ran += files_with(needles, home.path, "secrets")
    [gcs] = [one for one in family if "gcs_server" in one.name()]
    [port] = {one.laddr.port for one in gcs.net_connections() if one.status == psutil.CONN_LISTEN}
    assert asks_for_token(f"127.0.0.1:{port}")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output  # the one that raises
    assert "ConnectionError: cannot connect to postgresql://a%40b:***@/" in output

    commands = (("up", "--no-ui"), ("doctor",), ("down",), ("status", name), ("runs", name))
    said = [output, *(str(orch(*words, expect=None)) for words in commands)]
    assert not [text for text in said for needle in needles if needle in text]
    assert while_it_ran == []
    assert files_with(needles, home.path, "secrets") == []
    [kept] = (home.path / "artifacts").rglob("error.txt")
    assert "Traceback" in kept.read_text()
    printed = "select string_agg(line, '') from orch_ledger.logs where stream = 'stderr' and line like 'postgresql%'"
    assert "a%40b:***@/" in value_of(url, printed)
    assert "host=h password=*** or" in value_of(url, printed)
    for query in TEXTS:
        for needle in needles:
            count = f"select count(*) from ({query}) as t (said) where position(%s in said) > 0"
            assert value_of(url, count, needle) == 0, query


def test_the_embedded_servers_password_stays_in_its_file(orch: Orch, home: Home, name: str, tmp_path: Path) -> None:
    password, leak = home.secret("postgres"), tmp_path / "leak"
    leak.write_text(f"the server\nwith {password}")
    text = LEAKING.replace("FILE", str(leak)).replace("steps: 100, sleep_s: 0.03", "steps: 3")
    done = orch("sweep", orch.sweep_file(text, name), "--inline", expect=1)
    assert "ConnectionError: cannot connect to the server" in done.out + done.err
    [error] = orch.rows(f"select error from runs where sweep = '{name}' and error <> ''")
    assert error["error"].endswith("the server\nwith ***\n")
    assert password not in str(done) + str(orch("up", "--no-ui")) + str(orch("doctor"))
    assert files_with([password], home.path, "secrets") == []
    assert (home.path / "secrets").stat().st_mode & 0o777 == 0o700
    assert home.secret_file("postgres").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("postgresql://a%40b:p%2540%3A@/db?host=/tmp", "postgresql://a%40b:***@/db?host=/tmp"),
        ("at postgresql+psycopg://u:raw@at@host:5432/db.", "at postgresql+psycopg://u:***@host:5432/db."),
        ("http://host:80/plot@2x.png", "http://host:80/plot@2x.png"),
        ("redis://:secret@h/0, https://me:token@git", "redis://:***@h/0, https://me:***@git"),
        ("postgresql://h/db?user=u&password=a%20b&sslmode=require", "postgresql://h/db?user=u&password=***&sslmode=require"),
        (r"host=h password='it''s \' mine' user=u", "host=h password=*** user=u"),
        ("{'user': 'u', 'password': 'a b'}", "{'user': 'u', 'password': ***}"),
        ('PGPASSWORD="$(x)" WANDB_API_KEY: w', "PGPASSWORD=*** WANDB_API_KEY: ***"),
        ("password authentication failed; 3 tokens, key=4", "password authentication failed; 3 tokens, key=4"),
        ("""postgresql://u:p'q"r@h/d, PGPASSWORD=ab;c,d e""", "postgresql://u:***@h/d, PGPASSWORD=*** e"),
        ("f(password=abc, x={'password': b'a b'})", "f(password=***, x={'password': ***})"),
        (r'{"said": "{\"password\": \"a b\", \"n\": 1}"}', r'{"said": "{\"password\": ***, \"n\": 1}"}'),
        ("aws_session_token=a/b+c== x-amz-security-token: s", "aws_session_token=*** x-amz-security-token: ***"),
    ],
)  # fmt: skip
def test_a_password_is_known_by_where_it_stands(said: str, shown: str) -> None:
    assert mask(said) == shown


def test_a_known_password_is_hidden_in_every_spelling_but_a_word_too_short_is_left() -> None:
    secret = "it's a@b\\c"
    spellings = [secret, quote(secret, safe=""), secret.replace("\\", "\\\\").replace("'", "\\'"), repr(secret)[1:-1]]
    assert hide(" | ".join(spellings), [secret]) == " | ".join(["***"] * 4)
    assert hide("orch runs", ["orch", ""]) == "orch runs"


def test_an_error_that_nobody_foresaw_shows_its_traceback_without_the_password() -> None:
    text = "postgresql://u:topsecret@h/db"
    code = f"from orchestrator import cli; cli.cli.main = lambda **_: open({text!r}); cli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("FileNotFoundError: [Errno 2] No such file or directory: 'postgresql://u:***@h/db'\n")
