"""Under pytest-flask, whose request context lies around every test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flask_idempotency import idempotent

if TYPE_CHECKING:
    from flask import Flask
    from flask.testing import FlaskClient

    from tests.shop import Shop


@pytest.fixture
def app(shop: Shop) -> Flask:
    """Give pytest-flask the application of the test."""
    shop.app.post("/accounts")(idempotent(required=True)(shop.create))
    return shop.app


def test_requests_share_the_outer_context(client: FlaskClient, shop: Shop) -> None:
    """First call, replay and conflict work although no context ends in between."""
    headers = {"X-User": "u1", "Idempotency-Key": "k"}

    def post(name: str) -> int:
        return client.post(
            "/accounts", json={"name": name}, headers=headers
        ).status_code

    assert [post("first"), post("first"), post("second")] == [201, 201, 422]
    assert shop.accounts() == ["first"]
