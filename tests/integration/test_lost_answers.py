"""The database did it, but its answer never arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text

from flask_idempotency import Resolution, StoredResponse
from tests.shop import elsewhere, unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.shop import Shop


@pytest.fixture
def server_shop(shop: Shop) -> Shop:
    """Give a shop on a database that is reached by a connection."""
    if shop.database.name == "sqlite":
        pytest.skip("SQLite answers in the process")
    return shop


def cut(shop: Shop, dialect: Any, raw: Any) -> None:
    """Break a connection as a network does, and say so as the driver would."""
    driver = getattr(raw, "driver_connection", raw)
    if shop.database.name == "postgresql":
        driver.close()
        raise dialect.dbapi.OperationalError("the connection is lost")
    driver._force_close()
    raise dialect.dbapi.OperationalError(2013, "Lost connection to server")


def cut_at_commit(
    shop: Shop, *, committed: bool, then: Callable[[], object] = list
) -> None:
    """Lose the answer of the session's next COMMIT, which went through or not."""
    with shop.app.app_context():
        dialect: Any = shop.db.engine.dialect
    original = dialect.do_commit

    def do_commit(raw: Any) -> None:
        dialect.do_commit = original
        if committed:
            original(raw)
        try:
            cut(shop, dialect, raw)
        finally:
            elsewhere(then)

    dialect.do_commit = do_commit


def test_commit_that_went_through_is_answered_as_such(server_shop: Shop) -> None:
    """The record settles it: the client gets the answer, and duplicates the same."""
    shop = server_shop
    shop.creating_view()
    cut_at_commit(shop, committed=True)
    answers = [shop.post() for _ in range(2)]
    assert [a.status_code for a in answers] == [201, 201]
    assert answers[0].data == answers[1].data
    assert (shop.accounts(), shop.runs) == (["first"], ["first"])


def test_commit_that_did_not_go_through_is_a_failure(server_shop: Shop) -> None:
    """When the record says that nothing was committed, the call failed."""
    shop = server_shop
    shop.creating_view(retry_failed=True)
    cut_at_commit(shop, committed=False)
    assert [shop.post().status_code for _ in range(2)] == [500, 201]
    assert shop.accounts() == ["first"]


def test_unsettled_commit_writes_nothing(server_shop: Shop) -> None:
    """While somebody holds the record, the outcome is left open: 503, and the lease."""
    shop = server_shop
    shop.creating_view()
    with shop.app.app_context():
        holder = shop.db.engine.connect()
    lock = text("SELECT id FROM idempotency_record FOR UPDATE")
    cut_at_commit(shop, committed=False, then=lambda: holder.execute(lock).all())
    response = shop.post()
    holder.rollback()
    holder.close()
    assert response.status_code == 503
    assert (shop.status(), shop.accounts()) == ("processing", [])


def _expire(shop: Shop) -> None:
    shop.outlive()
    shop.idempotency.store.expire(limit=1)


def _give_up(shop: Shop) -> None:
    record = shop.idempotency.store.look(shop.scope())
    assert record is not None
    shop.idempotency.store.claim(shop.scope(), record.request_hash)


def _recover(shop: Shop) -> None:
    store = shop.idempotency.store
    record = store.look(shop.scope())
    assert record is not None
    claim = store.claim_recovery(shop.scope(), record.request_hash)
    assert claim is not None
    assert store.mark_succeeded(claim, StoredResponse(code=201, body=b"recovered"))


def _resolve(shop: Shop) -> None:
    ending = StoredResponse(code=201, body=b"settled")
    resolution = Resolution(ending=ending, by="me", reason="seen")
    assert shop.idempotency.store.resolve(shop.scope(), resolution) is not None


@pytest.mark.parametrize(
    ("own_commit", "end", "status"),
    [
        (False, _expire, "expired"),
        (False, _give_up, "failed"),
        (True, _recover, "succeeded"),
        (True, _resolve, "succeeded"),
    ],
    ids=["expired", "given up", "recovered", "resolved"],
)
def test_commit_of_a_late_owner_is_not_taken_for_anothers_ending(
    make_shop: Callable[..., Shop],
    *,
    own_commit: bool,
    end: Callable[[Shop], None],
    status: str,
) -> None:
    """Whoever ended the record, an owner whose COMMIT was lost did not."""
    shop = make_shop(IDEMPOTENCY_MAX_ATTEMPTS=1)
    if shop.database.name == "sqlite":
        pytest.skip("SQLite answers in the process")

    def end_it() -> None:
        shop.lapse()
        with shop.app.app_context():
            end(shop)

    def view() -> Any:
        if own_commit:
            shop.add("part")
            shop.db.session.commit()
        cut_at_commit(shop, committed=False, then=end_it)
        return shop.create()

    shop.view(view)
    unavailable(shop.post())
    assert shop.accounts() == (["part"] if own_commit else [])
    assert shop.status() == status


def test_claim_whose_answer_was_lost_is_ours(server_shop: Shop) -> None:
    """A claim that was inserted without an answer is found again by its token."""
    shop = server_shop
    shop.creating_view()
    with shop.app.app_context():
        engine = shop.idempotency.store._connections.engine  # type: ignore[attr-defined]
    lost: list[bool] = []

    original = engine.dialect.do_execute

    def do_execute(cursor: Any, statement: str, *rest: Any) -> None:
        original(cursor, statement, *rest)
        if "INSERT INTO" in statement and not lost:
            lost.append(True)
            cut(shop, engine.dialect, cursor.connection)

    engine.dialect.do_execute = do_execute
    assert shop.post().status_code == 201
    assert lost == [True]
    record = shop.record()
    assert record is not None
    assert (record.attempts, shop.accounts()) == (1, ["first"])
