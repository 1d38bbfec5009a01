"""What the tests of the web pages share: a small known sweep, `orch ui` on its database, and a real Chromium."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import psutil
import pytest

from orchestrator.database import view_catalog
from orchestrator.database.connection import Database
from orchestrator.ledger import Ledger, SweepRow, SweepState
from orchestrator.planning import read_spec
from orchestrator.settings import Home
from orchestrator.spec import SweepSpec
from orchestrator.trial import Candidate, Finding, Outcome, Severity, TrialState, config_hash
from tests.conftest import workspace_on

if TYPE_CHECKING:  # both are imported where they are used: most tests here need neither
    from mlflow import MlflowClient
    from playwright.sync_api import Browser, Page, Route

ROOT = Path(__file__).parents[2]
TRIVIAL = "workload: orch_lab:Trivial\nmetric: val/loss\n"
CHROMIUM = Path("/usr/bin/chromium")
# No sandbox: it refuses root. The rest keeps the browser itself off the network.
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-quic"),
]
COLUMNS = {"c_z": "double precision", "k": "bigint", "seed": "bigint"}
QUESTION = "<script>document.title = 'pwned'</script> Does it run?"
BROWSER_TIMEOUT_MS = 30_000  # only failures wait that long


@dataclass
class PageLab:
    """A database with the sweep `lab`: c_z x k x seed, one of the eight trials diverged at step 30."""

    home: Home
    database: Database
    ledger: Ledger
    client: MlflowClient
    run_ids: dict[int, str] = field(default_factory=dict)

    def add_sweep(self, name: str, description: str = "") -> SweepRow:
        experiment_id = self.client.create_experiment(name, (self.home.path / "artifacts" / name).as_uri())
        sweep = self.ledger.create_sweep(
            name=name,
            workload="moe_router",
            spec={},
            metric="val/mse",
            mode="min",
            columns=COLUMNS,
            description=description,
            experiment_id=experiment_id,
        )
        self.ledger.set_sweep_state(sweep.id, SweepState.RUNNING)
        return self.ledger.sweep(sweep.id)

    def run_trial(self, sweep: SweepRow, params: Mapping[str, Any], values: Mapping[int, float]) -> str:
        """A trial that reports `values` (step -> val/mse) and ends; diverged if the last of them is not finite."""
        from mlflow.entities import Metric, Param

        cell = {name: value for name, value in params.items() if name != "seed"}
        [trial] = self.ledger.add_trials(sweep.id, [(Candidate(params, cell), params, config_hash(params))])
        run = self.client.create_run(str(sweep.experiment_id), run_name=f"{sweep.name}-{trial.number}")
        run_id = str(run.info.run_id)
        self.ledger.set_run(trial.id, run_id)
        attempt = self.ledger.begin_attempt(trial.id, "host")
        now_ms = int(time.time() * 1000)
        metrics = [Metric("val/mse", value, now_ms, step) for step, value in values.items()]
        metrics += [Metric("router/z", 2.0 + step / 100, now_ms, step) for step in values]
        self.client.log_batch(run_id, metrics, [Param(name, str(value)) for name, value in params.items()])
        step, last = list(values.items())[-1]
        diverged = last != last
        self.ledger.finish(
            trial.id,
            attempt.number,
            Outcome(
                TrialState.DIVERGED if diverged else TrialState.FINISHED,
                objective=last,
                last_step=step,
                diverged_at=step if diverged else None,
                reason="val/mse is nan" if diverged else "",
            ),
        )
        self.client.set_terminated(run_id)
        return run_id


@contextmanager
def empty_lab(url: str, folder: Path) -> Iterator[PageLab]:
    from mlflow import MlflowClient

    import orchestrator.tracking  # noqa: F401  (sets MLflow's switches before MLflow loads)

    home = Home(folder / ".orch").ensure()
    database = workspace_on(url, home.path).database
    engine = database.engine("orch-tests")
    yield PageLab(home, database, Ledger(engine), MlflowClient(database.mlflow_uri))
    engine.dispose()


@pytest.fixture(scope="module")
def own_lab(server_url: str, database_on: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageLab]:
    """A database without a sweep, for the tests of one file."""
    with database_on(server_url) as url, empty_lab(url, tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture(scope="session")
def page_lab(server_url: str, database_on: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageLab]:
    """The sweep `lab` and what the tests of the pages add to it."""
    with database_on(server_url) as url, empty_lab(url, tmp_path_factory.mktemp("pages")) as lab:
        sweep = lab.add_sweep("lab", QUESTION)
        for number in range(8):
            params = {"c_z": (0.0, 0.001)[number // 4], "k": 1 + number // 2 % 2, "seed": number % 2}
            values = {step: 0.5 + number / 50 + 10 / step for step in range(10, 60, 10)}
            if number == 1:
                values = {10: 1.5, 20: 9.0, 30: float("nan")}
            lab.run_ids[number] = lab.run_trial(sweep, params, values)
        lab.client.log_text(lab.run_ids[0], "a note", "note.txt")
        trial = lab.ledger.trials(sweep.id)[2]
        seen = Finding("loss_factor", Severity.ERROR, "<b>40 times the loss</b>", "divide", 10, 40.0, 0.01)
        lab.ledger.add_findings(sweep.id, [(trial.id, 1, seen)])
        lab.ledger.set_sweep_state(sweep.id, SweepState.FINISHED)
        with lab.database.connect() as connection:
            view_catalog.rebuild_sweep_view(connection, "lab")
        yield lab


@dataclass(frozen=True)
class RunningUi:
    process: subprocess.Popen[str]
    mlflow: str
    dashboards: str
    output: str


@contextmanager
def ui_on(lab: PageLab, *flags: str) -> Iterator[RunningUi]:
    """`orch ui` until the block ends, started as a person would, once it has printed its addresses."""
    command = [sys.executable, "-m", "orchestrator.cli", "--home", str(lab.home.path), "ui"]
    process = subprocess.Popen(
        [*command, "--port", str(free_pair_of_ports()), *flags],
        env={**os.environ, "ORCH_DATABASE_URL": lab.database.url, "PYTHONPATH": str(ROOT)},
        cwd=lab.home.path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield wait_for_addresses(process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def wait_for_addresses(process: subprocess.Popen[str]) -> RunningUi:
    assert process.stdout is not None
    assert process.stderr is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "Ctrl-C" in line:
            break
    else:
        pytest.fail(f"orch ui ended with {process.wait()}:\n{process.stderr.read()}")
    output = "".join(lines)
    mlflow, dashboards = re.findall(r"http://\S+", output)
    return RunningUi(process, mlflow, dashboards, output)


def free_pair_of_ports() -> int:
    """A port that is free together with the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def get(url: str) -> bytes:
    with urlopen(url, timeout=20) as answer:
        body: bytes = answer.read()
        return body


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@pytest.fixture(name="ui_on", scope="session")
def ui_on_fixture() -> Any:
    """`with ui_on(lab, "--host", ...) as running:` for tests that stop it themselves."""
    return ui_on


@pytest.fixture(scope="session")
def ui(page_lab: PageLab) -> Iterator[RunningUi]:
    with ui_on(page_lab) as running:
        yield running


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        message = f"no browser at {CHROMIUM}; Debian's package `chromium` has it"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=BROWSER_TIMEOUT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield browser
        browser.close()


@dataclass
class WatchedPage:
    """A page, what its console said at the level `error`, and where beyond this host it wanted to go."""

    page: Page
    errors: list[str] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)

    def watch(self) -> None:
        self.page.on(
            "console",
            lambda said: self.errors.append(f"{said.text} {said.location['url']}") if said.type == "error" else None,
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.route("**/*", self._stay_here)

    def _stay_here(self, route: Route) -> None:
        address = urlsplit(route.request.url)
        if address.scheme in ("http", "https", "ws", "wss") and address.hostname not in ("127.0.0.1", "localhost"):
            self.blocked.append(route.request.url)
            route.abort()
        else:
            route.continue_()


@pytest.fixture
def watched(chromium: Browser) -> Iterator[WatchedPage]:
    page = chromium.new_page(viewport={"width": 1280, "height": 1000})
    page.set_default_timeout(BROWSER_TIMEOUT_MS)
    watched = WatchedPage(page)
    watched.watch()
    yield watched
    page.close()


@pytest.fixture
def spec_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Text -> spec, for workloads of the lab; `Trivial` where the text names none."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "lab"))

    def read(text: str) -> SweepSpec:
        path = tmp_path / "s.yaml"
        path.write_text(text if text.startswith("workload") else TRIVIAL + text)
        return read_spec(path, (), None)

    return read
