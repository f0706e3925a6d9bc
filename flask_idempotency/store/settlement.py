"""
Unknown outcomes: a call that committed a part and left no answer.

Its handler never runs again. A call of its own may recover the answer, or an operator
settles it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flask_idempotency.lifecycle import Failure, Status, StoredResponse

from .claims import Claims, claimed
from .outcomes import response_values
from .queries import Queries

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from flask_idempotency.lifecycle import (
        Claim,
        RecordView,
        Resolution,
        Retried,
        Scope,
    )


class Settlement(Claims, Queries):
    """The ways out of an unknown outcome."""

    def claim_recovery(
        self, scope: Scope, request_hash: str, *, lease_seconds: float | None = None
    ) -> Claim | None:
        """
        Claim a record of unknown outcome: still ``processing``, by a new owner.

        What was committed stays noted, so that the handler can never run again.

        Returns:
            ``None`` if the outcome is no longer unknown, or somebody else is at it.
        """
        claim = self._new_claim(scope, request_hash, None)
        parameters = self._claim_parameters(claim, lease_seconds)
        lock, update = self._sql.lock_unknown, self._sql.recover
        record = self._move(lock, update, parameters, None)
        return claimed(claim, record) if record else None

    def hand_back(
        self,
        claim: Claim,
        *,
        attempts: int = 0,
        connection: Connection | None = None,
    ) -> bool:
        """
        Give a call up, so that the next request may try: ``processing``, lapsed.

        Args:
            claim: The owner's claim.
            attempts: How many do not count as such.
            connection: A transaction of which it becomes a part.

        Returns:
            Whether the record still belonged to the claim.
        """
        return self._owned_update(
            self._sql.hand_back, claim, {"b_spent": attempts}, connection
        )

    def postpone(
        self, claim: Claim, retry: Retried, *, connection: Connection | None = None
    ) -> bool:
        """
        Leave a task to its next message: ``processing``, lapsed.

        A message with fewer retries is a stale copy from now on.

        Returns:
            Whether that was done; not once a part of it is durable, unless the task
            allows for that, and not with an open step.
        """
        values = {
            "b_retries": retry.retries,
            "b_request_hash": self.dialect.bind_text(retry.request_hash),
        }
        statement = self._sql.postpone[retry.after_effects]
        return self._owned_update(statement, claim, values, connection)

    def resolve(
        self, scope: Scope, resolution: Resolution, *, force: bool = False
    ) -> RecordView | None:
        """
        Settle a call that stopped: ``processing`` to what the resolution says.

        A waking owner loses: its token is gone.

        Args:
            scope: What the key is bound to.
            resolution: The outcome, who says so and why.
            force: Also settle a call whose lease is live, or that committed nothing.

        Returns:
            The record as it is now; ``None`` if there is nothing to settle.

        Raises:
            IdempotencyStoreUnavailable: If the database cannot answer.
        """
        ending = resolution.ending
        status = {StoredResponse: Status.SUCCEEDED, Failure: Status.FAILED}.get(
            type(ending), Status.EXPIRED
        )
        response = ending.response if isinstance(ending, Failure) else ending
        bind = self.dialect.bind_text
        values: dict[str, Any] = {
            **self._scope_parameters(scope),
            **response_values(response),
            "b_failure": ending.reason[:255] if isinstance(ending, Failure) else None,
            "b_resolved_by": bind(resolution.by),
            "b_resolved_reason": bind(resolution.reason),
            "b_ttl": self._config.ttl_seconds,
        }
        plan = self._sql.resolvable[force]

        def work(connection: Connection) -> bool:
            found = connection.execute(plan.lock, values).first()
            if found is None:
                return False
            update = plan.update[status]
            return (
                connection.execute(update, {**values, "b_id": found.id}).rowcount == 1
            )

        return self.look(scope) if self._runner.run_locked(work) else None
