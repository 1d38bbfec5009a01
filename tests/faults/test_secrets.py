"""The database's password after a sweep: in nothing that was printed, logged, tagged or left in a file."""

from __future__ import annotations

import secrets
from pathlib import Path
from urllib.parse import quote, urlsplit

from orchestrator.settings import Home
from tests.conftest import Orch
from tests.faults.conftest import FragileServer, num_points, value_of, wait_until

SLOW = """
    workload: orch_lab:Odd
    metric: {name: val/loss, mode: min}
    params: {do: {grid: [nothing, raise]}, steps: 100, sleep_s: 0.03}
    log_every: 1
    resources: {cpu: 0.5}
"""


def files_with(needles: list[str], folder: Path, *spared: str) -> list[str]:
    """Files below `folder` in which one of the words stands, but for those in the spared folders."""
    texts = [needle.encode() for needle in needles]
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).parts[0] not in spared:
            data = path.read_bytes()
            found += [str(path) for text in texts if text in data]
    return found


def test_a_password_full_of_special_characters_connects_and_shows_nowhere(
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

    process = orch.start("sweep", orch.sweep_file(SLOW, name), "--json")
    wait_until(lambda: num_points(url, name) > 50)
    sessions = home.short_folder.with_name(f"{home.short_folder.name}-ray")
    assert list(sessions.glob("*/session_*/logs/*")), "Ray is writing its logs here"
    while_it_ran = files_with(needles, sessions)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output  # the one that raises
    assert "a planted failure" in output

    said = [output, *(str(orch(*words, expect=None)) for words in (("up",), ("doctor",), ("down",), ("status", name)))]
    assert not [text for text in said for needle in needles if needle in text]
    assert while_it_ran == []
    assert files_with(needles, home.path, "secrets") == []
    stored = "select count(*) from (select value from public.{0} union all select value from public.params) as t"
    for table in ("tags", "experiment_tags"):
        for needle in needles:
            query = stored.format(table) + " where position(%s in value) > 0"
            assert value_of(url, query, needle) == 0
    spec = "select count(*) from orch_ledger.sweeps where position(%s in spec::text || source) > 0"
    assert value_of(url, spec, password) == 0


def test_the_embedded_servers_password_stays_in_its_file(orch: Orch, home: Home, name: str) -> None:
    text = SLOW.replace("steps: 100, sleep_s: 0.03", "steps: 3")
    done = orch("sweep", orch.sweep_file(text, name), "--inline", expect=1)
    password = home.secret("postgres")
    assert password not in str(done) + str(orch("up")) + str(orch("doctor"))
    assert files_with([password], home.path, "secrets") == []
    assert (home.path / "secrets").stat().st_mode & 0o777 == 0o700
    assert home.secret_file("postgres").stat().st_mode & 0o777 == 0o600
