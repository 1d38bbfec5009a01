"""What the command's outermost layer makes of errors: one block on standard error and the documented exit code."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import psycopg
import pytest
import sqlalchemy.exc

from orchestrator import cli
from orchestrator.cli.output import standard_output
from orchestrator.database.connection import is_away, why_away
from orchestrator.errors import DatabaseLost, DatabaseUnavailable, NoResult, NotFound, OrchError, PlaceUnusable
from orchestrator.execution import patience
from orchestrator.execution.patience import Patience
from orchestrator.signals import STOPPING
from orchestrator.workload import describe


@pytest.fixture(autouse=True)
def this_process_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command ends with its process, and hears no signal after its last word."""
    monkeypatch.setattr("orchestrator.signals.ignore", lambda: None)


def exit_of(monkeypatch: pytest.MonkeyPatch, error: BaseException | None) -> int | str | None:
    def main(**_: object) -> int:
        if error is not None:
            raise error
        return 0

    monkeypatch.setattr(cli.cli, "main", main)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (OrchError("wrong"), 2),
        (NotFound("unknown"), 2),
        (DatabaseUnavailable("away"), 2),
        (DatabaseLost("lost in mid-sweep"), 1),
        (NoResult("no finite run"), 1),
        (click.UsageError("bad option"), 2),
        (click.Abort(), 130),
        (KeyboardInterrupt(), 130),
        (OSError(errno.ENOSPC, "No space left on device"), 1),
        (OSError(errno.EFBIG, "File too large"), 1),
        (OSError(errno.EROFS, "Read-only file system", "/ro/x.html"), 1),
        (psycopg.OperationalError("the server closed the connection unexpectedly"), 2),
    ],
)
def test_every_error_of_the_users_has_its_exit_code_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException | None, code: int
) -> None:
    assert exit_of(monkeypatch, error) == code
    assert "Traceback" not in capsys.readouterr().err


def test_an_error_of_a_file_names_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    exit_of(monkeypatch, OSError(errno.EIO, "Input/output error", "/old/x.html"))
    exit_of(monkeypatch, OSError(errno.EDQUOT, "Disk quota exceeded"))
    assert capsys.readouterr().err.splitlines() == [
        "/old/x.html: Input/output error; mend that and run it again",
        "standard output: Disk quota exceeded; mend that and run it again",
    ]


def test_half_an_answer_on_standard_output_is_an_error_also_where_python_buffers_nothing(tmp_path: Path) -> None:
    program = (
        "import resource; from orchestrator.cli.output import standard_output\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))\n"  # a disk that fills
        "with standard_output() as out: out.write(bytes(5000))"
    )
    with (tmp_path / "half.html").open("wb") as half:
        done = subprocess.run([sys.executable, "-u", "-c", program], stdout=half, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == b"OSError: [Errno 27] File too large"


def test_a_closed_standard_output_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "__stdout__", None)  # as `>&-` leaves it
    with pytest.raises(PlaceUnusable, match="standard output is closed; name a file"), standard_output():
        pass


@pytest.mark.parametrize(
    "error",
    [
        ZeroDivisionError("ours"),
        ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "part of orch.txt"),
    ],
)
def test_an_error_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def main(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli.cli, "main", main)
    with pytest.raises(type(error)):
        cli.main()


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_after_the_last_word_changes_nothing(number: signal.Signals) -> None:
    program = (
        "import atexit, os, sys; from orchestrator import cli\n"
        f"atexit.register(os.kill, os.getpid(), {int(number)})\n"
        "sys.argv = ['orch', '--version']; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("orch")


def test_usage_errors_call_the_command_by_its_name() -> None:
    done = subprocess.run([sys.executable, "-m", "orchestrator.cli", "runs"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: orch runs [OPTIONS] SWEEP\n")


def test_a_workload_that_cannot_be_imported_shows_nothing_of_our_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep_lab.py").write_text("import a_module_that_is_nowhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(OrchError) as refused:
        describe("deep_lab:Anything")
    text = str(refused.value)
    assert text.startswith("importing deep_lab failed:\nTraceback (most recent call last):\n")
    assert "No module named 'a_module_that_is_nowhere'" in text
    assert "orchestrator/workload.py" not in text


@pytest.mark.parametrize(
    "thresholds", ['{"lim": "3"}', '["lim"]', "{5: 1.0}", '{"lim": True}', '{"lim": float("nan")}']
)
def test_a_workload_whose_limits_are_no_numbers_by_name_is_refused_in_one_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thresholds: str
) -> None:
    lines = ("class Own:", "    class Config: pass", "    metrics, run = (), None", f"    thresholds = {thresholds}")
    (tmp_path / "limits_lab.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "limits_lab", raising=False)
    with pytest.raises(OrchError) as refused:
        describe("limits_lab:Own")
    assert str(refused.value).startswith("workload 'limits_lab:Own' has thresholds = ")
    assert "numbers by name are due, such as {'my_limit': 3.0}" in str(refused.value)


# Waiting for a database


def wrapped(error: Exception) -> Exception:
    """As a library raises it: another error from the first."""
    try:
        raise RuntimeError("the store failed") from error
    except RuntimeError as outer:
        return outer


@pytest.mark.parametrize(
    "error",
    [
        psycopg.OperationalError("connection refused"),
        psycopg.errors.AdminShutdown("terminating connection due to administrator command"),
        psycopg.InterfaceError("the connection is closed"),
        sqlalchemy.exc.OperationalError("select 1", {}, psycopg.OperationalError("gone")),
        wrapped(psycopg.OperationalError("gone")),
    ],
)
def test_a_database_that_is_away_is_recognised_through_what_libraries_wrap_around_it(error: Exception) -> None:
    assert is_away(wrapped(error))


@pytest.mark.parametrize(
    "error", [ValueError("no"), psycopg.errors.UniqueViolation("twice"), OSError(errno.ENOSPC, "full"), KeyError("k")]
)
def test_other_errors_are_not_taken_for_an_absent_database(error: Exception) -> None:
    assert not is_away(error)


def test_the_reason_is_the_drivers_own_in_one_line() -> None:
    error = psycopg.OperationalError(
        'connection failed: connection to server on socket "/x/.s.PGSQL.5432" failed: No such file or directory\n'
        "\tIs the server running locally and accepting connections on that socket?"
    )
    assert why_away(wrapped(error)).endswith("failed: No such file or directory")


def failing(times: int, error: Exception) -> Callable[[], str]:
    left = [times]

    def work() -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return "done"

    return work


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PAUSES_S", (0.001, 0.001))


@pytest.mark.usefixtures("quick")
def test_work_is_done_again_after_the_database_is_back_and_the_person_is_told_twice() -> None:
    said: list[str] = []
    order: list[str] = []
    patiently = Patience(said.append, lambda: False, lambda: order.append("back"), lambda: order.append("revive"))
    first = failing(3, psycopg.OperationalError("gone"))
    again = failing(1, wrapped(psycopg.OperationalError("still gone")))
    assert patiently(first, lambda: order.append("again") or again()) == "done"
    assert order == ["revive", "back", "again", "back", "again"]  # a server that takes its time is not started twice
    assert [text.split(" (")[0] for text in said] == [
        "the database takes nothing at the moment",
        "the database is back after 0 s",
    ]


@pytest.mark.usefixtures("quick")
def test_patience_ends_at_once_for_another_error_and_after_its_time_for_an_absence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patiently = Patience(lambda _: None, lambda: True, lambda: None)
    with pytest.raises(ValueError, match="no"):
        patiently(failing(1, ValueError("no")))
    monkeypatch.setattr(patience, "PATIENCE_WHEN_INTERRUPTED_S", 0.01)
    with pytest.raises(DatabaseLost, match="run the same command with --resume"):
        patiently(failing(10_000, psycopg.OperationalError("gone")))
