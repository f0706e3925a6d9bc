"""Routes for the demo alone: one is slow on purpose, one fails on purpose."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from flask import Blueprint, abort, g

from example_app.auth import login_required
from example_app.extensions import db
from example_app.models import Account
from flask_idempotency import idempotent, not_idempotent

if TYPE_CHECKING:
    from flask.typing import ResponseReturnValue

#: Longest time that anybody waits, so that nothing hangs when the demo is gone.
WAIT_SECONDS = 8.0


def demo_blueprint() -> Blueprint:
    """Return the routes, with a gate of their own for the slow one."""
    bp = Blueprint("demo", __name__, url_prefix="/demo")
    entered, opened = threading.Event(), threading.Event()

    @bp.post("/slow")
    @login_required
    @idempotent(required=True)
    def create_slowly() -> ResponseReturnValue:
        entered.set()
        if not opened.wait(WAIT_SECONDS):
            abort(503, "Nobody opened the gate.")
        account = Account(tenant_id=g.caller.tenant_id, name="Slow")
        db.session.add(account)
        db.session.flush()
        return account.as_dict(), 201

    @bp.get("/gate")
    def await_arrival() -> ResponseReturnValue:
        if not entered.wait(WAIT_SECONDS):
            abort(504, "Nobody came to the gate.")
        return "", 204

    @bp.post("/gate")
    @not_idempotent("opening an open gate changes nothing")
    def open_gate() -> ResponseReturnValue:
        opened.set()
        return "", 204

    @bp.post("/broken")
    @login_required
    @idempotent(required=True)
    def create_and_fail() -> ResponseReturnValue:
        db.session.add(Account(tenant_id=g.caller.tenant_id, name="Broken"))
        db.session.flush()
        message = "This route always fails after it has written a row."
        raise RuntimeError(message)

    return bp
