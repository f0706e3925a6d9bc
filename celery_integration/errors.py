"""Errors of tasks. No Celery here: whoever reads a result can import them."""

from __future__ import annotations

from flask_idempotency.exceptions import IdempotencyError


class OutcomeUnknown(IdempotencyError):  # noqa: N818 - a state, as ``LeaseLost``
    """
    A run stopped after a part had, or may have, taken effect; it is not run again.

    ``flask idempotency diagnose`` shows what is known, ``resolve`` settles it.
    """


class RetryAfterEffects(IdempotencyError):  # noqa: N818 - what was asked for
    """A task asked for a retry after a part had, or may have, taken effect."""
