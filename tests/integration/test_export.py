"""`orch export`: what SQL says of a sweep, as a file that other programs read."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas
import pytest
from click import UsageError
from pyarrow import parquet

from orchestrator.cli import export as export_command
from orchestrator.database import view_catalog
from orchestrator.database.reader import snapshot
from orchestrator.errors import DatabaseUnavailable, NotFound, PlaceUnusable
from orchestrator.reports import export as export_module
from orchestrator.reports.export import Form, export
from orchestrator.reports.whole_file import NotWritten, whole_file
from orchestrator.settings import Home
from orchestrator.workspace import Workspace, open_workspace
from tests.conftest import Orch

DEADLINE_S = 30.0
SWEEP = """
    # Does every fate come out?
    # It should.
    workload: orch_lab:Odd
    metric: val/loss
    params: {do: {grid: [nothing, nan, inf, raise]}, note: "a, \\"b\\"\\nö 100%", x: 0.1}
    preflight: false
"""
ADDED = """
    insert into public.{table} (run_uuid, key, value, timestamp, step, is_nan)
    select trial.run_id, key, 1e-300, extract(epoch from trial.started_at)::bigint * 1000 + 1000, 1, false
    from orch_ledger.trials as trial
    join orch_ledger.sweeps as sweep on sweep.id = trial.sweep_id
    cross join unnest(array{keys}) as key
    where sweep.name = '{name}' and trial.number = 0
"""
ODD_NAMES = ["x", "seconds", "seconds_run", "router/load/3", "100% of/it"]


@dataclass(frozen=True)
class Fates:
    """A sweep whose trials finished, diverged (NaN, infinity) and failed."""

    orch: Orch
    workspace: Workspace
    name: str

    def sql(self, query: str) -> list[dict[str, Any]]:
        """What the owner is told, by another way than the export's."""
        with self.workspace.database.connect("orch-tests", autocommit=True) as connection:
            cursor = connection.execute(query.encode())
            names = [column.name for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in cursor] if names else []

    def report(self, keys: list[str]) -> None:
        """Further metrics of the first trial, written as the recorder writes them."""
        for table in ("metrics", "latest_metrics"):
            self.sql(ADDED.format(table=table, keys=keys, name=self.name))
        with self.workspace.database.connect("orch-tests") as connection:
            assert view_catalog.rebuild_sweep_view(connection, self.name)

    def exported(self, what: str, form: Form = "parquet") -> bytes:
        out = io.BytesIO()
        with snapshot(self.workspace.reader_database) as moment:
            export(moment, self.name, what, form, out)
        return out.getvalue()


@pytest.fixture(scope="module")
def fates(orch: Orch, home: Home) -> Fates:
    name = "export_fates"
    orch("sweep", orch.sweep_file(SWEEP, name), "--inline", expect=1)
    fates = Fates(orch, open_workspace(home.path), name)
    fates.report(ODD_NAMES)
    return fates


def same(one: Any, other: Any) -> bool:
    """Equal, where NaN is equal to itself and null to nothing but null."""
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and bool(one == other)


def plain(value: Any) -> Any:
    """What SQL said, as a Parquet file can hold it: what is structured is JSON text."""
    if isinstance(value, datetime):
        return value.astimezone(UTC)
    return json.dumps(value) if isinstance(value, dict | list) else value


def normal(value: Any) -> Any:
    """JSON text written in one way; everything else as it is."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        return json.dumps(json.loads(value))
    return value.astimezone(UTC) if isinstance(value, datetime) else value


def test_a_parquet_file_of_the_trials_holds_what_sql_says(fates: Fates, tmp_path: Path) -> None:
    path = tmp_path / "fates.parquet"
    path.write_text("an older file")
    done = fates.orch("export", fates.name, "-o", path)
    table = parquet.read_table(path)
    assert done.out.startswith(f"{path}  4 rows, {table.num_columns} columns, ")
    assert os.listdir(tmp_path) == ["fates.parquet"]
    expected = fates.sql(f"select * from orch.sweep_{fates.name} order by trial")
    for row, said in zip(table.to_pylist(), expected, strict=True):
        wrong = {name: (row[name], said[name]) for name in said if not same(normal(row[name]), plain(said[name]))}
        assert not wrong
    frame = pandas.read_parquet(path)
    assert list(frame["state"]) == ["finished", "diverged", "diverged", "failed"]
    assert math.isnan(frame["val/loss"][1]), "NaN is a number"
    assert frame["val/loss"][2] == math.inf
    assert table["100% of/it"].to_pylist() == [1e-300, None, None, None]
    assert (frame["x"][0], frame["x_metric"][0]) == (0.1, 1e-300), "a metric called like a parameter"
    assert frame["note"][0] == 'a, "b"\nö 100%'
    types = {name: str(table.schema.field(name).type) for name in ("steps", "x", "diverged", "do", "started_at")}
    assert types == {
        "steps": "int64", "x": "double", "diverged": "bool", "do": "string", "started_at": "timestamp[us, tz=UTC]",
    }  # fmt: skip


def test_beside_a_sweeps_columns_stands_what_is_known_of_each_trial(fates: Fates) -> None:
    table = parquet.read_table(io.BytesIO(fates.exported("runs")))
    beside = fates.sql(f"select * from orch.runs where sweep = '{fates.name}' order by trial")
    names = {name: "seconds_run_run" if name == "seconds" else name for name in beside[0]}
    assert table["seconds_run"].to_pylist()[0] == 1e-300, "a metric of that name comes first"
    for row, said in zip(table.to_pylist(), beside, strict=True):
        assert not [name for name in said if not same(normal(row[names[name]]), plain(said[name]))]
    assert beside[3]["error"].count("\n") > 2, "a traceback has lines, and an end without quotes is no end"
    about = {key.decode(): text.decode() for key, text in table.schema.metadata.items() if key.startswith(b"orch.")}
    assert about["orch.sweep"] == fates.name
    assert about["orch.question"] == "Does every fate come out?"
    assert (about["orch.metric"], about["orch.mode"]) == ("val/loss", "min")
    assert json.loads(about["orch.axes"]) == ["do"]
    assert "workload: orch_lab:Odd" in about["orch.spec"]


def test_every_point_comes_out_in_every_form(fates: Fates, monkeypatch: pytest.MonkeyPatch) -> None:
    order = "order by trial, key, step"
    said = fates.sql(f"select * from orch.metrics where sweep = '{fates.name}' {order}")
    monkeypatch.setattr(export_module, "BLOCK_BYTES", 500)  # some five points
    data = io.BytesIO(fates.exported("metrics"))
    assert parquet.ParquetFile(data).num_row_groups > 2
    frame = pandas.read_parquet(data).sort_values(["trial", "key", "step"])
    forms = {"parquet": frame.to_dict("records"), "csv": [], "jsonl": []}
    forms["csv"] = list(csv.DictReader(io.StringIO(fates.exported("metrics", "csv").decode())))
    forms["jsonl"] = [json.loads(line) for line in fates.exported("metrics", "jsonl").splitlines()]
    for rows in forms.values():
        rows.sort(key=lambda row: (int(row["trial"]), row["key"], int(row["step"])))
        assert len(rows) == len(said)
        for row, point in zip(rows, said, strict=True):
            assert list(row) == list(point)
            assert same(float(row["value"]), point["value"])
            assert (int(row["trial"]), row["key"], int(row["step"])) == (point["trial"], point["key"], point["step"])
            assert datetime.fromisoformat(str(row["measured_at"])) == point["measured_at"]
    assert {math.inf} < {point["value"] for point in said if not point["value"] < 1e9}, "also NaN and infinity"


def test_json_lines_keep_structure_and_csv_tells_nothing_from_an_empty_text(fates: Fates) -> None:
    rows = [json.loads(line) for line in fates.exported("runs", "jsonl").splitlines()]
    assert rows[0]["params"]["note"] == 'a, "b"\nö 100%'
    assert rows[0]["hidden"] == [1]
    assert [row["val/loss"] for row in rows[1:]] == ["NaN", "Infinity", 0.1]
    assert rows[0]["diverged"] is False
    text = fates.exported("runs", "csv").decode()
    frame = pandas.read_csv(io.StringIO(text), keep_default_na=False, na_values=[])
    assert list(frame["diverged"]) == [False, True, True, False]
    assert text.splitlines()[0].startswith("run_id,trial,state,diverged,verdict,")
    failed = text[text.index(",failed,") :]
    assert ',"",' in failed or ',""\n' in failed, "an empty text"
    assert ",," in failed, "nothing"


@pytest.mark.parametrize("what", ["final_metrics", "findings", "decisions", "logs"])
def test_the_other_views_come_out_too_also_without_rows(fates: Fates, what: str) -> None:
    said = fates.sql(f"select * from orch.{what} where sweep = '{fates.name}'")
    table = parquet.read_table(io.BytesIO(fates.exported(what)))
    assert table.num_rows == len(said)
    with fates.workspace.database.connect("orch-tests") as connection:
        columns = connection.execute(f"select * from orch.{what} limit 0".encode()).description or ()
    assert table.column_names == [column.name for column in columns]


def test_an_export_sees_one_moment_and_says_what_was_not_over(fates: Fates) -> None:
    running = f"update orch_ledger.trials set state = '{{}}' where number = 0 and sweep_id = {sweep_id(fates)}"
    out = io.BytesIO()
    fates.sql(running.format("running"))
    try:
        with snapshot(fates.workspace.reader_database) as moment:
            limit = moment.query("select current_setting('statement_timeout')").rows
            assert limit == [("0",)], "an export may take longer than a query"
            fates.sql(running.format("finished"))
            exported = export(moment, fates.name, "runs", "jsonl", out)
    finally:
        fates.sql(running.format("finished"))
    assert json.loads(out.getvalue().splitlines()[0])["state"] == "running"
    assert exported.notes == ("1 of 4 trials of export_fates had no result yet",)
    with snapshot(fates.workspace.reader_database) as moment, pytest.raises(NotFound, match="did you mean"):
        export(moment, "export_fate", "runs", "jsonl", out)


def sweep_id(fates: Fates) -> int:
    [row] = fates.sql(f"select id from orch_ledger.sweeps where name = '{fates.name}'")
    number: int = row["id"]
    return number


# The file


def test_standard_output_takes_every_form(fates: Fates, home: Home, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    said = fates.orch("export", fates.name, "-o", "-", "--format", "csv")
    assert said.out.encode() == fates.exported("runs", "csv")
    lines = on_standard_output(fates.name, home, capfdbinary, "jsonl")
    assert lines == fates.exported("final_metrics", "jsonl")
    table = parquet.read_table(io.BytesIO(on_standard_output(fates.name, home, capfdbinary, "parquet")))
    assert table.num_rows == len(lines.splitlines()) > 0


def on_standard_output(name: str, home: Home, capfdbinary: pytest.CaptureFixture[bytes], form: str) -> bytes:
    """What a sweep ended with, by the command in this process."""
    words = [name, "-o", "-", "--what", "final_metrics", "--format", form]
    export_command.command.main(words, standalone_mode=False, obj=home.path)
    return capfdbinary.readouterr().out


def test_parquet_is_nothing_for_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = os.openpty()
    with open(leader), open(follower, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", terminal)
        with pytest.raises(UsageError, match="Parquet is no text for a terminal: name a file"):
            export_command.command.main(["any", "-o", "-", "--format", "parquet"], standalone_mode=False)


def test_half_an_export_on_standard_output_is_no_success(
    fates: Fates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fates.exported("runs", "csv")
    with (tmp_path / "out").open("wb", buffering=0) as raw, snapshot(fates.workspace.reader_database) as moment:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, write_through=True))  # as PYTHONUNBUFFERED makes it
        with pytest.raises(OSError, match="File too large"), files_of_at_most(len(whole) - 1):
            export_command._to_standard_output(moment, fates.name, "runs", "csv")
        monkeypatch.undo()
    assert (tmp_path / "out").stat().st_size == len(whole) - 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-o", "x.xlsx"], "-o x.xlsx  ends in none of .parquet, .csv, .jsonl"),
        (["-o", "-"], "-o -  needs --format"),
        (["-o", "/nowhere/x.csv"], "/nowhere/x.csv  cannot be written: No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_is_refused_at_once(fates: Fates, arguments: list[str], said: str) -> None:
    assert said in fates.orch("export", fates.name, *arguments, expect=2).err


def test_links_that_lead_in_a_circle_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.symlink_to(path)
    with pytest.raises(PlaceUnusable, match="cannot be written: its links lead in a circle"), whole_file(path):
        pass


def test_what_breaks_off_leaves_the_older_file(tmp_path: Path) -> None:
    path, pipe = tmp_path / "x.csv", tmp_path / "pipe.csv"
    path.write_text("older")
    os.mkfifo(pipe)
    with pytest.raises(PlaceUnusable, match="no file that could be replaced"), whole_file(pipe):
        pass
    with pytest.raises(NotWritten, match="File too large; mend that and run it again") as error:
        write_too_much(path)
    assert error.value.exit_code == 1
    with pytest.raises(DatabaseUnavailable, match=r"^it went away$"), whole_file(path):  # in its own words
        raise DatabaseUnavailable("it went away")
    assert path.read_text() == "older"
    assert sorted(os.listdir(tmp_path)) == ["pipe.csv", "x.csv"]


def write_too_much(path: Path) -> None:
    with whole_file(path) as file, files_of_at_most(100_000):
        file.write(bytes(1_000_000))
        file.flush()


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """As on a full disk, for this process alone."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_killed_export_leaves_the_older_file_and_no_litter(fates: Fates, tmp_path: Path) -> None:
    path = tmp_path / "points.parquet"
    path.write_text("older")
    with fates.workspace.database.connect("orch-tests") as connection:
        connection.execute("alter view orch.logs reset (security_barrier)")  # a lock: it comes no further
        process = fates.orch.start("export", fates.name, "-o", path, "--what", "logs")
        deadline = time.monotonic() + DEADLINE_S
        while len(os.listdir(tmp_path)) == 1:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 130
    assert os.listdir(tmp_path) == ["points.parquet"]
    assert path.read_text() == "older"


@pytest.mark.slow  # to plan such a query takes PostgreSQL a second; fewer columns are tested above
def test_five_hundred_columns_come_out(fates: Fates) -> None:
    fates.report([f"wide/{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(view_catalog.MAX_COLUMNS)])
    table = parquet.read_table(io.BytesIO(fates.exported("runs")))
    assert table.num_columns > view_catalog.MAX_COLUMNS
    assert table["wide/aa"].to_pylist() == [1e-300, None, None, None]
