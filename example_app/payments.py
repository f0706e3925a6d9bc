"""Payments through an external provider, and the provider's webhook."""

from __future__ import annotations

from http.client import HTTPException as HTTPClientError
from typing import TYPE_CHECKING

from flask import Blueprint, abort, current_app, g, json, request
from sqlalchemy import select

from flask_idempotency import current_idempotency, idempotent

from .auth import login_required, verify_signature
from .extensions import db
from .httpclient import send
from .models import Payment, ProviderEvent
from .views import body_field, checked_text

if TYPE_CHECKING:
    from flask.typing import ResponseReturnValue

bp = Blueprint("payments", __name__)

MAX_AMOUNT = 1_000_000


class ProviderError(Exception):
    """The provider did not say that it charged; it may have, all the same."""


@bp.post("/payments")
@login_required
@idempotent(required=True, retry_failed=True)
def create_payment() -> ResponseReturnValue:
    """
    Charge an amount in cents: ``{"amount": 1250}``.

    The charge is a step, before the first row is written. Once the provider has
    answered, no retry asks it again, whatever fails afterwards. It honours keys, so the
    step is repeatable: where its answer was lost, a retry (``retry_failed``) asks again
    with the same key, and the provider charges once.
    """
    amount = body_field("amount")
    if type(amount) is not int or not 0 < amount <= MAX_AMOUNT:
        abort(400, f"The amount must be a whole number from 1 to {MAX_AMOUNT}.")
    reference = current_idempotency.run_step(
        "charge", lambda key: charge(amount, key), repeatable=True
    )
    payment = Payment(tenant_id=g.caller.tenant_id, reference=reference, amount=amount)
    db.session.add(payment)
    db.session.flush()  # for the id; @idempotent commits
    return payment.as_dict(), 201


@bp.get("/payments/<row_id:payment_id>")
@login_required
def show_payment(payment_id: int) -> ResponseReturnValue:
    """Show one payment."""
    payment = db.session.get(Payment, payment_id)
    if payment is None or payment.tenant_id != g.caller.tenant_id:
        abort(404, "There is no such payment.")
    return payment.as_dict()


@bp.post("/webhooks/provider")
@verify_signature
@idempotent(
    required=True,
    key=lambda: request.json["id"],
    # The event's id says which event it is, however its other members are written.
    fingerprint=None,
    # A delivery that failed is handled when the provider sends it again.
    retry_failed=True,
)
def receive_event() -> ResponseReturnValue:
    """Settle a payment; the provider delivers each event at least once."""
    reference = checked_text("reference", body_field("reference"))
    payment = db.session.scalar(select(Payment).where(Payment.reference == reference))
    if payment is None:
        # The payment's own request may still run: have the event sent again.
        abort(503, "The payment is not known yet.")
    event_id = body_field("id")
    # Not the bytes: those of UTF-16 are no text that a database keeps.
    payload = json.dumps(request.get_json())
    db.session.add(ProviderEvent(event_id=event_id, payload=payload))
    payment.status = "settled"
    return "", 204


@bp.errorhandler(ProviderError)
def answer_provider_error(_error: ProviderError) -> ResponseReturnValue:
    """Tell the client to retry with the same key."""
    detail = "The provider did not answer as it should. Send the request again."
    return {"error": "Bad Gateway", "detail": detail}, 502


def charge(amount: int, idempotency_key: str) -> str:
    """
    Let the provider charge an amount and return the charge's reference.

    Raises:
        ProviderError: If its answer is missing or no success.
    """
    try:
        reply = send(
            "POST",
            current_app.config["PROVIDER_URL"] + "/charges",
            json.dumps({"amount": amount}).encode(),
            {
                "Content-Type": "application/json",
                "Idempotency-Key": f'"{idempotency_key}"',
            },
        )
    except (OSError, HTTPClientError) as error:
        raise ProviderError from error
    if reply.status != 201:  # noqa: PLR2004 - Created
        raise ProviderError
    return str(reply.json()["id"])
