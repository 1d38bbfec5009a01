"""What a database URL may look like, and that nothing printed of it shows a secret."""

from __future__ import annotations

import pickle
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import make_url

from orchestrator.database.connection import Database, check, explain
from orchestrator.errors import DatabaseUnavailable
from orchestrator.tracking.mlflow_schema import mlflow_uri

AWKWARD = "postgresql://a%40b:p%2540%3A%2F%3F%23x@db.example:5433/lab"  # user a@b, password p%40:/?#x


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg", "postgresql+psycopg2"])
def test_every_usual_scheme_means_the_same_database(scheme: str) -> None:
    database = Database.from_url(f"{scheme}://u:p@h:5433/d")
    assert database == Database.from_url("postgresql://u:p@h:5433/d")
    assert database.sqlalchemy_url.drivername == "postgresql+psycopg"
    assert database.url == "postgresql://u:p@h:5433/d"


def test_percent_encoded_user_and_password_arrive_as_they_were_meant() -> None:
    database = Database.from_url(AWKWARD)
    wanted = {"user": "a@b", "password": "p%40:/?#x", "host": "db.example", "port": "5433", "dbname": "lab"}
    assert {key: database.psycopg_kwargs[key] for key in wanted} == wanted
    for text in (database.url, database.mlflow_uri):  # SQLAlchemy's parser is an independent reader
        url = make_url(text)
        assert (url.username, url.password, url.host, url.port) == ("a@b", "p%40:/?#x", "db.example", 5433)


def test_a_connection_notices_a_vanished_server_within_half_a_minute_unless_its_url_says_otherwise() -> None:
    for url, wanted in (("postgresql://u@h/d", "30000"), ("postgresql://u@h/d?tcp_user_timeout=5000", "5000")):
        for arguments in (Database.from_url(url).psycopg_kwargs, make_url(mlflow_uri(url)).query):
            assert str(arguments["tcp_user_timeout"]) == wanted
            silent_s = int(arguments["keepalives_idle"]) + int(arguments["keepalives_interval"]) * 4
            assert silent_s == 30  # the other way round: nothing is under way, and nobody answers
            psycopg.conninfo.make_conninfo(**arguments)  # raises for a name that libpq does not know


def test_a_socket_folder_survives_the_way_through_every_form() -> None:
    database = Database.from_url("postgresql://o:p@/orch?host=/tmp/orch-0-abc&port=5432")
    again = psycopg.conninfo.conninfo_to_dict(database.url)
    assert again == {"user": "o", "password": "p", "dbname": "orch", "host": "/tmp/orch-0-abc", "port": "5432"}
    _, arguments = make_url(database.mlflow_uri).get_dialect()().create_connect_args(make_url(database.mlflow_uri))
    assert (arguments["host"], str(arguments["port"])) == ("/tmp/orch-0-abc", "5432")


def test_the_search_path_is_public_and_the_users_own_options_stay() -> None:
    database = Database.from_url("postgresql://u@h/d?options=-cstatement_timeout%3D5s")
    assert database.psycopg_kwargs["options"].startswith("-cstatement_timeout=5s -csearch_path=public -c")
    assert make_url(database.mlflow_uri).query["options"] == "-cstatement_timeout=5s -csearch_path=public"


@pytest.mark.parametrize("url", [AWKWARD, "postgresql://u@h/d?password=p%2540&sslpassword=p%2540"])
def test_nothing_printed_shows_a_secret(url: str) -> None:
    database = Database.from_url(url)
    failure = explain(psycopg.OperationalError("connection failed: no route"), database)
    printed = [
        *(str(database), repr(database), f"{database}", repr([database]), database.masked_mlflow_uri),
        *(database.psql_line(), database.passwordless_url, repr(database.sqlalchemy_url), str(database.sqlalchemy_url)),
        *(repr(database.engine()), str(failure)),
    ]
    for text in printed:
        assert "p%40" not in text, text
        assert "p%2540" not in text, text
    assert "***" in str(database)


def test_a_password_in_the_query_is_used() -> None:
    assert Database.from_url("postgresql://u@h/d?password=x").psycopg_kwargs["password"] == "x"


def test_a_database_may_travel_to_a_worker() -> None:
    database = Database.from_url(AWKWARD)
    assert pickle.loads(pickle.dumps(database)) == database


def test_the_psql_line_takes_its_password_from_the_file() -> None:
    line = Database.from_url("postgresql://u:secret@h/d").psql_line(password_file=Path("/a b/pw"))
    assert line == "PGPASSWORD=\"$(cat '/a b/pw')\" psql postgresql://u@h/d"
    assert Database.from_url("postgresql://u:secret@h/d").psql_line(masked=False) == "psql postgresql://u:secret@h/d"


@pytest.mark.parametrize(
    "url",
    [
        "mysql://u:secret@h/d",
        "sqlite:///secret.db",
        "u:secret@h/d",
        "postgresql://u:sec%zzret@h/d",
        "postgresql://u:pa@secret@h/d",
        "postgresql://u:secret/x@h/d",
        "postgresql://u:12/secret@h/d",
    ],
)
def test_what_is_no_url_of_postgresql_is_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(DatabaseUnavailable) as caught:
        Database.from_url(url)
    assert "secret" not in str(caught.value)
    assert "ret@" not in str(caught.value)
    assert "postgresql://USER:PASSWORD@HOST:5432/DATABASE" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_engine_takes_no_more_connections_than_asked_for() -> None:
    pool = Database.from_url("postgresql://u:p@h/d").engine(pool_size=2).pool
    assert (pool.size(), pool._max_overflow) == (2, 0)  # type: ignore[attr-defined]


def test_a_closed_port_is_told_in_one_line_with_what_to_do() -> None:
    with pytest.raises(DatabaseUnavailable) as caught:
        check(Database.from_url("postgresql://u:secret@127.0.0.1:1/d"))
    text = str(caught.value)
    assert "postgresql://u:***@127.0.0.1:1/d: cannot connect" in text
    assert "Connection refused" in text
    assert "unset it to use the embedded server" in text
    assert "secret" not in text
    assert "\n" not in text
