"""The store's own pool: small, bounded, and like the application's."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.pool import NullPool

from tests.databases import Database
from tests.shop import Shop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SINGLE = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 3}


def test_request_that_holds_the_only_connection_can_claim(
    make_shop: Callable[..., Shop],
) -> None:
    """With one connection in the pool, taken before the view, requests work."""
    shop = make_shop(SQLALCHEMY_ENGINE_OPTIONS=SINGLE)

    @shop.app.before_request
    def load_user() -> None:
        shop.db.session.execute(text("SELECT count(*) FROM account")).scalar()

    shop.creating_view()
    assert [shop.post().status_code for _ in range(2)] == [201, 201]
    assert shop.accounts() == ["first"]


def test_many_requests_share_one_connection(make_shop: Callable[..., Shop]) -> None:
    """Parallel requests over a pool of one are all answered."""
    shop = make_shop(SQLALCHEMY_ENGINE_OPTIONS=SINGLE)
    shop.creating_view()
    barrier = threading.Barrier(10)

    def post(number: int) -> int:
        barrier.wait()
        return shop.post(f"n{number}", key=f"k{number}").status_code

    with ThreadPoolExecutor(10) as pool:
        assert list(pool.map(post, range(10))) == [201] * 10
    assert len(shop.accounts()) == 10


def test_store_opens_no_more_connections_than_it_may(
    make_shop: Callable[..., Shop],
) -> None:
    """IDEMPOTENCY_POOL_SIZE bounds what claims need beside the session's pool."""
    shop = make_shop(IDEMPOTENCY_POOL_SIZE=2)
    opened: list[Any] = []
    with shop.app.app_context():
        store_engine = shop.idempotency.store._connections.engine  # type: ignore[attr-defined]
    event.listen(store_engine, "connect", lambda *_: opened.append(1))
    store_engine.dispose()
    shop.creating_view()
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(lambda n: shop.post(f"n{n}", key=f"k{n}"), range(20)))
    assert 1 <= len(opened) <= 2


def test_exhausted_store_pool_is_answered_not_awaited(
    make_shop: Callable[..., Shop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When no connection of the store becomes free, the client gets 503."""
    monkeypatch.setattr("flask_idempotency.store.connections.WAIT_SECONDS", 0.01)
    shop = make_shop(IDEMPOTENCY_POOL_SIZE=1)
    shop.creating_view()
    with shop.app.app_context(), shop.idempotency.store._connections.connect():
        response = shop.post()
    assert response.status_code == 503
    assert response.json is not None
    assert response.json["code"] == "IDEMPOTENCY_STORE_UNAVAILABLE"
    assert response.headers["Retry-After"] == "1"
    assert shop.runs == []


def test_no_pool_at_all(make_shop: Callable[..., Shop]) -> None:
    """An application without pooling works, as behind an external pooler."""
    shop = make_shop(SQLALCHEMY_ENGINE_OPTIONS={"poolclass": NullPool})
    shop.creating_view()
    assert [shop.post().status_code for _ in range(2)] == [201, 201]


def test_listeners_of_the_application_pool_apply_to_the_store(
    make_shop: Callable[..., Shop],
) -> None:
    """What an application sets on each connection is set on the store's, too."""
    seen: list[Any] = []

    class Listening(Shop):
        """Sets a listener before the store exists."""

    shop = make_shop()
    with shop.app.app_context():
        event.listen(shop.db.engine, "connect", lambda *_: seen.append(1))
        state = shop.app.extensions["idempotency"]
        state._guard = state._store = None
        shop.db.engine.dispose()
        assert shop.idempotency.store.look(shop.scope()) is None
    assert seen


@pytest.fixture
def memory_shop() -> Iterator[Shop]:
    """Give an application on SQLite in memory, as tests use it."""
    shop = Shop(Database("sqlite", "sqlite://"))
    yield shop
    with shop.app.app_context():
        shop.db.session.remove()
        shop.db.engine.dispose()


def memory_accounts(shop: Shop) -> list[str]:
    """Return the names in the one database that the application sees."""
    with shop.app.app_context():
        return list(shop.db.session.scalars(shop.db.select(shop.Account.name)))


def test_memory_first_request_and_replay(memory_shop: Shop) -> None:
    """SQLite in memory has one connection, and works all the same."""
    memory_shop.creating_view()
    assert [memory_shop.post().status_code for _ in range(2)] == [201, 201]
    assert memory_accounts(memory_shop) == ["first"]


def test_memory_failure_is_recorded(memory_shop: Shop) -> None:
    """In memory, too, a failure outlives the rollback."""

    def view() -> None:
        memory_shop.add()
        raise ValueError

    memory_shop.view(view)
    assert [memory_shop.post().status_code for _ in range(2)] == [500, 500]
    assert memory_shop.status() == "failed"
    assert (memory_accounts(memory_shop), memory_shop.runs) == ([], ["first"])


def test_memory_nested_calls(memory_shop: Shop) -> None:
    """In memory an inner call is part of the outer transaction."""

    def view() -> dict[str, Any]:
        memory_shop.add("outer")
        inner = memory_shop.idempotency.guard.run(
            memory_shop.scope(route="inner"), "hash", lambda: memory_shop.add("inner")
        )
        if len(memory_shop.runs) == 2:
            raise ValueError
        return {"inner": inner.value}

    memory_shop.view(view, retry_failed=True)
    assert [memory_shop.post().status_code for _ in range(3)] == [500, 200, 200]
    assert memory_accounts(memory_shop) == ["outer", "inner"]
