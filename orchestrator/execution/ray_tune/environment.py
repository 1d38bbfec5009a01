"""What must stand in the environment before ray is imported, and why. Imports nothing of ray."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

# Measured on Ray 2.60: without these Tune imports TensorBoardX (and with it torch) in the driver, writes a snapshot
# that nobody reads, swallows Ctrl-C, changes directory under relative paths, and runs workers at nice 15.
TUNE_AND_RAY = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000000",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_worker_niceness": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a trial without a GPU share sees no GPU
    "RAY_enable_worker_prestart": "0",  # Tune never uses prestarted workers: they would only burn CPU
    "RAY_prestart_worker_first_driver": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # Ray would print every worker death to stdout; we tell it once, as an outcome
    "RAY_AIR_NEW_OUTPUT": "0",  # the new display prints a banner even when told to be silent
}
USAGE_STATISTICS = "RAY_USAGE_STATS_ENABLED"
THREADS = "OMP_NUM_THREADS"
LOGINS = ("ORCH_DATABASE_URL", "ORCH_READER_URL")
TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def prepare(token_file: Path | None) -> None:
    """Sets what the user has not set. `token_file` holds the token of a cluster of our own; None when attaching."""
    for name, value in TUNE_AND_RAY.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault(USAGE_STATISTICS, "0")
    if os.environ.get(THREADS) == "":  # Ray would take it for the user's own number
        del os.environ[THREADS]
    if token_file is not None:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.pop("RAY_AUTH_TOKEN", None)
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token_file)
    elif any(os.environ.get(name) for name in TOKEN_VARIABLES):
        # Ray turns token authentication on by itself for local clusters only, not for explicit addresses.
        os.environ.setdefault("RAY_AUTH_MODE", "token")


@contextlib.contextmanager
def without_logins() -> Iterator[None]:
    """Processes started here do not inherit the database's password: it reaches the recorder with the sweep."""
    taken = {name: os.environ.pop(name) for name in LOGINS if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(taken)
