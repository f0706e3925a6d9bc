"""What a guarded request costs in statements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.shop import statements_sent

if TYPE_CHECKING:
    from tests.shop import Shop

#: Statements before the view: PostgreSQL claims in one trip.
CLAIM = {"postgresql": 1, "sqlite": 2, "mariadb": 2}


def record_statements(statements: list[str]) -> list[str]:
    """Return those statements that concern the record."""
    return [s for s in statements if "idempotency_record" in s]


def test_first_request(shop: Shop) -> None:
    """One claim before the view and one UPDATE in the one commit."""
    marks: list[int] = []

    def view() -> tuple[str, int]:
        marks.append(len(statements))
        shop.add()
        marks.append(len(statements))
        return "done", 201

    shop.view(view)
    shop.post("warm up", key="other")
    marks.clear()
    with statements_sent() as statements:
        shop.post()
    assert marks[0] == CLAIM[shop.database.name]
    assert len(statements) - marks[1] == 1
    assert statements[-1].startswith("UPDATE idempotency_record")


def test_replay(shop: Shop) -> None:
    """A replay is one statement that writes nothing, without the session."""
    shop.creating_view()
    shop.post()
    with statements_sent() as statements:
        shop.post()
    assert len(statements) == 1


def test_undecorated_route(shop: Shop) -> None:
    """A route that declares nothing costs nothing."""
    shop.app.add_url_rule("/plain", view_func=lambda: "plain", methods=["POST"])
    with statements_sent() as statements:
        shop.post(path="/plain")
    assert statements == []


def test_view_that_commits_by_itself(shop: Shop) -> None:
    """A commit of the view's own costs one more UPDATE of the record."""

    def view() -> str:
        shop.add()
        shop.db.session.commit()
        return "done"

    shop.view(view)
    with statements_sent() as statements:
        shop.post()
    claim = CLAIM[shop.database.name]
    assert len(record_statements(statements)) == claim + 2


@pytest.mark.parametrize("status", [404, 503])
def test_error_answer(shop: Shop, status: int) -> None:
    """An error answer is one statement of its own."""
    shop.view(lambda: ("no", status))
    with statements_sent() as statements:
        shop.post()
    assert len(statements) == CLAIM[shop.database.name] + 1


def test_user_loaded_before_the_view_is_not_loaded_again(shop: Shop) -> None:
    """At READ COMMITTED the claim leaves the session's objects as they are."""

    @shop.app.before_request
    def load_user() -> None:
        shop.db.session.get(shop.Account, 1)

    shop.creating_view()
    shop.post("warm up", key="other")
    with statements_sent() as statements:
        shop.post()
    assert len([s for s in statements if s.startswith("SELECT account")]) == 1
