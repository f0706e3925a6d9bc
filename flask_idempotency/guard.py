"""
A guarded call: claim, run, commit effect and answer together; answer duplicates.

Knows nothing of HTTP requests. Statements belong in ``store``, the fence in
``unit_of_work``.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from . import signals
from .answers import duplicate_answer, first_answer, refuse_without_body
from .claiming import Claiming
from .completion import CallOptions, Completion, Work, failure_of
from .exceptions import (
    REPLAYED,
    IdempotencyConfigError,
    IdempotencyHTTPException,
    IdempotencyLeaseLost,
    IdempotencyOutcomeUnknown,
    IdempotencyStoreUnavailable,
    LeaseLost,
    ResultNotStorable,
)
from .lifecycle import Decision, StoredResponse, Verdict, decide
from .observation import Observer
from .settings import seconds_of
from .store.runner import SchemaMissing
from .unit_of_work import Call, current_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from uuid import UUID

    from sqlalchemy.orm import Session

    from .answers import Answer
    from .config import Config
    from .lifecycle import IdBuilder, Scope
    from .settings import Duration
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
        sender: Sender of the signals, the application.
    """

    def __init__(
        self,
        store: IdempotencyStore,
        session: Callable[[], Session],
        config: Config,
        *,
        dumps: Callable[[Any], str],
        loads: Callable[[bytes], Any],
        sender: object = None,
    ) -> None:
        self._store = store
        self._session = session
        self._config = config
        self._completion = Completion(store, session, config)
        self._claiming = Claiming(store, config)
        self._observer = Observer(store, sender)
        self._sender = sender
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
        wait: Duration | None = None,
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
            wait: How long a duplicate waits for a first call in progress. A call
                inside another one, or whose session has changes, does not wait.

        Raises:
            IdempotencyHTTPException: For a duplicate that has no answer to get (in
                progress, conflict, failed before, outcome unknown, not kept), or if
                the store cannot be reached.
            IdempotencyConfigError: If a duration is none, or if a transaction with
                changes would hide the claim.
            NestedCallError: If a call around this one has the same scope.
            ResultNotStorable: If the result has no JSON form; nothing is committed.
        """
        work = Work(
            handler=lambda: _split(handler()),
            encode=self._encode,
            rescue=_reraise,
            releases=lambda result: result[1] in self._config.release_on,
            admit=refuse_without_body,
        )
        options = CallOptions(
            ttl_seconds=None if ttl is None else _seconds("ttl", ttl),
            lease_seconds=None if lease is None else _seconds("lease", lease),
            wait_seconds=None if wait is None else _seconds("wait", wait, minimum=0),
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
        call = self._new_call()
        if scope is None:
            return self._perform(call, None, request_hash, work)
        if (options.mode or self._config.mode) == "observe":
            return self._observe(call, scope, request_hash, work, options)
        try:
            with self._counted(scope, options):
                decision = self._claiming.decide(call, scope, request_hash, options)
        except IdempotencyStoreUnavailable as error:
            if not _fails_open(error, options):
                raise
            log.exception("'%s' runs unprotected: %s", scope.route, error.reason)
            return self._perform(call, None, request_hash, work)
        if decision.claim is None:
            return self._duplicate(decision, scope, work)
        call.claim = decision.claim
        self._observer.note_claim(decision.claim)
        return self._perform(call, scope, request_hash, work)

    def _new_call(self) -> Call:
        return Call(
            claim=None,
            store=self._store,
            session=self._session(),
            parent=current_call.get(),
        )

    def _perform(
        self, call: Call, scope: Scope | None, request_hash: str, work: Work[R]
    ) -> Answer[R]:
        try:
            stored, result = self._completion.perform(call, work)
        except LeaseLost:
            self._log_lost_lease(call, scope)
            if scope is None:
                raise IdempotencyLeaseLost(retry_after_seconds=1) from None
            with self._counted(scope):
                decision = self._decision_of_new_owner(call, scope, request_hash)
            return self._duplicate(decision, scope, work)
        return first_answer(call.claim, stored, result)

    def _observe(
        self,
        call: Call,
        scope: Scope,
        request_hash: str,
        work: Work[R],
        options: CallOptions,
    ) -> Answer[R]:
        """Run the work in any case; its record stands beside it and protects nothing."""

        def claim() -> Decision:
            self._claiming.refuse_early_writes(call)
            return self._claiming.claim(scope, request_hash, options)

        # What an inner call did is not known before the outermost one has ended.
        claimed = self._observer.claim(scope, claim, work) if not call.host else None
        try:
            answer = self._perform(call, None, request_hash, work)
        except BaseException as error:
            failure = failure_of(error)
            self._observer.record(claimed, lambda: failure, committed=call.committed)
            raise
        result = cast("R", answer.result)
        self._observer.record(
            claimed,
            lambda: work.ending(answer.stored, result),
            committed=call.committed,
        )
        return answer

    def _duplicate(self, decision: Decision, scope: Scope, work: Work[R]) -> Answer[R]:
        with self._counted(scope):
            answer: Answer[R] = duplicate_answer(decision)
            work.admit(answer)
        signals.send(signals.replayed, self._sender, route=scope.route, enforced=True)
        return answer

    @contextmanager
    def _counted(
        self, scope: Scope, options: CallOptions | None = None
    ) -> Iterator[None]:
        """Count what refuses a request, or would if it did not fail open."""
        try:
            yield
        except IdempotencyHTTPException as error:
            code, enforced = error.error_code, not _fails_open(error, options)
            signals.count_refusal(self._sender, scope.route, code, enforced=enforced)
            raise

    def _log_lost_lease(self, call: Call, scope: Scope | None) -> None:
        log.warning(
            "A call of '%s' lost its lease and was rolled back. Give the route a lease "
            "that is longer than its slowest run.",
            scope.route if scope else "",
            extra={"idempotency_record_id": str(call.claim and call.claim.record_id)},
        )

    def _decision_of_new_owner(
        self, call: Call, scope: Scope, request_hash: str
    ) -> Decision:
        """Find out what the client of a call that lost its record gets."""
        if call.host is not None:  # the outer call's rows were rolled back too
            raise IdempotencyLeaseLost(retry_after_seconds=1)
        record = self._store.look(scope)
        verdict = decide(record.facts(request_hash)) if record else Verdict.MISSING
        if verdict in {Verdict.MISSING, Verdict.EXPIRED_REUSABLE}:
            if call.committed:
                raise IdempotencyOutcomeUnknown
            raise IdempotencyLeaseLost(retry_after_seconds=1)
        return Decision(outcome=verdict, record=record)

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


def _fails_open(error: Exception, options: CallOptions | None) -> bool:
    """Tell whether a route runs in spite of an error of the store."""
    return (
        options is not None
        and options.fail_open
        and isinstance(error, IdempotencyStoreUnavailable)
        and not isinstance(error, SchemaMissing)
    )


def _reraise(error: Exception) -> Any:
    raise error


def _split(result: object) -> tuple[object, int]:
    if isinstance(result, tuple) and len(result) == 2:  # noqa: PLR2004 - value, status
        value, status = result
        if type(status) is int and 100 <= status <= 599:  # noqa: PLR2004 - RFC 9110, 15
            return value, status
    return result, _SUCCESS


def _seconds(name: str, value: Duration, *, minimum: float = 1.0) -> float:
    try:
        return seconds_of(value, minimum=minimum)
    except ValueError as error:
        raise IdempotencyConfigError(
            f"{name} is {value!r}; it must be {error}."
        ) from error
