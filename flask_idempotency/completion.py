"""
How the owner's call ends: what is committed, rolled back and recorded.

Effect and record are written by one commit wherever the answer is below 400;
every other end is written on its own, after the rollback.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from . import failpoints
from .exceptions import (
    IdempotencyConfigError,
    IdempotencyError,
    IdempotencyHTTPException,
    IdempotencyLeaseLost,
    IdempotencyStoreUnavailable,
    LeaseLost,
)
from .keeper import keeper
from .ledger import hold, keeps_work
from .lifecycle import Failure, Status, StoredResponse, first_open
from .unit_of_work import (
    Release,
    can_commit,
    connection_of,
    roll_back,
    running,
    undo,
    write_ending,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from sqlalchemy.orm import Session, SessionTransaction

    from .answers import Answer
    from .config import Config
    from .lifecycle import Claim, IdBuilder, RecordView
    from .store import IdempotencyStore
    from .unit_of_work import Call, Ending

log = logging.getLogger(__name__)

R = TypeVar("R")

_NOT_COMMITTED = (
    "The session's commit() did not commit its transaction. Does a listener run SQL "
    "on each new connection ('engine_connect'), so that the session joins a transaction "
    "that is not its own? Let the listener end it, or use the event 'connect'."
)
_CLIENT_ERROR, _SERVER_ERROR = 400, 500


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """
    How one call is claimed; see ``IdempotencyMutationGuard.run``.

    ``None`` is the application's setting.
    """

    ttl_seconds: float | None = None
    lease_seconds: float | None = None
    #: ``None`` is ten leases.
    max_runtime_seconds: float | None = None
    wait_seconds: float | None = None
    mode: str | None = None
    retry_failed: bool = False
    #: Run unrecorded while the store cannot be reached.
    fail_open: bool = False
    #: ``None`` is the application's setting; an inner call is part of the outer one.
    atomic: bool | None = None
    task_id_builder: IdBuilder | None = None
    outbox_event_id_builder: IdBuilder | None = None


@dataclass(frozen=True, kw_only=True)
class Work(Generic[R]):
    """
    How a call is run and its result stored.

    Attributes:
        handler: The effect; called once at most.
        encode: Result to stored answer.
        rescue: Exception to result, where the application answers it; raises it
            again otherwise.
        releases: Whether a result of 400 or above says that nothing was done, so
            that the key is freed if that is so.
        admit: Raises what a duplicate gets that may not, or cannot, have the stored
            answer.
        recover: Finds the result of a call whose outcome is unknown, or ``None``.
    """

    handler: Callable[[], R]
    encode: Callable[[R], StoredResponse]
    rescue: Callable[[Exception], R]
    releases: Callable[[R], bool]
    admit: Callable[[Answer[R]], None]
    recover: Callable[[RecordView], R | None] | None = None

    def ending(self, stored: StoredResponse, result: R) -> Ending:
        """Return what is recorded of a result."""
        ending: StoredResponse | Failure = stored
        if stored.code >= _SERVER_ERROR:
            ending = Failure(reason=f"answer {stored.code}", response=stored)
        if stored.code >= _CLIENT_ERROR and self.releases(result):
            return Release(ending)
        return ending


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
        except BaseException as error:
            self._record_exception(call, error)
            if call.lost and isinstance(error, Exception):
                raise LeaseLost from error  # a late owner's exception is no answer
            raise
        if call.host is None:
            self._note_escaped(call)
            self._record_inner(call)
            if not call.settled:
                self._record_answer(call, lambda: work.ending(stored, result))
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
            self._commit(call, _unreleased(work.ending(stored, result), call.claim))
        except Exception as error:
            if call.lost:
                raise
            if isinstance(error, LeaseLost) and not call.committed:
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
        in_session = stored.code < _CLIENT_ERROR and (
            self._config.commit == "unit" and can_commit(call)
        )
        if call.transaction is None:
            return in_session and call.session.in_transaction()
        if stored.code >= _SERVER_ERROR:
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
        if call.claim is not None and not (call.settled or call.elsewhere):
            raise IdempotencyConfigError(_NOT_COMMITTED)

    def _note_escaped(self, call: Call) -> None:
        """Note effects that may be durable though the guard has committed nothing."""
        if call.transaction is not None and call.transaction.escaped:
            call.committed = True
            if call.claim is not None:
                call.lost = not self._store.mark_effects(call.claim)

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
        call.settled = False
        status = self._store.settle(call.claim)
        if status is None:
            call.abandon()
            raise IdempotencyStoreUnavailable(
                "The connection broke during COMMIT and its outcome is not known yet."
            ) from error
        if status is Status.PROCESSING:
            return False
        log.error("The commit went through, but raised.", exc_info=error)
        call.settled = True
        return True

    def _conduct_inside(self, call: Call, work: Work[R]) -> tuple[StoredResponse, R]:
        """Run an inner call in a savepoint; the outermost call's commit completes it."""
        savepoint = call.session.begin_nested()
        try:
            stored, result, raised = _attempt(call, work)
            if not raised and stored.code < _CLIENT_ERROR and can_commit(call):
                call.session.flush()
                _end(savepoint, call, savepoint.commit)
        finally:
            _end(savepoint, call, savepoint.rollback)
        _hand_over(call, work.ending(stored, result))
        return stored, result

    def _record_inner(self, call: Call) -> None:
        """Settle inner calls that no commit of the outer one has carried."""
        for inner in call.completed:
            if inner.settled or inner.claim is None:
                continue
            ending = inner.ending
            if not (inner.kept or isinstance(ending, Failure)):
                ending = Release(Failure(reason="rolled back with the call around it"))
            try:
                if ending is not None:
                    write_ending(self._store, inner.claim, ending)
            except IdempotencyError:
                log.exception("An inner call that was undone could not be recorded.")

    def _record_answer(self, call: Call, ending: Callable[[], Ending]) -> None:
        try:
            if call.claim is not None and not call.lost:
                failpoints.reach("before_outcome")
                call.lost = not self._record_alone(call.claim, ending())
                failpoints.reach("after_outcome")
        except IdempotencyError:
            raise  # the database cannot tell now; the lease decides
        except Exception as error:
            self._record_exception(call, error)
            raise

    def _record_alone(self, claim: Claim, ending: Ending) -> bool:
        """Store, durably, what no commit of the session carried; tell if it was ours."""
        if isinstance(ending, Release) and self._store.release(claim):
            return True
        return write_ending(self._store, claim, _unreleased(ending, claim))

    def _record_exception(self, call: Call, error: BaseException) -> None:
        """Record an exception that goes on; never replace it by one of ours."""
        failure = failure_of(error)
        retryable = isinstance(error, IdempotencyHTTPException) and error.retryable
        if call.host is not None:
            _hand_over(call, Release(failure) if retryable else failure)
            return
        call.session = self._session()
        roll_back(call.session)
        self._record_inner(call)
        try:
            if call.claim is None or call.lost:
                return
            self._note_escaped(call)
            failpoints.reach("before_outcome")
            call.lost = not self._record_failure(call, failure, retryable=retryable)
            failpoints.reach("after_outcome")
        except Exception:
            log.exception("The failure of a guarded call could not be recorded.")

    def _record_failure(self, call: Call, failure: Failure, *, retryable: bool) -> bool:
        """Write what an exception leaves, and tell whether the record was ours."""
        claim = cast("Claim", call.claim)
        if call.recovering:
            return self._store.hand_back(claim)
        if retryable and self._store.release(claim):
            return True
        # The client may come back, and gets the results of the steps that have run.
        if retryable and not call.committed and first_open(claim.steps) is None:
            return self._store.hand_back(claim)
        return self._store.mark_failed(claim, failure)


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


def _unreleased(ending: Ending, claim: Claim | None) -> StoredResponse | Failure:
    """Return what is recorded of a call of which a part stays."""
    if not isinstance(ending, Release):
        return ending
    log.warning(
        "'%s' answered that nothing was done after a commit or a step, so its key is "
        "not freed.",
        claim.scope.route if claim else "",
    )
    return ending.otherwise


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


def _hand_over(call: Call, ending: Ending) -> None:
    """Leave the outcome of an inner call to the commit of the outermost one."""
    host = call.host
    if host is None or call.claim is None:
        return
    call.ending = ending
    host.completed.append(call)
    if can_commit(call):
        hold(call)


def _end(savepoint: SessionTransaction, call: Call, how: Callable[[], None]) -> None:
    """End a savepoint, unless a commit or rollback of the handler has ended it."""
    if call.session.get_nested_transaction() is savepoint:
        how()


def failure_of(error: BaseException) -> Failure:
    """Return what is recorded of an exception: the name of its class, no value."""
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    return Failure(reason=name.encode("ascii", "backslashreplace").decode())
