"""Fixtures: an application whose database can fall silent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.proxy import Proxy
from tests.shop import Shop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.databases import Database


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the store wait for a moment where it waits for seconds."""
    monkeypatch.setattr("flask_idempotency.store.connections.ANSWER_SECONDS", 0.3)
    monkeypatch.setattr("flask_idempotency.store.runner._PATIENCE_SECONDS", 0.3)


@pytest.fixture
def proxy(database: Database) -> Iterator[Proxy]:
    """Give a way to the database that can fall silent."""
    proxy = Proxy(database)
    yield proxy
    proxy.close()


@pytest.fixture
def make_far_shop(proxy: Proxy) -> Iterator[Callable[..., Shop]]:
    """Make applications that reach their database through the proxy."""
    made: list[Shop] = []

    def make(**config: object) -> Shop:
        shop = Shop(proxy.database, **config)
        made.append(shop)
        return shop

    yield make
    for shop in made:
        shop.close()


@pytest.fixture
def far_shop(make_far_shop: Callable[..., Shop]) -> Shop:
    """Give such an application with the default configuration and a view."""
    shop = make_far_shop()
    shop.creating_view()
    return shop
