"""
A shop for real servers, whose view can be held for as long as a test likes.

gunicorn loads ``create_app``; the test process has made the tables before.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from flask import request

from flask_idempotency import idempotent

from .databases import Database
from .servers import ask_hook
from .shop import Shop

if TYPE_CHECKING:
    from flask import Flask


def create_app() -> Flask:
    """Return the application, on the database that the environment names."""
    database = Database(os.environ["SHOP_DATABASE"], os.environ["SHOP_DATABASE_URL"])
    shop = Shop(database)

    def view() -> tuple[dict[str, Any], int]:
        answer = shop.create()
        if "X-Hook" in request.headers:
            ask_hook(int(request.headers["X-Hook"]))
        return answer

    shop.view(view, wait=10)
    # As with the first rule, but a crash blocks a key for a second alone.
    brief = idempotent(required=True, lease=1)(view)
    shop.app.add_url_rule("/brief", view_func=brief, methods=["POST"])
    return shop.app
