"""The login of `orch sql`: a role that reads schema `orch` and nothing else, and the one place where a user's SQL runs.

Never uses SET ROLE, which a query could undo. What the role may not do is kept by its missing rights; the read-only
transaction, the time limit and the single statement are a second fence.
"""

from __future__ import annotations

import difflib
import hashlib
import hmac
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

from orchestrator.database.connection import READABLE, Database
from orchestrator.errors import DatabaseUnavailable, OrchError, QueryError

STATEMENT_TIMEOUT_S = 60
LOCK_TIMEOUT_S = 10  # we rebuild views within milliseconds
IDLE_TIMEOUT_S = 300
SESSION = {  # how a session begins; whoever logs in may change these
    "search_path": "orch",
    "default_transaction_read_only": "on",
    "statement_timeout": f"{STATEMENT_TIMEOUT_S}s",
    "lock_timeout": f"{LOCK_TIMEOUT_S}s",
    "idle_in_transaction_session_timeout": f"{IDLE_TIMEOUT_S}s",
    "jit": "off",  # compiling takes longer than our queries
    **READABLE,  # not the time zone: times are shown in the database's
}
SNAPSHOT = {  # an export may take minutes, and whoever reads it knows nothing of this server's ways of writing
    **SESSION,
    "statement_timeout": "0",
    "TimeZone": "UTC",
    "extra_float_digits": "1",  # as many as it takes to read back the very number
    "client_encoding": "UTF8",
}
MAX_CONNECTIONS = 20  # of the role, so that it cannot use up the server's
# What only a superuser may give or take. The role cannot undo it.
BY_SUPERUSER = "alter role {} set temp_file_limit = '1GB'"  # of generate_series and large sorts, per session
# Large objects may be made by everybody, with no right to any schema. On a given server other programs may need them.
ON_OUR_SERVER = "revoke execute on function lo_creat(integer), lo_create(oid), lo_from_bytea(oid, bytea) from public"
SCRAM_ROUNDS = 4096  # as PostgreSQL's own verifier, beside which ours adds no weakness
UNDEFINED_COLUMN, UNDEFINED_TABLE = "42703", "42P01"
WRITES = ("25006", "55000")  # in a read-only transaction; into a view that cannot be written
IDENTIFIER = re.compile(r'(?:"(?:[^"]|"")+"|\w+)(?:\.(?:"(?:[^"]|"")+"|\w+))*')

Connection = psycopg.Connection[Any]
Parameters = Sequence[Any] | Mapping[str, Any]  # for `%s`, or for `%(name)s`


@dataclass(frozen=True)
class Login:
    role: str
    password: str

    def __repr__(self) -> str:
        return f"Login({self.role!r}, '***')"


class Answer(NamedTuple):
    """What a query gave: column names, and rows of Python values (float, int, str, bool, datetime, dict, None)."""

    columns: list[str]
    rows: list[tuple[Any, ...]]


def reader_login(database_name: str, secret: str) -> Login:
    """The reader of a database. `secret`: the owner's password, or a kept one where the owner has none.

    Roles belong to a whole server, so the name carries the database's. Every host that knows the secret knows the
    password, and the password does not tell the secret.
    """
    digest = hashlib.sha256(database_name.encode()).hexdigest()[:8]
    password = hmac.new(secret.encode(), f"orch reader of {database_name}".encode(), hashlib.sha256).hexdigest()
    return Login(f"orch_reader_{digest}", password)


def reader_database(owner: Database, login: Login) -> Database:
    """The owner's database as the reader sees it: same server, the reader's name and password."""
    parameters = {key: value for key, value in owner.parameters if key not in ("passfile", "service")}
    return Database(tuple(sorted({**parameters, "user": login.role, "password": login.password}.items())))


def ensure_reader(connection: Connection, secret: str, *, is_server_ours: bool) -> Login:
    """Makes the reader's role, or mends it, on the owner's connection; one question when all is well.

    `is_server_ours`: nobody else has anything there. Needs schema `orch` and the ledger's tables. Raises
    DatabaseUnavailable where the owner may not create roles.
    """
    login = reader_login(connection.info.dbname, secret)
    with connection.transaction():
        if _is_ready(connection, login):
            return login
    try:
        with connection.transaction():
            connection.execute("select pg_advisory_xact_lock(hashtext('orch reader'))")
            _make_role(connection, login)
            _grant(connection, login)
            if is_server_ours:
                connection.execute(ON_OUR_SERVER)
            _remember(connection, login)
    except psycopg.errors.InsufficientPrivilege as error:
        raise DatabaseUnavailable(
            f"orch sql needs a login of its own, and {connection.info.user} may not create the role {login.role} "
            f"({error.diag.message_primary}); have an administrator create a role that may only read schema orch, "
            "and set ORCH_READER_URL to its URL"
        ) from None
    return login


def run_query(reader: Database, query: str, parameters: Parameters = ()) -> Answer:
    """Runs one statement as the reader, in a read-only transaction of its own.

    Raises QueryError with PostgreSQL's words, the place and, for unknown names, the nearest ones; DatabaseUnavailable
    when the reader cannot log in.
    """
    with _connect(reader, SESSION) as connection:
        connection.read_only = True
        return _answer(reader, connection, query, parameters)


class Snapshot:
    """The database as it was at one moment, for several questions. Ends with the block that made it."""

    def __init__(self, reader: Database, connection: Connection) -> None:
        self._reader, self._connection = reader, connection

    def query(self, query: str, parameters: Parameters = ()) -> Answer:
        """As `run_query`."""
        return _answer(self._reader, self._connection, query, parameters)

    @contextmanager
    def copied(self, query: str, parameters: Sequence[Any], options: str) -> Iterator[Iterator[bytes]]:
        """The rows of a query as COPY writes them with these options, one by one, a header first if asked for.

        No more than a row is held here: PostgreSQL sends each in a message of its own ("always one per row", in its
        manual under Message Flow, COPY Operations). Raises as `run_query`.
        """
        statement = f"copy ({query}) to stdout ({options})"
        try:
            with self._connection.cursor().copy(statement.encode(), parameters) as copy:
                yield map(bytes, copy)
        except psycopg.Error as error:
            raise _told(self._reader, self._connection, query, error) from None


@contextmanager
def snapshot(reader: Database) -> Iterator[Snapshot]:
    """Opens one for reading as the reader, with no limit of time. Raises DatabaseUnavailable."""
    with _connect(reader, SNAPSHOT) as connection:
        connection.read_only = True
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        yield Snapshot(reader, connection)


def _answer(reader: Database, connection: Connection, query: str, parameters: Parameters) -> Answer:
    try:
        # The extended protocol takes one statement only: `; commit; ...` cannot follow.
        cursor = connection.execute(query, parameters or None, prepare=True)
        rows = cursor.fetchall() if cursor.description else []
    except UnicodeEncodeError as error:
        raise QueryError(f"the query is not valid text at character {error.start + 1}") from None
    except psycopg.Error as error:
        raise _told(reader, connection, query, error) from None
    return Answer([column.name for column in cursor.description or ()], rows)


def _told(reader: Database, connection: Connection, query: str, error: psycopg.Error) -> OrchError:
    """What became of a query, for the person who wrote it."""
    if connection.closed:
        return DatabaseUnavailable(f"{reader}: the connection broke ({str(error).strip()})")
    if connection.info.transaction_status is TransactionStatus.ACTIVE:  # the server waits for us to copy
        connection.close()
        return QueryError("COPY is not possible here; write the query itself and choose --format")
    connection.rollback()
    return QueryError(_in_words(connection, query, error))


def _connect(reader: Database, session: Mapping[str, str]) -> Connection:
    # Said again for the session: a given reader (ORCH_READER_URL) has no such settings of its own.
    options = " ".join(f"-c{name}={value}" for name, value in session.items())
    arguments: dict[str, Any] = {**reader.psycopg_kwargs, "options": options, "application_name": "orch sql"}
    try:
        return psycopg.connect(**arguments)
    except psycopg.OperationalError as error:
        reason = str(error).strip().splitlines()[-1]
        raise DatabaseUnavailable(
            f"{reader}: the views cannot be read, since their reader cannot log in ({reason}); "
            "see that the server runs, and that ORCH_READER_URL is right if you set it, and try again"
        ) from None


def _is_ready(connection: Connection, login: Login) -> bool:
    row = connection.execute(
        """
        select
            role.rolcanlogin and not (role.rolsuper or role.rolcreaterole or role.rolcreatedb)
            and to_regnamespace('orch') is not null and has_schema_privilege(role.oid, 'orch', 'usage')
            and not exists (
                select from pg_class as relation
                where relation.relnamespace = to_regnamespace('orch') and relation.relkind = 'v'
                    and not has_table_privilege(role.oid, relation.oid, 'select')
            )
            and exists (
                select from pg_default_acl as acl
                where acl.defaclnamespace = to_regnamespace('orch') and acl.defaclrole = current_user::regrole
                    and acl.defaclacl::text like '%%' || role.rolname || '=r%%'
            )
            and exists (
                select from orch_ledger.readers as reader
                where reader.role = role.rolname and reader.verifier = %s
            )
        from pg_roles as role
        where role.rolname = %s
        """,
        (_verifier(login), login.role),
    ).fetchone()
    return bool(row and row[0])


def _make_role(connection: Connection, login: Login) -> None:
    role = sql.Identifier(login.role)
    exists = connection.execute("select 1 from pg_roles where rolname = %s", (login.role,)).fetchone()
    # `alter` leaves attributes alone that only a superuser may name; nobody but us gives this role any.
    verb = "alter role {} with login" if exists else "create role {} login noinherit"
    statement = sql.SQL(verb + " connection limit {} password {}")
    connection.execute(statement.format(role, MAX_CONNECTIONS, sql.Literal(_scram(connection, login))))
    for name, value in SESSION.items():
        setting = sql.SQL("alter role {} set {} = {}").format(role, sql.Identifier(name), sql.Literal(value))
        connection.execute(setting)
    if connection.info.parameter_status("is_superuser") == "on":
        connection.execute(sql.SQL(BY_SUPERUSER).format(role))


def _scram(connection: Connection, login: Login) -> str:
    """The password as a SCRAM verifier, so that it stands in no server log."""
    verifier = connection.pgconn.encrypt_password(login.password.encode(), login.role.encode(), b"scram-sha-256")
    return verifier.decode()


def _grant(connection: Connection, login: Login) -> None:
    role = sql.Identifier(login.role)
    for statement in (
        "grant usage on schema orch to {}",
        "grant select on all tables in schema orch to {}",
        "alter default privileges in schema orch grant select on tables to {}",  # views to come
    ):
        connection.execute(sql.SQL(statement).format(role))
    # Temporary tables are a right of everybody unless the database's owner takes it away; owners keep it.
    owns = "select pg_has_role(current_user, datdba, 'usage') from pg_database where datname = current_database()"
    row = connection.execute(owns).fetchone()
    if row and row[0]:
        name = sql.Identifier(connection.info.dbname)
        connection.execute(sql.SQL("revoke temporary on database {} from public").format(name))


def _remember(connection: Connection, login: Login) -> None:
    connection.execute(
        """
        insert into orch_ledger.readers (role, verifier) values (%s, %s)
        on conflict (role) do update set verifier = excluded.verifier, made_at = now()
        """,
        (login.role, _verifier(login)),
    )


def _verifier(login: Login) -> str:
    """Changes with the password and with what the role is given; tells neither."""
    text = repr((login.password, sorted(SESSION.items()), MAX_CONNECTIONS, BY_SUPERUSER, ON_OUR_SERVER))
    return hashlib.pbkdf2_hmac("sha256", text.encode(), login.role.encode(), SCRAM_ROUNDS).hex()


def _in_words(connection: Connection, query: str, error: psycopg.Error) -> str:
    diagnosis = error.diag
    if "multiple commands into a prepared statement" in (diagnosis.message_primary or ""):
        return "one statement at a time: nothing may follow the first ;"
    if diagnosis.sqlstate in WRITES:
        return f"{diagnosis.message_primary}\norch sql only reads; orch up prints how to reach the database with psql"
    lines = [diagnosis.message_primary or str(error).strip()]
    position = int(diagnosis.statement_position or 0) - 1
    if position >= 0:
        lines.append(_place(query, position))
    lines += [text for text in (diagnosis.message_detail, diagnosis.message_hint) if text]
    if diagnosis.sqlstate in (UNDEFINED_COLUMN, UNDEFINED_TABLE) and position >= 0:
        near = _nearest(connection, query, position, diagnosis.sqlstate)
        lines.append(f"nearest: {', '.join(near)}" if near else r"'\d' lists the views, '\d VIEW' their columns")
    return "\n".join(lines)


def _place(query: str, position: int) -> str:
    """The line of the query with a mark below the place."""
    start = query.rfind("\n", 0, position) + 1
    line = query[start:].split("\n", 1)[0]
    return f"  {line}\n  {' ' * (position - start)}^"


def _nearest(connection: Connection, query: str, position: int, sqlstate: str) -> list[str]:
    """Names that exist and that the person may have meant at `position`, written as they must be in SQL."""
    views = _names(connection)
    mentioned = [view for view in views if re.search(rf"\b{re.escape(view)}\b", query)]
    columns = sorted({column for view in mentioned or views for column in views[view]})
    bare = [name for name in columns if not _is_plain(name) and query.startswith(name, position)]
    if bare:  # val/loss without quotes is val divided by loss
        return [_quoted(max(bare, key=len))]
    written = IDENTIFIER.match(query, position)
    if written is None:
        return []
    meant = written.group().split(".")[-1].strip('"')
    known = list(views) if sqlstate == UNDEFINED_TABLE else columns
    lowered = {name.lower(): name for name in known}
    return [_quoted(lowered[name]) for name in difflib.get_close_matches(meant.lower(), lowered, n=3)]


def _names(connection: Connection) -> dict[str, list[str]]:
    """View -> its columns, in schema `orch`."""
    rows: Sequence[tuple[str, list[str]]] = connection.execute(
        """
        select relation.relname, array_agg(attribute.attname::text order by attribute.attnum)
        from pg_class as relation
        join pg_attribute as attribute on attribute.attrelid = relation.oid and attribute.attnum > 0
        where relation.relnamespace = to_regnamespace('orch') and relation.relkind = 'v'
        group by relation.relname
        """
    ).fetchall()
    return dict(rows)


def _is_plain(name: str) -> bool:
    return re.fullmatch(r"[a-z_][a-z0-9_]*", name) is not None


def _quoted(name: str) -> str:
    return name if _is_plain(name) else '"' + name.replace('"', '""') + '"'
