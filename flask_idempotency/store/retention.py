"""The end of a record: expired when its key's life is over, purged later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import StoreBase

if TYPE_CHECKING:
    from sqlalchemy import Connection


class Retention(StoreBase):
    """Batches of expiry and purge, and what they would find."""

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

    def count_unknown_outcomes(self, *, past_expiry: bool = False) -> int:
        """
        Count the calls of which nobody knows what they did.

        Args:
            past_expiry: Only those that ``expire`` leaves although their time is over.
        """
        return self._count(self._sql.count_unknown[past_expiry], {})

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

    def _batch(self, lock: Any, change: Any, limit: int, values: dict[str, Any]) -> int:
        def work(connection: Connection) -> int:
            ids = list(connection.execute(lock, {**values, "b_limit": limit}).scalars())
            if not ids:
                return 0
            return connection.execute(change, {**values, "b_ids": ids}).rowcount

        return self._runner.run_locked(work)

    def _count(self, statement: Any, values: dict[str, Any]) -> int:
        return int(
            self._runner.run(lambda c: c.execute(statement, values).scalar_one())
        )
