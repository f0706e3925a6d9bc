"""Atomic views: what the view commits becomes durable with its answer, or not at all."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest
from flask import abort
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from flask_idempotency import (
    IdempotencyConfigError,
    current_idempotency,
    failpoints,
    idempotent,
)
from flask_idempotency.exceptions import NestedCallError
from tests.integration.test_crashes import die, end_process, settle_down
from tests.shop import Shop, elsewhere, is_replay

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.databases import Database

INSERT = "INSERT INTO account (name) VALUES ('{}')"


def commit(shop: Shop, name: str) -> None:
    """Add an account and commit, as an unmodified view does."""
    shop.add(name)
    shop.db.session.commit()


def expect(shop: Shop, view: Callable[[], Any], code: int, **options: Any) -> Any:
    """Serve an atomic view, ask twice, and return the first answer."""
    shop.view(view, atomic=True, **options)
    first, second = shop.post(), shop.post()
    assert (first.status_code, second.status_code) == (code, code)
    assert is_replay(second)
    return first


def test_commits_of_the_view_are_durable_with_its_answer(shop: Shop) -> None:
    """Until then nobody sees them, and no effect is noted."""
    seen: list[Any] = []

    def view() -> Any:
        commit(shop, "one")
        record = elsewhere(shop.record)
        seen.append((shop.accounts(), record and record.effects_committed_at))
        commit(shop, "two")
        shop.add("three")
        return "done", 201

    expect(shop, view, 201)
    assert seen == [([], None)]
    assert shop.accounts() == ["one", "two", "three"]
    record = shop.record()
    assert record is not None
    assert (record.status.value, record.effects_committed_at is None) == (
        "succeeded",
        False,
    )


def test_exception_undoes_all_of_it(shop: Shop) -> None:
    """So that the failure may be retried, although the view had committed."""

    def view() -> Any:
        commit(shop, f"attempt {len(shop.runs)}")
        if len(shop.runs) == 1:
            raise ValueError
        return "done", 201

    shop.view(view, atomic=True, retry_failed=True)
    assert shop.post().status_code == 500
    assert (shop.accounts(), shop.status()) == ([], "failed")
    assert shop.post().status_code == 201
    assert shop.accounts() == ["attempt 1"]


def test_server_error_undoes_all_of_it(shop: Shop) -> None:
    """Also one that the view answers by itself."""

    def view() -> Any:
        commit(shop, "one")
        return "no", 503

    expect(shop, view, 503)
    assert (shop.accounts(), shop.status()) == ([], "failed")


def test_error_that_is_answered_undoes_all_of_it(shop: Shop) -> None:
    """abort() is an exception, too; its answer is kept for duplicates."""

    def view() -> Any:
        commit(shop, "one")
        abort(409)

    expect(shop, view, 409)
    assert (shop.accounts(), shop.status()) == ([], "succeeded")


def test_client_error_keeps_what_the_view_committed(shop: Shop) -> None:
    """What it left open is dropped."""

    def view() -> Any:
        commit(shop, "kept")
        shop.add("dropped")
        return "no", 422

    expect(shop, view, 422)
    assert (shop.accounts(), shop.status()) == (["kept"], "succeeded")


def test_key_is_freed_while_nothing_stays(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """A 401 frees its key, unless the view has committed."""

    def view() -> Any:
        shop.add("dropped")
        if len(shop.runs) == 2:
            shop.db.session.commit()
        return "no", 401

    shop.view(view, atomic=True)
    assert shop.post().status_code == 401
    assert (shop.accounts(), shop.status()) == ([], None)
    with caplog.at_level(logging.WARNING):
        assert shop.post().status_code == 401
    assert "its key is not freed" in caplog.text
    assert (shop.accounts(), shop.status()) == (["dropped"], "succeeded")


def test_rollback_of_the_view_goes_back_to_its_last_commit(shop: Shop) -> None:
    """As without the decorator."""

    def view() -> Any:
        commit(shop, "kept")
        shop.add("dropped")
        shop.db.session.rollback()
        shop.add("last")
        return "done"

    expect(shop, view, 200)
    assert shop.accounts() == ["kept", "last"]


def test_view_that_swallows_an_error(shop: Shop) -> None:
    """What it had committed before stays, and its answer counts."""

    def view() -> Any:
        commit(shop, "kept")
        with pytest.raises(SQLAlchemyError):
            shop.add("kept")
        return "done"

    expect(shop, view, 200)
    assert (shop.accounts(), shop.status()) == (["kept"], "succeeded")


def test_removed_session_leaves_its_commits(shop: Shop) -> None:
    """The next one goes on in the same transaction."""

    def view() -> Any:
        commit(shop, "one")
        shop.add("dropped")
        shop.db.session.remove()
        shop.add("two")
        return "done"

    expect(shop, view, 200)
    assert shop.accounts() == ["one", "two"]


def test_view_that_only_reads(shop: Shop) -> None:
    """Its answer is stored as any other one."""

    def view() -> Any:
        return str(shop.db.session.query(shop.Account).count())

    assert expect(shop, view, 200).data == b"0"
    assert shop.status() == "succeeded"


def test_view_without_database(shop: Shop) -> None:
    """No transaction is begun for it."""
    with shop.app.app_context():
        begun: list[Any] = []
        event.listen(shop.db.engine, "begin", begun.append)
    expect(shop, lambda: "done", 200)
    assert (begun, shop.status()) == ([], "succeeded")


def test_without_a_key_it_is_atomic_too(shop: Shop) -> None:
    """The key decides only whether the call is recorded."""

    def view() -> Any:
        commit(shop, "one")
        raise ValueError

    shop.view(view, atomic=True, required=False)
    assert shop.post(key=None).status_code == 500
    assert shop.accounts() == []


def test_default_of_the_application(make_shop: Callable[..., Shop]) -> None:
    """IDEMPOTENCY_ATOMIC is for all routes that say nothing."""
    shop = make_shop(IDEMPOTENCY_ATOMIC=True)

    def view() -> Any:
        commit(shop, "one")
        raise ValueError

    shop.app.add_url_rule(
        "/plain",
        endpoint="plain",
        view_func=idempotent(required=True, atomic=False)(view),
        methods=["POST"],
    )
    shop.view(view)
    assert shop.post().status_code == 500
    assert shop.accounts() == []
    assert shop.post(path="/plain").status_code == 500
    assert shop.accounts() == ["one"]


def test_late_owner_commits_nothing(shop: Shop) -> None:
    """After a take-over the first call gets the winner's answer."""

    def view() -> Any:
        if shop.runs:
            return "winner"
        commit(shop, "late")
        if shop.database.name == "sqlite":  # whose lock keeps everybody else out
            shop.db.session.rollback()
            shop.db.session.connection().connection.dbapi_connection.rollback()  # type: ignore[union-attr]
        elsewhere(shop.lapse)
        assert elsewhere(shop.post).data == b"winner"
        return "late"

    shop.view(view, atomic=True)
    answer = shop.post()
    assert (answer.data, is_replay(answer)) == (b"winner", True)
    assert shop.accounts() == []


@pytest.mark.parametrize("write", [True, False], ids=["write", "read"])
def test_commit_beside_the_transaction_is_refused(shop: Shop, *, write: bool) -> None:
    """Through the engine, what was only read is no matter; the rest is rolled back."""
    statement = INSERT.format("beside") if write else "SELECT 1"

    def view() -> Any:
        with shop.db.engine.begin() as connection:
            connection.execute(text(statement))
        commit(shop, "one")
        return "done"

    shop.view(view, atomic=True)
    if write:
        shop.app.testing = True
        with pytest.raises(IdempotencyConfigError, match="committed once"):
            shop.post()
        assert (shop.accounts(), shop.status()) == ([], "failed")
    else:
        assert shop.post().status_code == 200
        assert shop.accounts() == ["one"]


@pytest.mark.parametrize("how", ["commit", "rollback"])
def test_end_past_the_session_is_no_success(shop: Shop, how: str) -> None:
    """A view that swallows the refusal has no half of its work committed either."""

    def view() -> Any:
        commit(shop, "one")
        connection = shop.db.session.connection()
        try:
            getattr(connection, how)()
        except IdempotencyConfigError:
            shop.db.session.rollback()
        return "done"

    shop.view(view, atomic=True, retry_failed=True)
    assert shop.post().status_code == 500
    record = shop.record()
    assert record is not None
    assert (shop.accounts(), record.status.value) == ([], "failed")
    assert record.effects_committed_at is None


def test_commit_through_the_driver_is_noted(shop: Shop) -> None:
    """It cannot be fenced; but the call does not go on as if nothing had happened."""

    def view() -> Any:
        shop.add("escaped")
        shop.db.session.connection().connection.dbapi_connection.commit()  # type: ignore[union-attr]
        shop.runs.append("ran")
        return "done"

    shop.view(view, atomic=True, retry_failed=True)
    assert [shop.post().status_code for _ in range(2)] == [500, 500]
    record = shop.record()
    assert record is not None
    assert record.effects_committed_at is not None
    assert shop.runs == ["escaped", "ran"]


@pytest.mark.parametrize(
    "statement",
    [
        "COMMIT",
        pytest.param("CREATE TABLE extra (id INT)", id="ddl"),
    ],
)
def test_statement_that_commits_is_not_sent(shop: Shop, statement: str) -> None:
    """DDL commits on MariaDB; elsewhere it is a part of the transaction."""
    is_part = statement != "COMMIT" and shop.database.name != "mariadb"

    def view() -> Any:
        commit(shop, "one")
        if is_part:
            shop.db.session.execute(text(statement))
        else:
            with pytest.raises(IdempotencyConfigError, match=statement):
                shop.db.session.execute(text(statement))
        raise ValueError

    shop.view(view, atomic=True)
    assert shop.post().status_code == 500
    assert (shop.accounts(), shop.status()) == ([], "failed")


def test_registered_session_takes_part(shop: Shop) -> None:
    """Its commits are savepoints, and what it left open at the end is dropped."""
    factory = sessionmaker()
    others = scoped_session(factory)
    shop.idempotency.register_session(others)

    def view() -> Any:
        factory.configure(bind=shop.db.engine)
        commit(shop, "one")
        others.execute(text(INSERT.format("two")))
        others.commit()
        commit(shop, "three")
        others.execute(text(INSERT.format("dropped")))
        return "done" if len(shop.runs) < 3 else abort(500)

    shop.view(view, atomic=True)
    assert shop.post().status_code == 200
    assert shop.accounts() == ["one", "two", "three"]
    others.remove()
    assert shop.post(key="other").status_code == 500


def test_two_sessions_with_open_work_are_refused(shop: Shop) -> None:
    """A commit of one would take the other's work along."""
    factory = sessionmaker()
    shop.idempotency.register_session(factory)

    def view() -> Any:
        shop.add("one")
        with factory(bind=shop.db.engine) as other:
            other.execute(text(INSERT.format("two")))
        return "done"

    shop.view(view, atomic=True)
    shop.app.testing = True
    with pytest.raises(IdempotencyConfigError, match="Two sessions have open work"):
        shop.post()
    assert (shop.accounts(), shop.status()) == ([], "failed")


@pytest.mark.parametrize(
    "options", [{"twophase": True}, {"join_transaction_mode": "rollback_only"}], ids=str
)
def test_session_that_cannot_join_is_refused(
    shop: Shop, options: dict[str, Any]
) -> None:
    """With a text that names the option."""
    factory = sessionmaker(**options)
    shop.idempotency.register_session(factory)

    def view() -> Any:
        with factory(bind=shop.db.engine) as other:
            other.execute(text("SELECT 1"))
        return "done"

    shop.view(view, atomic=True)
    shop.app.testing = True
    with pytest.raises(IdempotencyConfigError, match=next(iter(options))):
        shop.post()


def test_session_that_no_factory_makes_is_refused(shop: Shop) -> None:
    """There is no class on which its sessions could be told."""
    with pytest.raises(IdempotencyConfigError, match="neither a sessionmaker"):
        shop.idempotency.register_session(Session)  # type: ignore[arg-type]


def test_nested_context_takes_part(shop: Shop) -> None:
    """A session of another app context joins, while the outer one has nothing open."""

    def view() -> Any:
        commit(shop, "one")
        with shop.app.app_context():
            commit(shop, "two")
        commit(shop, "three")
        return "done"

    expect(shop, view, 200)
    assert shop.accounts() == ["one", "two", "three"]


def test_inner_call_is_completed_by_the_one_commit(shop: Shop) -> None:
    """Also if the view commits or rolls back afterwards."""

    def view() -> Any:
        def run(name: str) -> Any:
            scope = shop.scope(route=name)
            return shop.idempotency.guard.run(scope, "hash", lambda: shop.add(name))

        run("kept")
        shop.db.session.commit()
        run("undone")
        shop.db.session.rollback()
        assert elsewhere(lambda: shop.status(route="kept")) in {"processing", None}
        return "done"

    expect(shop, view, 200)
    assert shop.accounts() == ["kept"]
    assert shop.status(route="kept") == "succeeded"
    assert shop.status(route="undone") is None


def test_inner_call_fails_with_the_outer_one(shop: Shop) -> None:
    """Its effect is undone, and its key is free again."""

    def view() -> Any:
        scope = shop.scope(route="inner")
        shop.idempotency.guard.run(scope, "hash", lambda: shop.add("inner"))
        shop.db.session.commit()
        raise ValueError

    expect(shop, view, 500)
    assert shop.accounts() == []
    assert shop.status(route="inner") is None


def test_inner_call_with_a_session_of_its_own_is_refused(shop: Shop) -> None:
    """Its commit would be another one."""

    def view() -> Any:
        with (
            shop.app.app_context(),
            pytest.raises(NestedCallError, match="app context"),
        ):
            shop.idempotency.guard.run(None, "hash", lambda: None)
        return "done"

    expect(shop, view, 200)


def test_user_loaded_before_the_view(make_shop: Callable[..., Shop]) -> None:
    """With one connection, which the session holds already; the user is read again."""
    shop = make_shop(
        SQLALCHEMY_ENGINE_OPTIONS={"pool_size": 1, "max_overflow": 0, "pool_timeout": 2}
    )
    with shop.app.app_context():
        shop.db.session.add(shop.Account(name="user"))
        shop.db.session.commit()
    users: list[Any] = []

    @shop.app.before_request
    def load_user() -> None:
        users.append(shop.db.session.query(shop.Account).first())

    def view() -> Any:
        commit(shop, "one")
        return users[-1].name

    assert expect(shop, view, 200).data == b"user"
    assert shop.accounts() == ["user", "one"]


@pytest.mark.parametrize("key", ["k", None], ids=["key", "no key"])
def test_early_writes_are_refused(shop: Shop, key: str | None) -> None:
    """They cannot be a part of the call."""

    @shop.app.before_request
    def write() -> None:
        shop.db.session.add(shop.Account(name="early"))

    shop.view(lambda: "done", atomic=True, required=False)
    shop.app.testing = True
    with pytest.raises(IdempotencyConfigError, match="BEFORE_VIEW_WRITES"):
        shop.post(key=key)
    assert (shop.accounts(), shop.status()) == ([], None)


def test_early_writes_are_committed_on_request(make_shop: Callable[..., Shop]) -> None:
    """With IDEMPOTENCY_BEFORE_VIEW_WRITES = 'commit' they are durable before."""
    shop = make_shop(IDEMPOTENCY_BEFORE_VIEW_WRITES="commit")

    @shop.app.before_request
    def write() -> None:
        shop.db.session.add(shop.Account(name="early"))

    def view() -> Any:
        shop.add("late")
        raise ValueError

    shop.view(view, atomic=True)
    assert shop.post().status_code == 500
    assert shop.accounts() == ["early"]


def test_view_mode_drops_what_the_view_left_open(
    make_shop: Callable[..., Shop],
) -> None:
    """With IDEMPOTENCY_COMMIT = 'view' only its own commits count."""
    shop = make_shop(IDEMPOTENCY_COMMIT="view")

    def view() -> Any:
        commit(shop, "kept")
        shop.add("dropped")
        return "done"

    expect(shop, view, 200)
    assert shop.accounts() == ["kept"]


def test_async_view(shop: Shop) -> None:
    """It runs in another thread, with the context of the call."""

    async def view() -> Any:
        """Commit once by itself."""
        commit(shop, "one")
        shop.add("two")
        return "done"

    expect(shop, view, 200)
    assert shop.accounts() == ["one", "two"]


def test_listener_that_opens_a_transaction(shop: Shop) -> None:
    """What it does on each new connection is not what the view does."""
    with shop.app.app_context():
        engine = shop.db.engine

    @event.listens_for(engine, "engine_connect")
    def ping(connection: Any) -> None:
        connection.execute(text("SELECT 1"))

    def view() -> Any:
        commit(shop, "one")
        return "done"

    expect(shop, view, 200)
    assert (shop.accounts(), shop.status()) == (["one"], "succeeded")


def test_signal_of_the_session_fires_at_the_savepoint(shop: Shop) -> None:
    """Documented: hooks of other libraries do not wait for the real commit."""
    seen: list[Any] = []
    with shop.app.app_context():
        event.listen(
            shop.db.session.session_factory,
            "after_commit",
            lambda _session: seen.append(shop.accounts()),
        )

    def view() -> Any:
        commit(shop, "one")
        return "done"

    expect(shop, view, 200)
    assert seen[0] == []


def test_failing_commit_is_an_exception_of_the_view(shop: Shop) -> None:
    """The application may have an answer to it; nothing of the call stays."""

    @shop.app.errorhandler(DBAPIError)
    def conflict(_error: Any) -> Any:
        return "conflict", 409

    def view() -> Any:
        commit(shop, "one")
        shop.db.session.add(shop.Account(name="one"))
        return "done"

    expect(shop, view, 409)
    assert (shop.accounts(), shop.status()) == ([], "succeeded")


def test_observed_call_is_atomic(shop: Shop) -> None:
    """Its record stands beside it."""

    def view() -> Any:
        commit(shop, "one")
        raise ValueError

    shop.view(view, atomic=True, mode="observe")
    assert shop.post().status_code == 500
    assert (shop.accounts(), shop.status()) == ([], "failed")


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_deadlock_that_the_view_survives_is_no_success(
    shop: Shop, database: Database
) -> None:
    """On MariaDB it undoes released savepoints, too: all or nothing, never a half."""
    touch = _two_rows(shop)
    errors: list[str] = []

    def view() -> Any:
        commit(shop, "one")
        touch(shop.db.session, "a")
        try:
            _meet(shop, touch)
        except DBAPIError as error:
            errors.append(str(error))
        try:
            shop.db.session.rollback()
            shop.add("two")
        except SQLAlchemyError:
            shop.db.session.rollback()
        return "done"

    shop.view(view, atomic=True, retry_failed=True)
    answer = shop.post()
    assert "deadlock" in errors[0].lower()
    names = [n for n in shop.accounts() if n in {"one", "two"}]
    if database.name == "postgresql":  # where savepoints survive it
        assert (answer.status_code, names) == (200, ["one", "two"])
    else:
        assert (answer.status_code, names) == (500, [])
        record = shop.record()
        assert record is not None
        assert (record.status.value, record.effects_committed_at) == ("failed", None)
        assert str(record.failure).endswith(".IdempotencyConfigError")


def test_attempt_number_and_key_are_those_of_the_call(shop: Shop) -> None:
    """The call's own state is the same as without ``atomic``."""

    def view() -> Any:
        commit(shop, "one")
        return f"{current_idempotency.attempt} {current_idempotency.active}"

    assert expect(shop, view, 200).data == b"1 True"


def _two_rows(shop: Shop) -> Callable[[Any, str], None]:
    """Add the accounts "a" and "b", and return how to change one of them."""
    with shop.app.app_context(), shop.db.engine.begin() as connection:
        for name in "ab":
            connection.execute(text(INSERT.format(name)))
        found = connection.execute(text("SELECT name, id FROM account"))
        ids = {row.name: row.id for row in found}
    # By the primary key: a scan would wait for rows that it does not change.
    update = text("UPDATE account SET name = concat(name, 'x') WHERE id = :id")
    return lambda connection, name: connection.execute(update, {"id": ids[name]})


def _meet(shop: Shop, touch: Callable[[Any, str], None]) -> None:
    """Lock crosswise with a rival that has done more, so that the view is the victim."""
    has_lock = threading.Event()

    def rival() -> None:
        with shop.app.app_context(), shop.db.engine.connect() as connection:
            for number in range(20):
                connection.execute(text(INSERT.format(f"weight {number}")))
            if shop.database.name == "postgresql":  # who looks first is the victim
                connection.execute(text("SET LOCAL deadlock_timeout = '20s'"))
            touch(connection, "b")
            has_lock.set()
            with contextlib.suppress(DBAPIError):
                touch(connection, "a")
            connection.rollback()

    thread = threading.Thread(target=rival)
    thread.start()
    assert has_lock.wait(10)
    try:
        touch(shop.db.session, "b")
    finally:
        thread.join()


def _crash(database: Database, place: str) -> None:
    shop = Shop(database)

    def view() -> Any:
        commit(shop, "one")
        if place == "in_view":
            end_process()
        return "done", 201

    if place != "in_view":
        failpoints.set_failpoint(place, end_process)
    shop.view(view, atomic=True)
    shop.post()


@pytest.mark.parametrize("place", ["in_view", "before_commit", "after_commit"])
def test_kill_leaves_all_or_nothing(database: Database, shop: Shop, place: str) -> None:
    """Also after a commit of the view's own: so the outcome is never unknown."""
    die(_crash, database, place)
    done = place == "after_commit"
    assert shop.accounts() == (["one"] if done else [])

    def view() -> Any:
        commit(shop, "one")
        return "done", 201

    shop.view(view, atomic=True)
    settle_down(shop)
    assert [shop.post().status_code for _ in range(2)] == [201, 201]
    assert shop.runs == ([] if done else ["one"])
    assert shop.accounts() == ["one"]
