"""``current_idempotency``: what the running call is about."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lifecycle import derived_id
from .unit_of_work import Call, current_call

if TYPE_CHECKING:
    from .lifecycle import Claim, Scope


class CurrentIdempotency:
    """
    Read-only view of the innermost guarded call.

    Outside of any call every attribute raises ``RuntimeError``. In a call without a
    key ``active`` is False and ``derive_key`` is another one in each call, so that one
    view works both with and without a key.
    """

    @property
    def active(self) -> bool:
        """Whether the call is recorded."""
        return self._call().claim is not None

    @property
    def scope(self) -> Scope | None:
        """What the key is bound to."""
        claim = self._claim()
        return claim.scope if claim else None

    @property
    def request_hash(self) -> str | None:
        """Hash of the request."""
        claim = self._claim()
        return claim.request_hash if claim else None

    @property
    def attempt(self) -> int:
        """1 for the first run of the operation."""
        claim = self._claim()
        return claim.attempt if claim else 1

    @property
    def task_id(self) -> str | None:
        """Task bound to the record."""
        claim = self._claim()
        return claim.task_id if claim else None

    @property
    def outbox_event_id(self) -> str | None:
        """Event bound to the record."""
        claim = self._claim()
        return claim.outbox_event_id if claim else None

    def derive_key(self, *names: str) -> str:
        """
        Return a key for a downstream system that belongs to the operation.

        Every attempt of the operation gets the same one, so that a provider that
        honours it performs the operation once. In a call without a key it is random,
        and stays the same while the call runs.
        """
        call = self._call()
        if call.claim is not None:
            return call.claim.derive_id("key", *names)
        return derived_id(call.loose_id, "key", *names)

    def _claim(self) -> Claim | None:
        return self._call().claim

    def _call(self) -> Call:
        call = current_call.get()
        if call is None:
            message = "Working outside of an idempotent call."
            raise RuntimeError(message)
        return call


current_idempotency = CurrentIdempotency()
