"""
How a call is recorded whose outcome no commit of its session has carried.

Each is written on its own, durably, and never in place of the exception that goes on.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from . import failpoints
from .exceptions import IdempotencyError, IdempotencyHTTPException
from .ledger import hold
from .lifecycle import Failure, first_open
from .unit_of_work import (
    Effect,
    HandedBack,
    Release,
    can_commit,
    roll_back,
    write_ending,
)
from .work import failure_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.orm import Session

    from .lifecycle import Claim
    from .store import IdempotencyStore
    from .unit_of_work import Call, Ending

log = logging.getLogger(__name__)


class Recording:
    """
    Writes the outcomes that stand beside the session's transaction.

    Args:
        store: Keeps the records.
        session: Gives the session of the current context.
    """

    def __init__(self, store: IdempotencyStore, session: Callable[[], Session]) -> None:
        self._store = store
        self._session = session

    def note_escaped(self, call: Call) -> None:
        """Note effects that may be durable though the guard has committed nothing."""
        if call.transaction is not None and call.transaction.escaped:
            call.partly_committed = True
            if call.claim is not None:
                call.lost = not self._store.mark_effects(call.claim)

    def settle_inner(self, call: Call) -> None:
        """Settle inner calls that no commit of the outer one has carried."""
        for inner in call.completed:
            if inner.settled or inner.claim is None:
                continue
            ending = inner.ending
            if not (inner.effect is Effect.COMMITTED or isinstance(ending, Failure)):
                ending = Release(Failure(reason="rolled back with the call around it"))
            try:
                if ending is not None:
                    write_ending(self._store, inner.claim, ending)
            except IdempotencyError:
                log.exception("An inner call that was undone could not be recorded.")

    def record_answer(self, call: Call, ending: Callable[[], Ending]) -> None:
        """
        Record an answer of which no commit has carried anything.

        Args:
            call: The outermost call, which has ended.
            ending: Makes what is recorded; an exception of its own is recorded, too.
        """
        try:
            if call.claim is not None and not call.lost:
                failpoints.reach("before_outcome")
                call.lost = not self._write_alone(call.claim, ending())
                failpoints.reach("after_outcome")
        except IdempotencyError:
            raise  # the database cannot tell now; the lease decides
        except Exception as error:  # raised again
            self.record_exception(call, error)
            raise

    def _write_alone(self, claim: Claim, ending: Ending) -> bool:
        """Store, durably, what no commit of the session carried; tell if it was ours."""
        if isinstance(ending, Release) and self._store.release(claim):
            return True
        return write_ending(self._store, claim, unreleased(ending, claim))

    def record_exception(
        self, call: Call, error: BaseException, leaves: Ending | None = None
    ) -> None:
        """
        Record an exception that goes on; never replace it by one of ours.

        Args:
            call: The call that it ends.
            error: The exception.
            leaves: What is recorded of it, if it is no failure.
        """
        ending = leaves or failure_of(error)
        if isinstance(error, IdempotencyHTTPException) and error.retryable:
            ending = Release(failure_of(error))
        if call.host is not None:
            hand_over(call, ending)
            return
        call.session = self._session()
        roll_back(call.session)
        self.settle_inner(call)
        try:
            if call.claim is None or call.lost:
                return
            self.note_escaped(call)
            failpoints.reach("before_outcome")
            call.lost = not self._write_exception(call, ending)
            failpoints.reach("after_outcome")
        except Exception:  # the handler's own goes on, and the lease decides
            log.exception("The failure of a guarded call could not be recorded.")

    def _write_exception(self, call: Call, ending: Ending) -> bool:
        """Write what an exception leaves, and tell whether the record was ours."""
        claim = cast("Claim", call.claim)
        if call.recovering:
            return self._store.hand_back(claim)
        if not isinstance(ending, Release) or call.partly_committed:
            return write_ending(self._store, claim, ending)
        # The client may come back, and gets the results of the steps that have run.
        idle = first_open(claim.steps) is None
        kept = HandedBack(attempts=1) if idle else ending.otherwise
        return self._store.release(claim) or write_ending(self._store, claim, kept)


def unreleased(ending: Ending, claim: Claim | None) -> Ending:
    """Return what is recorded of a call of which a part stays."""
    if not isinstance(ending, Release):
        return ending
    log.warning(
        "'%s' answered that nothing was done after a commit or a step, so its key is "
        "not freed.",
        claim.scope.route if claim else "",
    )
    return ending.otherwise


def hand_over(call: Call, ending: Ending) -> None:
    """Leave the outcome of an inner call to the commit of the outermost one."""
    host = call.host
    if host is None or call.claim is None:
        return
    call.ending = ending
    host.completed.append(call)
    if can_commit(call):
        hold(call)
