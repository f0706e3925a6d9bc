"""The owner's moves out of ``processing``, each one conditional statement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flask_idempotency.codec import encode_body, encode_headers, encode_steps
from flask_idempotency.lifecycle import first_open, have_run

from .base import StoreBase

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from flask_idempotency.lifecycle import Claim, Failure, Step, StoredResponse

    from .statements import Endings


class Outcomes(StoreBase):
    """What only the owner of a record may write, under its token."""

    def mark_effects(self, claim: Claim, connection: Connection | None = None) -> bool:
        """
        Note that a part of the operation becomes, or is, durable.

        ``processing`` stays. Called by the fence in the transaction that makes it so;
        without one the note is written on its own.

        Returns:
            Whether the record still belongs to the claim; if not, roll back.
        """
        return self._owned_update(self._sql.mark_effects, claim, {}, connection)

    def write_steps(self, claim: Claim, steps: tuple[Step, ...]) -> bool:
        """
        Keep what is known of the operation's steps; ``processing`` stays.

        Durable on its own, and never part of a transaction of the session.

        Returns:
            Whether the record still belongs to the claim; if not, none of its steps
            may be called.
        """
        name = first_open(steps)
        values = {
            "b_steps": encode_steps(steps),
            "b_open_step": name and self.dialect.bind_text(name),
        }
        return self._owned_update(self._sql.write_steps, claim, values, None)

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
        statement = self._endings(connection).mark_succeeded
        values = {**self._answer_values(claim, response), "b_failure": None}
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
            **self._answer_values(claim, failure.response),
            "b_failure": failure.reason[:255],
        }
        return self._owned_update(
            self._endings(connection).mark_failed, claim, values, connection
        )

    def release(self, claim: Claim, *, connection: Connection | None = None) -> bool:
        """
        Free the key: ``processing`` without effects to missing, by the owner only.

        Args:
            claim: The owner's claim.
            connection: A transaction of which the release becomes a part.

        Returns:
            Whether the record was removed; not once a part of it is durable, or one of
            its steps has run.
        """
        idle = None if have_run(claim.steps) else encode_steps(claim.steps)
        return self._owned_update(
            self._endings(connection).release, claim, {"b_steps": idle}, connection
        )

    def _endings(self, connection: Connection | None) -> Endings:
        return self._sql.alone if connection is None else self._sql.carried

    def _answer_values(
        self, claim: Claim, response: StoredResponse | None
    ) -> dict[str, Any]:
        return {
            **response_values(response),
            "b_ttl": claim.ttl_seconds,
            "b_half_ttl": claim.ttl_seconds / 2,
        }


def response_values(response: StoredResponse | None) -> dict[str, Any]:
    """Return an answer as it is kept, as parameters."""
    body, encoding = encode_body(response.body if response else None)
    return {
        "b_response_code": response.code if response else None,
        "b_response_headers": encode_headers(response.headers) if response else None,
        "b_response_body": body,
        "b_response_encoding": encoding,
    }
