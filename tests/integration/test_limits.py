"""How long a connection waits: what the store sets for itself, and for nobody else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, text

from flask_idempotency.exceptions import IdempotencyStoreUnavailable
from tests.proxy import reconnect

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.shop import Shop

on_servers = pytest.mark.parametrize(
    "database", ["postgresql", "mariadb"], indirect=True
)
on_mariadb = pytest.mark.parametrize("database", ["mariadb"], indirect=True)
on_postgresql = pytest.mark.parametrize("database", ["postgresql"], indirect=True)


def own_connection(shop: Shop) -> Any:
    """Return a driver connection of the application's own pool."""
    connection = shop.db.session.connection().connection
    return connection.driver_connection


def sleeping(shop: Shop, seconds: float) -> Any:
    """Return a statement that takes its time."""
    function = "pg_sleep" if shop.database.name == "postgresql" else "SLEEP"
    return text(f"SELECT {function}({seconds})")


@on_servers
@pytest.mark.usefixtures("impatient")
def test_connections_of_the_application_wait_as_long_as_it_likes(
    far_shop: Shop,
) -> None:
    """Only the store gives up: a slow statement of the application is answered."""
    far_shop.post()
    reconnect(far_shop)
    with far_shop.app.app_context():
        store = far_shop.idempotency.store
        with pytest.raises(IdempotencyStoreUnavailable):
            store._runner.run(lambda c: c.execute(sleeping(far_shop, 0.6)))
        far_shop.db.session.execute(sleeping(far_shop, 0.6))


@on_servers
def test_connections_of_the_application_are_made_as_ever(far_shop: Shop) -> None:
    """No argument of the store's reaches the connections of the application."""
    far_shop.post()
    reconnect(far_shop)
    with far_shop.app.app_context():
        raw = own_connection(far_shop)
        if far_shop.database.name == "postgresql":
            assert "connect_timeout" not in raw.info.get_parameters()
            assert "wait" not in vars(raw)
        else:
            assert (raw._read_timeout, raw._write_timeout) == (None, None)
            assert raw.connect_timeout == 10


def store_parameters(shop: Shop) -> dict[str, Any]:
    """Return what a connection of the store was made with."""
    with shop.app.app_context(), shop.idempotency.store._connections.connect() as own:
        raw: Any = own.connection.driver_connection
        if shop.database.name == "postgresql":
            return dict(raw.info.get_parameters())
        return {
            "connect_timeout": raw.connect_timeout,
            "read_timeout": raw._read_timeout,
            "write_timeout": raw._write_timeout,
        }


@on_servers
def test_store_connects_with_limits(far_shop: Shop) -> None:
    """A connection of the store is made with a limit, unlike the application's."""
    parameters = store_parameters(far_shop)
    assert int(parameters["connect_timeout"]) == 5


@on_servers
def test_limits_of_the_application_count(make_far_shop: Callable[..., Shop]) -> None:
    """An application that chose its own time for a connect keeps it."""
    shop = make_far_shop(
        SQLALCHEMY_ENGINE_OPTIONS={"connect_args": {"connect_timeout": 8}}
    )
    assert int(store_parameters(shop)["connect_timeout"]) == 8


@on_mariadb
def test_read_timeout_of_the_application_counts(
    make_far_shop: Callable[..., Shop],
) -> None:
    """An application that chose its own time for an answer keeps it."""
    shop = make_far_shop(
        SQLALCHEMY_ENGINE_OPTIONS={"connect_args": {"read_timeout": 8}}
    )
    assert store_parameters(shop)["read_timeout"] == 8


@on_postgresql
def test_environment_of_the_application_counts(
    make_far_shop: Callable[..., Shop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for a connect may come from libpq's environment."""
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "8")
    parameters = store_parameters(make_far_shop())
    assert parameters.get("connect_timeout", "8") == "8"


@on_servers
@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
def test_connect_listener_is_called_once(far_shop: Shop, *, early: bool) -> None:
    """A listener sees each connect of the store once, and what it sets is kept."""
    calls: list[int] = []

    def listen(_dialect: Any, _record: Any, _cargs: Any, cparams: Any) -> None:
        calls.append(1)
        cparams["connect_timeout"] = 9

    with far_shop.app.app_context():
        engine, store = far_shop.db.engine, far_shop.idempotency.store
    if early:
        event.listen(engine, "do_connect", listen)
    store_parameters(far_shop)
    store.close()
    store._connections.forget()  # type: ignore[attr-defined]  # as after a fork
    if not early:
        event.listen(engine, "do_connect", listen)
    calls.clear()
    assert int(store_parameters(far_shop)["connect_timeout"]) == 9
    assert calls == [1]


@on_servers
def test_connect_listener_may_connect_by_itself(far_shop: Shop) -> None:
    """A connection that a listener returns is the one that the store uses."""
    made: list[Any] = []

    def listen(dialect: Any, _record: Any, cargs: Any, cparams: Any) -> Any:
        made.append(dialect.connect(*cargs, **cparams))
        return made[-1]

    with far_shop.app.app_context():
        store = far_shop.idempotency.store
        event.listen(far_shop.db.engine, "do_connect", listen)
        with store._connections.connect() as own:
            assert own.connection.driver_connection is made[0]
