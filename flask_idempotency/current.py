"""``current_idempotency``: what the running call is about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .lifecycle import derived_id
from .steps import run_step
from .unit_of_work import Call, current_call

if TYPE_CHECKING:
    from collections.abc import Callable

    from .lifecycle import Claim, Scope


class CurrentIdempotency:
    """
    The innermost guarded call, as the code in it sees it.

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
        """1 for the first run of the operation; those that asked to come back do not count."""
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

    def run_step(
        self,
        name: str,
        fn: Callable[[str], object],
        *,
        repeatable: bool = False,
        definite: tuple[type[BaseException], ...] = (),
    ) -> Any:
        """
        Call a foreign system once per operation, and return what it answered.

        The result is stored at once, whatever becomes of the call: a later attempt of
        the operation gets it instead of calling again. Steps come before the first
        write of the session. A read transaction of the session is ended where it would
        keep the step from being stored. In a call without a key `fn` is just called,
        under the same rules and with a random key.

        Args:
            name: Which step it is; within one operation the same name is the same step.
            fn: Called with the step's downstream key, which a provider that honours it
                takes to perform the step once. It must not write in the session.
            repeatable: A step that was started and has not finished may be called again
                with the same key. Otherwise nobody calls it again, and the outcome of a
                call that dies there is unknown.
            definite: Exceptions that say for certain that nothing took effect. They
                go on to the caller, and the next try of the step gets another key.

        Returns:
            The decoded JSON of what `fn` returned, in every attempt.

        Raises:
            IdempotencyConfigError: If the session has written something, before the
                step or in it, or if an open step is called again.
            IdempotencyStoreUnavailable: If the step cannot be stored now.
            LeaseLost: If the operation belongs to another call by now.
            NestedCallError: Inside another step, or in an inner call that could not
                keep it.
            ResultNotStorable: If the result has no JSON form or is too large.
            TypeError: If `definite` is no tuple of exception classes.
            ValueError: If the name is empty, too long or not storable.
        """
        return run_step(
            self._call(), name, fn, repeatable=repeatable, definite=definite
        )

    def _claim(self) -> Claim | None:
        return self._call().claim

    def _call(self) -> Call:
        call = current_call.get()
        if call is None:
            message = "Working outside of an idempotent call."
            raise RuntimeError(message)
        return call


current_idempotency = CurrentIdempotency()
