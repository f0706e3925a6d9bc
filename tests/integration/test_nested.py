"""An inner call's record says what became of its effect, whatever the outer one does."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, text

from flask_idempotency import IdempotencyConfigError, Scope, fingerprint
from flask_idempotency.exceptions import NestedCallError
from tests.shop import elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.shop import Shop

HASH = fingerprint(1)
INNER = Scope(tenant_id="", user_id="u1", route="inner", idempotency_key="i")


def inner(shop: Shop, handler: Callable[[], Any] | None = None) -> Any:
    """Run an inner call that adds an account, or does what `handler` does."""
    handler = handler or (lambda: shop.add("inner"))
    return shop.idempotency.guard.run(INNER, HASH, handler).value


def inner_state(shop: Shop) -> tuple[str, bool] | None:
    """Return status and "something stayed" of the inner record."""
    with shop.app.app_context():
        record = shop.idempotency.store.look(INNER)
    if record is None:
        return None
    return record.status.value, record.effects_committed_at is not None


def rolled_back(shop: Shop) -> None:
    """Roll the session back after the inner call."""
    inner(shop)
    shop.db.session.rollback()


def removed(shop: Shop) -> None:
    """Close the session after the inner call."""
    inner(shop)
    shop.db.session.remove()


def savepoint_rolled_back(shop: Shop) -> None:
    """Make the inner call inside a savepoint that is rolled back."""
    with suppress(LookupError), shop.db.session.begin_nested():
        inner(shop)
        raise LookupError


def savepoint_in_other_words(shop: Shop) -> None:
    """The same by statements, in the spellings that the database knows."""
    execute = shop.db.session.connection().exec_driver_sql
    execute("SAVEPOINT here")
    inner(shop)
    shop.db.session.flush()
    verb = "TRANSACTION" if shop.database.name == "sqlite" else "WORK"
    execute(f"/* undo */ ROLLBACK {verb} TO SAVEPOINT HERE")


def rolled_back_as_text(shop: Shop) -> None:
    """Roll back by a statement, past the session."""
    inner(shop)
    shop.db.session.flush()
    shop.db.session.execute(text("ROLLBACK"))


UNDOINGS = [
    rolled_back,
    removed,
    savepoint_rolled_back,
    savepoint_in_other_words,
    rolled_back_as_text,
]


@pytest.mark.parametrize("key", ["k", None])
@pytest.mark.parametrize("undo", UNDOINGS)
def test_undone_inner_call_is_free_again(
    shop: Shop, undo: Callable[[Shop], None], key: str | None
) -> None:
    """When the outer call undoes an inner one and goes on, the inner key is free."""

    def view() -> str:
        undo(shop)
        shop.add("later")
        return "done"

    shop.view(view, required=False)
    assert shop.post(key=key).status_code == 200
    assert (shop.accounts(), inner_state(shop)) == (["later"], None)


@pytest.mark.parametrize("key", ["k", None])
def test_undone_inner_call_and_nothing_more(shop: Shop, key: str | None) -> None:
    """Also when the outer call then has nothing to commit."""

    def view() -> str:
        rolled_back(shop)
        return "done"

    shop.view(view, required=False)
    assert shop.post(key=key).status_code == 200
    assert (shop.accounts(), inner_state(shop)) == ([], None)


def test_call_without_a_key_in_between(shop: Shop) -> None:
    """An unrecorded call around an inner one does not hide it from the commit."""

    def view() -> str:
        shop.idempotency.guard.run(None, "", lambda: inner(shop))
        shop.add("outer")
        return "done"

    shop.view(view)
    assert shop.post().status_code == 200
    assert shop.accounts() == ["inner", "outer"]
    assert inner_state(shop) == ("succeeded", True)


def test_commit_on_another_connection_is_not_the_inner_calls(shop: Shop) -> None:
    """What another connection commits says nothing of rows that the session holds."""
    if shop.database.name == "sqlite":
        pytest.skip("SQLite has one writer")

    def view() -> tuple[str, int]:
        inner(shop)
        with shop.db.engine.begin() as connection:
            connection.execute(text("INSERT INTO account (name) VALUES ('audit')"))
        return "no", 400

    shop.view(view)
    assert shop.post().status_code == 400
    assert (shop.accounts(), inner_state(shop)) == (["audit"], None)


def test_listener_that_commits_elsewhere_before_a_failing_flush(shop: Shop) -> None:
    """A success is written by the commit of its rows, not by that of an audit row."""
    if shop.database.name == "sqlite":
        pytest.skip("SQLite has one writer")

    def view() -> tuple[str, int]:
        shop.db.session.add_all([shop.Account(name="twin"), shop.Account(name="twin")])
        return "created", 201

    shop.view(view)

    @event.listens_for(shop.db.session, "before_commit")
    def audit(_session: Any) -> None:
        with shop.db.engine.begin() as connection:
            connection.execute(text("INSERT INTO account (name) VALUES ('audit')"))

    assert shop.post().status_code == 500
    assert (shop.accounts(), shop.status()) == (["audit"], "failed")


@pytest.mark.parametrize("status", [403, 429])
def test_released_inner_call_and_a_commit_of_the_view(shop: Shop, status: int) -> None:
    """An inner key that is freed stays free over any number of commits."""

    def view() -> str:
        inner(shop, lambda: ("no", status))
        shop.add("one")
        shop.db.session.commit()
        shop.add("two")
        return "done"

    shop.view(view)
    assert shop.post().status_code == 200
    assert (shop.accounts(), inner_state(shop)) == (["one", "two"], None)


def test_inner_commit_keeps_an_answer_that_would_free_the_key(shop: Shop) -> None:
    """Once a part of the inner call is durable, its answer is kept."""

    def handler() -> Any:
        shop.add("inner")
        shop.db.session.commit()
        return "slow down", 429

    def view() -> str:
        inner(shop, handler)
        shop.add("outer")
        return "done"

    shop.view(view)
    assert shop.post().status_code == 200
    assert shop.accounts() == ["inner", "outer"]
    assert inner_state(shop) == ("succeeded", True)


@pytest.mark.parametrize("key", ["k", None])
def test_inner_commit_and_nothing_more(shop: Shop, key: str | None) -> None:
    """An inner call that committed by itself completes with the outer one."""

    def handler() -> str:
        shop.add("inner")
        shop.db.session.commit()
        return "done"

    shop.view(lambda: inner(shop, handler), required=False)
    assert shop.post(key=key).status_code == 200
    assert (shop.accounts(), inner_state(shop)) == (["inner"], ("succeeded", True))


@pytest.mark.parametrize("key", ["k", None])
def test_inner_commit_under_an_outer_failure(shop: Shop, key: str | None) -> None:
    """What an inner call committed is never run again; nothing stays processing."""

    def handler() -> str:
        shop.add("inner")
        shop.db.session.commit()
        return "done"

    def view() -> tuple[str, int]:
        inner(shop, handler)
        return "no", 400

    shop.view(view, required=False)
    assert shop.post(key=key).status_code == 400
    assert (shop.accounts(), inner_state(shop)) == (["inner"], ("failed", True))


def test_same_inner_scope_twice_before_the_commit(shop: Shop) -> None:
    """A second use of a key that waits for this very commit is said to be a mistake."""

    def view() -> str:
        inner(shop)
        with pytest.raises(NestedCallError):
            inner(shop)
        return "done"

    shop.view(view)
    assert shop.post().status_code == 200
    assert (shop.accounts(), inner_state(shop)) == (["inner"], ("succeeded", True))


def test_same_inner_scope_after_a_commit_is_a_replay(shop: Shop) -> None:
    """Once it is committed, the inner key answers like any other."""

    def view() -> str:
        inner(shop)
        shop.db.session.commit()
        return str(inner(shop))

    shop.view(view)
    assert shop.post().data == b"inner"
    assert shop.accounts() == ["inner"]


def test_duplicate_of_a_joined_claim_does_not_wait(
    make_shop: Callable[..., Shop],
) -> None:
    """Where an inner claim is part of the outer transaction, rivals get 409 at once."""
    name = make_shop().database.name
    if name == "sqlite":
        pytest.skip("SQLite locks the database, not rows")
    options: dict[str, Any] = {"isolation_level": "REPEATABLE READ"}
    if name == "mariadb":
        snapshots = "SET innodb_snapshot_isolation = ON"
        options["connect_args"] = {"init_command": snapshots}
    shop = make_shop(SQLALCHEMY_ENGINE_OPTIONS=options)

    def rival() -> str:
        with shop.app.app_context():
            decision = shop.idempotency.store.claim(INNER, HASH)
        return decision.outcome.value

    def view() -> str:
        shop.add("outer")
        return str(inner(shop, lambda: elsewhere(rival)))

    shop.view(view)
    assert shop.post().data == b"in_progress"
    assert inner_state(shop) == ("succeeded", True)


def by_rollback(shop: Shop) -> None:
    """End the inner savepoint by a rollback of the session."""
    shop.add("ended")
    shop.db.session.rollback()


def by_commit(shop: Shop) -> None:
    """End the inner savepoint by a commit of the session."""
    shop.add("ended")
    shop.db.session.commit()


def by_savepoint(shop: Shop) -> None:
    """Leave a savepoint open, inside that of the inner call."""
    shop.db.session.begin_nested()


@pytest.mark.parametrize("atomic", [False, True], ids=["plain", "atomic"])
@pytest.mark.parametrize("end", [by_rollback, by_commit, by_savepoint])
def test_inner_failure_leaves_nothing_open(
    shop: Shop, end: Callable[[Shop], None], *, atomic: bool
) -> None:
    """What it did after it ended its savepoint is undone, what it committed noted."""

    def handler() -> None:
        end(shop)
        shop.add("open")
        raise LookupError

    def view() -> str:
        with suppress(LookupError):
            inner(shop, handler)
        shop.add("outer")
        return "done"

    shop.view(view, atomic=atomic)
    assert shop.post().status_code == 200
    kept = ["ended"] if end is by_commit else []
    assert shop.accounts() == [*kept, "outer"]
    assert inner_state(shop) == ("failed", bool(kept))


@pytest.mark.parametrize("atomic", [False, True], ids=["plain", "atomic"])
def test_inner_commit_that_is_undone_with_the_outer_call(
    shop: Shop, *, atomic: bool
) -> None:
    """In an atomic call nothing of it stays, and nothing is noted."""

    def view() -> None:
        def handler() -> None:
            by_commit(shop)
            raise LookupError

        inner(shop, handler)

    shop.view(view, atomic=atomic)
    assert shop.post().status_code == 500
    assert shop.accounts() == ([] if atomic else ["ended"])
    assert inner_state(shop) == ("failed", not atomic)


def test_inner_success_with_an_open_savepoint(shop: Shop) -> None:
    """A savepoint that its handler did not end is released with its own."""

    def handler() -> None:
        by_savepoint(shop)
        shop.add("inner")

    def view() -> str:
        inner(shop, handler)
        return "done"

    shop.view(view)
    assert shop.post().status_code == 200
    assert (shop.accounts(), inner_state(shop)) == (["inner"], ("succeeded", True))


@pytest.mark.parametrize("commits", [False, True])
def test_joined_claim_that_its_handler_undoes(
    make_shop: Callable[..., Shop], *, commits: bool
) -> None:
    """What nothing would be known of is not committed: the mistake is said."""
    shop = make_shop()
    if shop.database.name != "sqlite":  # where any written transaction hides a claim
        options = {"isolation_level": "REPEATABLE READ"}
        if shop.database.name == "mariadb":
            snapshots = "SET innodb_snapshot_isolation = ON"
            options["connect_args"] = {"init_command": snapshots}  # type: ignore[assignment]
        shop = make_shop(SQLALCHEMY_ENGINE_OPTIONS=options)

    def handler() -> None:
        by_rollback(shop)
        shop.add("inner")
        if commits:
            shop.db.session.commit()

    def view() -> str:
        shop.add("outer")
        inner(shop, handler)
        return "done"

    shop.view(view)
    shop.app.testing = True
    with pytest.raises(IdempotencyConfigError, match="its own claim"):
        shop.post()
    assert (shop.accounts(), shop.status(), inner_state(shop)) == ([], "failed", None)
