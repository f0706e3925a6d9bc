"""
A small shop of an application on flask_idempotency: copy from it what you need.

Start it with an embedded SQLite database in the instance folder::

    python -m flask --app example_app db upgrade
    python -m flask --app example_app run

Send a request twice; the second answer is the first one, and there is one account::

    curl -i localhost:5000/accounts -H 'Authorization: Bearer example-token-1' \
        -H 'Idempotency-Key: "k-1"' --json '{"name": "Savings"}'
    curl localhost:5000/accounts -H 'Authorization: Bearer example-token-1'

``EXAMPLE_DATABASE_URI`` names another database. Payments need the simulated provider:
``python -m example_app.provider``. The whole story: ``flask --app example_app demo``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from flask import Flask, json
from werkzeug.exceptions import HTTPException

from . import payments, views
from .auth import EXAMPLE_SIGNING_KEY, EXAMPLE_TOKENS
from .database import (
    RowId,
    configure_sqlite,
    hint_at_missing_tables,
    refuse_without_tables,
)
from .demo import demo
from .extensions import db, idempotency, migrate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from werkzeug.wrappers import Response

__all__ = ["create_app"]


def create_app(config: Mapping[str, Any] | None = None) -> Flask:
    """
    Return the application.

    Args:
        config: Settings that replace the defaults below.
    """
    app = Flask(__name__)
    app.config.from_mapping(
        SQLALCHEMY_DATABASE_URI=os.environ.get(
            "EXAMPLE_DATABASE_URI", "sqlite:///example.sqlite3"
        ),
        PROVIDER_URL=os.environ.get("EXAMPLE_PROVIDER_URL", "http://127.0.0.1:5001"),
        PROVIDER_SIGNING_KEY=EXAMPLE_SIGNING_KEY,
        API_TOKENS=EXAMPLE_TOKENS,
        MAX_CONTENT_LENGTH=1024 * 1024,
    )
    app.config.from_mapping(config)
    db.init_app(app)
    # Before the extension: its own connections get the listeners that exist by then.
    configure_sqlite(app)
    idempotency.init_app(app)
    migrate.init_app(app, db)
    app.url_map.converters["row_id"] = RowId
    app.register_blueprint(views.bp)
    app.register_blueprint(payments.bp)
    app.register_error_handler(HTTPException, _as_json)
    app.before_request(refuse_without_tables)
    app.cli.add_command(demo)
    hint_at_missing_tables(app)
    return app


def _as_json(error: HTTPException) -> Response:
    """Answer the application's own errors as JSON, with their headers."""
    response = error.get_response()
    response.data = json.dumps({"error": error.name, "detail": error.description})
    response.content_type = "application/json"
    return response
