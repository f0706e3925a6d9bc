"""Renewed leases, in a table of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import StoreBase

if TYPE_CHECKING:
    from uuid import UUID

#: How long a lease that is over stays, by which nobody can mistake it for a live one.
_KEPT_SECONDS = 3600.0


class Leases(StoreBase):
    """What the keeper of running calls writes. It never touches a record."""

    @property
    def can_renew(self) -> bool:
        """Whether leases can be renewed beside a transaction of the session."""
        return self._connections.autocommit

    def renew(self, leases: dict[UUID, float]) -> None:
        """
        Give owner tokens a new lease, in one statement.

        A token that lost its record gains nothing by it.

        Args:
            leases: Seconds from now for each owner token.

        Raises:
            IdempotencyStoreUnavailable: If the database cannot do it now.
        """
        statement = self._sql.renew(leases)
        self._runner.run(lambda connection: connection.execute(statement))

    def forget_leases(self, tokens: list[UUID]) -> None:
        """Remove the leases of calls that have ended."""
        values = {"b_ids": tokens}
        self._runner.run(lambda c: c.execute(self._sql.forget_leases, values))

    def purge_leases(self) -> int:
        """Remove the leases of processes that died, and return how many these were."""
        values = {"b_older_than": _KEPT_SECONDS}
        return self._runner.run(
            lambda c: c.execute(self._sql.purge_leases, values).rowcount
        )
