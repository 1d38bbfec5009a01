"""Waits until the PostgreSQL of ORCH_DATABASE_URL takes connections. Explains nothing: `orch`, run next, does that."""

from __future__ import annotations

import os
import sys
import time

import psycopg

TIMEOUT_S = float(os.environ.get("START_WAIT_S", "90"))
POLL_S = 0.5


def is_pointless(error: psycopg.OperationalError) -> bool:
    """A server that answers with a refusal will not change its mind."""
    return any(reason in str(error) for reason in ("authentication failed", "does not exist"))


def main() -> int:
    url = os.environ["ORCH_DATABASE_URL"].replace("postgresql+psycopg://", "postgresql://", 1)
    deadline = time.monotonic() + TIMEOUT_S
    told = False
    while True:
        try:
            psycopg.connect(url, connect_timeout=5).close()
            return 0
        except psycopg.OperationalError as error:
            if is_pointless(error) or time.monotonic() > deadline:
                return 1
        if not told:
            print(f"waiting for the database, at most {TIMEOUT_S:.0f} s", file=sys.stderr)
            told = True
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main())
