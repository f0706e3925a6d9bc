"""
How a call comes to its record.

Beside the session's transaction or as a part of it; at once, or after a wait for the
call in progress.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from .exceptions import (
    IdempotencyConfigError,
    IdempotencyStoreUnavailable,
    NestedCallError,
)
from .ledger import has_changes, has_written, hold
from .lifecycle import Decision, Verdict
from .rules import decide, facts_of, is_takeable
from .unit_of_work import connection_of
from .waiting import Waiters

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from .config import Config
    from .lifecycle import Scope
    from .store import IdempotencyStore
    from .unit_of_work import Call
    from .work import CallOptions


class Claiming:
    """
    Claims records for the calls of one application.

    Args:
        store: Keeps the records.
        config: The application's settings.
    """

    def __init__(self, store: IdempotencyStore, config: Config) -> None:
        self._store = store
        self._config = config
        self._waiters = Waiters(store.look)

    def decide(
        self,
        call: Call,
        scope: Scope,
        request_hash: str,
        options: CallOptions,
        *,
        recoverable: bool,
    ) -> Decision:
        """
        Claim the record for a call, or find out what a duplicate gets.

        Args:
            call: The call, which is not running yet.
            scope: What the key is bound to.
            request_hash: What is asked for.
            options: How it is claimed, and how long to wait for a call in progress.
            recoverable: Whether the call could recover an unknown outcome.

        Raises:
            IdempotencyConfigError: If a transaction with changes would hide the claim.
            IdempotencyStoreUnavailable: If the database cannot answer.
            NestedCallError: If a call around this one has the same scope.
        """
        decision = self._claim_or_wait(call, scope, request_hash, options)
        unknown = decision.outcome is Verdict.OUTCOME_UNKNOWN
        if unknown and recoverable and call.host is None:
            claim = self._store.claim_recovery(
                scope, request_hash, lease_seconds=options.lease_seconds
            )
            if claim is None:  # somebody else is at it
                return self._claim(call, scope, request_hash, options)
            return replace(decision, outcome=Verdict.CLAIMED, claim=claim)
        return decision

    def _claim_or_wait(
        self, call: Call, scope: Scope, request_hash: str, options: CallOptions
    ) -> Decision:
        """Claim the record, again after each call in progress that is waited for."""
        seconds = options.wait_seconds
        if seconds is None:
            seconds = self._config.wait_seconds
        deadline = time.monotonic() + seconds
        decision = self._claim(call, scope, request_hash, options)
        while decision.outcome is Verdict.IN_PROGRESS and self._let_go(call, deadline):
            seen_at = time.monotonic()
            try:
                record = self._waiters.wait(
                    scope, deadline=deadline, retry_failed=options.retry_failed
                )
                facts = facts_of(record, request_hash) if record else None
                # The one that asked may not have wanted to run it again.
                if facts and not is_takeable(facts, retry_failed=options.retry_failed):
                    return Decision(outcome=decide(facts), record=record)
                decision = self._claim(call, scope, request_hash, options)
            except (TimeoutError, IdempotencyStoreUnavailable):
                # That call runs, for all we know: never "run this one unprotected".
                return _aged(decision, time.monotonic() - seen_at)
        return decision

    def claim(
        self,
        scope: Scope,
        request_hash: str,
        options: CallOptions,
        connection: Connection | None = None,
    ) -> Decision:
        """Claim the record, beside whatever the session does."""
        return self._store.claim(
            scope,
            request_hash,
            ttl_seconds=options.ttl_seconds,
            lease_seconds=options.lease_seconds,
            retry_failed=options.retry_failed,
            task_id_builder=options.task_id_builder,
            outbox_event_id_builder=options.outbox_event_id_builder,
            connection=connection,
        )

    def _let_go(self, call: Call, deadline: float) -> bool:
        """Give the session's connection back for a wait, if nothing is lost by it."""
        if call.host is not None or time.monotonic() >= deadline:
            return False
        session = call.session
        if session.in_transaction():
            if has_changes(session) or has_written(connection_of(call)):
                return False
            session.commit()
        return True

    def _claim(
        self, call: Call, scope: Scope, request_hash: str, options: CallOptions
    ) -> Decision:
        self._refuse_recursion(call, scope)
        connection = self._transaction_to_join(call)
        decision = self.claim(scope, request_hash, options, connection)
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

    def _transaction_to_join(self, call: Call) -> Connection | None:
        """
        Make the session ready for a claim beside it.

        Returns:
            The session's connection where the claim must be part of its transaction:
            inside another call whose snapshot would hide it. None is the rule.
        """
        session = call.session
        # An atomic call's transaction goes on between two of the session.
        begun = call.host is not None and call.atomic and call.atomic.has_begun
        if not (session.in_transaction() or begun):
            return None
        connection = connection_of(call)
        if not self._store.dialect.hides_claims(connection):
            return None
        if call.host is not None:
            return connection
        self._end_snapshot(call)
        return None

    def end_snapshot(self, call: Call) -> None:
        """
        End the session's transaction before an atomic call, which has one of its own.

        Raises:
            IdempotencyConfigError: If it has changes that are not to be committed.
        """
        if call.transaction is not None and call.session.in_transaction():
            self._end_snapshot(call)

    def _end_snapshot(self, call: Call) -> None:
        self.refuse_early_writes(call)
        call.session.commit()

    def refuse_early_writes(self, call: Call) -> None:
        """
        Refuse changes from before the call where their transaction has to end first.

        Raises:
            IdempotencyConfigError: If that is so, and is not to be committed.
        """
        session = call.session
        if (
            self._config.before_view_writes == "refuse"
            and session.in_transaction()
            and (
                call.transaction is not None
                or self._store.dialect.hides_claims(connection_of(call))
            )
            and has_changes(session)
        ):
            raise IdempotencyConfigError(_EARLY_WRITES)


_EARLY_WRITES = (
    "The session has uncommitted changes from before this call (a before_request "
    "function?). They cannot be a part of it: it is atomic, or the snapshot of their "
    "transaction would hide the claim. Commit them there, or set "
    "IDEMPOTENCY_BEFORE_VIEW_WRITES = 'commit'."
)


def _aged(decision: Decision, seconds: float) -> Decision:
    """Return a decision as it is some seconds after its record was read."""
    record = decision.record
    if record is None:
        return decision
    left = max(0.0, record.lease_seconds_left - seconds)
    return replace(decision, record=replace(record, lease_seconds_left=left))
