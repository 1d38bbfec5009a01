"""Hands an `orch` command to a cluster's job server, and waits until it has begun. Follows no sweep: the ledger tells.

The command runs on the cluster's head, in the environment in which Ray was started there: its database, its artifact
root. What travels is shown by Ray's dashboard and kept in its log, so no secret does: the command line, the sweep file,
the package of the user's workload, and the name of the database's contents.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.errors import ResourceError
from orchestrator.execution.ray_tune import environment
from orchestrator.execution.ray_tune.cluster import folder_of
from orchestrator.execution.ray_tune.reachable import refuse_silent_address, refuse_silent_server

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

POLL_S = 0.3
STARTING_LIMIT_S = 60.0
TRY_AGAIN = "try again later"  # Ray's words
PENDING_LIMIT_S = 120.0  # the head starts one process for a job; where that takes longer it will not happen
LIMIT_BYTES = 200_000_000  # Ray takes half a gigabyte, and keeps it in the head's memory
LAST_LINES = 40
OF_THE_CLUSTER = ("orchestrator", "workloads")  # installed there with `orch` itself
OF_RAY = re.compile(r"Running entrypoint for job |[\d-]+ [\d:,]+\s+(INFO|WARNING) \S+\.py:\d+ -- ")
NOT_CODE = ("__pycache__", ".git", ".orch", ".venv", "*.pyc")


class Ended(NamedTuple):
    """A job that is over: the exit code of its command, and what that said last."""

    code: int
    said: str


def files_of(spec: Path | None, package: str) -> dict[str, Path]:
    """What a sweep needs besides `orch` itself, by its name beside the command: its file, the workload's package."""
    files = {} if spec is None else {spec.name: spec}
    if package not in OF_THE_CLUSTER:
        folder = folder_of(package)
        files[folder.name] = folder
    return files


def new_name() -> str:
    """Of a job that is to be submitted: known before, it can be stopped while it is on its way."""
    return f"orch-{uuid.uuid4().hex[:16]}"


def submit(address: str, job: str, argv: Sequence[str], files: Mapping[str, Path], expect: str) -> None:
    """Has the cluster run `orch ARGV` beside copies of `files`, on the database whose contents are named `expect`.

    `address` is the job server's, `http://HOST:8265`, or one that a Ray node of this machine knows. Raises
    ResourceError, with nothing started, when no job server takes it.
    """
    (refuse_silent_server if "://" in address else refuse_silent_address)(address)
    with _together(files) as folder, _server(address) as client:
        _submit(client, job, _entrypoint(argv, expect), {"working_dir": str(folder)} if files else {})


def _submit(client: JobSubmissionClient, job: str, entrypoint: str, runtime_env: dict[str, str]) -> None:
    """A head that has just been started takes no job for some seconds, and says so."""
    began = time.monotonic()
    while True:
        try:
            client.submit_job(entrypoint=entrypoint, submission_id=job, runtime_env=dict(runtime_env))
            return
        except RuntimeError as error:
            if TRY_AGAIN not in str(error) or time.monotonic() - began > STARTING_LIMIT_S:
                raise
        time.sleep(POLL_S)


def wait_until(address: str, job: str, is_there: Callable[[], bool]) -> Ended | None:
    """Waits until `is_there`, and returns None; or until the job's command has ended, well or not, and how.

    A sweep's preflight may take minutes. Raises ResourceError when the command was not run, or not to its end.
    """
    from ray.job_submission import JobStatus

    began = time.monotonic()
    while not is_there():
        with _server(address, f"job {job} was submitted; `orch status` shows whether it runs") as client:
            status = client.get_job_status(job)
            if status.is_terminal():
                return _ended(client, job)
            if status == JobStatus.PENDING and time.monotonic() - began > PENDING_LIMIT_S:
                client.stop_job(job)
                raise ResourceError(
                    f"{address}  the cluster did not begin job {job} within {PENDING_LIMIT_S:g} s, so it was "
                    "withdrawn; look at its head (ray status), and submit again"
                )
        time.sleep(POLL_S)
    return None


def stop(address: str, job: str) -> bool:
    """Ends a job; False if it never came there. Raises ResourceError, which names it, when the cluster does not say."""
    with _server(address, f"job {job} may have begun; `orch status` shows whether it runs") as client:
        is_there = any(one.submission_id == job for one in client.list_jobs())
        return is_there and bool(client.stop_job(job))


def _ended(client: JobSubmissionClient, job: str) -> Ended:
    info, said = client.get_job_info(job), _last_words(client.get_job_logs(job))
    if info.driver_exit_code is None or info.driver_exit_code < 0:  # never begun, stopped, killed
        why = str(info.message or "it was ended from outside").splitlines()[0]
        raise ResourceError("\n".join(filter(None, [said, f"job {job} did not run to its end: {why}"])))
    return Ended(info.driver_exit_code, said and f"{said}\n")


def _entrypoint(argv: Sequence[str], expect: str) -> str:
    """`exec`, so that a signal for the job reaches `orch` itself."""
    return f"exec env ORCH_EXPECTED_DATABASE={shlex.quote(expect)} orch {shlex.join(argv)}"


@contextlib.contextmanager
def _server(address: str, meanwhile: str = "") -> Iterator[JobSubmissionClient]:
    """The job server of a cluster. What goes wrong with it is a ResourceError; `meanwhile` says what is so anyway."""
    environment.prepare(None)
    from ray.exceptions import AuthenticationError, RayError
    from ray.job_submission import JobSubmissionClient

    for chatty in ("dashboard.modules.dashboard_sdk", "_private.runtime_env.packaging"):  # they tell of every upload
        logging.getLogger(f"ray.{chatty}").setLevel(logging.WARNING)
    try:
        with _without("RAY_ADDRESS"):  # it would count more than the argument
            client = JobSubmissionClient(address)
        yield client
    except AuthenticationError as error:
        raise ResourceError(_told(address, "the cluster refuses the token", TOKEN_ADVICE, meanwhile)) from error
    except (OSError, RuntimeError, ValueError, RayError) as error:  # requests' exceptions are OSErrors
        first_line = (str(error).strip() or repr(error)).split("\n")[0]
        what = f"no job server takes it ({first_line})"
        raise ResourceError(_told(address, what, SERVER_ADVICE, meanwhile)) from error


TOKEN_ADVICE = "set RAY_AUTH_TOKEN to the one that its nodes were started with"
SERVER_ADVICE = (
    "write http://HOST:8265 of its head, where Ray must be installed with its job server "
    "(pip install 'orch-sweeps[cluster]')"
)


def _told(address: str, what: str, advice: str, meanwhile: str) -> str:
    return "\n".join(filter(None, [f"{address}  {what}; {advice}", meanwhile]))


@contextlib.contextmanager
def _without(variable: str) -> Iterator[None]:
    value = os.environ.pop(variable, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[variable] = value


@contextlib.contextmanager
def _together(files: Mapping[str, Path]) -> Iterator[Path]:
    """A folder with copies of `files`, for as long as they are being sent."""
    with tempfile.TemporaryDirectory(prefix="orch-job-") as folder:
        for name, path in files.items():
            if path.is_dir():
                shutil.copytree(path, Path(folder, name), ignore=shutil.ignore_patterns(*NOT_CODE))
            else:
                shutil.copyfile(path, Path(folder, name))
        _refuse_large(Path(folder), files)
        yield Path(folder)


def _refuse_large(folder: Path, files: Mapping[str, Path]) -> None:
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > LIMIT_BYTES:
        largest = max(files.values(), key=lambda path: sum(one.stat().st_size for one in (path, *path.rglob("*"))))
        raise ResourceError(
            f"{largest}  what travels with the sweep has {size / 1e6:.0f} MB; {LIMIT_BYTES / 1e6:.0f} are the most; "
            "keep data out of the workload's package, in a place that the nodes reach"
        )


def _last_words(log: str) -> str:
    """What the command said last, without what Ray says around it."""
    lines = [line for line in log.splitlines() if line.strip() and not OF_RAY.match(line)]
    return "\n".join(lines[-LAST_LINES:])
