"""The database accepts and never answers: whatever asks the store gets its error."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import psycopg
import psycopg.waiting
import pytest
from sqlalchemy import create_engine, event, make_url, text
from sqlalchemy.pool import NullPool, Pool

from flask_idempotency import Failure
from flask_idempotency.exceptions import IdempotencyStoreUnavailable
from flask_idempotency.store.dialects import PostgreSQL
from tests.proxy import Proxy, disconnect, in_time, reconnect
from tests.shop import Shop, unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from flask_idempotency import Claim, IdempotencyStore, Scope
    from tests.databases import Database

on_servers = pytest.mark.parametrize(
    "database", ["postgresql", "mariadb"], indirect=True
)
on_postgresql = pytest.mark.parametrize("database", ["postgresql"], indirect=True)
on_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


@on_servers
@pytest.mark.usefixtures("impatient")
def test_silent_connection_is_503(far_shop: Shop, proxy: Proxy) -> None:
    """A claim on a pooled connection that fell silent is given up."""
    assert far_shop.post("before", key="before").status_code == 201
    proxy.freeze()
    unavailable(in_time(far_shop.post))
    assert far_shop.runs == ["before"]


@on_servers
@pytest.mark.usefixtures("impatient")
@pytest.mark.slow
def test_silent_connect_is_503(far_shop: Shop, proxy: Proxy) -> None:
    """A claim whose new connection is accepted and never answered is given up."""
    disconnect(far_shop)
    proxy.freeze()
    unavailable(in_time(far_shop.post))
    assert far_shop.runs == []


@on_servers
@pytest.mark.torture
@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "new"])
def test_silence_costs_seconds(far_shop: Shop, proxy: Proxy, *, pooled: bool) -> None:
    """With nothing configured a request is refused within ten seconds."""
    if pooled:
        far_shop.post("before", key="before")
    else:
        disconnect(far_shop)
    proxy.freeze()
    started = time.monotonic()
    unavailable(in_time(far_shop.post))
    assert 4.5 <= time.monotonic() - started <= 10


@on_servers
@pytest.mark.usefixtures("impatient")
def test_silent_connection_is_replaced(far_shop: Shop, proxy: Proxy) -> None:
    """After the silence the same request runs, on a new connection."""
    far_shop.post("before", key="before")
    proxy.freeze()
    unavailable(in_time(far_shop.post))
    proxy.thaw()
    reconnect(far_shop)
    assert in_time(far_shop.post).status_code == 201
    assert far_shop.runs == ["before", "first"]


@on_servers
@pytest.mark.usefixtures("impatient")
def test_silence_while_the_view_runs_ends_the_request(
    make_far_shop: Callable[..., Shop], proxy: Proxy
) -> None:
    """A failure that cannot be recorded is answered, and blocks its key for a lease."""
    shop = make_far_shop()

    def view() -> None:
        shop.runs.append(1)
        proxy.freeze()
        raise ZeroDivisionError

    shop.view(view)
    assert in_time(shop.post).status_code >= 500
    proxy.thaw()
    reconnect(shop)
    assert (shop.runs, shop.status()) == ([1], "processing")


USES: dict[str, Callable[[IdempotencyStore, Scope, Claim], object]] = {
    "claim": lambda store, scope, _: store.claim(scope, "hash"),
    "mark_failed": lambda store, _, claim: store.mark_failed(
        claim, Failure(reason="x")
    ),
    "release": lambda store, _, claim: store.release(claim),
    "look": lambda store, scope, _: store.look(scope),
    "diagnose": lambda store, scope, _: store.diagnose(scope),
    "expire": lambda store, *_: store.expire(limit=10),
    "purge": lambda store, *_: store.purge(limit=10),
    "count": lambda store, *_: store.count_expirable(),
}


@on_servers
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_of_the_store_ends(
    far_shop: Shop,
    proxy: Proxy,
    use: Callable[[IdempotencyStore, Scope, Claim], object],
) -> None:
    """Whatever asks the store on its own connection gets the documented error."""

    def silent() -> None:
        with far_shop.app.app_context():
            store = far_shop.idempotency.store
            claim = store.claim(far_shop.scope(), "hash").claim
            assert claim is not None
            proxy.freeze()
            with pytest.raises(IdempotencyStoreUnavailable):
                use(store, far_shop.scope(), claim)

    in_time(silent)


def freeze_and_ask(proxy: Proxy, raw: Any) -> None:
    """Do what a listener does that sets a connection up, in silence."""
    proxy.freeze()
    with raw.cursor() as cursor:
        cursor.execute("SELECT 1")


@pytest.fixture
def connecting_shop(make_far_shop: Callable[..., Shop], proxy: Proxy) -> Shop:
    """Give an application that makes its connections itself."""
    plain = create_engine(proxy.database.url, poolclass=NullPool)

    def creator() -> Any:
        args, params = plain.dialect.create_connect_args(make_url(plain.url))
        return plain.dialect.connect(*args, **params)

    shop = make_far_shop(SQLALCHEMY_ENGINE_OPTIONS={"creator": creator})
    shop.creating_view()
    return shop


@on_servers
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("kind", "target"),
    [("far_shop", "engine"), ("far_shop", "class"), ("connecting_shop", "engine")],
)
def test_listeners_on_the_store_connections_are_bounded(
    request: pytest.FixtureRequest, proxy: Proxy, kind: str, target: str
) -> None:
    """What an application asks on each new connection cannot hang the store either."""
    shop: Shop = request.getfixturevalue(kind)
    reconnect(shop)
    with shop.app.app_context():
        listened: Any = shop.db.engine if target == "engine" else Pool

    def listen(raw: Any, _record: Any) -> None:
        freeze_and_ask(proxy, raw)

    event.listen(listened, "connect", listen)
    try:
        unavailable(in_time(shop.post))
    finally:
        event.remove(listened, "connect", listen)


@on_servers
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", ["far_shop", "connecting_shop"])
def test_silence_during_the_first_set_up_is_503(
    request: pytest.FixtureRequest, proxy: Proxy, kind: str
) -> None:
    """What SQLAlchemy asks on the first connection of all is bounded, too."""
    shop: Shop = request.getfixturevalue(kind)
    reconnect(shop)
    with shop.app.app_context():
        event.listen(shop.db.engine, "connect", lambda *_: proxy.freeze())
    unavailable(in_time(shop.post))


@on_servers
@pytest.mark.usefixtures("impatient")
def test_creator_of_the_application_is_bounded(
    connecting_shop: Shop, proxy: Proxy
) -> None:
    """Statements end also where the application makes the connections itself."""
    connecting_shop.post("before", key="before")
    proxy.freeze()
    unavailable(in_time(connecting_shop.post))


@on_postgresql
@pytest.mark.parametrize(
    "wait", ["wait_c", "wait_poll", "wait_select", "wait_selector"]
)
def test_each_way_of_waiting_ends(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, wait: str
) -> None:
    """However psycopg waits, in C, in Python or as gevent needs it, it gives up."""
    if not hasattr(psycopg.waiting, wait):
        pytest.skip("psycopg is without its part in C here")
    monkeypatch.setattr("psycopg.waiting.wait", getattr(psycopg.waiting, wait))
    engine = create_engine(proxy.database.url, poolclass=NullPool)
    pooled = engine.raw_connection()
    raw: Any = pooled.driver_connection
    PostgreSQL().limit(raw, 0.1)
    assert raw.execute("SELECT 1").fetchone() == (1,)
    proxy.freeze()
    with pytest.raises(psycopg.OperationalError, match="no answer within"):
        in_time(lambda: raw.execute("SELECT 1"))
    assert raw.closed
    pooled.invalidate()


@on_servers
@pytest.mark.usefixtures("impatient")
@pytest.mark.slow
def test_ping_before_each_use_is_bounded(
    make_far_shop: Callable[..., Shop], proxy: Proxy
) -> None:
    """With ``pool_pre_ping`` ping and new connection are both given up."""
    shop = make_far_shop(SQLALCHEMY_ENGINE_OPTIONS={"pool_pre_ping": True})
    shop.creating_view()
    shop.post("before", key="before")
    proxy.freeze()
    unavailable(in_time(shop.post))


@on_servers
@pytest.mark.usefixtures("impatient")
def test_locked_table_is_503(far_shop: Shop, database: Database) -> None:
    """A migration that holds the table for long refuses requests, but hangs none."""
    far_shop.post("before", key="before")
    engine = create_engine(database.url, poolclass=NullPool)
    locks = {
        "postgresql": "LOCK TABLE idempotency_record IN ACCESS EXCLUSIVE MODE",
        "mariadb": "LOCK TABLES idempotency_record WRITE",
    }
    with engine.connect() as migration:
        migration.execute(text(locks[database.name]))
        unavailable(in_time(far_shop.post))
    assert far_shop.runs == ["before"]


@on_sqlite
def test_locked_file_is_503(make_shop: Callable[..., Shop]) -> None:
    """On SQLite the driver's own timeout bounds the wait for somebody's write."""
    shop = make_shop(SQLALCHEMY_ENGINE_OPTIONS={"connect_args": {"timeout": 0.1}})
    shop.creating_view()
    engine = create_engine(shop.database.url, poolclass=NullPool)
    with engine.connect() as writer:
        writer.exec_driver_sql("BEGIN IMMEDIATE")
        unavailable(in_time(shop.post))
    assert shop.runs == []
