"""
Observe mode: record and compare, never change an answer.

Nothing here protects anything. The handler always runs, as if undecorated; its record
is written beside it, so that the log can say what would have been answered.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from . import signals
from .answers import duplicate_answer
from .exceptions import IdempotencyHTTPException
from .lifecycle import Failure, StoredResponse
from .unit_of_work import Release

if TYPE_CHECKING:
    from collections.abc import Callable

    from .lifecycle import Claim, Decision, Scope
    from .store import IdempotencyStore
    from .unit_of_work import Ending

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

    def claim(self, scope: Scope, claim: Callable[[], Decision]) -> Claim | None:
        """Claim the record, or note what a duplicate would have got."""
        route = scope.route
        try:
            decision = claim()
            if decision.claim is not None:
                return decision.claim
            duplicate_answer(decision)
        except IdempotencyHTTPException as error:
            note_refusal(self._sender, route, error)
        except Exception:  # an observer may not fail what it observes
            log.exception("A call of '%s' could not be observed.", route)
        else:
            log.info("Observed: a request of '%s' would have been replayed.", route)
            signals.replayed.send(self._sender, route=route, enforced=False)
        return None

    def record(self, claim: Claim | None, ending: Callable[[], Ending]) -> None:
        """Write how an observed call ended."""
        if claim is None:
            return
        try:
            self._write(claim, ending())
        except Exception:  # an observer may not fail what it observes
            log.exception("The end of '%s' could not be observed.", claim.scope.route)

    def _write(self, claim: Claim, ending: Ending) -> None:
        if isinstance(ending, Release):
            self._store.release(claim)
        elif isinstance(ending, Failure):
            self._store.mark_failed(claim, ending)
        elif isinstance(ending, StoredResponse):
            self._store.mark_succeeded(claim, ending)


def note_refusal(sender: object, route: str, error: IdempotencyHTTPException) -> None:
    """Log and count an error that enforcement would have answered."""
    code = error.error_code
    extra = {"idempotency_code": code}
    log.warning(
        "Observed: a request of '%s' would have got %s.", route, code, extra=extra
    )
    signals.refused.send(sender, route=route, error_code=code, enforced=False)
