"""
Observe mode: record and compare, never change an answer.

Nothing here protects anything. The handler always runs, as if undecorated; its record
is written beside it, so that the log can say what would have been answered.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from . import signals
from .answers import duplicate_answer
from .exceptions import IdempotencyHTTPException
from .unit_of_work import write_ending
from .work import failure_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from .lifecycle import Claim, Decision, Scope
    from .store import IdempotencyStore
    from .unit_of_work import Ending
    from .work import Work

log = logging.getLogger(__name__)


class Observer:
    """
    Writes the records of observed calls and says what enforcement would do.

    Args:
        store: Keeps the records.
        sender: Sender of the signals, the application.
    """

    def __init__(self, store: IdempotencyStore, sender: object) -> None:
        self._store = store
        self._sender = sender

    def claim(
        self, scope: Scope, claim: Callable[[], Decision], work: Work[Any]
    ) -> Claim | None:
        """Claim the record, or note what a duplicate would have got."""
        route = scope.route
        try:
            decision = claim()
            if decision.claim is not None:
                self.note_claim(decision.claim)
                return decision.claim
            work.admit(duplicate_answer(decision))
        except IdempotencyHTTPException as error:
            note_refusal(self._sender, route, error)
        except Exception:  # an observer may not fail what it observes
            log.exception("A call of '%s' could not be observed.", route)
        else:
            log.info("Observed: a request of '%s' would have been replayed.", route)
            signals.send(signals.replayed, self._sender, route=route, enforced=False)
        return None

    def note_claim(self, claim: Claim) -> None:
        """Count a claim."""
        route, attempt = claim.scope.route, claim.attempt
        signals.send(signals.claimed, self._sender, route=route, attempt=attempt)

    def record(
        self, claim: Claim | None, ending: Callable[[], Ending], *, committed: bool
    ) -> None:
        """
        Write how an observed call ended.

        Args:
            claim: Of its record, if it has one.
            ending: Makes what is recorded.
            committed: Whether the call has committed something before its end.
        """
        if claim is None:
            return
        try:
            if committed:
                self._store.mark_effects(claim)
            self._write(claim, ending)
        except Exception:  # an observer may not fail what it observes
            log.exception("The end of '%s' could not be observed.", claim.scope.route)

    def _write(self, claim: Claim, ending: Callable[[], Ending]) -> None:
        try:
            ended = ending()
        except Exception as error:
            self._store.mark_failed(claim, failure_of(error))
            raise
        write_ending(self._store, claim, ended)


def note_refusal(sender: object, route: str, error: IdempotencyHTTPException) -> None:
    """Log and count an error that enforcement would have answered."""
    code = error.error_code
    extra = {"idempotency_code": code}
    reason = getattr(error, "reason", None)
    log.warning(
        "Observed: a request of '%s' would have got %s.%s",
        route,
        code,
        f" {reason}" if reason else "",
        extra=extra,
    )
    signals.count_refusal(sender, route, code, enforced=False)
