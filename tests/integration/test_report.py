"""`orch report`: one page that says what the commands say, and in which everything that others wrote is only text."""

from __future__ import annotations

import datetime as dt
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import report as report_command
from orchestrator.database import view_catalog
from orchestrator.errors import PlaceUnusable
from orchestrator.ledger import SweepRow, SweepState
from orchestrator.reports import page as page_module
from orchestrator.reports.compare import compare, effects
from orchestrator.reports.health import health
from orchestrator.reports.page import page, sections, selection
from orchestrator.reports.page.place import place_for
from orchestrator.reports.runs import best
from orchestrator.reports.source import Query
from orchestrator.reports.spec_text import spec_text
from orchestrator.reports.table import short
from orchestrator.reports.whole_file import whole_file
from orchestrator.trial import Finding, Severity
from tests.conftest import Orch, workspace_on

NAN = math.nan
NOW = dt.datetime(2026, 1, 2, 3, 4, tzinfo=dt.UTC)
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)></svg></style>]]> $\\frac{1}{2}$ {{7*7}} {% raw %}"
DRAWN = {"svg", "g", "path", "text", "use", "defs", "clippath", "rect", "tspan"}
WRITTEN = {
    *("html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "h3", "p", "span", "div", "pre", "code"),
    *("table", "thead", "tbody", "tr", "th", "td", "wbr", "details", "summary", "figure", "figcaption", "footer"),
}
NUM_LINES = """() => {
    const range = document.createRange();
    range.selectNodeContents(document.querySelector("footer td + td"));
    return new Set([...range.getClientRects()].map(rect => rect.top)).size;
}"""
SPEC = "# Does it hold?\nname: told\nparams:\n  c_z: {grid: [0, 0.001]}\n"


@pytest.fixture(scope="module")
def query(own_lab: Any) -> Query:
    return workspace_on(own_lab.database.url, own_lab.home.path).query


class Read(HTMLParser):
    """What a page consists of."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self._in_cell = False
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {(name, value or "") for name, value in attrs}
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._in_cell:
            self.rows[-1][-1] = (self.rows[-1][-1] + data).rstrip("\n")

    @property
    def text(self) -> str:
        return "".join(self.texts)


def add_sweep(
    lab: Any, name: str, axes: Mapping[str, Any], description: str = "Does it hold?", **spec: Any
) -> SweepRow:
    """A sweep that runs, over axes with their domains."""
    sweep: SweepRow = lab.add_sweep(name, description)
    document = {"axes": list(axes), "params": dict(axes), "show": [], "resolved": SPEC, **spec}
    change(lab, "update orch_ledger.sweeps set spec = %s where id = %s", json.dumps(document), sweep.id)
    return sweep


def end(lab: Any, sweep: SweepRow) -> None:
    lab.ledger.set_sweep_state(sweep.id, SweepState.FINISHED)
    show(lab, sweep.name)


def show(lab: Any, name: str) -> None:
    with lab.database.connect("orch-tests") as connection:
        view_catalog.rebuild_sweep_view(connection, name)


def change(lab: Any, statement: str, *values: object) -> None:
    with lab.database.connect("orch-tests") as connection:
        connection.execute(statement, values)


def of_page(query: Query, name: str, by: Any = None, metrics: Iterable[str] = ()) -> Read:
    return Read(page(query, name, by, tuple(metrics), NOW))


@pytest.fixture(scope="module")
def told(own_lab: Any) -> str:
    """c_z x seed; at 0.001 one of two diverged, and one was found suspect; at 0 a third failed."""
    sweep = add_sweep(own_lab, "told", {"c_z": {"grid": [0, 0.001]}, "seed": {"grid": [0, 1]}}, "Does it hold?\n\nYes.")
    for number, last in enumerate((0.5, 0.75, 0.25, NAN)):
        params = {"c_z": (0.0, 0.001)[number // 2], "k": 1, "seed": number % 2}
        own_lab.run_trial(sweep, params, {10: 2.0 + number, 20: 1.0, 30: last})
    trial = own_lab.ledger.trials(sweep.id)[2]
    seen = [Finding("loss_factor", Severity.ERROR, "40 times the loss", "divide", step) for step in (10, 20)]
    own_lab.ledger.add_findings(sweep.id, [(trial.id, 1, one) for one in seen])
    own_lab.run_trial(sweep, {"c_z": 0.0, "k": 1, "seed": 2}, {10: 9.0})
    failed = "update orch_ledger.trials set state = 'failed', reason = 'it broke' where sweep_id = %s and number = 4"
    change(own_lab, failed, sweep.id)
    end(own_lab, sweep)
    return "told"


@pytest.fixture
def typed(orch: Orch, own_lab: Any, tmp_path: Path) -> Orch:
    env = {"ORCH_DATABASE_URL": own_lab.database.url, "ORCH_HOME": str(own_lab.home.path)}
    return Orch({**orch.env, **env}, tmp_path)


def test_the_page_says_what_the_commands_say(typed: Orch, query: Query, told: str, tmp_path: Path) -> None:
    file = tmp_path / "answer.html"
    assert typed("report", told, "-o", file).out.strip() == str(file)
    piped = typed("report", told, "-o", "-").out
    assert piped.startswith("<!doctype html>")
    assert piped.endswith("</html>")
    read = Read(file.read_text())
    for table in (compare(query, [told], None, None), effects(query, told), best(query, told, None, None, "last")):
        assert list(table.columns) in read.rows
        assert [[short(value) for value in row] for row in table.rows if list(map(short, row)) not in read.rows] == []
    assert ["c_z", "0 -> 0.001", "1", "x 0.5", "0/2 -> 1/2"] in read.rows
    assert "diverged: 1 of 4 results (95 % interval of the share: 5 to 70 %)" in read.text
    [found] = health(query, told).rows  # found at two steps, said once
    assert list(map(short, found)) in read.rows
    assert ["3", "diverged", "30", "0.001", "1", "val/mse is nan"] in read.rows
    assert spec_text(query, told) in read.text
    for words in (
        "Does it hold?",
        "Yes.",
        "finished: 5 trials (1 diverged, 1 failed, 3 finished)",
        f"orch compare {told}",
    ):
        assert words in read.text
    [sql] = re.findall("orch sql '(.*?)'", read.text)
    _, rows = query(sql.replace("from ", "from orch."))
    assert rows == [(0.0, 2, 0.625), (0.001, 2, 0.25)]
    assert [list(row) for row in rows] == [list(row[:3]) for row in compare(query, [told], None, None).rows]


def test_a_value_with_which_all_diverge_is_told_by_its_shares_and_one_without_results_is_not_told(
    own_lab: Any, query: Query
) -> None:
    sweep = add_sweep(own_lab, "steep", {"lr": {"grid": [0.1, 1, 10]}})
    for lr, last in ((0.1, 0.5), (1.0, NAN), (10.0, 1.0)):
        own_lab.run_trial(sweep, {"lr": lr, "k": 1, "seed": 0}, {10: 2.0, 20: last})
    failed = "update orch_ledger.trials set state = 'failed' where sweep_id = %s and number = 2"
    change(own_lab, failed, sweep.id)
    end(own_lab, sweep)
    assert effects(query, "steep").rows == [["lr", "0.1 -> 1", 0, None, "0/1 -> 1/1"]]


def test_other_axes_and_metrics_are_those_of_compare(query: Query, told: str) -> None:
    read = of_page(query, told, ["seed"], ["router/z"])
    assert ["seed", "n", "router/z", "router/z ±"] in [row[:4] for row in read.rows]
    assert "orch compare told --by seed --metric router/z" in read.text
    assert "best router/z (min) of told" in read.text
    assert "What each axis changes" not in read.text


@pytest.fixture(scope="module")
def hostile(own_lab: Any) -> str:
    """Every text that others may write says HOSTILE, in a database that believed all of it."""
    metric = f"{HOSTILE}m"
    axes = {"note": {"grid": [f"{HOSTILE}{n}" for n in range(3)]}, "seed": {"grid": [0]}}
    sweep = add_sweep(own_lab, "hostile", axes, f"{HOSTILE} asked\n{HOSTILE} told", resolved=f"# {HOSTILE} spec\n")
    for number in range(4):
        values = {10: 1.0 + number, 20: NAN if number == 3 else 2.0 + number}
        own_lab.run_trial(sweep, {"note": f"{HOSTILE}{number % 3}", "seed": number}, values)
    trials = own_lab.ledger.trials(sweep.id)
    seen = Finding(f"{HOSTILE} check", Severity.ERROR, f"{HOSTILE} found", f"{HOSTILE} advised", 10)
    own_lab.ledger.add_findings(sweep.id, [(trials[0].id, 1, seen)])
    renamed = "update public.metrics set key = %s where key = 'val/mse' and run_uuid = any(%s)"
    change(own_lab, renamed, metric, [one.run_id for one in trials])
    tags = json.dumps({f"{HOSTILE} tag": f"{HOSTILE} tagged"})
    change(own_lab, "update orch_ledger.sweeps set metric = %s, tags = %s where id = %s", metric, tags, sweep.id)
    words = [f"{HOSTILE} {word}" for word in ("reason", "error", "host", "device")]
    spoken = "update orch_ledger.trials set reason = %s, error = %s, host = %s, device = %s, git_commit = %s"
    change(own_lab, f"{spoken} where sweep_id = %s", *words, "<b>commit", sweep.id)
    end(own_lab, sweep)
    return "hostile"


def test_what_others_wrote_is_text_for_every_reader_of_html(query: Query, hostile: str) -> None:
    html = page(query, hostile, None, (), NOW)
    read = Read(html)
    assert read.tags <= DRAWN | WRITTEN
    for name, value in read.attributes:
        assert not name.startswith("on")
        assert name not in ("src", "srcset", "action", "formaction", "srcdoc")
        assert name != "href" or value.startswith("#")
    said = (
        "asked",
        "told",
        "spec",
        "check",
        "found",
        "advised",
        "reason",
        "error",
        "host",
        "device",
        "tag:",
        "tagged",
        "0",
    )
    for words in said:
        assert f"{HOSTILE} {words}" in read.text or f"{HOSTILE}{words}" in read.text
    assert "<b>commit" in read.text
    assert read.text.count("alert(1)") > 20
    assert html.count("<style>") == html.count("</style>") == 1
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert html.index(policy) < html.index("alert(1)")


def test_a_browser_runs_loads_and_complains_of_nothing(
    query: Query, hostile: str, watched: Any, tmp_path: Path
) -> None:
    file, asked, dialogs = tmp_path / "hostile.html", [], []
    file.write_text(page(query, hostile, None, (), NOW))
    watched.page.on("request", lambda request: asked.append(request.url))
    watched.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    watched.page.goto(file.as_uri())
    assert watched.page.title() == f"hostile: {HOSTILE} asked"[:129]
    assert watched.page.locator("figure svg").count() >= 2
    assert watched.page.locator("svg text", has_text="<script>").count() > 0
    assert (asked, dialogs, watched.errors, watched.blocked) == ([file.as_uri()], [], [], [])
    for width in (1280, 400):  # nothing sticks out, however long its words
        watched.page.set_viewport_size({"width": width, "height": 900})
        assert watched.page.evaluate("document.documentElement.scrollWidth") == width
    assert watched.page.evaluate(NUM_LINES) <= 2  # of `the comparison`, on a telephone: no word is broken


def test_a_sweep_without_a_result_has_a_page_that_says_so(own_lab: Any, query: Query) -> None:
    sweep = add_sweep(own_lab, "young", {"c_z": {"grid": [0, 1]}})
    show(own_lab, "young")
    read = of_page(query, "young")
    assert "no finite run" in read.text
    assert "still running: 0 of 0 trials so far have a result" in read.text
    for number in range(2):
        own_lab.run_trial(sweep, {"c_z": float(number), "seed": 0}, {5: NAN})
    own_lab.ledger.set_sweep_state(sweep.id, SweepState.INTERRUPTED)
    read = of_page(query, "young")
    assert "not finished (interrupted): 2 of 2 trials so far have a result" in read.text
    assert "orch resume young" in read.text
    assert "diverged: 2 of 2 results" in read.text
    assert "svg" in read.tags  # the shares; there is no value to draw


def test_the_page_of_a_sweep_that_runs_is_of_one_moment(
    own_lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = add_sweep(own_lab, "moving", {"c_z": {"grid": [0, 1]}})
    show(own_lab, "moving")

    def after_one_more(moment: Query, *arguments: Any) -> str:
        own_lab.run_trial(sweep, {"c_z": 1.0, "seed": 0}, {5: 2.0})
        return page(moment, *arguments)

    monkeypatch.setenv("ORCH_DATABASE_URL", own_lab.database.url)
    monkeypatch.setattr(page_module, "page", after_one_more)
    file = tmp_path / "moving.html"
    report_command.command.main(["moving", "-o", str(file)], standalone_mode=False, obj=own_lab.home.path)
    assert "0 of 0 trials so far have a result" in file.read_text()


def test_one_trial_without_an_axis_is_a_page(own_lab: Any, query: Query) -> None:
    sweep = add_sweep(own_lab, "single", {})
    name = "長い名前🙂\u202e" + "x" * 500
    own_lab.run_trial(sweep, {"note": name, "seed": 0}, {1: 4.0, 2: 1.0})
    end(own_lab, sweep)
    html = page(query, "single", ["note"], (), NOW)
    assert html.count("<svg") == 1  # its course; one cell is nothing to compare
    assert name.replace("\u202e", "\\u202e")[:300] in html  # it reverses nothing
    assert name not in html
    assert "characters more" in html


def test_several_objectives_have_a_front_and_figures_each(own_lab: Any, query: Query) -> None:
    more = [{"name": "router/z", "mode": "max"}]
    sweep = add_sweep(own_lab, "both", {"lr": {"loguniform": [0.01, 1]}, "seed": {"grid": [0]}}, more_metrics=more)
    for number in range(4):
        own_lab.run_trial(sweep, {"lr": 0.01 * 4**number, "seed": 0}, {10: 1.0, 20 + number: 0.5 + number})
    end(own_lab, sweep)
    read = of_page(query, "both")
    assert "4 of 4 runs of both that no other beats in val/mse (min), router/z (max)" in read.text
    assert read.text.count("last value over lr") == 2


def test_many_trials_and_points_make_a_small_page_that_names_what_it_leaves_out(
    own_lab: Any, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = add_sweep(own_lab, "many", {"c_z": {"grid": list(range(12))}, "seed": {"grid": [0]}})
    spiky = {step: 1e6 if step == 333 else 2.0 - step / 1000 for step in range(1, 401)}
    for number in range(12):
        values = spiky if number == 0 else {1: 3.0, 400: 9.0 + number}
        own_lab.run_trial(sweep, {"c_z": float(number), "seed": 0}, values)
    end(own_lab, sweep)
    monkeypatch.setattr(selection, "MAX_CURVES", 4)
    monkeypatch.setattr(page_module, "MAX_ROWS", 5)
    drawn = [{"trial": 0, "state": "finished", "diverged_at": None}]
    same = selection.Shades(None, [], {0: "s0"})
    monkeypatch.setattr(selection, "MAX_CURVE_POINTS", 40)
    [piece] = selection.curves(query, "many", "val/mse", drawn, same)[0].pieces
    assert (333, 1e6) in piece  # a spike of one step among hundreds
    assert piece[0] == (1, spiky[1])
    assert piece[-1] == (400, spiky[400])
    assert len(piece) <= 2 * 20 + 2
    read = of_page(query, "many")
    assert "4 of 12 curves are drawn, the median one of 4 of the 12 cells" in read.text
    assert "the 5 best of 12 cells by val/mse" in read.text
    assert "7 more: orch compare many" in read.text


def test_a_wrong_request_is_one_block_and_writes_nothing(typed: Orch, told: str, tmp_path: Path) -> None:
    refused = typed("report", "tolt", expect=2)
    assert refused.err == "unknown sweep 'tolt'; did you mean told?\n"
    refused = typed("report", told, "-o", tmp_path / "r.html", "--metric", "val/mes", expect=2)
    assert refused.err == "--metric  no run of told reports 'val/mes'; did you mean val/mse?\n"
    assert list(tmp_path.iterdir()) == []


def test_an_older_report_is_replaced_and_no_other_file(query: Query, told: str, tmp_path: Path) -> None:
    report, other, empty = tmp_path / "r.html", tmp_path / "sweep.yaml", tmp_path / "empty.html"
    html = page(query, told, None, (), NOW)
    report.write_text(html.replace("Does it hold?", "an older one"))
    others = os.umask(0o077)  # what a page names is for whoever the person lets read it
    try:
        with whole_file(place_for(report)) as file:
            file.write(html.encode())
    finally:
        os.umask(others)
    assert report.read_text() == html
    assert report.stat().st_mode & 0o777 == 0o600
    other.write_text("workload: moe_router\n")
    with pytest.raises(PlaceUnusable, match=r"sweep\.yaml exists and is no report of orch"):
        place_for(other)
    empty.touch()
    assert place_for(empty) == empty  # of mktemp
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.html", "r.html", "sweep.yaml"]


def test_a_place_that_cannot_be_written_is_told_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(PlaceUnusable, match="there is no folder"):
        place_for(tmp_path / "no" / "r.html")
    with pytest.raises(PlaceUnusable, match="no regular file; -o - writes to standard output"):
        place_for(Path("/dev/null"))
    with pytest.raises(PlaceUnusable, match="is no regular file"):
        place_for(tmp_path)
    with pytest.raises(PlaceUnusable, match="name too long"):
        place_for(tmp_path / ("x" * 300))
    os.symlink(tmp_path / "loop.html", tmp_path / "loop.html")
    with pytest.raises(PlaceUnusable, match=r"Symlink loop.*; name another file"):
        place_for(tmp_path / "loop.html")
    os.symlink(tmp_path / "there.html", tmp_path / "link.html")
    assert place_for(tmp_path / "link.html") == tmp_path / "there.html"


def test_a_metric_without_a_number_is_named_and_takes_no_other_metrics_place(
    own_lab: Any, query: Query, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = add_sweep(own_lab, "huge", {"c_z": {"grid": [0, 1, 2]}})
    for number in range(3):
        run_id = own_lab.run_trial(sweep, {"c_z": float(number), "seed": 0}, {10: 1e298, 20: 1e299})
        own_lab.client.log_metric(run_id, "train/loss", 1.0, step=10)
    end(own_lab, sweep)
    monkeypatch.setattr(sections, "MAX_METRICS", 1)
    read = of_page(query, "huge", None, ["val/mse", "router/z", "train/loss"])
    assert "last value over c_z" in read.text
    assert "beyond the first 1: train/loss" in read.text
    assert "nothing that a figure could show: val/mse" in read.text
