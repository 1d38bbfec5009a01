"""The pages of one `orch ui` in a real browser, who can reach them, and the rules by which the dashboard draws."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import psutil
from playwright.sync_api import expect

from dashboards import overview
from orchestrator import serve
from orchestrator.database.connection import Database
from orchestrator.trial import Finding, Severity
from tests.integration.conftest import descendants, get

NAN = math.nan
CROSS = 'svg.marks path[stroke="#c23b3b"]'
LEGEND = "svg.marks .role-legend-title"


def test_the_dashboard_shows_a_sweep_its_curves_and_links_and_keeps_what_was_picked(
    page_lab: Any, ui: Any, watched: Any
) -> None:
    page = watched.page
    page.goto(ui.dashboards)
    expect(page.locator("table.orch-sweeps tr", has_text="lab")).to_contain_text(["Does it run?"])
    expect(page.get_by_label("metric")).to_contain_text("val/mse")  # the sweep's own
    expect(page.locator(LEGEND)).to_have_text("c_z")  # its first axis
    expect(page.locator(CROSS)).to_have_count(1)  # trial 1 diverged

    page.get_by_label("colour by").select_option(label="k")
    expect(page.locator(LEGEND)).to_have_text("k")
    page.get_by_text("mean over seeds").click()
    page.get_by_role("switch").click()
    expect(page.locator("svg.marks .mark-area path").first).to_be_attached()  # the band

    link = page.get_by_role("link", name="run", exact=True).first
    experiment_id = page_lab.ledger.find_sweep("lab").experiment_id
    assert link.get_attribute("href").startswith(
        f"{ui.mlflow}/#/experiments/{experiment_id}/runs/{page_lab.run_ids[0]}"
    )
    expect(page.locator("table.orch-sweeps tr", has_text="loss_factor")).to_contain_text(["1 of 8 trials"])
    page.get_by_text("NaN", exact=True).wait_for()  # the diverged run's last value is said, not drawn

    newer = page_lab.add_sweep("newer")
    page_lab.run_trial(newer, {"c_z": 0.0, "k": 1, "seed": 0}, {10: 1.0})
    page.locator("table.orch-sweeps tr", has_text="newer").wait_for()  # by itself
    expect(page.get_by_label("sweep")).to_have_value("lab")
    expect(page.locator(LEGEND)).to_have_text("k")

    assert page.title() == "orch"  # a description's <script> is text
    assert watched.blocked == []
    assert watched.errors == []


def test_what_people_and_workloads_write_is_shown_as_text_and_never_run(page_lab: Any, ui: Any, watched: Any) -> None:
    page, hostile = (
        watched.page,
        "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>",
    )
    sweep = page_lab.add_sweep("hostile", f"{hostile} asked")
    for number in range(2):
        page_lab.run_trial(sweep, {"note": f"{hostile}{number}", "seed": 0}, {10: 1.0, 20: math.nan})
    [first, *_] = page_lab.ledger.trials(sweep.id)
    seen = Finding(f"{hostile} check", Severity.ERROR, f"{hostile} found", f"{hostile} advised", 10)
    page_lab.ledger.add_findings(sweep.id, [(first.id, 1, seen)])
    with page_lab.database.connect("orch-tests") as connection:
        reason = f"ValueError: {hostile} failed"
        connection.execute("update orch_ledger.trials set reason = %s where sweep_id = %s", [reason, sweep.id])

    page.goto(ui.dashboards)
    page.get_by_label("sweep").select_option(label="hostile")
    for words in ("asked", "check", "found", "advised", "failed"):
        expect(page.get_by_text(f"{hostile} {words}").first).to_be_visible()
    expect(page.locator(LEGEND)).to_have_text("note")
    expect(page.locator(".role-legend-label", has_text="<img").first).to_be_attached()  # an axis' values
    page.locator(CROSS).last.hover()  # its tooltip holds them too
    expect(page.locator("#vg-tooltip-element")).to_contain_text("<img src=x")
    assert page.locator("img[src=x]").count() == 0
    assert page.title() == "orch"
    assert watched.errors == []


def test_the_dashboard_says_that_the_database_is_away_and_goes_on_when_it_is_back(
    page_lab: Any, ui: Any, watched: Any
) -> None:
    page = watched.page
    page.goto(ui.dashboards)
    page.locator("table.orch-sweeps tr", has_text="lab").wait_for()
    page.get_by_role("combobox").first.select_option("2s")
    with closed_to_newcomers(page_lab.database):
        expect(page.get_by_role("alert")).to_contain_text("The database does not answer")
        assert "password" not in page.get_by_role("alert").inner_text()
        expect(page.locator("table.orch-sweeps tr", has_text="lab")).to_have_count(1)  # what was read stays
    page.get_by_role("alert").wait_for(state="detached")
    page_lab.add_sweep("afterwards")
    page.locator("table.orch-sweeps tr", has_text="afterwards").wait_for()
    assert watched.errors == []


@contextmanager
def closed_to_newcomers(database: Database) -> Iterator[None]:
    """The server refuses new connections to this database, as while it starts or stops."""

    def allow(word: str) -> None:
        with database.beside("postgres").connect("orch-tests", autocommit=True) as connection:
            connection.execute(f'alter database "{database.name}" with allow_connections {word}')

    allow("false")
    try:
        yield
    finally:
        allow("true")


def curves_of(*values_of_trials: list[float], state: str = "finished") -> dict[str, Any]:
    """Trials of one configuration that differ in their seed and report at the steps 0, 1, 2, ..."""
    trials = [
        {
            "trial": number,
            "run_id": f"run{number}",
            "state": "diverged" if NAN in values else state,
            "params": {"c_z": 0.1, "seed": number},
            "diverged_at": values.index(NAN) if NAN in values else None,
            "last_step": len(values) - 1,
        }
        for number, values in enumerate(values_of_trials)
    ]
    points = [
        {"trial": number, "step": step, "value": value}
        for number, values in enumerate(values_of_trials)
        for step, value in enumerate(values)
    ]
    return {"metric": "loss", "trials": trials, "drawn": [trial["trial"] for trial in trials], "points": points}


def test_a_curve_breaks_where_a_value_is_not_finite_and_none_is_drawn_as_a_number() -> None:
    segments, steps = overview.finite_segments([(0, 1.0), (1, math.inf), (2, NAN), (3, 2.0)])
    assert segments == [[(0, 1.0)], [(3, 2.0)]]
    assert steps == [1]


def test_a_diverged_trial_ends_with_a_mark_at_its_step_and_at_the_height_of_its_last_finite_value() -> None:
    points, [mark] = overview.trial_lines(curves_of([1.0, 5.0, NAN]), "c_z")
    assert [point["value"] for point in points] == [1.0, 5.0]
    assert (mark["step"], mark["value"], mark["what"]) == (2, 5.0, "diverged at step 2")


def test_a_trial_that_was_never_finite_is_named_instead_of_drawn() -> None:
    curves = curves_of([1.0, 1.0], [NAN])
    points, marks = overview.trial_lines(curves, "c_z")
    assert marks == []
    assert overview.chart_notes(curves, points, marks, False) == "Never finite, so not drawn: trial 1."


def test_a_mean_over_seeds_ends_where_one_of_them_diverges() -> None:
    means, marks = overview.mean_lines(curves_of([1.0, 2.0, 3.0], [3.0, 4.0, NAN]), "c_z")
    assert [(point["step"], point["value"], point["low"], point["high"]) for point in means] == [
        (0, 2.0, 1.0, 3.0),
        (1, 3.0, 2.0, 4.0),
    ]
    assert [mark["step"] for mark in marks] == [2]


def test_an_axis_that_holds_text_and_numbers_is_text_throughout() -> None:
    curves = curves_of([1.0], [1.0])
    curves["trials"][0]["params"]["c_z"] = "auto"
    assert overview.axis_values(curves, "c_z") == {0: "auto", 1: "0.1"}


# What serves the pages


def test_mlflows_page_shows_the_run_its_parameters_and_its_artifacts(page_lab: Any, ui: Any, watched: Any) -> None:
    run_id = page_lab.run_ids[2]
    experiment_id = page_lab.ledger.find_sweep("lab").experiment_id
    watched.page.goto(f"{ui.mlflow}/#/experiments/{experiment_id}/runs/{run_id}")
    wrong = watched.page.get_by_text("Something went wrong")
    expect(watched.page.get_by_role("heading", name="lab-2").or_(wrong).first).to_be_visible()
    assert wrong.count() == 0, watched.errors
    expect(watched.page.get_by_text("c_z", exact=True).first).to_be_visible()
    # MLflow asks who is logged in, and without its login plug-in answers itself with 404.
    assert [error for error in watched.errors if "/users/current" not in error] == []
    assert watched.blocked == []

    run = json.loads(get(f"{ui.mlflow}/api/2.0/mlflow/runs/get?run_id={run_id}"))["run"]
    assert {param["key"]: param["value"] for param in run["data"]["params"]} == {"c_z": "0.0", "k": "2", "seed": "0"}
    listing = json.loads(get(f"{ui.mlflow}/api/2.0/mlflow/artifacts/list?run_id={page_lab.run_ids[0]}"))
    assert [file["path"] for file in listing["files"]] == ["note.txt"]
    assert get(f"{ui.mlflow}/get-artifact?path=note.txt&run_id={page_lab.run_ids[0]}") == b"a note"


def test_no_password_is_on_a_command_line_or_in_a_log_and_the_connections_are_few(page_lab: Any, ui: Any) -> None:
    password = dict(page_lab.database.parameters)["password"]
    for process in descendants(ui.process.pid):
        assert password not in " ".join(process.cmdline())
        assert "ORCH_DATABASE_URL" not in process.environ()
    for name in ("mlflow", "dashboards"):
        assert password not in (page_lab.home.path / "logs" / f"{name}.log").read_text()
    with page_lab.database.connect("orch-tests") as connection:
        query = "select count(*) from pg_stat_activity where datname = current_database() and application_name = %s"
        [[num_connections]] = connection.execute(query, [serve.MLFLOW_SESSION]).fetchall()
    assert 1 <= num_connections <= 4


def test_both_servers_and_all_their_workers_listen_on_loopback_only(ui: Any) -> None:
    family = descendants(ui.process.pid)
    listening = [
        one.laddr for process in family for one in process.net_connections() if one.status == psutil.CONN_LISTEN
    ]
    assert {urlsplit(ui.mlflow).port, urlsplit(ui.dashboards).port} <= {address.port for address in listening}
    assert {address.ip for address in listening} == {"127.0.0.1"}
