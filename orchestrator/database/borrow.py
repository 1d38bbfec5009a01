"""Lends a psycopg connection out of an engine's pool, so that a command keeps to its few connections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from sqlalchemy import Engine

__all__ = ["Engine", "borrowed"]


@contextmanager
def borrowed(engine: Engine) -> Iterator[psycopg.Connection[Any]]:
    """A connection of the pool; what was done on it is committed at the end, or rolled back when an error leaves."""
    link = engine.raw_connection()
    connection: Any = link.driver_connection
    try:
        yield connection
        connection.commit()
    except BaseException:
        if connection.closed:  # the server cut it: there is nothing to roll back, and nobody shall get it again
            link.invalidate()
        else:
            link.rollback()
        raise
    finally:
        link.close()
