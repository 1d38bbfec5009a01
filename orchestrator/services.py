"""Starts and stops what runs beside the commands: the database, the web pages, a warm Ray. Runs no sweep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from orchestrator import background, serve
from orchestrator.database import embedded
from orchestrator.database.connection import is_away
from orchestrator.errors import AlreadyExists, OrchError
from orchestrator.ledger.lease import Holder
from orchestrator.ledger.leftovers import driven
from orchestrator.locks import locked
from orchestrator.settings import Home
from orchestrator.workspace import find_home, open_workspace


def up(home_path: Path | None, port: int | None, with_ui: bool, with_ray: bool) -> Iterator[str]:
    """Starts what does not run yet, and says, piece by piece, how to reach it. Raises OrchError."""
    workspace = open_workspace(home_path)
    kind = "embedded PostgreSQL" if workspace.is_embedded else "given PostgreSQL"
    yield f"{kind} is up: {workspace.database}"
    yield f"psql:   {workspace.psql_line}"
    yield "views:  orch sql"
    with locked(workspace.home.ensure().path / "up.lock"):  # two at once would start everything twice
        if with_ui:
            yield from _ui(workspace.home, port)
        if with_ray:
            yield _ray(workspace.home)


def down(home_path: Path | None, force: bool) -> Iterator[str]:
    """Stops what `up` and other commands started for this home; a given server is not ours to stop.

    Raises AlreadyExists, with nothing stopped, while a sweep needs it, unless `force`.
    """
    settings, home = find_home(home_path)
    if not force:
        _refuse_under_sweeps(home_path)
    if home.path.is_dir():
        with locked(home.path / "up.lock"):
            if background.stop(home, serve.NAME):
                yield "MLflow's UI and the dashboards are stopped"
            if background.stop(home, "ray"):
                yield "the warm Ray is stopped"
    if settings.database_url is not None:
        yield "ORCH_DATABASE_URL is set: that server is not ours to stop"
    else:
        yield "the embedded PostgreSQL is stopped" if embedded.stop(home) else "the embedded PostgreSQL was not running"


def _refuse_under_sweeps(home_path: Path | None) -> None:
    from orchestrator.execution.ray_tune import warm

    settings, home = find_home(home_path)
    on_warm_ray = warm.user_of(home)
    is_ours = settings.database_url is None and embedded.running(home) is not None
    sweeps = _driven(home_path) if is_ours or on_warm_ray else []
    needing = {one.sweep: one.name for one in sweeps if is_ours or one.name == on_warm_ray}
    if not needing and not on_warm_ray:
        return
    lines = [f"sweep {sweep} is being run by {holder}; nothing was stopped" for sweep, holder in needing.items()]
    lines = lines or [f"a sweep of {on_warm_ray} trains on the warm Ray; nothing was stopped"]
    lines += [f"  orch cancel {sweep:<30}  stop it; orch resume goes on" for sweep in needing]
    what = "trials on the warm Ray die" if on_warm_ray else "its points wait in the journal"
    lines.append(f"  orch down --force{'':<24}  stop all the same: {what}")
    raise AlreadyExists("\n".join(lines))


def _driven(home_path: Path | None) -> list[Holder]:
    """The sweeps that somebody drives now; none where the database does not answer: it may have to be stopped."""
    try:
        with open_workspace(home_path).database.connect("orch down") as connection:
            return driven(connection)
    except Exception as error:
        if not (isinstance(error, OrchError) or is_away(error)):
            raise
        return []


def _ui(home: Home, port: int | None) -> Iterator[str]:
    was = background.find(home, serve.NAME)
    now = serve.start_ui(home, port)
    yield from serve.addresses(now)
    if now == was and port not in (None, now.facts["port"]):
        yield f"(they were up already; for port {port}, orch down first)"


def _ray(home: Home) -> str:
    from orchestrator.execution.ray_tune import warm

    service = background.find(home, warm.NAME)
    if service is None or not service.is_up:
        if user := warm.user_of(home):
            raise AlreadyExists(f"the warm Ray has died under a sweep of {user}; start another when that has ended")
        service = warm.start(home)
    return f"warm Ray    {service.facts['address']} (sweeps without --address join it)"
