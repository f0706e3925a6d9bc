"""The database fails: before the claim, without its table, and while the view runs."""

from __future__ import annotations

import logging
import sqlite3
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from flask_idempotency import fingerprint, idempotent
from flask_idempotency.exceptions import IdempotencyStoreUnavailable
from tests.shop import cut_off, elsewhere, unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.shop import Shop

on_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
#: SQLite has no connection that another one could end.
on_servers = pytest.mark.parametrize(
    "database", ["postgresql", "mariadb"], indirect=True
)


@pytest.fixture
def down(shop: Shop) -> Iterator[Shop]:
    """Give an application whose database went away before its first request."""
    with cut_off(shop):
        yield shop


def records(shop: Shop) -> int:
    """Count all records, as another connection sees them."""
    engine = create_engine(shop.database.url, poolclass=NullPool)
    with engine.connect() as connection:
        query = text("SELECT count(*) FROM idempotency_record")
        return int(connection.execute(query).scalar_one())


def change(shop: Shop, *statements: str) -> None:
    """Change the database as a migration would."""
    engine = create_engine(shop.database.url, poolclass=NullPool)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


def test_unreachable_database_is_503(down: Shop) -> None:
    """Without its database a guarded route fails closed."""
    down.creating_view()
    unavailable(down.post())
    assert down.runs == []


@on_sqlite
def test_unreachable_database_fails_every_time(down: Shop) -> None:
    """Each request is refused, and none uses up the store's connections."""
    down.creating_view()
    for _ in range(5):
        unavailable(down.post())
    assert down.runs == []


def test_client_learns_nothing_of_the_database(down: Shop) -> None:
    """What the driver said goes to the log, not to the client."""
    down.creating_view()
    body = down.post().text
    url = make_url(down.database.url)
    hidden = ["refused", "connect", "driver", "127.0.0.1", "unable", url.database]
    assert [word for word in hidden if word and word in body] == []


def test_operator_finds_the_outage_in_one_log_line(
    down: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """An outage is one error line with its code and reason, and without the key."""
    down.creating_view()
    with caplog.at_level(logging.DEBUG):
        down.post(key="secret")
    errors = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert "IDEMPOTENCY_STORE_UNAVAILABLE" in errors[0].getMessage()
    assert "The database could not answer" in errors[0].getMessage()
    assert "secret" not in caplog.text


@on_sqlite
def test_undecorated_route_does_not_notice(down: Shop) -> None:
    """A route that declares nothing works without the database."""
    down.app.add_url_rule("/plain", view_func=lambda: "fine", methods=["POST"])
    assert down.post(path="/plain").status_code == 200


def test_request_without_a_key_needs_no_store(down: Shop) -> None:
    """Where no key is sent, only what the view does needs the database."""
    down.app.post("/accounts")(idempotent(lambda: "fine"))
    assert down.post(key=None).status_code == 200
    unavailable(down.post())


def test_service_gets_the_same_error(down: Shop) -> None:
    """The guard tells a service what a route tells its client."""
    with down.app.app_context(), pytest.raises(IdempotencyStoreUnavailable) as caught:
        down.idempotency.guard.run(
            down.scope(), fingerprint(1), lambda: down.runs.append(1)
        )
    assert caught.value.retryable is True
    assert caught.value.reason.startswith("The database could not answer: ")
    assert down.runs == []


def test_retry_runs_once_the_database_is_back(shop: Shop) -> None:
    """After an outage the same request runs, once."""
    shop.creating_view()
    with cut_off(shop):
        unavailable(shop.post())
    assert [shop.post().status_code for _ in range(2)] == [201, 201]
    assert (shop.runs, shop.accounts()) == (["first"], ["first"])


def test_missing_table_is_503_and_says_what_to_do(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """A table that was not migrated is an outage whose log line names the command."""
    shop.creating_view()
    change(shop, "DROP TABLE idempotency_record")
    unavailable(shop.post())
    assert "'idempotency_record'" in caplog.text
    assert "flask db upgrade" in caplog.text
    assert (shop.runs, shop.accounts()) == ([], [])


def test_created_table_ends_the_outage(shop: Shop) -> None:
    """Once the migration ran, requests run, without a restart."""
    shop.creating_view()
    change(shop, "DROP TABLE idempotency_record")
    unavailable(shop.post())
    with shop.app.app_context():
        shop.db.create_all()
    assert shop.post().status_code == 201


def test_missing_column_is_503(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """A table of an older release runs nothing, and the log names the command."""
    shop.creating_view()
    change(shop, "ALTER TABLE idempotency_record DROP COLUMN response_headers")
    unavailable(shop.post())
    assert "flask db upgrade" in caplog.text
    assert (shop.runs, shop.accounts(), records(shop)) == ([], [], 0)


@pytest.fixture
def read_only(shop: Shop) -> Shop:
    """Give an application on a SQLite file that cannot be written."""
    shop.creating_view()
    shop.post("before", key="old")
    path = make_url(shop.database.url).database
    with shop.app.app_context():
        engine = shop.db.engine
        engine.dispose()
        shop.idempotency.store.close()

    @event.listens_for(engine, "do_connect")
    def connect(*_args: Any) -> Any:
        address = f"file:{path}?mode=ro"
        return sqlite3.connect(address, uri=True, check_same_thread=False)

    return shop


@on_sqlite
def test_read_only_database_runs_nothing(read_only: Shop) -> None:
    """Where the claim cannot be written, the view does not run."""
    unavailable(read_only.post())
    assert read_only.runs == ["before"]


@on_sqlite
def test_read_only_database_still_replays(read_only: Shop) -> None:
    """A stored answer can be given out without a write."""
    response = read_only.post("before", key="old")
    assert response.status_code == 201
    assert response.headers["Idempotent-Replayed"] == "true"


def connection_id(shop: Shop) -> int:
    """Return the server's number of the session's connection."""
    is_postgresql = shop.database.name == "postgresql"
    function = "pg_backend_pid()" if is_postgresql else "CONNECTION_ID()"
    return int(shop.db.session.execute(text(f"SELECT {function}")).scalar_one())


def killing(shop: Shop, number: int) -> str:
    """Return the statement that ends a connection."""
    if shop.database.name == "postgresql":
        return f"SELECT pg_terminate_backend({number})"
    return f"KILL {number}"


def kill(shop: Shop) -> None:
    """End the session's connection from another one."""
    statement = killing(shop, connection_id(shop))

    def execute() -> None:
        engine = create_engine(
            shop.database.url, poolclass=NullPool, isolation_level="AUTOCOMMIT"
        )
        with engine.connect() as connection:
            connection.execute(text(statement))

    elsewhere(execute)


def kill_own(shop: Shop) -> None:
    """End the session's connection by itself."""
    shop.db.session.execute(text(killing(shop, connection_id(shop))))


def losing_view(
    shop: Shop, end: Callable[[], Any], *, lose: Any = kill, **options: Any
) -> None:
    """Serve a view that adds a row, loses its connection once, and ends as told."""

    def view() -> Any:
        answer = shop.create()
        if len(shop.runs) > 1:
            return answer
        lose(shop)
        return end()

    shop.view(view, **options)


def lost_and_raise() -> None:
    """Raise as a view does whose own logic fails."""
    raise ZeroDivisionError


ENDS: dict[str, Callable[[], Any]] = {
    "answer": lambda: ("made", 201),
    "exception": lost_and_raise,
    "client error": lambda: ("no", 404),
    "server error": lambda: ("down", 502),
}


@on_servers
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_lost_connection_never_runs_the_view_twice(
    shop: Shop, end: Callable[[], Any]
) -> None:
    """At once a duplicate gets the status of the first answer, and no row stays."""
    losing_view(shop, end)
    first, second = shop.post(), shop.post()
    assert second.status_code == first.status_code
    assert second.headers["Idempotent-Replayed"] == "true"
    assert (shop.runs, shop.accounts()) == (["first"], [])


@on_servers
def test_answer_whose_commit_failed_is_a_failure(shop: Shop) -> None:
    """An answer whose rows could not be committed is not given out."""
    losing_view(shop, ENDS["answer"])
    assert shop.post().status_code == 500
    record = shop.record()
    assert record is not None
    assert record.status.value == "failed"
    assert record.failure == "sqlalchemy.exc.OperationalError"
    assert record.effects_committed_at is None


@on_servers
@pytest.mark.parametrize(
    ("name", "status"), [("client error", 404), ("server error", 502)]
)
def test_answer_without_rows_survives_the_connection(
    shop: Shop, name: str, status: int
) -> None:
    """An answer that commits nothing does not depend on the lost connection."""
    losing_view(shop, ENDS[name])
    assert shop.post().status_code == status


@on_servers
def test_exception_of_the_view_is_not_replaced(shop: Shop) -> None:
    """The application sees its own exception, not the one of the roll-back."""
    losing_view(shop, ENDS["exception"])
    shop.app.testing = True
    with pytest.raises(ZeroDivisionError):
        shop.post()
    record = shop.record()
    assert record is not None
    assert record.failure == "builtins.ZeroDivisionError"


@on_servers
def test_connection_that_ends_itself_raises_in_the_view(shop: Shop) -> None:
    """The statement that loses the connection fails like any statement of a view."""
    losing_view(shop, ENDS["answer"], lose=kill_own)
    assert shop.post().status_code == 500
    assert (shop.status(), shop.accounts()) == ("failed", [])


@on_servers
def test_view_that_answers_for_a_lost_connection(shop: Shop) -> None:
    """An answer of a view that noticed the loss is kept, without its rows."""

    def noticed(shop: Shop) -> None:
        with pytest.raises(DBAPIError):
            kill_own(shop)

    losing_view(shop, lambda: ("try later", 200), lose=noticed)
    answers = [shop.post() for _ in range(2)]
    assert [(a.status_code, a.text) for a in answers] == [(200, "try later")] * 2
    assert (shop.status(), shop.accounts()) == ("succeeded", [])


@on_servers
@pytest.mark.parametrize("name", ["answer", "exception"])
def test_retry_failed_runs_after_a_lost_connection(shop: Shop, name: str) -> None:
    """Nothing stayed of the lost run, so a route that retries runs again, once."""
    losing_view(shop, ENDS[name], retry_failed=True)
    assert shop.post().status_code >= 500
    assert [shop.post().status_code for _ in range(2)] == [201, 201]
    assert shop.accounts() == ["first"]
    assert shop.runs == ["first", "first"]


@on_servers
def test_loss_after_the_views_own_commit_is_never_run_again(
    shop: Shop,
) -> None:
    """Once a part is durable, a lost connection and retry_failed run nothing."""

    def lose(shop: Shop) -> None:
        shop.db.session.commit()
        shop.add("second")
        kill(shop)

    losing_view(shop, ENDS["answer"], lose=lose, retry_failed=True)
    assert [shop.post().status_code for _ in range(2)] == [500, 500]
    assert shop.accounts() == ["first"]
    record = shop.record()
    assert record is not None
    assert record.effects_committed_at is not None


@on_servers
def test_next_request_uses_a_new_connection(shop: Shop) -> None:
    """A connection that was lost is not lent to the next request."""
    losing_view(shop, ENDS["answer"])
    shop.post()
    assert shop.post("second", key="k2").status_code == 201


@on_servers
def test_store_replaces_a_connection_that_was_closed(shop: Shop) -> None:
    """A claim on a connection that the server closed is sent again on a new one."""
    shop.creating_view()
    shop.post()
    with shop.app.app_context():
        store = shop.idempotency.store
        is_postgresql = shop.database.name == "postgresql"
        function = "pg_backend_pid()" if is_postgresql else "CONNECTION_ID()"
        with store._connections.connect() as connection:
            number = connection.execute(text(f"SELECT {function}")).scalar_one()
        shop.db.session.execute(text(killing(shop, number)))
    assert shop.post("second", key="k2").status_code == 201
    assert shop.runs == ["first", "second"]


def test_lost_table_while_the_view_runs(shop: Shop) -> None:
    """A record that cannot be completed commits nothing of the view."""

    def view() -> Any:
        shop.runs.append(1)
        with shop.app.app_context():
            change(shop, "ALTER TABLE idempotency_record RENAME TO elsewhere")
        return shop.create()

    shop.view(view)
    assert shop.post().status_code >= 500
    assert shop.accounts() == []
    change(shop, "ALTER TABLE elsewhere RENAME TO idempotency_record")
    assert shop.status() == "processing"


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_error_of_the_driver_alone_is_a_lost_connection(shop: Shop) -> None:
    """An error that no server has sent ends the connection, and the claim goes on."""
    shop.creating_view()
    shop.post()
    with shop.app.app_context(), shop.idempotency.store._connections.connect() as own:
        raw: Any = own.connection.driver_connection
        original = raw.wait

    def wait(*_args: Any, **_options: Any) -> None:
        raw.wait = original
        raise psycopg.OperationalError("connection socket closed")

    raw.wait = wait
    assert shop.post("second", key="k2").status_code == 201
