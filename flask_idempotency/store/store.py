"""
The moves of a record: each one conditional statement, or one locked short transaction.

What decides whether a request may run belongs in ``lifecycle``; what runs, commits
and answers belongs in ``guard``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import IntegrityError

from flask_idempotency.codec import encode_body, encode_headers
from flask_idempotency.keys import new_id
from flask_idempotency.lifecycle import (
    BOUND_ID_LENGTH,
    REQUEST_HASH_LENGTH,
    Claim,
    Decision,
    Diagnosis,
    Failure,
    RecordView,
    Scope,
    Status,
    StoredResponse,
    Verdict,
    check_text,
    decide,
    is_takeable,
)

from .dialects import PostgreSQL, dialect_for
from .explain import explain
from .rows import record_of
from .runner import TRIES, Runner, pause
from .statements import Statements

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection, Table

    from flask_idempotency.config import Config

    from .connections import Connections

    IdBuilder = Callable[[Claim], str]

#: How often a record is tried that could be taken over but whose row is locked.
_LOCKED_TRIES = 2


class IdempotencyStore:
    """
    Keeps the records of one table on one database.

    Args:
        table: The record's table.
        dialect_name: SQLAlchemy's name of the database.
        connections: Where statements run that are durable on their own.
        config: Defaults for the life of keys and leases.
    """

    def __init__(
        self, table: Table, dialect_name: str, connections: Connections, config: Config
    ) -> None:
        self.dialect = dialect_for(dialect_name)
        self._table = table
        #: How a session finds the engine of the records.
        self.bind_arguments = {"clause": table}
        self._sql = Statements(table, self.dialect)
        self._runner = Runner(self.dialect, connections, table.name)
        self._connections = connections
        self._config = config

    def close(self) -> None:
        """Close the connections of the store's own pool that are not in use."""
        self._connections.close()

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
        parameters = self._claim_parameters(claim, lease_seconds)
        return self._negotiate(claim, parameters, connection, retry_failed=retry_failed)

    def _negotiate(
        self,
        claim: Claim,
        parameters: dict[str, Any],
        connection: Connection | None,
        *,
        retry_failed: bool,
    ) -> Decision:
        locked = 0
        for attempt in range(TRIES):
            if attempt:
                pause(attempt)
            inserted, record = self._insert_or_see(parameters, connection)
            if inserted:
                return Decision(outcome=Verdict.CLAIMED, claim=claim)
            if record is None:
                continue  # the winner's row became visible, or vanished, in between
            if record.owner_token == claim.owner_token:
                return _claimed(claim, record)  # the answer of an INSERT was lost
            facts = record.facts(claim.request_hash)
            if not is_takeable(facts, retry_failed=retry_failed):
                return Decision(outcome=decide(facts), record=record)
            if self._give_up(record, facts, parameters, connection):
                continue
            taken = self._take_over(parameters, connection, retry_failed=retry_failed)
            if taken:
                return _claimed(claim, taken)
            locked += 1
            if locked == _LOCKED_TRIES:
                break
        return Decision(outcome=Verdict.IN_PROGRESS, record=record)

    def mark_effects(self, claim: Claim, connection: Connection) -> bool:
        """
        Note in a transaction that its commit makes a part of the operation durable.

        ``processing`` stays. Called by the fence, for the owner.

        Returns:
            Whether the record still belongs to the claim; if not, roll back.
        """
        return self._owned_update(self._sql.mark_effects, claim, {}, connection)

    def mark_succeeded(
        self,
        claim: Claim,
        response: StoredResponse,
        *,
        connection: Connection | None = None,
    ) -> bool:
        """
        Store the answer: ``processing`` to ``succeeded``, by the owner only.

        Args:
            claim: The owner's claim.
            response: What duplicates get.
            connection: The business transaction that carries the record; without
                one the answer is stored, durably, on its own.

        Returns:
            Whether the record still belonged to the claim; if not, roll back.
        """
        statement = (
            self._sql.mark_succeeded_with_effects
            if connection
            else self._sql.mark_succeeded
        )
        values = {**self._response_values(claim, response), "b_failure": None}
        return self._owned_update(statement, claim, values, connection)

    def mark_failed(
        self,
        claim: Claim,
        failure: Failure,
        *,
        connection: Connection | None = None,
    ) -> bool:
        """
        Store a failure: ``processing`` to ``failed``, by the owner only.

        Effects that were committed before stay noted, so that nothing runs again.

        Returns:
            Whether the record still belonged to the claim.
        """
        values = {
            **self._response_values(claim, failure.response),
            "b_failure": failure.reason[:255],
        }
        return self._owned_update(self._sql.mark_failed, claim, values, connection)

    def release(
        self, claim: Claim, *, connection: Connection | None = None
    ) -> bool:
        """
        Free the key: ``processing`` without effects to missing, by the owner only.

        Args:
            claim: The owner's claim.
            connection: A transaction of which the release becomes a part.

        Returns:
            Whether the record was removed; not once a part of it is durable.
        """
        return self._owned_update(self._sql.release, claim, {}, connection)

    def settle(self, claim: Claim) -> Status | None:
        """
        Find out what became of a COMMIT whose answer was lost.

        A locking read: a plain one says "nothing happened" just before it did.

        Returns:
            The record's status if this claim wrote it or still owns it; ``None`` if
            that cannot be told, because the row is locked, gone or another's.
        """

        def work(connection: Connection) -> Status | None:
            key = {"b_id": claim.record_id}
            if connection.execute(self._sql.lock_by_id, key).first() is None:
                return None
            row = connection.execute(self._sql.look_by_id, key).first()
            record = record_of(row) if row is not None else None
            return record.status if record and _is_own(record, claim) else None

        return self._runner.run_locked(work)

    def is_settled(self, claim: Claim, connection: Connection) -> bool:
        """Tell whether this attempt's outcome is on its record already."""
        row = connection.execute(
            self._sql.look_by_id, {"b_id": claim.record_id}
        ).first()
        record = record_of(row) if row is not None else None
        return (
            record is not None
            and _is_own(record, claim)
            and record.status is not Status.PROCESSING
        )

    def look(self, scope: Scope) -> RecordView | None:
        """Read the record of a scope, without any lock."""
        parameters = self._scope_parameters(scope)
        row = self._runner.run(lambda c: c.execute(self._sql.look, parameters).first())
        return record_of(row) if row is not None else None

    def diagnose(self, scope: Scope, request_hash: str | None = None) -> Diagnosis:
        """
        Say what the next request with a scope would meet, and why.

        Args:
            scope: What the key is bound to.
            request_hash: Hash of that request; without it the record's own.

        Raises:
            IdempotencyStoreUnavailable: If the database cannot answer.
        """
        record = self.look(scope)
        facts = record.facts(request_hash) if record else None
        verdict = decide(facts) if facts else Verdict.MISSING
        return Diagnosis(
            diagnosis=verdict,
            scope=scope,
            record=record,
            explanation=explain(verdict, record),
        )

    def expire(self, *, limit: int) -> int:
        """
        Mark one batch: finished or lapsed without effects, past its time, to expired.

        Rows that somebody has locked are left for a later batch.

        Args:
            limit: Most records of the batch.

        Returns:
            How many were marked.
        """
        return self._batch(self._sql.lock_expirable, self._sql.expire, limit, {})

    def purge(
        self,
        *,
        limit: int,
        older_than_seconds: float | None = None,
        tenant_id: str | None = None,
        user_id: str | None = None,
    ) -> int:
        """
        Delete one batch of expired records.

        Args:
            limit: Most records of the batch.
            older_than_seconds: Time since the end of the key's life; the
                application's retention if not given.
            tenant_id: Only this tenant's.
            user_id: Only this user's.

        Returns:
            How many were deleted.
        """
        (_, lock, purge), values = self._purge_plan(
            older_than_seconds, tenant_id, user_id
        )
        return self._batch(lock, purge, limit, values)

    def count_expirable(self) -> int:
        """Count the records that ``expire`` would mark."""
        return self._count(self._sql.count_expirable, {})

    def count_unknown_outcomes(self) -> int:
        """Count the records past their time that ``expire`` leaves: outcome unknown."""
        return self._count(self._sql.count_unknown, {})

    def count_purgeable(
        self,
        *,
        older_than_seconds: float | None = None,
        tenant_id: str | None = None,
        user_id: str | None = None,
    ) -> int:
        """Count the records that ``purge`` would delete."""
        (count, _, _), values = self._purge_plan(older_than_seconds, tenant_id, user_id)
        return self._count(count, values)

    def _purge_plan(
        self, older_than: float | None, tenant_id: str | None, user_id: str | None
    ) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
        if older_than is None:
            older_than = self._config.retention_seconds
        given = {"tenant_id": tenant_id, "user_id": user_id}
        filters = {name: text for name, text in given.items() if text is not None}
        values: dict[str, Any] = {
            f"b_{name}": self.dialect.bind_text(text) for name, text in filters.items()
        }
        values["b_older_than"] = older_than
        return self._sql.purgeable(*filters), values

    def _insert_or_see(
        self, parameters: dict[str, Any], connection: Connection | None
    ) -> tuple[bool, RecordView | None]:
        work = (
            self._insert_or_see_at_once
            if isinstance(self.dialect, PostgreSQL)
            else self._see_or_insert
        )
        return self._runner.run(lambda c: work(c, parameters, own=connection is None), connection)

    def _insert_or_see_at_once(
        self, connection: Connection, parameters: dict[str, Any], *, own: bool
    ) -> tuple[bool, RecordView | None]:
        statement = (
            self._sql.insert_or_see if own else self._sql.insert_or_see_in_transaction
        )
        row = connection.execute(statement, parameters).first()
        if row is None:
            return False, None
        return row.inserted, None if row.inserted else record_of(row)

    def _see_or_insert(
        self, connection: Connection, parameters: dict[str, Any], *, own: bool
    ) -> tuple[bool, RecordView | None]:
        # Looking first spares a replay the write lock; only the INSERT decides.
        row = connection.execute(self._sql.look, parameters).first()
        if row is not None:
            return False, record_of(row)
        try:
            connection.execute(self._sql.insert, parameters)
        except IntegrityError as error:
            name = self._sql.constraint
            if not self.dialect.is_duplicate(error, name, self._table.name):
                raise
            return False, None
        return True, None

    def _give_up(
        self,
        record: RecordView,
        facts: Any,
        parameters: dict[str, Any],
        connection: Connection | None,
    ) -> bool:
        """Mark a record failed whose every attempt died without an outcome."""
        if (
            decide(facts) is not Verdict.LEASE_LAPSED
            or record.attempts < self._config.max_attempts
        ):
            return False
        values = {
            **parameters,
            "b_max_attempts": self._config.max_attempts,
            "b_failure": f"no outcome after {record.attempts} attempts",
        }
        sql = self._sql
        return bool(
            self._locked(sql.lock_exhausted, sql.give_up, values, connection)
        )

    def _take_over(
        self,
        parameters: dict[str, Any],
        connection: Connection | None,
        *,
        retry_failed: bool,
    ) -> RecordView | None:
        sql = self._sql
        return self._locked(
            sql.lock_takeable[retry_failed],
            sql.take_over[retry_failed],
            parameters,
            connection,
        )

    def _locked(
        self,
        lock: Any,
        update: Any,
        parameters: dict[str, Any],
        connection: Connection | None,
    ) -> RecordView | None:
        """Lock one row if nobody holds it, move it, and return it as it is then."""

        def work(connection: Connection) -> RecordView | None:
            row_id = connection.execute(lock, parameters).scalar()
            if row_id is None:
                return None
            values = {**parameters, "b_id": row_id}
            if connection.execute(update, values).rowcount != 1:
                return None
            row = connection.execute(self._sql.look_by_id, {"b_id": row_id}).one()
            return record_of(row)

        return self._runner.run_locked(work, connection)

    def _batch(self, lock: Any, change: Any, limit: int, values: dict[str, Any]) -> int:
        def work(connection: Connection) -> int:
            ids = list(connection.execute(lock, {**values, "b_limit": limit}).scalars())
            if not ids:
                return 0
            return connection.execute(change, {**values, "b_ids": ids}).rowcount

        return self._runner.run_locked(work)

    def _count(self, statement: Any, values: dict[str, Any]) -> int:
        return int(self._runner.run(lambda c: c.execute(statement, values).scalar_one()))

    def _owned_update(
        self,
        statement: Any,
        claim: Claim,
        values: dict[str, Any],
        connection: Connection | None,
    ) -> bool:
        parameters = {
            "b_id": claim.record_id,
            "b_owner_token": claim.owner_token,
            **values,
        }
        return self._runner.run(
            lambda c: c.execute(statement, parameters).rowcount == 1, connection
        )

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

    def _scope_parameters(self, scope: Scope) -> dict[str, Any]:
        bind = self.dialect.bind_text
        return {
            "b_tenant_id": bind(scope.tenant_id),
            "b_user_id": bind(scope.user_id),
            "b_route": bind(scope.route),
            "b_idempotency_key": bind(scope.idempotency_key),
        }

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

    def _response_values(
        self, claim: Claim, response: StoredResponse | None
    ) -> dict[str, Any]:
        body, encoding = encode_body(response.body if response else None)
        return {
            "b_response_code": response.code if response else None,
            "b_response_headers": encode_headers(response.headers) if response else None,
            "b_response_body": body,
            "b_response_encoding": encoding,
            "b_ttl": claim.ttl_seconds,
            "b_half_ttl": claim.ttl_seconds / 2,
        }


def _built(name: str, builder: IdBuilder | None, claim: Claim) -> str | None:
    return check_text(name, builder(claim), BOUND_ID_LENGTH) if builder else None


def _claimed(claim: Claim, record: RecordView) -> Decision:
    claim = replace(
        claim,
        record_id=record.id,
        operation_id=record.operation_id,
        attempt=record.attempts,
        task_id=record.task_id,
        outbox_event_id=record.outbox_event_id,
    )
    return Decision(outcome=Verdict.CLAIMED, claim=claim)


def _is_own(record: RecordView, claim: Claim) -> bool:
    """Tell whether the record's state is this attempt's doing."""
    return (
        record.operation_id == claim.operation_id
        and record.attempts == claim.attempt
        and record.owner_token in {None, claim.owner_token}
    )

