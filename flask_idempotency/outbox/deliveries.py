"""
All SQL on deliveries: each method is one move or one question.

    (missing) --add--> pending --mark_published--> published --end--> done, failed, ...
    pending --claim_due, mark_unpublished, release--> pending
    published, repeatable, no end --claim_due--> published, with a publisher again
    pending, published --claim_due--> expired, dead
    failed, dead --retry--> pending
    ended long ago --purge--> (missing)
"""

from __future__ import annotations

import random
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import IntegrityError

from flask_idempotency.keys import new_id
from flask_idempotency.lifecycle import LAST_ERROR_LENGTH, DeliveryState
from flask_idempotency.models import delivery_table
from flask_idempotency.store.rows import instant_of, text_of
from flask_idempotency.store.runner import RecordLocked, Runner

from .models import LEASE_SECONDS, Batch, Delivery, DeliveryStats, DeliveryView
from .statements import GIVEN_COLUMNS, DeliveryStatements

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from uuid import UUID

    from sqlalchemy import Connection, Row, Table

    from flask_idempotency.config import Config
    from flask_idempotency.store.connections import Connections
    from flask_idempotency.store.dialects import Dialect

#: How often publishing is begun before a delivery is dead.
MAX_PUBLISHES = 25
# After a failure: jittered, so that a broker that comes back meets no crowd. All tries
# together outlast a broker that is away for an hour.
_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 2.0, 1800.0
# After a success that no end has followed: 25 of them last less than two days, which
# must be shorter than the life of the records by which work guards itself.
_FIRST_REPEAT_SECONDS, _LONGEST_REPEAT_SECONDS = 300.0, 7200.0
RETRYABLE_STATES = frozenset({DeliveryState.DEAD, DeliveryState.FAILED})
_ENDS = frozenset(DeliveryState) - {DeliveryState.PENDING, DeliveryState.PUBLISHED}


class Deliveries:
    """
    Keeps the messages that are published after the commit of their rows.

    Args:
        record_table: The record's table, beside which the deliveries' is.
        dialect: Speaks for the database.
        connections: Where statements run that are durable on their own.
        config: Says how long ended deliveries are kept.
    """

    def __init__(
        self,
        record_table: Table,
        dialect: Dialect,
        connections: Connections,
        config: Config,
    ) -> None:
        self._table = delivery_table(record_table)
        self._dialect = dialect
        self._runner = Runner(dialect, connections, self._table.name)
        self._config = config

    @cached_property
    def _sql(self) -> DeliveryStatements:
        """Built at first use: most processes of an application send no messages."""
        return DeliveryStatements(self._table, self._dialect)

    def add(
        self,
        delivery: Delivery,
        connection: Connection,
        *,
        due_in_seconds: float = 0.0,
        expires_in_seconds: float | None = None,
    ) -> bool:
        """
        Write a delivery in the transaction of the business rows: missing to pending.

        It is leased to its writer, who publishes it first, right after the commit. A
        dispatcher does so if the lease has ended without.

        Args:
            delivery: What to publish.
            connection: The session's connection to the engine of the records.
            due_in_seconds: When the work is wanted: a dispatcher does not publish
                before, and waits from then on for the work to end.
            expires_in_seconds: When the message's life ends.

        Returns:
            False if there is a delivery with this kind and task id already, or one with
            this unique key is open. The transaction can go on.
        """
        values = {
            **{f"b_{name}": getattr(delivery, name) for name in GIVEN_COLUMNS},
            **self._texts(
                kind=delivery.kind,
                name=delivery.name,
                tenant_id=delivery.tenant_id,
                user_id=delivery.user_id,
                task_id=delivery.task_id,
                unique_key=delivery.unique_key,
            ),
            "b_owner_token": delivery.token,
            "b_lease": LEASE_SECONDS,
            "b_due": due_in_seconds,
            "b_expires": expires_in_seconds,
        }
        ends = expires_in_seconds is not None
        try:
            return connection.execute(self._sql.insert[ends], values).rowcount == 1
        except IntegrityError as error:  # MySQL and MariaDB
            for constraint in ("task_id", "unique_key"):
                name = f"uq_{self._table.name}_{constraint}"
                if self._dialect.is_duplicate(error, name, self._table.name):
                    return False
            raise

    def claim_due(self, limit: int, kinds: Collection[str]) -> Batch:
        """
        Lease the deliveries whose time has come, before any of them is published.

        Those whose message's life is over are ended as expired, those that were
        published or tried too often as dead. What somebody has locked is left alone.

        Args:
            limit: Most deliveries of the batch.
            kinds: Those that this process can publish.

        Raises:
            IdempotencyStoreUnavailable: If the database cannot do it now.
        """
        # Every try with one token: a batch whose COMMIT was not answered is still ours.
        token = new_id()
        kind = self._dialect.bind_text
        due = {"b_limit": limit, "b_kinds": [kind(name) for name in kinds]}

        def work(connection: Connection) -> Batch:
            rows = connection.execute(self._sql.lock_due, due).all()
            gone = [row.id for row in rows if row.gone]
            tired = [
                row.id
                for row in rows
                if not row.gone and row.publishes >= MAX_PUBLISHES
            ]
            over = {*gone, *tired}
            ids = [row.id for row in rows if row.id not in over]
            return Batch(
                expired=self._change(connection, self._sql.expire, gone),
                dead=self._change(
                    connection,
                    self._sql.bury,
                    tired,
                    b_max=MAX_PUBLISHES,
                    **self._texts(
                        last_error=f"no end after {MAX_PUBLISHES} publishings"
                    ),
                ),
                deliveries=self._lease(connection, ids, token),
            )

        return self._runner.run_locked(work)

    def mark_published(self, delivery: Delivery) -> bool:
        """
        Note that a delivery was handed over: pending or published to published.

        Returns:
            Whether it was still leased to us. If not, the work has already ended, or
            somebody else publishes it too.
        """
        pause = _grown(
            _FIRST_REPEAT_SECONDS, delivery.publishes, _LONGEST_REPEAT_SECONDS
        )
        return self._own(self._sql.mark_published, delivery, b_backoff=pause)

    def mark_unpublished(self, delivery: Delivery, error: str) -> bool:
        """
        Note that publishing failed: due again after a pause, or dead.

        Args:
            delivery: A delivery that is leased to us.
            error: What failed, without values of the request: the error's class.

        Returns:
            Whether it is dead now.
        """
        values: dict[str, Any] = self._texts(last_error=error[:LAST_ERROR_LENGTH])
        if delivery.publishes >= MAX_PUBLISHES:
            return self._own(self._sql.bury_own, delivery, **values)
        longest = _grown(
            _FIRST_RETRY_SECONDS, delivery.publishes, _LONGEST_RETRY_SECONDS
        )
        values["b_backoff"] = random.uniform(0, longest)  # noqa: S311 - jitter
        self._own(self._sql.mark_unpublished, delivery, **values)
        return False

    def release(self, delivery: Delivery) -> bool:
        """Hand back a delivery that was not tried: it is due at once for others."""
        return self._own(self._sql.release, delivery)

    def end(
        self,
        kind: str,
        task_id: str,
        state: DeliveryState,
        *,
        error: str | None = None,
        connection: Connection | None = None,
    ) -> bool:
        """
        Note the end of the work: pending or published to an end. The first end stays.

        Args:
            kind: The delivery's kind.
            task_id: Its task id.
            state: How it ended.
            error: What failed, without values of the request: the error's class.
            connection: The transaction of the work itself, if the end is a part of it.

        Returns:
            False if there is no such delivery, or if it has ended before.

        Raises:
            ValueError: If the state is no end.
        """
        if state not in _ENDS:
            message = f"'{state.value}' is no end of a delivery"
            raise ValueError(message)
        statement = self._sql.end(state, alone=connection is None)
        values = self._texts(
            kind=kind, task_id=task_id, last_error=error and error[:LAST_ERROR_LENGTH]
        )
        return self._runner.run(
            lambda c: c.execute(statement, values).rowcount == 1, connection
        )

    def find_open(self, kind: str, name: str, unique_key: str) -> DeliveryView | None:
        """Read the committed delivery that holds a unique key."""
        values = self._texts(kind=kind, name=name, unique_key=unique_key)
        return self._one(self._sql.find_open, values)

    def look(self, kind: str, task_id: str) -> DeliveryView | None:
        """Read a delivery, without any lock."""
        return self._one(self._sql.look, self._texts(kind=kind, task_id=task_id))

    def list(
        self,
        *,
        limit: int,
        state: DeliveryState | None = None,
        kind: str | None = None,
        name: str | None = None,
        tenant_id: str | None = None,
    ) -> tuple[DeliveryView, ...]:
        """
        Read the newest deliveries first.

        Args:
            limit: Most of them.
            state: Only those in this state.
            kind: Only those of this kind.
            name: Only those with this name.
            tenant_id: Only this tenant's.
        """
        filters = _given(state=state, kind=kind, name=name, tenant_id=tenant_id)
        statement = self._sql.some(*filters)
        values = {"b_limit": limit, **self._texts(**filters)}
        rows = self._runner.run(lambda c: c.execute(statement, values).all())
        return tuple(_view_of(row) for row in rows)

    def stats(self) -> DeliveryStats:
        """Count the deliveries."""

        def work(connection: Connection) -> DeliveryStats:
            due, seconds = connection.execute(self._sql.count_due).one()
            counts = {
                (text_of(kind), DeliveryState(state)): number
                for kind, state, number in connection.execute(self._sql.count)
            }
            oldest = None if seconds is None else max(0.0, -float(seconds))
            return DeliveryStats(counts=counts, due=due, oldest_due_seconds=oldest)

        return self._runner.run(work)

    def count_retryable(self, state: DeliveryState, **chosen: str | None) -> int:
        """Count what ``retry`` would move."""
        filters = _given(**chosen)
        count, _, _ = self._sql.retryable(*filters)
        return self._count(count, self._texts(state=state.value, **filters))

    def retry(self, state: DeliveryState, *, limit: int, **chosen: str | None) -> int:
        """
        Move one batch of failed or dead deliveries back to pending, to be published.

        A unique key is not held again: another delivery may have it by now. What is
        past its message's life stays as it is.

        Args:
            state: ``failed`` or ``dead``.
            limit: Most deliveries of the batch.
            chosen: Values of ``kind``, ``name``, ``tenant_id``, ``task_id``.

        Returns:
            How many were moved.

        Raises:
            ValueError: If what is in this state cannot be retried.
        """
        if state not in RETRYABLE_STATES:
            message = f"a delivery that is '{state.value}' cannot be retried"
            raise ValueError(message)
        filters = _given(**chosen)
        _, lock, change = self._sql.retryable(*filters)
        values = self._texts(state=state.value, **filters)
        return self._batch(lock, change, limit, values)

    def count_purgeable(self, *, older_than_seconds: float | None = None) -> int:
        """Count what ``purge`` would delete."""
        count, _, _ = self._sql.purgeable()
        return self._count(count, self._age(older_than_seconds))

    def purge(self, *, limit: int, older_than_seconds: float | None = None) -> int:
        """
        Delete one batch of ended deliveries, never an open one.

        Args:
            limit: Most deliveries of the batch.
            older_than_seconds: Time since their end; the application's retention if
                not given.

        Returns:
            How many were deleted.
        """
        _, lock, change = self._sql.purgeable()
        return self._batch(lock, change, limit, self._age(older_than_seconds))

    def _lease(
        self, connection: Connection, ids: Sequence[UUID], token: UUID
    ) -> tuple[Delivery, ...]:
        if not ids:
            return ()
        values = {"b_ids": ids, "b_owner_token": token}
        connection.execute(self._sql.lease, {**values, "b_lease": LEASE_SECONDS})
        rows = connection.execute(self._sql.leased, values).all()
        return tuple(_delivery_of(row, token) for row in rows)

    def _change(
        self, connection: Connection, statement: Any, ids: Sequence[UUID], **values: Any
    ) -> int:
        if not ids:
            return 0
        return connection.execute(statement, {**values, "b_ids": ids}).rowcount

    def _batch(self, lock: Any, change: Any, limit: int, values: dict[str, Any]) -> int:
        def work(connection: Connection) -> int:
            found = (
                connection.execute(lock, {**values, "b_limit": limit}).scalars().all()
            )
            return self._change(connection, change, found, **values)

        return self._runner.run_locked(work)

    def _count(self, statement: Any, values: dict[str, Any]) -> int:
        return int(
            self._runner.run(lambda c: c.execute(statement, values).scalar_one())
        )

    def _own(self, statement: Any, delivery: Delivery, **values: Any) -> bool:
        parameters = {"b_id": delivery.id, "b_owner_token": delivery.token, **values}
        try:
            return self._runner.run(
                lambda c: c.execute(statement, parameters).rowcount == 1
            )
        except RecordLocked:
            # The work itself is just writing its end.
            return False

    def _one(self, statement: Any, values: dict[str, Any]) -> DeliveryView | None:
        row = self._runner.run(lambda c: c.execute(statement, values).first())
        return _view_of(row) if row is not None else None

    def _texts(self, **texts: str | None) -> dict[str, Any]:
        bind = self._dialect.bind_text
        # The one column that is no byte-exact text.
        plain = {"state"}
        return {
            f"b_{name}": text if text is None or name in plain else bind(text)
            for name, text in texts.items()
        }

    def _age(self, older_than_seconds: float | None) -> dict[str, Any]:
        if older_than_seconds is None:
            older_than_seconds = self._config.retention_seconds
        return {"b_older_than": older_than_seconds}


def _given(**filters: str | None) -> dict[str, str]:
    return {name: value for name, value in filters.items() if value is not None}


def _grown(first: float, times: int, longest: float) -> float:
    """Return a pause that doubles each time."""
    return min(longest, first * 2.0 ** (times - 1))


def _delivery_of(row: Row[Any], token: UUID) -> Delivery:
    texts = ("kind", "name", "tenant_id", "user_id", "task_id", "unique_key")
    return Delivery(
        **{name: text_of(getattr(row, name)) for name in texts},
        id=row.id,
        record_id=row.record_id,
        payload=bytes(row.payload),
        repeatable=bool(row.repeatable),
        publishes=row.publishes,
        token=token,
    )


def _view_of(row: Row[Any]) -> DeliveryView:
    values = {name: getattr(row, name) for name in DeliveryView.__dataclass_fields__}
    for name, value in values.items():
        values[name] = instant_of(value) if name.endswith("_at") else text_of(value)
    values["state"] = DeliveryState(row.state)
    values["leased"] = bool(row.leased)
    return DeliveryView(**values)
