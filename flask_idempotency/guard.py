"""
A guarded call: claim, run, commit effect and answer together; answer duplicates.

Knows nothing of HTTP requests. Statements belong in ``store``, the fence in
``unit_of_work``.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sqlalchemy.exc import DBAPIError

from .config import Config, seconds_of
from .exceptions import (
    IdempotencyConfigError,
    IdempotencyError,
    IdempotencyHTTPException,
    IdempotencyInProgress,
    IdempotencyKeyConflict,
    IdempotencyLeaseLost,
    IdempotencyOutcomeUnknown,
    IdempotencyPreviousFailure,
    IdempotencyResponseUnavailable,
    IdempotencyStoreUnavailable,
    LeaseLost,
    NestedCallError,
    ResultNotStorable,
)
from .lifecycle import (
    Claim,
    Decision,
    Failure,
    RecordView,
    Scope,
    Status,
    StoredResponse,
    Verdict,
    decide,
)
from .unit_of_work import Call, Release, current_call, has_written, running

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from .config import Duration
    from .store import IdempotencyStore

    from .unit_of_work import Ending

    IdBuilder = Callable[[Claim], str]

log = logging.getLogger(__name__)

R = TypeVar("R")

_REFUSALS: dict[Verdict, type[IdempotencyHTTPException]] = {
    Verdict.REQUEST_HASH_CONFLICT: IdempotencyKeyConflict,
    Verdict.IN_PROGRESS: IdempotencyInProgress,
    Verdict.OUTCOME_UNKNOWN: IdempotencyOutcomeUnknown,
    # Seen only after another owner took the record over and stopped in its turn.
    Verdict.LEASE_LAPSED: IdempotencyInProgress,
}
_SUCCESS, _CLIENT_ERROR, _SERVER_ERROR = 200, 400, 500


@dataclass(frozen=True, kw_only=True)
class MutationResult:
    """
    What ``run()`` returns, first call and duplicate alike.

    Attributes:
        value: The decoded JSON of the handler's result, also on the first call.
        response_code: The status that the handler gave, 200 by default.
        response_body: The JSON as it is stored.
        replayed: Whether the handler was not run for this call.
        task_id: Task bound to the record.
        outbox_event_id: Event bound to the record.
        record_id: Primary key of the record; ``None`` without a scope.
    """

    value: Any
    response_code: int
    response_body: bytes
    replayed: bool
    task_id: str | None = None
    outbox_event_id: str | None = None
    record_id: UUID | None = None


@dataclass(frozen=True, kw_only=True)
class Work(Generic[R]):
    """
    How a call is run and its result stored.

    Attributes:
        handler: The effect; called once at most.
        encode: Result to stored answer.
        rescue: Exception to result, where the application answers it; raises it
            again otherwise.
    """

    handler: Callable[[], R]
    encode: Callable[[R], StoredResponse]
    rescue: Callable[[Exception], R]


@dataclass(frozen=True, kw_only=True)
class Answer(Generic[R]):
    """
    The end of a guarded call.

    Attributes:
        stored: The answer as it is kept.
        result: The handler's own result; ``None`` on a replay.
        replayed: Whether the handler was not run for this call.
    """

    stored: StoredResponse
    result: R | None = None
    replayed: bool = False
    task_id: str | None = None
    outbox_event_id: str | None = None
    record_id: UUID | None = None


class IdempotencyMutationGuard:
    """
    Runs mutations so that each takes effect once per scope.

    Args:
        store: Keeps the records.
        session: Gives the session whose commit carries effect and record.
        config: The application's settings.
        dumps: Result to JSON text, the application's own.
        loads: JSON text to value.
    """

    def __init__(
        self,
        store: IdempotencyStore,
        session: Callable[[], Session],
        config: Config,
        *,
        dumps: Callable[[Any], str],
        loads: Callable[[bytes], Any],
    ) -> None:
        self._store = store
        self._session = session
        self._config = config
        self._dumps = dumps
        self._loads = loads

    def run(  # noqa: PLR0913 - the specified signature
        self,
        scope: Scope | None,
        request_hash: str,
        handler: Callable[[], object],
        *,
        task_id_builder: IdBuilder | None = None,
        outbox_event_id_builder: IdBuilder | None = None,
        retry_failed: bool = False,
        ttl: Duration | None = None,
        lease: Duration | None = None,
    ) -> MutationResult:
        """
        Run `handler` once for `scope`; answer duplicates with its first result.

        Rows that the handler wrote in the session and the record are committed
        together by this call, or by the guarded call around it.

        Args:
            scope: What the key is bound to; ``None`` runs unrecorded, in the same
                unit of work.
            request_hash: What is asked for, as ``fingerprint(value)`` gives it.
            handler: Returns a JSON-like value, or ``(value, status)``. A status of
                400 or above rolls its rows back.
            task_id_builder: Called with the claim before the handler runs; a
                duplicate gets the same id. Pure: it may be called and dropped.
            outbox_event_id_builder: The same for an event.
            retry_failed: Run a failed operation again if nothing of it stayed.
            ttl: Life of the key, in seconds or as timedelta.
            lease: How long a crash can block the key.

        Raises:
            IdempotencyHTTPException: For a duplicate that has no answer to get: in
                progress, conflict, failed before, outcome unknown.
            ResultNotStorable: If the result has no JSON form; nothing is committed.
        """
        work = Work(
            handler=lambda: _split(handler()), encode=self._encode, rescue=_reraise
        )
        answer = self.call(
            scope,
            request_hash,
            work,
            task_id_builder=task_id_builder,
            outbox_event_id_builder=outbox_event_id_builder,
            retry_failed=retry_failed,
            ttl_seconds=None if ttl is None else _seconds("ttl", ttl),
            lease_seconds=None if lease is None else _seconds("lease", lease),
        )
        body = answer.stored.body or b"null"
        return MutationResult(
            value=self._loads(body),
            response_code=answer.stored.code,
            response_body=body,
            replayed=answer.replayed,
            task_id=answer.task_id,
            outbox_event_id=answer.outbox_event_id,
            record_id=answer.record_id,
        )

    def call(
        self, scope: Scope | None, request_hash: str, work: Work[R], **options: Any
    ) -> Answer[R]:
        """
        Run `work` once for `scope`; the general form of ``run()``.

        Args:
            scope: What the key is bound to; ``None`` runs unrecorded.
            request_hash: What is asked for.
            work: The effect and how its result is stored.
            options: As ``IdempotencyStore.claim`` takes them.
        """
        call = Call(
            claim=None,
            store=self._store,
            session=self._session(),
            parent=current_call.get(),
        )
        if scope is not None:
            decision = self._claim(call, scope, request_hash, options)
            if decision.claim is None:
                return _duplicate_answer(decision)
            call.claim = decision.claim
        try:
            stored, result = self._perform(call, work)
        except LeaseLost:
            if call.host is not None:  # the outer call's rows were rolled back too
                raise IdempotencyLeaseLost(retry_after_seconds=1) from None
            return self._answer_of_new_owner(scope, request_hash)
        return _first_answer(call.claim, stored, result)

    def _claim(
        self, call: Call, scope: Scope, request_hash: str, options: dict[str, Any]
    ) -> Decision:
        around = call.parent.chain() if call.parent else ()
        if any(outer.claim and outer.claim.scope == scope for outer in around):
            raise NestedCallError(
                f"A guarded call of '{scope.route}' runs inside another one with the "
                "same scope. Give the inner one a route of its own."
            )
        connection = self._transaction_to_join(call)
        return self._store.claim(
            scope, request_hash, connection=connection, **options
        )

    def _transaction_to_join(self, call: Call) -> Connection | None:
        """
        Make the session ready for a claim beside it.

        Returns:
            The session's connection where the claim must be part of its transaction:
            inside another call whose snapshot would hide it. None is the rule.
        """
        session = call.session
        if not session.in_transaction():
            return None
        connection = self._connection(session)
        if not self._store.dialect.hides_claims(connection):
            return None
        if call.host is not None:
            return connection
        pending = session.new or session.dirty or session.deleted
        if (
            pending or has_written(connection)
        ) and self._config.before_view_writes == "refuse":
            raise IdempotencyConfigError(_EARLY_WRITES)
        session.commit()
        return None

    def _connection(self, session: Session) -> Connection:
        return session.connection(bind_arguments=self._store.bind_arguments)

    def _perform(self, call: Call, work: Work[R]) -> tuple[StoredResponse, R]:
        """Run the work, then record what its own commit did not carry."""
        try:
            with running(call):
                if call.host is None:
                    stored, result, carried = self._conduct(call, work)
                else:
                    stored, result, carried = self._conduct_inside(call, work)
        except BaseException as error:
            self._undo(call)
            if call.lost:
                raise LeaseLost from error
            self._record_exception(call, error)
            raise
        if call.lost:
            self._undo(call)
            raise LeaseLost
        if not carried:
            self._record_alone(call, stored)
        return stored, result

    def _conduct(self, call: Call, work: Work[R]) -> tuple[StoredResponse, R, bool]:
        """
        Run the outermost call's work and commit it if the answer is below 400.

        Returns:
            The answer, the result, and whether a commit carried the record.
        """
        stored, result = _attempt(work)
        if call.lost or stored.code >= _CLIENT_ERROR or not self._is_committable(call):
            call.session.rollback()
            return stored, result, False
        if not call.session.in_transaction():
            return stored, result, call.claim is None
        try:
            self._commit(call, stored)
        except Exception as error:  # noqa: BLE001 - goes on, or the application answers it
            if call.lost:
                raise
            if isinstance(error, LeaseLost):  # an inner call's record was
                raise IdempotencyLeaseLost(retry_after_seconds=1) from error
            call.session.rollback()
            if self._has_committed(call, error):
                return stored, result, True
            # As an exception of the view: the application may have an answer to it.
            call.ending = None
            result = work.rescue(error)
            return work.encode(result), result, False
        return stored, result, True

    def _is_committable(self, call: Call) -> bool:
        """Tell whether what the handler left in the session can be committed."""
        session = call.session
        if self._config.commit == "view" or not session.is_active:
            return False
        return not (
            session.in_transaction()
            and self._store.dialect.is_aborted(self._connection(session))
        )

    def _commit(self, call: Call, stored: StoredResponse) -> None:
        if call.claim is not None:
            self._connection(call.session)  # so that the commit reaches the engine
            call.ending = stored
        call.session.commit()

    def _has_committed(self, call: Call, error: Exception) -> bool:
        """
        Find out what became of a commit that raised.

        Raises:
            IdempotencyStoreUnavailable: If that cannot be told. Then nothing is
                written, and the lease decides.
        """
        lost_answer = isinstance(error, DBAPIError) and error.connection_invalidated
        if not lost_answer or call.claim is None:
            return False
        status = self._store.settle(call.claim)
        if status is None:
            call.abandon()
            raise IdempotencyStoreUnavailable(
                "The connection broke during COMMIT and its outcome is not known yet."
            ) from error
        return status is not Status.PROCESSING

    def _conduct_inside(
        self, call: Call, work: Work[R]
    ) -> tuple[StoredResponse, R, bool]:
        """Run an inner call in a savepoint; the outermost call's commit completes it."""
        savepoint = call.session.begin_nested()
        try:
            stored, result = _attempt(work)
            if stored.code < _CLIENT_ERROR:
                call.session.flush()
        except BaseException:
            if savepoint.is_active:
                savepoint.rollback()
            raise
        if savepoint.is_active:
            if stored.code < _CLIENT_ERROR:
                savepoint.commit()
            else:
                savepoint.rollback()
        released = stored.code in self._config.release_on
        self._hand_over(call, Release() if released else _ending_of(stored))
        return stored, result, True

    def _hand_over(self, call: Call, ending: Ending) -> None:
        """Leave the outcome of an inner call to the commit of the outermost one."""
        host = call.host
        if host is not None and call.claim is not None:
            call.ending = ending
            host.completed += [*call.completed, call]

    def _undo(self, call: Call) -> None:
        """Roll back an outermost call, and free what ended inside it."""
        if call.host is not None:
            return
        call.session.rollback()
        for inner in call.completed:
            self._record_undone(inner)

    def _record_undone(self, inner: Call) -> None:
        """Settle an inner call whose effect was rolled back with the outer one."""
        if inner.claim is None:
            return
        if isinstance(inner.ending, Failure):
            self._store.mark_failed(inner.claim, inner.ending)
        else:
            self._store.release(inner.claim)

    def _record_alone(self, call: Call, stored: StoredResponse) -> None:
        """Store an answer that no commit of the session carried, durably."""
        for inner in call.completed:
            self._record_undone(inner)
        if call.claim is None:
            return
        ending = _ending_of(stored)
        if isinstance(ending, Failure):
            owned = self._store.mark_failed(call.claim, ending)
        else:
            owned = self._released(call.claim, stored) or self._store.mark_succeeded(
                call.claim, stored
            )
        if not owned:
            raise LeaseLost

    def _released(self, claim: Claim, stored: StoredResponse) -> bool:
        """Free the key after an answer that says "nothing was done", if that is so."""
        if stored.code not in self._config.release_on:
            return False
        released = self._store.release(claim)
        if not released:
            log.warning(
                "'%s' answered %s after a commit, so its key is not freed.",
                claim.scope.route,
                stored.code,
            )
        return released

    def _record_exception(self, call: Call, error: BaseException) -> None:
        """Record an exception that goes on; never replace it by one of ours."""
        if call.claim is None:
            return
        failure = Failure(reason=f"{type(error).__module__}.{type(error).__qualname__}")
        retryable = isinstance(error, IdempotencyHTTPException) and error.retryable
        if call.host is not None:
            self._hand_over(call, Release() if retryable else failure)
            return
        try:
            if not (retryable and self._store.release(call.claim)):
                self._store.mark_failed(call.claim, failure)
        except IdempotencyError:
            log.exception("The failure of a guarded call could not be recorded.")

    def _answer_of_new_owner(
        self, scope: Scope | None, request_hash: str
    ) -> Answer[Any]:
        """Answer the client of a call that lost its record."""
        record = self._store.look(scope) if scope is not None else None
        verdict = decide(record.facts(request_hash)) if record else Verdict.MISSING
        if verdict in {Verdict.MISSING, Verdict.EXPIRED_REUSABLE}:
            raise IdempotencyLeaseLost(retry_after_seconds=1)
        return _duplicate_answer(Decision(outcome=verdict, record=record))

    def _encode(self, result: tuple[object, int]) -> StoredResponse:
        value, status = result
        try:
            body = self._dumps(value).encode()
        except (TypeError, ValueError) as error:
            raise ResultNotStorable(
                f"The handler's result has no JSON form: {error}. "
                "Return dicts, lists, str, int, float, bool or None."
            ) from error
        return StoredResponse(code=status, body=body)


_EARLY_WRITES = (
    "The session has uncommitted changes from before this call (a before_request "
    "function?), and the transaction's snapshot would hide the claim from it. Commit "
    "them there, or set IDEMPOTENCY_BEFORE_VIEW_WRITES = 'commit'."
)


def _attempt(work: Work[R]) -> tuple[StoredResponse, R]:
    try:
        result = work.handler()
        return work.encode(result), result
    except Exception as error:  # noqa: BLE001 - rescue raises it again, or answers it
        result = work.rescue(error)
        return work.encode(result), result


def _reraise(error: Exception) -> Any:
    raise error


def _split(result: object) -> tuple[object, int]:
    if isinstance(result, tuple) and len(result) == 2:  # noqa: PLR2004 - value, status
        value, status = result
        if type(status) is int and 100 <= status <= 599:  # noqa: PLR2004 - RFC 9110, 15
            return value, status
    return result, _SUCCESS


def _ending_of(stored: StoredResponse) -> StoredResponse | Failure:
    if stored.code < _SERVER_ERROR:
        return stored
    return Failure(reason=f"answer {stored.code}", response=stored)


def _seconds(name: str, value: Duration) -> float:
    try:
        return seconds_of(value)
    except ValueError as error:
        raise IdempotencyConfigError(
            f"{name} is {value!r}; it must be {error}."
        ) from error


def _first_answer(claim: Claim | None, stored: StoredResponse, result: R) -> Answer[R]:
    if claim is None:
        return Answer(stored=stored, result=result)
    return Answer(
        stored=stored,
        result=result,
        task_id=claim.task_id,
        outbox_event_id=claim.outbox_event_id,
        record_id=claim.record_id,
    )


def _duplicate_answer(decision: Decision) -> Answer[Any]:
    """Replay what is stored, or raise the error that says why there is nothing."""
    record = decision.record
    if record is None:  # every try met a row that vanished again
        raise IdempotencyInProgress(retry_after_seconds=1)
    facts: dict[str, Any] = {
        "task_id": record.task_id,
        "outbox_event_id": record.outbox_event_id,
        "expires_at": record.expires_at,
    }
    if decision.outcome in _REFUSALS:
        refusal = _REFUSALS[decision.outcome]
        if refusal.retryable:
            facts["retry_after_seconds"] = _retry_after(record)
        raise refusal(**facts)
    if record.response is None:
        raise IdempotencyPreviousFailure(**facts, replayed=True)
    if record.response.body is None:
        raise IdempotencyResponseUnavailable(**facts)
    return Answer(
        stored=record.response,
        replayed=True,
        task_id=record.task_id,
        outbox_event_id=record.outbox_event_id,
        record_id=record.id,
    )


def _retry_after(record: RecordView) -> int:
    return max(1, math.ceil(record.lease_seconds_left))
