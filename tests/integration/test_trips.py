"""What a guarded request costs in round trips to the server, counted on the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from flask_idempotency import not_idempotent

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.proxy import Proxy
    from tests.shop import Shop

pytestmark = pytest.mark.parametrize(
    "database", ["postgresql", "mariadb"], indirect=True
)

#: Of a claim; MariaDB looks and inserts, and PyMySQL rolls back what was not begun.
CLAIM = {"postgresql": 1, "mariadb": 3}
#: Of a look at a record that is there.
LOOK = {"postgresql": 1, "mariadb": 2}


@pytest.fixture
def trips(far_shop: Shop, proxy: Proxy) -> Callable[..., int]:
    """Count the round trips of a request, when all connections are there."""

    @far_shop.app.post("/plain")
    @not_idempotent("to compare with")
    def plain() -> tuple[dict[str, Any], int]:
        answer = far_shop.create()
        far_shop.db.session.commit()
        return answer

    far_shop.app.add_url_rule("/idle", view_func=lambda: ("", 201), methods=["POST"])
    for path in ("/accounts", "/plain"):
        far_shop.post(f"warm{path}", key="warm", path=path)

    def count(name: str, path: str) -> int:
        before = proxy.trips
        assert far_shop.post(name, key=name, path=path).status_code == 201
        return proxy.trips - before

    return count


def test_first_request(trips: Callable[..., int], far_shop: Shop) -> None:
    """Beside the view's own work there are the claim and one UPDATE."""
    name = far_shop.database.name
    assert trips("guarded", "/accounts") - trips("bare", "/plain") == CLAIM[name] + 1


def test_replay(trips: Callable[..., int], far_shop: Shop) -> None:
    """A replay asks once, and does not use the session."""
    trips("first", "/accounts")
    assert trips("first", "/accounts") == LOOK[far_shop.database.name]


def test_undecorated_route(trips: Callable[..., int]) -> None:
    """Where nothing is declared, nothing is asked."""
    assert trips("first", "/idle") == 0
