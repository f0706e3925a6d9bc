"""
A guarded call: claim, run, commit effect and answer together; answer duplicates.

Knows nothing of HTTP requests. Statements belong in ``store``, the fence in
``unit_of_work``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from .answers import duplicate_answer, first_answer
from .completion import CallOptions, Completion, Work
from .config import seconds_of
from .exceptions import (
    REPLAYED,
    IdempotencyConfigError,
    IdempotencyLeaseLost,
    IdempotencyOutcomeUnknown,
    LeaseLost,
    NestedCallError,
    ResultNotStorable,
)
from .lifecycle import Decision, StoredResponse, Verdict, decide
from .unit_of_work import Call, connection_of, current_call, has_written, hold

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from .answers import Answer
    from .config import Config, Duration
    from .lifecycle import IdBuilder, Scope
    from .store import IdempotencyStore

log = logging.getLogger(__name__)

R = TypeVar("R")

_SUCCESS = 200


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

    @property
    def headers(self) -> dict[str, str]:
        """The marker of a replay, for a view that answers with this result."""
        return {REPLAYED: "true"} if self.replayed else {}


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
        self._completion = Completion(store, session, config)
        self._dumps = dumps
        self._loads = loads

    def run(
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
                400 or above rolls its rows back. An exception, also one of
                ``abort()``, is a failure.
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
        options = CallOptions(
            ttl_seconds=None if ttl is None else _seconds("ttl", ttl),
            lease_seconds=None if lease is None else _seconds("lease", lease),
            retry_failed=retry_failed,
            task_id_builder=task_id_builder,
            outbox_event_id_builder=outbox_event_id_builder,
        )
        answer = self.call(scope, request_hash, work, options)
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
        self,
        scope: Scope | None,
        request_hash: str,
        work: Work[R],
        options: CallOptions,
    ) -> Answer[R]:
        """
        Run `work` once for `scope`; the general form of ``run()``.

        Args:
            scope: What the key is bound to; ``None`` runs unrecorded.
            request_hash: What is asked for.
            work: The effect and how its result is stored.
            options: How it is claimed.
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
                return duplicate_answer(decision)
            call.claim = decision.claim
        try:
            stored, result = self._completion.perform(call, work)
        except LeaseLost:
            self._log_lost_lease(call, scope)
            if call.host is not None:  # the outer call's rows were rolled back too
                raise IdempotencyLeaseLost(retry_after_seconds=1) from None
            return self._answer_of_new_owner(call, scope, request_hash)
        return first_answer(call.claim, stored, result)

    def _claim(
        self, call: Call, scope: Scope, request_hash: str, options: CallOptions
    ) -> Decision:
        self._refuse_recursion(call, scope)
        connection = self._transaction_to_join(call)
        decision = self._store.claim(
            scope,
            request_hash,
            ttl_seconds=options.ttl_seconds,
            lease_seconds=options.lease_seconds,
            retry_failed=options.retry_failed,
            task_id_builder=options.task_id_builder,
            outbox_event_id_builder=options.outbox_event_id_builder,
            connection=connection,
        )
        if connection is not None and decision.claim is not None:
            call.joined = True
            hold(call)
        return decision

    def _refuse_recursion(self, call: Call, scope: Scope) -> None:
        """Refuse a call whose record waits for the commit of a call around it."""
        around = list(call.parent.chain()) if call.parent else []
        pending = [inner for outer in around for inner in outer.completed]
        for other in (*around, *(inner for inner in pending if not inner.settled)):
            same_store = other.store is self._store
            if other.claim and other.claim.scope == scope and same_store:
                raise NestedCallError(
                    f"A guarded call of '{scope.route}' runs inside another one that "
                    "has the same scope, or has used it before its commit. Give each "
                    "operation a route or key of its own."
                )

    def _log_lost_lease(self, call: Call, scope: Scope | None) -> None:
        log.warning(
            "A call of '%s' lost its lease and was rolled back. Give the route a lease "
            "that is longer than its slowest run.",
            scope.route if scope else "",
            extra={"idempotency_record_id": str(call.claim and call.claim.record_id)},
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
        connection = connection_of(call)
        if not self._store.dialect.hides_claims(connection):
            return None
        if call.host is not None:
            return connection
        pending = session.new or session.dirty or session.deleted
        if (
            pending or has_written(connection, unknown=False)
        ) and self._config.before_view_writes == "refuse":
            raise IdempotencyConfigError(_EARLY_WRITES)
        session.commit()
        return None

    def _answer_of_new_owner(
        self, call: Call, scope: Scope | None, request_hash: str
    ) -> Answer[Any]:
        """Answer the client of a call that lost its record."""
        record = self._store.look(scope) if scope is not None else None
        verdict = decide(record.facts(request_hash)) if record else Verdict.MISSING
        if verdict in {Verdict.MISSING, Verdict.EXPIRED_REUSABLE}:
            if call.committed:
                raise IdempotencyOutcomeUnknown
            raise IdempotencyLeaseLost(retry_after_seconds=1)
        return duplicate_answer(Decision(outcome=verdict, record=record))

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


def _reraise(error: Exception) -> Any:
    raise error


def _split(result: object) -> tuple[object, int]:
    if isinstance(result, tuple) and len(result) == 2:  # noqa: PLR2004 - value, status
        value, status = result
        if type(status) is int and 100 <= status <= 599:  # noqa: PLR2004 - RFC 9110, 15
            return value, status
    return result, _SUCCESS


def _seconds(name: str, value: Duration) -> float:
    try:
        return seconds_of(value)
    except ValueError as error:
        raise IdempotencyConfigError(
            f"{name} is {value!r}; it must be {error}."
        ) from error
