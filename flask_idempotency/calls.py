"""
A guarded call: claim, run, commit effect and answer together; answer duplicates.

Knows nothing of HTTP requests. Statements belong in ``store``, the fence in
``fence``; how a call gets its record is in ``claiming``, how it ends in
``completion``.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from . import signals
from .answers import duplicate_answer, first_answer
from .atomic import AtomicTransaction
from .claiming import Claiming
from .codec import ResultCodec
from .completion import Completion
from .exceptions import (
    IdempotencyHTTPException,
    IdempotencyLeaseLost,
    IdempotencyOutcomeUnknown,
    IdempotencyStoreUnavailable,
    LeaseLost,
    NestedCallError,
)
from .lifecycle import Decision, Verdict, have_run
from .observation import Observer
from .rules import verdict_on
from .store.runner import SchemaMissing
from .unit_of_work import Call, current_call
from .work import failure_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Engine
    from sqlalchemy.orm import Session

    from .answers import Answer
    from .config import Config
    from .lifecycle import RecordView, Scope
    from .store import IdempotencyStore
    from .work import CallOptions, Work

log = logging.getLogger(__name__)

R = TypeVar("R")

_OTHER_SESSION = (
    "A guarded call inside an atomic one works in a session of its own (in an app "
    "context of its own?), whose commit would be a second one. Call it in the app "
    "context of the call around it, or let that one not be atomic."
)
#: Leases for which a call is renewed, if its route says nothing else.
_LEASES = 10


class GuardedCalls:
    """
    Makes calls take effect once per scope.

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
        loads: Callable[[str | bytes], Any],
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
        self._results = ResultCodec(
            dumps=dumps, loads=loads, max_size=config.max_response_size
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
        call = self._new_call(options)
        self._claiming.end_snapshot(call)
        if scope is None:
            return self._perform(call, None, request_hash, work)
        if (options.mode or self._config.mode) == "observe":
            return self._observe(call, scope, request_hash, work, options)
        try:
            with self._counted(scope, options):
                decision = self._claiming.decide(
                    call,
                    scope,
                    request_hash,
                    options,
                    recoverable=work.recover is not None,
                )
        except IdempotencyStoreUnavailable as error:
            if not _fails_open(error, options):
                raise
            log.exception("'%s' runs unprotected: %s", scope.route, error.reason)
            return self._perform(call, None, request_hash, work)
        if decision.claim is None:
            return self._duplicate(decision, scope, work)
        call.claim = decision.claim
        self._observer.note_claim(decision.claim)
        if decision.record is not None:
            call.recovering = True
            work = _recovery(work, decision.record)
        return self._perform(call, scope, request_hash, work)

    def _new_call(self, options: CallOptions) -> Call:
        lease = options.lease_seconds or self._config.lease_seconds
        call = Call(
            claim=None,
            lease_seconds=lease,
            max_runtime_seconds=options.max_runtime_seconds or _LEASES * lease,
            store=self._store,
            session=self._session(),
            find_session=self._session,
            results=self._results,
            parent=current_call.get(),
        )
        if call.host is not None:
            return call
        if call.atomic is not None:
            raise NestedCallError(_OTHER_SESSION)
        atomic = self._config.atomic if options.atomic is None else options.atomic
        if atomic:
            engine = call.session.get_bind(clause=self._store.bind_arguments["clause"])
            call.transaction = AtomicTransaction(
                cast("Engine", engine), self._store.dialect
            )
        return call

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
        except BaseException as error:  # raised again
            failure = failure_of(error)
            self._observer.record(
                claimed, lambda: failure, committed=call.partly_committed
            )
            raise
        result = cast("R", answer.result)
        self._observer.record(
            claimed,
            lambda: work.ending(answer.stored, result),
            committed=call.partly_committed,
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
            "A call of '%s' lost its lease and was rolled back: it ran longer than its "
            "'max_runtime', or its process stood still.",
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
        verdict = verdict_on(record, request_hash)
        if verdict in {Verdict.MISSING, Verdict.EXPIRED_REUSABLE}:
            if call.partly_committed or (call.claim and have_run(call.claim.steps)):
                raise IdempotencyOutcomeUnknown
            raise IdempotencyLeaseLost(retry_after_seconds=1)
        return Decision(outcome=verdict, record=record)


def _fails_open(error: Exception, options: CallOptions | None) -> bool:
    """Tell whether a route runs in spite of an error of the store."""
    return (
        options is not None
        and options.fail_open
        and isinstance(error, IdempotencyStoreUnavailable)
        and not isinstance(error, SchemaMissing)
    )


def _recovery(work: Work[R], record: RecordView) -> Work[R]:
    """Return the work of finding out how the call of a record ended."""

    def recover() -> R:
        result = work.recover(record) if work.recover else None
        if result is None:
            raise IdempotencyOutcomeUnknown
        return result

    return replace(work, handler=recover)
