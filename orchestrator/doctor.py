"""Looks at everything a sweep needs and says what is wrong, with the remedy. Mends nothing, except by `--init`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from orchestrator import background, ledger
from orchestrator.database import embedded, schema, view_catalog
from orchestrator.errors import OrchError, PlaceUnusable
from orchestrator.host import Line, device_line, disk_line, limit_lines, package_line
from orchestrator.ledger import leftovers
from orchestrator.reports.table import Table
from orchestrator.settings import Home, Settings, artifact_root, journal_folder
from orchestrator.tracking.artifacts import local_folder
from orchestrator.tracking.indexes import NEEDED
from orchestrator.tracking.journal import backlog_of, is_abandoned
from orchestrator.workspace import Workspace, find_home, open_workspace

CONNECTIONS_NEEDED = 10  # 4 of a node, 3 of a command, MLflow's UI and a psql beside them
CLOCK_TOLERANCE_S = 5.0
HEAD_WAIT_S = 15.0  # where all is started at once, as in compose, Ray's head is the last to listen


def examine(home_path: Path | None, init: bool) -> tuple[Table, bool]:
    """One line a check; False if any is wrong."""
    settings, home = find_home(home_path)
    lines = [*_home_lines(settings, home), device_line(), package_line(), *_cluster_lines(settings.ray_address)]
    try:
        workspace = open_workspace(home_path, allow_nonempty=init)
    except OrchError as error:
        lines.append(Line("database", "wrong", str(error)))
    else:
        lines += [*_database_lines(workspace), *_journal_lines(workspace), *_service_lines(home)]
    return Table(["check", "state", "what", "remedy"], lines), all(line.state != "wrong" for line in lines)


def _home_lines(settings: Settings, home: Home) -> Iterator[Line]:
    try:
        home.ensure()
    except PlaceUnusable as error:
        yield Line("home", "wrong", str(error))
        return
    yield Line("home", "ok", str(home.path))
    places = {"disk (home)": home.path, "disk (journal)": journal_folder(settings, home)}
    if (folder := local_folder(artifact_root(settings, home))) is not None:
        places["disk (artifacts)"] = folder
    for name, place in places.items():
        yield disk_line(name, place)
    yield from limit_lines(home)
    if settings.mlflow_tracking_uri:
        what = "is set and not used: orch writes to its own database"
        yield Line("MLFLOW_TRACKING_URI", "note", what)


def _cluster_lines(address: str | None) -> Iterator[Line]:
    if address is None or "://" in address:  # a job server's address serves --detach only
        return
    from orchestrator.execution.ray_tune.reachable import asks_for_token

    try:
        if asks_for_token(address, HEAD_WAIT_S):
            yield Line("ray", "ok", f"{address} asks for a token")
        else:
            advice = "restart its nodes with RAY_AUTH_MODE=token and a RAY_AUTH_TOKEN (see docs/security.md)"
            yield Line("ray", "wrong", f"{address} lets everybody in, and whoever reaches Ray runs code there", advice)
    except OrchError as error:
        yield Line("ray", "wrong", str(error))


# The database


def _database_lines(workspace: Workspace) -> Iterator[Line]:
    with workspace.database.connect("orch doctor") as connection:
        yield _server_line(workspace, connection)
        yield from _schema_lines(connection)
        yield _index_line(connection)
        yield _connection_line(connection)
        yield _clock_line(connection)
        yield from _abandoned_lines(connection)
    yield _tried("views", lambda: f"{len(workspace.query('select sweep from orch.sweeps')[1])} sweeps")
    yield Line("psql", "ok", workspace.psql_line)


def _server_line(workspace: Workspace, connection: Any) -> Line:
    kind = "embedded" if workspace.is_embedded else "given"
    number, checksums = _row(connection, "select current_setting('server_version'), current_setting('data_checksums')")
    what = f"{kind} PostgreSQL {number}: {workspace.database}"
    if checksums != "on":
        remedy = "stop that server, then: pg_checksums --enable -D ITS_DATA"
        return Line("database", "note", f"{what}, without checksums: a bad disk goes unnoticed", remedy)
    brought = embedded.wheel_version()
    if workspace.is_embedded and not f"{brought}.".startswith(f"{number}."):
        return Line(
            "database", "note", f"{what}, but the wheel brings {brought}", "orch down; the next command starts it"
        )
    return Line("database", "ok", what)


def _schema_lines(connection: Any) -> Iterator[Line]:
    """Opening the workspace has brought them here or refused; what it found is worth seeing."""
    found = schema.look_quickly(connection)
    expected = found.notes.get(schema.MLFLOW_REVISION)
    is_same = found.revision == expected
    remedy = "" if is_same else "run any orch command again: it says what to do"
    yield Line("schema (MLflow)", "ok" if is_same else "wrong", f"{found.revision}, expected {expected}", remedy)
    (revision,) = _row(connection, "select version_num from orch_ledger.alembic_version")
    remedy = "" if revision == ledger.HEAD else "install a newer orch"
    yield Line("schema (ledger)", "wrong" if remedy else "ok", f"{revision}, expected {ledger.HEAD}", remedy)
    is_ours = view_catalog.is_current(connection)
    what = "of this program" if is_ours else "of another version of orch, which has just opened this database"
    remedy = "" if is_ours else "use one version of orch on one database"
    yield Line("schema (views)", "ok" if is_ours else "note", what, remedy)


def _index_line(connection: Any) -> Line:
    wanted = NEEDED | leftovers.index_statements()
    missing = sorted(set(wanted) - schema.indexes(connection))
    if missing:
        remedy = "in psql: " + "; ".join(wanted[name] for name in missing)
        return Line("indexes", "wrong", f"missing or broken: {', '.join(missing)}", remedy)
    return Line("indexes", "ok", f"all {len(wanted)} that views and the recorder need")


def _connection_line(connection: Any) -> Line:
    most, used = _row(
        connection,
        "select current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int,"
        " count(*) from pg_stat_activity where backend_type = 'client backend'",
    )
    is_enough = most - used >= CONNECTIONS_NEEDED
    remedy = "" if is_enough else "close some, or raise max_connections in postgresql.conf and restart the server"
    what = f"{used} of {most} in use; a sweep needs up to {CONNECTIONS_NEEDED}"
    return Line("connections", "ok" if is_enough else "wrong", what, remedy)


def _clock_line(connection: Any) -> Line:
    before = time.time()
    (theirs,) = _row(connection, "select extract(epoch from clock_timestamp())::double precision")
    difference_s = theirs - (before + time.time()) / 2
    what = f"the database's is {abs(difference_s):.1f} s {'ahead of' if difference_s > 0 else 'behind'} this host's"
    if abs(difference_s) <= CLOCK_TOLERANCE_S:
        return Line("clock", "ok", what)
    remedy = "set both by NTP; leases go by the database's, the times of points by each host's"
    return Line("clock", "note", what, remedy)


def _abandoned_lines(connection: Any) -> Iterator[Line]:
    for name, holder, num_lost in leftovers.abandoned(connection):
        what = f"its command {holder} died; {num_lost} trials are lost"
        yield Line(f"sweep {name}", "note", what, f"orch resume {name}")


def _row(connection: Any, query: str) -> Any:
    row = connection.execute(query).fetchone()
    assert row is not None, "one row is asked for"
    return row


# What lies beside the database


def _journal_lines(workspace: Workspace) -> Iterator[Line]:
    """Journals that hold something; those of living recorders are drained as we look."""
    num_waiting = 0
    beside = workspace.journal.parent.glob("*/*~*~*")  # also for databases that this home had before
    for folder in sorted({*beside, *workspace.remote_journal.glob("*~*~*")}):
        if (num_bytes := backlog_of(folder)) == 0:
            continue
        num_waiting += 1
        age_s = time.time() - max((path.stat().st_mtime for path in folder.glob("*.journal")), default=time.time())
        what = (
            f"{num_bytes / 1e6:.2f} MB of {folder.name.split('~')[0]}, last written {age_s / 3600:.1f} h ago: {folder}"
        )
        yield Line("journal", "note", what, _journal_remedy(folder, folder.parent.name == workspace.identity))
    if num_waiting == 0:
        where = " or ".join(str(one.parent) for one in workspace.journals)
        yield Line("journal", "ok", f"nothing waits to be written in {where}")


def _journal_remedy(folder: Path, is_ours: bool) -> str:
    if not is_ours:
        return "for another database: run orch with that one, or orch gc --foreign-journals"
    return "the next sweep on this host writes it" if is_abandoned(folder) else "its recorder lives, here or elsewhere"


def _service_lines(home: Home) -> Iterator[Line]:
    for path in sorted(home.path.glob("*.json")):
        service = background.find(home, path.stem)
        if service is not None and service.is_up:
            yield Line(f"background {path.stem}", "ok", f"runs, pid {service.pid}; orch down stops it")
        elif service is not None:
            what = f"died (pid {service.pid}); its last words are in {background.log_file(home, path.stem)}"
            yield Line(f"background {path.stem}", "note", what, "orch up starts it again")


def _tried(name: str, look: Callable[[], str]) -> Line:
    try:
        return Line(name, "ok", look())
    except OrchError as error:
        return Line(name, "wrong", str(error))
