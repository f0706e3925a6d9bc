"""Fixtures: an application whose database can fall silent."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest

from tests.backends import Backends
from tests.databases import NAMES, Database, Server, sqlite_database
from tests.proxy import Proxy

from .tables import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.shop import Shop


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the store wait for a moment where it waits for seconds."""
    monkeypatch.setattr("flask_idempotency.store.connections.ANSWER_SECONDS", 0.3)
    monkeypatch.setattr("flask_idempotency.store.runner._PATIENCE_SECONDS", 0.3)


@pytest.fixture
def backends(database: Database) -> Iterator[Backends]:
    """Give the operator's view of the server."""
    backends = Backends(database)
    yield backends
    backends.close()


@pytest.fixture
def proxy(database: Database) -> Iterator[Proxy]:
    """Give a way to the database that can fall silent."""
    proxy = Proxy(database)
    yield proxy
    proxy.close()


@pytest.fixture
def make_far_shop(open_shop: Callable[..., Shop], proxy: Proxy) -> Callable[..., Shop]:
    """Make applications that reach their database through the proxy."""
    return functools.partial(open_shop, proxy.database)


@pytest.fixture
def far_shop(make_far_shop: Callable[..., Shop]) -> Shop:
    """Give such an application with the default configuration and a view."""
    shop = make_far_shop()
    shop.creating_view()
    return shop


@pytest.fixture(scope="module", params=NAMES)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """Give one application for many tests, each of which uses a key of its own."""
    name: str = request.param
    if name == "sqlite":
        database = sqlite_database(tmp_path_factory.mktemp("world"))
    else:
        server = Server(name)
        if absence := server.absence():
            pytest.skip(absence)
        database = Database(name, server.create())
    world = World(database)
    yield world
    world.close()
    if name != "sqlite":
        server.drop(database.url)
