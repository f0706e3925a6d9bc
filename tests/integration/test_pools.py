"""The store's own pool: small, bounded, and like the application's."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.pool import NullPool

from flask_idempotency import IdempotencyConfigError, fingerprint
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
    barrier = threading.Barrier(10, timeout=30)

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
    shop = make_shop()
    with shop.app.app_context():
        event.listen(shop.db.engine, "connect", lambda *_: seen.append(1))
        assert shop.idempotency.store.look(shop.scope()) is None
    assert seen == [1]


def test_execution_options_of_the_engine_apply_to_the_store(
    make_shop: Callable[..., Shop],
) -> None:
    """A translated schema is translated for claims, too."""
    options = {"schema_translate_map": {"nowhere": None}}
    shop = make_shop(SQLALCHEMY_ENGINE_OPTIONS={"execution_options": options})
    with shop.app.app_context():
        engine = shop.idempotency.store._connections.engine  # type: ignore[attr-defined]
    assert engine.get_execution_options()["schema_translate_map"] == {"nowhere": None}


def test_engine_in_autocommit_is_refused(make_shop: Callable[..., Shop]) -> None:
    """Where nothing can be rolled back, nothing is promised."""
    with pytest.raises(IdempotencyConfigError, match="AUTOCOMMIT"):
        make_shop(SQLALCHEMY_ENGINE_OPTIONS={"isolation_level": "AUTOCOMMIT"})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
# The child runs a request and ends; nothing waits for the parent's threads.
@pytest.mark.filterwarnings("ignore:This process .*multi-threaded:DeprecationWarning")
def test_forked_children_make_connections_of_their_own(shop: Shop) -> None:
    """A pre-fork server whose parent has claimed before works in every child."""
    shop.creating_view()
    assert shop.post("parent", key="parent").status_code == 201
    children = [_fork(shop, f"child-{number}") for number in range(3)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [0, 0, 0]
    assert shop.post("again", key="again").status_code == 201
    assert len(shop.accounts()) == 5


def _fork(shop: Shop, name: str) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            with shop.app.app_context():
                shop.db.engine.dispose(close=False)  # as SQLAlchemy asks for
            os._exit(0 if shop.post(name, key=name).status_code == 201 else 1)
        finally:
            os._exit(2)
    return pid


def test_errors_of_the_store_hold_no_key(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """What the database says about a claim reaches the logs without its values."""
    shop.creating_view()
    with shop.app.app_context(), shop.db.engine.begin() as connection:
        shop.idempotency.Record.__table__.drop(connection)
        connection.execute(text("CREATE TABLE idempotency_record (id CHAR(32))"))
    with caplog.at_level("DEBUG"):
        assert shop.post(key="SECRET-KEY").status_code == 503
    errors = [r.getMessage() + str(r.exc_text or "") for r in caplog.records]
    assert "SECRET-KEY" not in "".join(errors)


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


SMALL = {"single": SINGLE, "none": {"poolclass": NullPool}}


@pytest.fixture(params=SMALL)
def small_shop(make_shop: Callable[..., Shop], request: pytest.FixtureRequest) -> Shop:
    """Give an application whose session has one connection, or makes one each time."""
    return make_shop(SQLALCHEMY_ENGINE_OPTIONS=SMALL[request.param])


def test_contexts_inside_a_call_need_no_second_connection(small_shop: Shop) -> None:
    """A call that holds the one connection may claim, look and diagnose within."""
    shop = small_shop
    seen: list[Any] = []

    def view() -> Any:
        session, account = shop.db.session(), shop.create()
        inner = shop.scope(route="inner")
        guard = shop.idempotency.guard
        value = guard.run(inner, fingerprint(1), lambda: shop.add("inner")).value
        with shop.app.app_context():
            store = shop.idempotency.store
            seen.append(store.diagnose(shop.scope()).diagnosis.value)
            seen.append(store.look(shop.scope(route="inner")) is not None)
        assert shop.db.session() is session
        return {**account[0], "inner": value}, 201

    shop.view(view)
    answers = [shop.post() for _ in range(2)]
    assert [a.status_code for a in answers] == [201, 201]
    assert answers[0].data == answers[1].data
    assert seen[0] == "in_progress"
    assert shop.accounts() == ["first", "inner"]


def test_duplicates_wait_beside_the_one_connection(small_shop: Shop) -> None:
    """Those that wait leave the connection to the call that they wait for."""
    shop = small_shop
    running, go_on = threading.Event(), threading.Event()

    def view() -> Any:
        shop.db.session.execute(text("SELECT count(*) FROM account"))
        running.set()
        assert go_on.wait(30)
        return shop.create()

    shop.view(view, wait=20)
    with ThreadPoolExecutor(6) as pool:
        first = pool.submit(shop.post)
        assert running.wait(30)
        waiters = [pool.submit(shop.post) for _ in range(5)]
        other = shop.record()  # the store has room for more
        go_on.set()
        assert [f.result().status_code for f in (first, *waiters)] == [201] * 6
    assert other is not None
    assert (shop.runs, shop.accounts()) == (["first"], ["first"])


def test_context_that_wants_the_only_connection_fails_and_frees_all(
    make_shop: Callable[..., Shop],
) -> None:
    """A second session over a pool of one is a failure of both calls; no key hangs."""
    shop = make_shop(SQLALCHEMY_ENGINE_OPTIONS={**SINGLE, "pool_timeout": 0.05})

    def view() -> Any:
        if not shop.runs:
            shop.db.session.execute(text("SELECT count(*) FROM account"))
            with shop.app.app_context():
                shop.idempotency.guard.run(
                    shop.scope(route="inner"), fingerprint(1), lambda: shop.add("inner")
                )
        return shop.create()

    shop.view(view, retry_failed=True)
    assert shop.post().status_code == 500
    assert (shop.status(), shop.status(route="inner")) == ("failed", "failed")
    assert [shop.post().status_code for _ in range(2)] == [201, 201]
    assert shop.accounts() == ["first"]
