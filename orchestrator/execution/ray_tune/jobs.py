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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

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

T = TypeVar("T")


def files_of(spec: Path | None, package: str) -> dict[str, Path]:
    """What a sweep needs besides `orch` itself, by its name beside the command: its file, the workload's package."""
    files = {} if spec is None else {spec.name: spec}
    if package not in OF_THE_CLUSTER:
        folder = folder_of(package)
        files[folder.name] = folder
    return files


def submit(address: str, argv: Sequence[str], files: Mapping[str, Path], expect: str) -> str:
    """Has the cluster run `orch ARGV` beside copies of `files`, on the database whose contents are named `expect`.

    `address` is the job server's, `http://HOST:8265`, or one that a Ray node of this machine knows. Returns the job's
    id. Raises ResourceError, with nothing started, when no job server takes it.
    """
    (refuse_silent_server if "://" in address else refuse_silent_address)(address)
    with _together(files) as folder, _server(address) as client:
        return _submitted(client, _entrypoint(argv, expect), {"working_dir": str(folder)} if files else {})


def _submitted(client: JobSubmissionClient, entrypoint: str, runtime_env: dict[str, str]) -> str:
    """The new job's id. A head that has just been started takes none for some seconds, and says so."""
    began = time.monotonic()
    while True:
        try:
            job: str = client.submit_job(entrypoint=entrypoint, runtime_env=dict(runtime_env))
            return job
        except RuntimeError as error:
            if TRY_AGAIN not in str(error) or time.monotonic() - began > STARTING_LIMIT_S:
                raise
        time.sleep(POLL_S)


def wait_until(address: str, job: str, is_there: Callable[[], bool]) -> None:
    """Waits until `is_there`, or the job has ended well. A sweep's preflight may take minutes.

    Raises ResourceError with the job's last lines when it failed, and when it does not begin at all.
    """
    from ray.job_submission import JobStatus

    began = time.monotonic()
    while not is_there():
        with _server(address, f"job {job} was submitted; `orch status` shows whether it runs") as client:
            status = client.get_job_status(job)
            if status in (JobStatus.FAILED, JobStatus.STOPPED):
                raise ResourceError(_last_words(client.get_job_logs(job)) or _why(client, job))
            if status == JobStatus.SUCCEEDED:
                return
            if status == JobStatus.PENDING and time.monotonic() - began > PENDING_LIMIT_S:
                client.stop_job(job)
                raise ResourceError(
                    f"{address}  the cluster did not begin job {job} within {PENDING_LIMIT_S:g} s, so it was "
                    "withdrawn; look at its head (ray status), and submit again"
                )
        time.sleep(POLL_S)


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


def _why(client: JobSubmissionClient, job: str) -> str:
    return str(client.get_job_info(job).message or f"job {job} ended without a word")
