"""Turns a PostgreSQL URL into connections whose search path is `public`. Starts no server and creates no table.

A `Database` holds a password; whatever it prints shows `***` instead.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolBusy

from orchestrator.database.embedded import ensure_running
from orchestrator.errors import DatabaseUnavailable, OrchError
from orchestrator.masking import MASK, SECRET_PARAMETERS
from orchestrator.settings import LIVENESS, Home, Settings

OLDEST_VERSION = 15
CONNECT_TIMEOUT_S = 10
SEARCH_PATH = "-csearch_path=public"
READABLE = {"DateStyle": "ISO", "IntervalStyle": "postgres"}  # all psycopg reads, whatever is set there
SCHEMES = ("postgresql", "postgres", "postgresql+psycopg", "postgresql+psycopg2")
PASSWORD_OF_URL = (  # in single quotes for a shell
    "'import os, urllib.parse as u; print(u.unquote(u.urlsplit(os.environ[\"ORCH_DATABASE_URL\"]).password))'"
)
URL_EXAMPLE = "postgresql://USER:PASSWORD@HOST:5432/DATABASE"


@dataclass(frozen=True, repr=False)
class Database:
    """One database of one server. May be pickled and sent to workers; prints without its secrets.

    `parameters` are libpq's connection parameters, secrets included, as sorted pairs.
    """

    parameters: tuple[tuple[str, str], ...]

    @classmethod
    def from_url(cls, text: str) -> Database:
        """Reads the URL as libpq does. Raises DatabaseUnavailable, without repeating the text, if it is no such URL."""
        scheme, _, rest = text.strip().partition("://")
        if scheme.lower() not in SCHEMES:
            raise _not_a_url(f"starts with {scheme}://" if rest else "has no scheme")
        _refuse_raw_password(rest)
        try:
            parameters = conninfo_to_dict(f"postgresql://{rest}")
        except psycopg.ProgrammingError:  # its text quotes the URL, so it may hold a piece of the password
            raise _not_a_url("cannot be read") from None
        return cls(tuple(sorted((key, str(value)) for key, value in parameters.items() if value is not None)))

    @property
    def name(self) -> str:
        """The database's name; libpq takes the user's name where none is given."""
        return self._get("dbname") or self._get("user")

    @property
    def user(self) -> str:
        return self._get("user")

    @property
    def url(self) -> str:
        """The URL with its secrets, as libpq and psql read it."""
        return self._whole_url.set(drivername="postgresql").render_as_string(hide_password=False)

    @property
    def masked_url(self) -> str:
        return _masked(self._whole_url.set(drivername="postgresql"))

    @property
    def passwordless_url(self) -> str:
        """For commands people type: without a password in the URL, PostgreSQL's tools ask for it."""
        public = tuple(pair for pair in self.parameters if pair[0] not in SECRET_PARAMETERS)
        return Database(public).url

    @property
    def sqlalchemy_url(self) -> URL:
        """For SQLAlchemy with psycopg 3; it masks the password in `str` and `repr`, and knows of no other secrets.

        Those (`sslpassword` and the like) are left out here; `engine` has them.
        """
        return self._whole_url.difference_update_query(SECRET_PARAMETERS)

    @property
    def mlflow_uri(self) -> str:
        """The backend store URI for MLflow, secrets included.

        MLflow hands it to SQLAlchemy as it is and escapes `%` for Alembic itself (checked in 3.17.2). The search path
        rides along, because Postgres' default would let a user called `orch` put MLflow's tables beside our views.
        """
        url = self._whole_url.update_query_dict({"options": self._options})
        return url.render_as_string(hide_password=False)

    @property
    def masked_mlflow_uri(self) -> str:
        return _masked(self._whole_url.update_query_dict({"options": self._options}))

    @property
    def secrets(self) -> tuple[str, ...]:
        """What no text may show, see `masking.hide`."""
        return tuple(value for key, value in self.parameters if key in SECRET_PARAMETERS)

    @property
    def psycopg_kwargs(self) -> dict[str, Any]:
        """Arguments of `psycopg.connect`, secrets included."""
        defaults = {"connect_timeout": str(CONNECT_TIMEOUT_S), **LIVENESS}
        options = [self._options, *(f"-c{name}={value}" for name, value in READABLE.items())]
        return {**defaults, **dict(self.parameters), "options": " ".join(options)}

    def psql_line(self, masked: bool = True, password_file: Path | None = None, program: str = "psql") -> str:
        """A command line for a shell. Masked, psql asks for the password or takes it from `password_file`."""
        if not masked:
            return shlex.join([program, self.url])
        line = shlex.join([program, self.passwordless_url])
        return f'PGPASSWORD="$(cat {shlex.quote(str(password_file))})" {line}' if password_file else line

    def mlflow_line(self, *arguments: str, password_file: Path | None = None) -> str:
        """A call of MLflow for a shell, with this database's address. The password comes from where we have it."""
        public = Database(tuple(pair for pair in self.parameters if pair[0] not in SECRET_PARAMETERS))
        return self.in_shell([sys.executable, "-m", "mlflow", *arguments, public.mlflow_uri], password_file)

    def in_shell(self, command: Sequence[str], password_file: Path | None = None) -> str:
        """The command with PGPASSWORD read from that file, or out of ORCH_DATABASE_URL; without one if we use none."""
        if not self._get("password"):
            return shlex.join(command)
        source = f"cat {shlex.quote(str(password_file))}" if password_file else f"{sys.executable} -c {PASSWORD_OF_URL}"
        return f'PGPASSWORD="$({source})" {shlex.join(command)}'

    def engine(self, application_name: str = "orch", pool_size: int = 1) -> Engine:
        """A pool of at most `pool_size` connections that are tested before use.

        Threads may share one connection, each for a moment; one that waits for half a minute hears `PoolBusy`, which
        counts as the database being away (`is_away`).
        """
        arguments = {**self.psycopg_kwargs, "application_name": application_name}
        return create_engine(
            self.sqlalchemy_url, connect_args=arguments, pool_size=pool_size, max_overflow=0, pool_pre_ping=True
        )

    def connect(self, application_name: str = "orch", autocommit: bool = False) -> psycopg.Connection[tuple[Any, ...]]:
        """A psycopg connection. Raises psycopg.OperationalError; `explain` turns it into words."""
        arguments = {**self.psycopg_kwargs, "application_name": application_name}
        return psycopg.connect(**arguments, autocommit=autocommit)

    def beside(self, name: str) -> Database:
        """The database called `name` on the same server, for the same user."""
        return Database(tuple(sorted({**dict(self.parameters), "dbname": name}.items())))

    def _get(self, key: str) -> str:
        return dict(self.parameters).get(key, "")

    @property
    def _whole_url(self) -> URL:
        return _sqlalchemy_url(dict(self.parameters))

    @property
    def _options(self) -> str:
        return f"{self._get('options')} {SEARCH_PATH}".strip()

    def __str__(self) -> str:
        return self.masked_url

    def __repr__(self) -> str:
        return f"Database({self.masked_url!r})"


def open_database(settings: Settings, home: Home) -> Database:
    """The database of ORCH_DATABASE_URL, else the embedded one, started if need be. It answers and is new enough.

    Raises DatabaseUnavailable with one line on the reason and what to do.
    """
    if settings.database_url is not None:
        database = Database.from_url(settings.database_url.get_secret_value())
        check(database)
        return database
    return Database.from_url(ensure_running(home))  # has just connected, to a server whose version we know


def check(database: Database) -> None:
    """Connects once. Raises DatabaseUnavailable if that fails, for a server before PostgreSQL 15, or without UTF8."""
    try:
        with database.connect("orch-check", autocommit=True) as connection:
            version = connection.info.server_version // 10_000
            encoding = connection.info.parameter_status("server_encoding")
    except psycopg.OperationalError as error:
        raise explain(error, database) from None
    if version < OLDEST_VERSION:
        raise DatabaseUnavailable(
            f"{database}: this is PostgreSQL {version}, orch needs {OLDEST_VERSION} or newer; "
            "upgrade it, or unset ORCH_DATABASE_URL to use the embedded server"
        )
    if encoding != "UTF8":
        raise DatabaseUnavailable(
            f"{database}: its encoding is {encoding}, orch needs UTF8; "
            "create another: createdb --template=template0 --encoding=UTF8 NAME"
        )


def refuse_read_only(database: Database) -> None:
    """Raises DatabaseUnavailable for a server that takes no writes now: a standby, or one in maintenance."""
    with database.connect("orch-check", autocommit=True) as connection:
        row = connection.execute("select current_setting('transaction_read_only'), pg_is_in_recovery()").fetchone()
    if row is not None and row[0] == "on":
        why = "it is a standby" if row[1] else "default_transaction_read_only is on"
        raise DatabaseUnavailable(
            f"{database}: takes no writes ({why}); wait until it does, or correct ORCH_DATABASE_URL; "
            "nothing was started"
        )


def explain(error: psycopg.OperationalError, database: Database) -> DatabaseUnavailable:
    """Why a connection failed, in one line, and what to do now."""
    reason = _reason(error)
    if "password authentication failed" in reason or "no password supplied" in reason:
        return DatabaseUnavailable(
            f"{database}: wrong user or password ({reason}); "
            "special characters of a password must be percent-encoded in ORCH_DATABASE_URL"
        )
    if "FATAL" in reason and _is_missing(database):
        maintenance = f"--maintenance-db={database.beside('postgres').passwordless_url}"
        createdb = shlex.join(["createdb", maintenance, database.name])
        return DatabaseUnavailable(f"{database}: the database {database.name!r} does not exist; create it: {createdb}")
    if "too many clients" in reason or "connection slots" in reason:
        return DatabaseUnavailable(
            f"{database}: it has no connection left ({reason}); "
            "wait until others have ended, or raise max_connections there (orch needs up to 7)"
        )
    if error.sqlstate is not None:  # the connection stood, and the server gave up on a statement
        return DatabaseUnavailable(f"{database}: the server cannot go on ({reason}); mend that and run it again")
    return DatabaseUnavailable(
        f"{database}: cannot connect ({reason}); "
        "start that server, correct ORCH_DATABASE_URL, or unset it to use the embedded server"
    )


def is_away(error: BaseException) -> bool:
    """True when the database could not be reached or was restarting, so that the same call may succeed later.

    Looks through what SQLAlchemy and MLflow wrap around the driver's errors.
    """
    return not isinstance(error, OrchError) and any(map(_says_away, _causes(error)))  # ours says what it means


def _says_away(error: BaseException) -> bool:
    if isinstance(error, DBAPIError):
        return error.connection_invalidated or (error.orig is not None and _says_away(error.orig))
    is_read_only = isinstance(error, psycopg.errors.ReadOnlySqlTransaction)  # a server that is looked after, a standby
    return is_read_only or isinstance(error, psycopg.OperationalError | psycopg.InterfaceError | PoolBusy)


def why_away(error: BaseException) -> str:
    """The driver's own words in one line."""
    if isinstance(error, PoolBusy):  # another thread of ours waits for its answer on the only connection
        return "no answer for half a minute"
    own = [one for one in _causes(error) if isinstance(one, psycopg.Error)]
    return _reason(own[-1]) if own else str(error).split("\n")[0]


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _is_missing(database: Database) -> bool:
    """Asks the server's own list, since its messages come in the server's language."""
    try:
        with database.beside("postgres").connect("orch-check", autocommit=True) as connection:
            rows = connection.execute("select 1 from pg_database where datname = %s", [database.name]).fetchall()
    except psycopg.OperationalError:  # documented answer: we could not find out, so the first error stands
        return False
    return not rows


def _reason(error: psycopg.Error) -> str:
    """The telling line of a message that may have one line for each address tried."""
    if error.diag.message_primary:  # the server's own words on a statement
        return error.diag.message_primary
    lines = [line.strip(" -\t") for line in str(error).splitlines() if line.strip()]
    fatal = [line for line in lines if "FATAL" in line]
    failed = [line for line in lines if "failed" in line or "timeout" in line]
    chosen = (fatal or failed or lines or ["no reason given"])[-1]
    return chosen.removeprefix("connection failed: ").rstrip(":.")


def _refuse_raw_password(rest: str) -> None:
    """A password with a raw `@` or `/` would end up in the host or the database, and so in messages."""
    place = rest.partition("?")[0]
    authority, _, path = place.partition("/")
    port = authority.rpartition("@")[2].rpartition(":")[2] if ":" in authority.rpartition("@")[2] else ""
    is_ipv6 = authority.endswith("]")
    if authority.count("@") > 1 or "@" in path or not (is_ipv6 or port.replace(",", "").isdigit() or port == ""):
        raise _not_a_url("cannot be read: percent-encode the special characters of user and password")


def _not_a_url(what: str) -> DatabaseUnavailable:
    return DatabaseUnavailable(
        f"ORCH_DATABASE_URL {what}; orch needs PostgreSQL, written {URL_EXAMPLE} "
        "(special characters percent-encoded: @ is %40, / is %2F, % is %25)"
    )


def _sqlalchemy_url(parameters: dict[str, str]) -> URL:
    """SQLAlchemy's value for libpq's parameters; socket folders and lists of hosts go into the query."""
    user, password = parameters.pop("user", None), parameters.pop("password", None)
    database = parameters.pop("dbname", None)
    host, port = parameters.get("host", ""), parameters.get("port", "")
    is_plain = host and not host.startswith(("/", "@")) and "," not in host and "," not in port
    if is_plain:
        del parameters["host"]
        port = parameters.pop("port", "")
    return URL.create(
        "postgresql+psycopg",
        username=user,
        password=password,
        host=host if is_plain else None,
        port=int(port) if is_plain and port else None,
        database=database,
        query=parameters,
    )


def _masked(url: URL) -> str:
    hidden = {key: MASK for key in url.query if key in SECRET_PARAMETERS}
    return url.update_query_dict(hidden).render_as_string(hide_password=True).replace(quote(MASK), MASK)
