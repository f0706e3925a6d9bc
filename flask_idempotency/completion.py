"""
How the owner's call ends: what is committed, rolled back and recorded.

Effect and record are written by one commit wherever the answer is below 400;
every other end is written on its own, after the rollback: see ``recording``.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy.exc import DBAPIError

from . import failpoints
from .exceptions import (
    IdempotencyConfigError,
    IdempotencyHTTPException,
    IdempotencyLeaseLost,
    IdempotencyStoreUnavailable,
    LeaseLost,
)
from .keeper import keeper
from .ledger import hold, keeps_work
from .lifecycle import Status, StoredResponse
from .recording import Recording, hand_over, unreleased
from .unit_of_work import (
    FORGOTTEN,
    Effect,
    can_commit,
    connection_of,
    roll_back,
    running,
    undo,
)
from .work import CLIENT_ERROR, SERVER_ERROR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from sqlalchemy.orm import Session, SessionTransaction

    from .config import Config
    from .store import IdempotencyStore
    from .unit_of_work import Call, Ending
    from .work import Work

log = logging.getLogger(__name__)

R = TypeVar("R")

_NOT_COMMITTED = (
    "The session's commit() did not commit its transaction. Does a listener run SQL "
    "on each new connection ('engine_connect'), so that the session joins a transaction "
    "that is not its own? Let the listener end it, or use the event 'connect'."
)


class Completion:
    """
    Runs the work of a claimed call and settles its record.

    Args:
        store: Keeps the records.
        session: Gives the session of the current context.
        config: The application's settings.
    """

    def __init__(
        self, store: IdempotencyStore, session: Callable[[], Session], config: Config
    ) -> None:
        self._store = store
        self._session = session
        self._config = config
        self._recording = Recording(store, session)

    def perform(self, call: Call, work: Work[R]) -> tuple[StoredResponse, R]:
        """
        Run the work and settle the record.

        Raises:
            LeaseLost: If the record belongs to another owner by now.
        """
        try:
            return self._settled(call, work)
        finally:
            _run_hooks(call)

    def _settled(self, call: Call, work: Work[R]) -> tuple[StoredResponse, R]:
        try:
            with running(call), self._kept(call), _ended(call):
                if call.host is None:
                    stored, result = self._conduct(call, work)
                else:
                    stored, result = self._conduct_inside(call, work)
        except BaseException as error:  # raised again, or told by a lost lease
            leaves = work.leaves and work.leaves(error)
            self._recording.record_exception(call, error, leaves)
            if call.lost and isinstance(error, Exception):
                raise LeaseLost from error  # a late owner's exception is no answer
            raise
        if call.host is None:
            self._recording.note_escaped(call)
            self._recording.settle_inner(call)
            if not call.settled:
                self._recording.record_answer(call, lambda: work.ending(stored, result))
        if call.lost:
            raise LeaseLost
        return stored, result

    def _kept(self, call: Call) -> AbstractContextManager[None]:
        """Renew the call's lease while it runs."""
        if call.claim is None or call.joined or not self._store.can_renew:
            return nullcontext()
        return keeper.keeping(
            self._store,
            call.claim.owner_token,
            lease_seconds=call.lease_seconds,
            max_runtime_seconds=call.max_runtime_seconds,
        )

    def _conduct(self, call: Call, work: Work[R]) -> tuple[StoredResponse, R]:
        """Run the outermost call's work and commit what of it is to stay."""
        stored, result, raised = _attempt(call, work)
        failpoints.reach("after_view")
        call.session = self._session()  # another one, if the view removed the first
        if call.lost or raised or not self._stays(call, stored):
            undo(call)
            return stored, result
        try:
            self._commit(call, unreleased(work.ending(stored, result), call.claim))
        except Exception as error:  # as one of the view's, whatever the driver raises
            if call.lost:
                raise
            if isinstance(error, LeaseLost) and not call.partly_committed:
                # An inner call's record was taken over; nothing of it all is durable.
                raise IdempotencyLeaseLost(retry_after_seconds=1) from error
            call.ending = None
            undo(call)
            if self._has_committed(call, error):
                return stored, result
            # As an exception of the view: the application may have an answer to it.
            result = work.rescue(error)
            return work.encode(result), result
        return stored, result

    def _stays(self, call: Call, stored: StoredResponse) -> bool:
        """
        Tell whether there is something for the guard to commit.

        Of an atomic call also below 500, what the handler itself has committed;
        what it left open is dropped here.
        """
        in_session = stored.code < CLIENT_ERROR and (
            self._config.commit == "unit" and can_commit(call)
        )
        if call.transaction is None:
            return in_session and call.session.in_transaction()
        if stored.code >= SERVER_ERROR:
            return False
        if not in_session:
            roll_back(call.session)
        if not call.transaction.has_begun:
            return False
        return in_session or keeps_work(connection_of(call))

    def _commit(self, call: Call, ending: Ending) -> None:
        if call.transaction is not None:
            call.session.commit()
            call.transaction.release(call.session)
        if call.claim is not None:
            call.ending = ending
            hold(call)
        failpoints.reach("before_commit")
        (call.transaction or call.session).commit()
        failpoints.reach("after_commit")
        if call.claim is not None and call.effect is Effect.OPEN:
            raise IdempotencyConfigError(_NOT_COMMITTED)

    def _has_committed(self, call: Call, error: Exception) -> bool:
        """
        Find out what became of a commit that raised.

        Raises:
            IdempotencyStoreUnavailable: If that cannot be told. Then nothing is
                written, and the lease decides.
        """
        lost_answer = getattr(error, "connection_invalidated", False)
        if call.claim is None or not (call.settled or lost_answer):
            return False
        call.effect = Effect.OPEN
        status = self._store.settle(call.claim)
        if status is None:
            call.abandon()
            raise IdempotencyStoreUnavailable(
                "The connection broke during COMMIT and its outcome is not known yet; "
                "a retry with the same key finds it out once the lease is over."
            ) from error
        if status is Status.PROCESSING:
            return False
        log.error("The commit went through, but raised.", exc_info=error)
        call.effect = Effect.SETTLED
        return True

    def _conduct_inside(self, call: Call, work: Work[R]) -> tuple[StoredResponse, R]:
        """Run an inner call in a savepoint; the outermost call's commit completes it."""
        savepoint = call.session.begin_nested()
        root = call.session.get_transaction()
        stays = False
        try:
            stored, result, raised = _attempt(call, work)
            if not raised and stored.code < CLIENT_ERROR:
                stays = self._keep_inside(call, savepoint)
        finally:
            _end(savepoint, call, lambda: _undo(savepoint))
            if not stays and call.session.get_transaction() is not root:
                self._undo_rest(call)
        hand_over(call, work.ending(stored, result))
        return stored, result

    def _keep_inside(self, call: Call, savepoint: SessionTransaction) -> bool:
        """Keep what an inner call did, if the outer transaction still can carry it."""
        if call.forgotten:
            raise IdempotencyConfigError(FORGOTTEN)
        if not can_commit(call):
            return False
        call.session.flush()
        _end(savepoint, call, savepoint.commit)
        return True

    def _undo_rest(self, call: Call) -> None:
        """
        Undo what an inner call left open after a commit or rollback of its own.

        In an atomic call what it committed can become durable with the one around it,
        so this is noted, to the same end.
        """
        roll_back(call.session)
        if call.atomic is None or call.claim is None or not call.atomic.has_begun:
            return
        connection = call.atomic.connection
        if connection is not None and keeps_work(connection) and can_commit(call):
            call.lost = not self._store.mark_effects(call.claim, connection)


def _attempt(call: Call, work: Work[R]) -> tuple[StoredResponse, R, bool]:
    """
    Run the handler; let the application answer an exception.

    Returns:
        The answer, the result, and whether the handler raised. Then its uncommitted
        rows are half of something, whatever the answer says.
    """
    try:
        result = work.handler()
        return work.encode(result), result, False
    except Exception as error:
        if call.recovering:
            raise  # how the operation ended is as unknown as before
        if isinstance(error, IdempotencyHTTPException) and error.retryable:
            raise  # "come back later" is no answer to keep for duplicates
        result = work.rescue(error)
        return work.encode(result), result, True


def _run_hooks(call: Call) -> None:
    """Do what was asked for after the commits of an outermost call."""
    for hook in call.hooks:
        if not hook.due:
            continue
        try:
            hook.run()
        except Exception:  # the call is over and durable; its answer stands
            log.exception("What was to be done after a commit failed.")


@contextmanager
def _ended(call: Call) -> Iterator[None]:
    """End the transaction of an atomic call, however the call ends."""
    try:
        yield
    finally:
        if call.transaction is not None:
            call.transaction.end()


def _end(savepoint: SessionTransaction, call: Call, how: Callable[[], None]) -> None:
    """End a savepoint and those inside, unless the handler has ended it."""
    transaction = call.session.get_nested_transaction()
    while transaction is not None:
        if transaction is savepoint:
            how()
            return
        transaction = transaction.parent


def _undo(savepoint: SessionTransaction) -> None:
    """Roll a savepoint back, also when a deadlock or a lost connection took it away."""
    try:
        savepoint.rollback()
    except DBAPIError:  # the one before it says why, and the fence what is left
        log.warning("A savepoint was lost before its rollback.", exc_info=True)
