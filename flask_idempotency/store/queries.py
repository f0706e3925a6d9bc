"""Reading records: what a key means now, and what became of a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flask_idempotency.explain import explain
from flask_idempotency.lifecycle import Diagnosis, Status
from flask_idempotency.rules import verdict_on

from .base import StoreBase
from .rows import record_of
from .runner import TRIES, pause

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from flask_idempotency.lifecycle import Claim, RecordView, Scope


class Queries(StoreBase):
    """Questions about one record."""

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
        verdict = verdict_on(record, request_hash)
        return Diagnosis(
            diagnosis=verdict,
            scope=scope,
            record=record,
            explanation=explain(verdict, record),
        )

    def statement_timeout(self) -> float | None:
        """
        Return the seconds that the server gives a statement; ``None`` without limit.

        Raises:
            IdempotencyStoreUnavailable: If the database cannot answer.
        """
        query = self.dialect.timeout_query
        if not query:
            return None
        rows = self._runner.run(lambda c: list(c.exec_driver_sql(query)))
        return self.dialect.timeout_seconds(rows)

    def settle(self, claim: Claim) -> Status | None:
        """
        Find out what became of a COMMIT whose answer was lost.

        A locking read: a plain one says "nothing happened" just before it did. It is
        tried a few times, since a server needs a moment to notice that the connection
        is gone, and to give up the lock of its transaction.

        Returns:
            ``succeeded`` if this claim wrote that, ``processing`` if it wrote nothing;
            ``None`` if that cannot be told, because the row is locked, gone or ended
            by somebody else.
        """

        def work(connection: Connection) -> Status | None:
            key = {"b_id": claim.record_id}
            if connection.execute(self._sql.lock_by_id, key).first() is None:
                return None
            row = connection.execute(self._sql.look_by_id, key).first()
            record = record_of(row) if row is not None else None
            return record.status if record and _is_own(record, claim) else None

        for attempt in range(1, TRIES):
            status = self._runner.run_locked(work)
            if status is not None:
                return status
            pause(attempt)
        return self._runner.run_locked(work)


def _is_own(record: RecordView, claim: Claim) -> bool:
    """
    Tell whether the record's state is this attempt's doing.

    A lapsed attempt may also have been marked as failed or expired, or settled by an
    operator; a COMMIT that the fence passed leaves none of these.
    """
    return (
        record.operation_id == claim.operation_id
        and record.attempts == claim.attempt
        and record.owner_token in {None, claim.owner_token}
        and record.status in {Status.PROCESSING, Status.SUCCEEDED}
        and record.resolved_by is None
    )
