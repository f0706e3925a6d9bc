"""What a guarded request costs in flushes of the database's log to disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.private import PrivateMariaDB, PrivatePostgreSQL
from tests.proxy import disconnect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.private import PrivateServer
    from tests.shop import Shop

REQUESTS = 40
#: What the server does by itself meanwhile.
SPARE = 4

#: Flushes for a first request, and for one whose answer nobody's commit carries.
CASES = [
    pytest.param(PrivatePostgreSQL, 1, 1, id="postgresql"),
    # Which has no way to leave the claim's flush out.
    pytest.param(PrivateMariaDB, 2, 2, id="mariadb", marks=pytest.mark.torture),
]


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[PrivateServer]:
    """Give a server on which nobody else is."""
    kind: type[PrivateServer] = request.param
    if kind.absence():
        pytest.skip(f"{kind.absence()}")
    server = kind()
    yield server
    server.close()


@pytest.mark.parametrize(("server", "first", "outcome"), CASES, indirect=["server"])
def test_each_request_flushes_as_often_as_it_must(
    server: PrivateServer, open_shop: Callable[..., Shop], first: int, outcome: int
) -> None:
    """A claim of PostgreSQL's costs no flush, and a replay costs none anywhere."""
    shop = open_shop(server.database)

    def view() -> tuple[object, int]:
        return ("no", 404) if shop.runs else shop.create()

    def flushes_of(prefix: str) -> int:
        before = server.flushes()
        for number in range(REQUESTS):
            shop.runs.clear()
            if prefix == "refused":
                shop.runs.append("refuse")
            shop.post(f"{prefix}{number}", key=f"{prefix}{number}")
        disconnect(shop)
        return server.flushes() - before

    shop.view(view)
    shop.post("warm", key="warm")
    disconnect(shop)
    fresh = flushes_of("fresh")
    assert REQUESTS * first <= fresh <= REQUESTS * first + SPARE
    assert flushes_of("fresh") <= SPARE
    refused = flushes_of("refused")
    assert REQUESTS * outcome <= refused <= REQUESTS * outcome + SPARE
    assert len(shop.accounts()) == REQUESTS + 1
