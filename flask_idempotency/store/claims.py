"""
Claiming a record: insert first, and take over only what the decision table allows.

What decides whether a request may run belongs in ``rules``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError, IntegrityError

from flask_idempotency import failpoints
from flask_idempotency.keys import new_id
from flask_idempotency.lifecycle import (
    BOUND_ID_LENGTH,
    REQUEST_HASH_LENGTH,
    Claim,
    Decision,
    Verdict,
    check_text,
)
from flask_idempotency.rules import comparable_hash, decide, facts_of, is_takeable

from .base import StoreBase
from .dialects import PostgreSQL
from .rows import record_of
from .runner import LOCKED_TRIES, TRIES, RecordLocked, pause

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from flask_idempotency.lifecycle import IdBuilder, RecordView, Scope


@dataclass(frozen=True, kw_only=True)
class _Try:
    """What every try of one claim repeats, with one and the same token."""

    claim: Claim
    parameters: dict[str, Any]
    retry_failed: bool
    #: The transaction to join; None for a connection of the store's own.
    connection: Connection | None


class Claims(StoreBase):
    """The way of a record into ``processing``."""

    def claim(
        self,
        scope: Scope,
        request_hash: str,
        *,
        ttl_seconds: float | None = None,
        lease_seconds: float | None = None,
        retry_failed: bool = False,
        task_id_builder: IdBuilder | None = None,
        outbox_event_id_builder: IdBuilder | None = None,
        connection: Connection | None = None,
    ) -> Decision:
        """
        Claim the record of a scope: missing, lapsed or expired to ``processing``.

        Of any number of callers at most one gets a claim; the others get the record
        that stands in their way.

        Args:
            scope: What the key is bound to.
            request_hash: What the key was used for.
            ttl_seconds: Life of the key; the application's default if not given.
            lease_seconds: How long nobody else may take the record over.
            retry_failed: Also take over a failed record of which nothing stayed.
            task_id_builder: Makes the task id of a new operation; pure, since its
                result may be dropped.
            outbox_event_id_builder: The same for the event id.
            connection: A transaction of which the claim becomes a part, where it
                cannot be made beside it.

        Raises:
            ValueError: If the hash or a built id is not storable.
            IdempotencyStoreUnavailable: If the database cannot answer.
        """
        check_text("request_hash", request_hash, REQUEST_HASH_LENGTH)
        claim = self._new_claim(scope, request_hash, ttl_seconds)
        claim = replace(
            claim,
            task_id=_built("task_id", task_id_builder, claim),
            outbox_event_id=_built("outbox_event_id", outbox_event_id_builder, claim),
        )
        trial = _Try(
            claim=claim,
            parameters=self._claim_parameters(claim, lease_seconds),
            retry_failed=retry_failed,
            connection=connection,
        )
        failpoints.reach("before_claim")
        try:
            decision = self._negotiate(trial)
        except RecordLocked:
            return Decision(outcome=Verdict.IN_PROGRESS)
        except DBAPIError as error:
            # In a transaction to join: a rival was first, and the transaction is over.
            if connection is not None and self.dialect.is_transient(error):
                return Decision(outcome=Verdict.IN_PROGRESS)
            raise
        failpoints.reach("after_claim")
        return decision

    def _negotiate(self, trial: _Try) -> Decision:
        record, locked = None, 0
        for attempt in range(TRIES):
            if attempt:
                pause(attempt)
            inserted, record = self._insert_or_see(trial)
            if inserted:
                return _granted(trial.claim)
            if record is None:
                continue  # the winner's row became visible, or vanished, in between
            decision = self._decide(trial, record)
            if decision is not None:
                return decision
            locked += 1
            if locked == LOCKED_TRIES:
                break
        return Decision(outcome=Verdict.IN_PROGRESS, record=record)

    def _decide(self, trial: _Try, record: RecordView) -> Decision | None:
        """Decide on the record that is there; None if somebody else moves it."""
        if record.owner_token == trial.claim.owner_token:
            # The answer of an INSERT was lost.
            return _granted(claimed(trial.claim, record))
        trial = self._comparable(trial, record)
        facts = facts_of(record, trial.claim.request_hash)
        verdict = decide(facts)
        if not is_takeable(facts, retry_failed=trial.retry_failed):
            return Decision(outcome=verdict, record=record)
        exhausted = record.attempts >= self._config.max_attempts
        if verdict is Verdict.LEASE_LAPSED and exhausted:
            failed = self._give_up(trial, record)
            verdict = Verdict.FAILED_RETRY_REQUIRES_OPT_IN
            return Decision(outcome=verdict, record=failed) if failed else None
        taken = self._take_over(trial)
        return _granted(claimed(trial.claim, taken)) if taken else None

    def _comparable(self, trial: _Try, record: RecordView) -> _Try:
        """Leave a hash that other rules made as it is, in the record and the UPDATE."""
        known = comparable_hash(trial.claim.request_hash, record.request_hash)
        if known == trial.claim.request_hash or record.gone:
            return trial
        return replace(
            trial,
            claim=replace(trial.claim, request_hash=known),
            parameters={
                **trial.parameters,
                "b_request_hash": self.dialect.bind_text(known),
            },
        )

    def _insert_or_see(self, trial: _Try) -> tuple[bool, RecordView | None]:
        """Insert the record, or return the one that is there (None: ask again)."""
        if isinstance(self.dialect, PostgreSQL):
            return self._runner.run(
                lambda c: self._insert_or_see_at_once(c, trial), trial.connection
            )
        return self._runner.run(
            lambda c: self._see_or_insert(c, trial), trial.connection
        )

    def _insert_or_see_at_once(
        self, connection: Connection, trial: _Try
    ) -> tuple[bool, RecordView | None]:
        statement = (
            self._sql.insert_or_see
            if trial.connection is None
            else self._sql.insert_or_see_in_transaction
        )
        row = connection.execute(statement, trial.parameters).first()
        if row is None:
            return False, None
        return row.inserted, None if row.inserted else record_of(row)

    def _see_or_insert(
        self, connection: Connection, trial: _Try
    ) -> tuple[bool, RecordView | None]:
        # Looking first spares a replay the write lock; only the INSERT decides.
        row = connection.execute(self._sql.look, trial.parameters).first()
        if row is not None:
            return False, record_of(row)
        try:
            connection.execute(self._sql.insert, trial.parameters)
        except IntegrityError as error:
            name = self._sql.constraint
            if not self.dialect.is_duplicate(error, name, self._table.name):
                raise
            return False, None
        return True, None

    def _give_up(self, trial: _Try, record: RecordView) -> RecordView | None:
        """Mark a record failed whose every attempt died without an outcome."""
        values = {
            **trial.parameters,
            "b_max_attempts": self._config.max_attempts,
            "b_failure": f"no outcome after {record.attempts} attempts",
        }
        lock, update = self._sql.lock_exhausted, self._sql.give_up
        return self._move(lock, update, values, trial.connection)

    def _take_over(self, trial: _Try) -> RecordView | None:
        lock = self._sql.lock_takeable[trial.retry_failed]
        update = self._sql.take_over[trial.retry_failed]
        return self._move(lock, update, trial.parameters, trial.connection)

    def _move(
        self,
        lock: Any,
        update: Any,
        parameters: dict[str, Any],
        connection: Connection | None,
    ) -> RecordView | None:
        """Lock one row if nobody holds it, move it, and return it as it is then."""

        def work(connection: Connection) -> RecordView | None:
            found = connection.execute(lock, parameters).first()
            if found is None:
                return None
            row_id = found.id
            values = {**parameters, "b_id": row_id, "b_anew": bool(found.anew)}
            if connection.execute(update, values).rowcount != 1:
                return None
            row = connection.execute(self._sql.look_by_id, {"b_id": row_id}).one()
            return record_of(row)

        return self._runner.run_locked(work, connection)

    def _new_claim(
        self, scope: Scope, request_hash: str, ttl_seconds: float | None
    ) -> Claim:
        token = new_id()
        return Claim(
            record_id=token,
            operation_id=token,
            owner_token=token,
            scope=scope,
            request_hash=request_hash,
            ttl_seconds=(
                self._config.ttl_seconds if ttl_seconds is None else ttl_seconds
            ),
        )

    def _claim_parameters(
        self, claim: Claim, lease_seconds: float | None
    ) -> dict[str, Any]:
        bind = self.dialect.bind_text
        lease = self._config.lease_seconds if lease_seconds is None else lease_seconds
        return {
            **self._scope_parameters(claim.scope),
            "b_id": claim.record_id,
            "b_operation_id": claim.operation_id,
            "b_owner_token": claim.owner_token,
            "b_request_hash": bind(claim.request_hash),
            "b_task_id": claim.task_id and bind(claim.task_id),
            "b_outbox_event_id": claim.outbox_event_id and bind(claim.outbox_event_id),
            "b_lease": lease,
            "b_ttl": claim.ttl_seconds,
        }


def _built(name: str, builder: IdBuilder | None, claim: Claim) -> str | None:
    return check_text(name, builder(claim), BOUND_ID_LENGTH) if builder else None


def _granted(claim: Claim) -> Decision:
    return Decision(outcome=Verdict.CLAIMED, claim=claim)


def claimed(claim: Claim, record: RecordView) -> Claim:
    """Return the claim to a record as it is now."""
    return replace(
        claim,
        record_id=record.id,
        operation_id=record.operation_id,
        attempt=record.attempts,
        retries=record.retries or 0,
        task_id=record.task_id,
        outbox_event_id=record.outbox_event_id,
        steps=record.all_steps,
    )
