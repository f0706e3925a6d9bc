"""Settling what a crash left open, and saying so."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flask_idempotency import signals

if TYPE_CHECKING:
    from flask import Flask

    from flask_idempotency.lifecycle import RecordView, Resolution, Scope
    from flask_idempotency.store import IdempotencyStore

log = logging.getLogger(__name__)


def resolve(
    app: Flask,
    store: IdempotencyStore,
    scope: Scope,
    resolution: Resolution,
    *,
    force: bool = False,
) -> RecordView | None:
    """
    Settle a call of unknown outcome.

    Args:
        app: Sender of the signal ``resolved``.
        store: The application's store.
        scope: What the key is bound to.
        resolution: The outcome, who says so and why.
        force: Also settle a call whose lease is live, or that committed nothing.

    Returns:
        The record as it is now; ``None`` if there was nothing to settle.
    """
    record = store.resolve(scope, resolution, force=force)
    if record is not None:
        status = record.status.value
        extra = {"idempotency_record_id": str(record.id)}
        log.warning(
            "A call of '%s' was settled as %s by '%s'.",
            scope.route,
            status,
            resolution.by,
            extra=extra,
        )
        signals.send(signals.resolved, app, route=scope.route, status=status)
    return record
