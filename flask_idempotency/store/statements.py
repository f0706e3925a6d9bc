"""The statements on one record table, built once for a store."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    Boolean,
    ColumnElement,
    and_,
    bindparam,
    case,
    delete,
    exists,
    false,
    func,
    insert,
    literal,
    null,
    or_,
    select,
    true,
    union_all,
    update,
)
from sqlalchemy.dialects.postgresql import insert as pg_insert

from flask_idempotency.lifecycle import Status
from flask_idempotency.models import SCOPE_COLUMNS, scope_constraint
from flask_idempotency.rules import EXPIRABLE, UNKNOWN

from .conditions import Conditions

if TYPE_CHECKING:
    from uuid import UUID

    from sqlalchemy import Delete, Executable, Insert, Select, Update


#: What an ending writes of the answer.
ANSWER_COLUMNS = (
    "response_code",
    "response_headers",
    "response_body",
    "response_encoding",
    "failure",
)


@dataclass(frozen=True, kw_only=True)
class Endings:
    """The moves of an owner out of ``processing``."""

    mark_succeeded: Update
    mark_failed: Update
    release: Delete


class Statements(Conditions):
    """
    Every statement that the store sends, for one table on one kind of database.

    Each is built when it is first needed: a process does not need them all.
    """

    @cached_property
    def constraint(self) -> str:
        """Name of the unique constraint by which a duplicate is known."""
        return str(scope_constraint(self._table).name)

    @cached_property
    def look(self) -> Select[Any]:
        """Reads the record of a scope."""
        return select(*self._view()).where(self._scope)

    @cached_property
    def look_by_id(self) -> Select[Any]:
        """Reads a record."""
        return select(*self._view()).where(self._table.c.id == self._bind("id"))

    @cached_property
    def lock_by_id(self) -> Select[Any]:
        """Locks a record, whatever its state is."""
        return self._lock(self._table.c.id == self._bind("id"))

    @cached_property
    def insert(self) -> Insert:
        """Claims a scope that has no record."""
        return insert(self._table).values(**self._new_row())

    @cached_property
    def insert_or_see(self) -> Executable:
        """Claims a scope or reads its record, on a connection of the store's own."""
        return self._insert_or_see(lazy_flush=True)

    @cached_property
    def insert_or_see_in_transaction(self) -> Executable:
        """Claims a scope or reads its record, in one of the application's."""
        return self._insert_or_see(lazy_flush=False)

    @cached_property
    def take_over(self) -> dict[bool, Update]:
        """Takes a locked record over; for whether failed ones count."""
        return {
            retry: self._take_over(self._takeable(retry_failed=retry))
            for retry in (False, True)
        }

    @cached_property
    def lock_takeable(self) -> dict[bool, Select[Any]]:
        """Locks a record that may be taken over; for whether failed ones count."""
        return {
            retry: self._lock(self._scope, self._takeable(retry_failed=retry))
            for retry in (False, True)
        }

    @cached_property
    def lock_exhausted(self) -> Select[Any]:
        """Locks a record whose every attempt died."""
        return self._lock(self._scope, self._exhausted())

    @cached_property
    def give_up(self) -> Update:
        """Marks such a record as failed."""
        return self._end(
            and_(self._table.c.id == self._bind("id"), self._exhausted()),
            status=Status.FAILED,
            failure=self._bind("failure"),
        )

    @cached_property
    def alone(self) -> Endings:
        """An owner's endings, as statements of their own."""
        return self._endings(alone=True)

    @cached_property
    def carried(self) -> Endings:
        """An owner's endings, inside a transaction of the application."""
        return self._endings(alone=False)

    @cached_property
    def lock_expirable(self) -> Select[Any]:
        """Locks records whose key's life is over."""
        return self._lock(self._any_of(EXPIRABLE), batch=True)

    @cached_property
    def expire(self) -> Update:
        """Marks them so."""
        return self._end(
            and_(self._table.c.id.in_(self._ids()), self._any_of(EXPIRABLE)),
            status=Status.EXPIRED,
        )

    @cached_property
    def count_expirable(self) -> Select[Any]:
        """Counts them."""
        return select(func.count()).where(self._any_of(EXPIRABLE))

    @cached_property
    def count_unknown(self) -> dict[bool, Select[Any]]:
        """Counts unknown outcomes: all, or those past the end of their key's life."""
        whatever = [replace(rule, same=None) for rule in UNKNOWN]
        past = [rule for rule in whatever if rule.gone is True]
        return {
            past_expiry: select(func.count()).where(self._any_of(rules))
            for past_expiry, rules in ((False, whatever), (True, past))
        }

    @cached_property
    def forget_leases(self) -> Delete:
        """Deletes the leases of owners."""
        return delete(self._leases).where(self._leases.c.owner_token.in_(self._ids()))

    @cached_property
    def purge_leases(self) -> Delete:
        """Deletes leases that are long over."""
        past = self._dialect.later(-self._bind_seconds("older_than"))
        return delete(self._leases).where(self._leases.c.until <= past)

    def renew(self, leases: dict[UUID, float]) -> Executable:
        """Build the renewal of some leases, each of its own length in seconds."""
        rows = [
            {"owner_token": token, "until": self._dialect.later(literal(seconds))}
            for token, seconds in leases.items()
        ]
        return self._dialect.upsert(self._leases, rows)

    def purgeable(self, *filters: str) -> tuple[Select[Any], Select[Any], Delete]:
        """
        Return how to count, lock and delete a batch of expired records.

        Args:
            filters: Names of scope columns that must equal their parameter.
        """
        columns = self._table.c
        condition = and_(
            columns.status == Status.EXPIRED.value,
            columns.expires_at
            <= self._dialect.later(-self._bind_seconds("older_than")),
            ~self._has_open_delivery(),
            *(columns[name] == self._bind(name) for name in filters),
        )
        return (
            select(func.count()).where(condition),
            self._lock(condition, batch=True),
            delete(self._table).where(columns.id.in_(self._ids()), condition),
        )

    def _has_open_delivery(self) -> ColumnElement[bool]:
        """Tell whether a message of the operation is not known to have come to its end."""
        deliveries = self._deliveries.c
        return exists().where(
            deliveries.record_id == self._table.c.id, deliveries.ended_at.is_(None)
        )

    def _new_row(self) -> dict[str, ColumnElement[Any]]:
        bound = (
            "id",
            "operation_id",
            "owner_token",
            *SCOPE_COLUMNS,
            "request_hash",
            "task_id",
            "outbox_event_id",
        )
        return {
            **{name: self._bind(name) for name in bound},
            "status": literal(Status.PROCESSING.value),
            "version": literal(1),
            "attempts": literal(1),
            "locked_until": self._later("lease"),
            "expires_at": self._later("ttl"),
            "created_at": self._dialect.now(),
        }

    def _insert_or_see(self, *, lazy_flush: bool) -> Executable:
        """
        Build PostgreSQL's claim: see the row that is there, or insert it, in one trip.

        The INSERT is left out where a row is seen, since even with ON CONFLICT it
        would wait for a transaction that is updating that row.

        `lazy_flush` saves the claim's own fsync. Nothing is lost by it: whatever
        becomes durable for this claim updates the same row later, and so flushes
        the claim first. The setting is local to the statement's transaction, so it
        must not be used inside one of the application's.
        """
        row = self._new_row()
        seen = select(*self._view()).where(self._scope).cte("seen")
        source = select(*row.values()).where(~exists(select(1).select_from(seen)))
        if lazy_flush:
            off = func.set_config("synchronous_commit", "off", true())
            source = source.where(off == "off", *self._dialect.short_wait())
        inserted = (
            pg_insert(self._table)
            .from_select(list(row), source)
            .on_conflict_do_nothing(constraint=self.constraint)
            # No more: a subquery on the leases would be about all records here.
            .returning(self._table.c.id)
            .cte("inserted")
        )
        nothing = select(true(), *(null() for _ in seen.c)).select_from(inserted)
        # Columns one by one: older releases of SQLAlchemy fill a CTE's own list of
        # them at the first compilation, which several threads may do at once.
        return union_all(select(false().label("inserted"), *seen.c), nothing)

    def _take_over(self, takeable: ColumnElement[bool]) -> Update:
        columns = self._table.c
        # Decided once, with the lock, so that no row is half old and half new.
        gone = bindparam("b_anew", type_=Boolean()) == true()

        def anew(fresh: Any, name: str) -> ColumnElement[Any]:
            """Give a column a new value only where a new operation starts."""
            return case((gone, fresh), else_=columns[name])

        return (
            update(self._table)
            .where(columns.id == self._bind("id"), takeable)
            # In this order: MySQL and MariaDB compute each assignment from the row as
            # the earlier ones left it.
            .ordered_values(
                (
                    columns.operation_id,
                    anew(self._bind("operation_id"), "operation_id"),
                ),
                (columns.attempts, case((gone, 1), else_=columns.attempts + 1)),
                (columns.task_id, anew(self._bind("task_id"), "task_id")),
                (
                    columns.outbox_event_id,
                    anew(self._bind("outbox_event_id"), "outbox_event_id"),
                ),
                (columns.retries, anew(null(), "retries")),
                (columns.steps, anew(null(), "steps")),
                (columns.open_step, anew(null(), "open_step")),
                (columns.created_at, anew(self._dialect.now(), "created_at")),
                (columns.expires_at, anew(self._later("ttl"), "expires_at")),
                (columns.request_hash, self._bind("request_hash")),
                (columns.owner_token, self._bind("owner_token")),
                (columns.status, Status.PROCESSING.value),
                (columns.version, columns.version + 1),
                (columns.locked_until, self._later("lease")),
                (columns.effects_committed_at, null()),
                (columns.response_code, null()),
                (columns.response_headers, null()),
                (columns.response_body, null()),
                (columns.response_encoding, null()),
                (columns.failure, null()),
                (columns.resolved_by, null()),
                (columns.resolved_reason, null()),
                (columns.completed_at, null()),
            )
        )

    def _end(
        self, condition: ColumnElement[bool], *, status: Status, **values: Any
    ) -> Update:
        columns = self._table.c
        if status is not Status.EXPIRED:
            values["completed_at"] = self._dialect.now()
        return (
            update(self._table)
            .where(condition)
            .values(
                status=status.value,
                version=columns.version + 1,
                owner_token=null(),
                locked_until=null(),
                **values,
            )
        )

    @cached_property
    def mark_effects(self) -> Update:
        """Notes that a part of an operation becomes durable."""
        columns = self._table.c
        first = func.coalesce(columns.effects_committed_at, self._dialect.now())
        return (
            update(self._table)
            .where(self._owned)
            .values(version=columns.version + 1, effects_committed_at=first)
        )

    @cached_property
    def write_steps(self) -> Update:
        """Keeps what is known of an operation's steps."""
        columns = self._table.c
        return (
            update(self._table)
            .where(self._owned, *self._dialect.short_wait())
            .values(
                version=columns.version + 1,
                steps=self._bind("steps"),
                open_step=self._bind("open_step"),
            )
        )

    def _endings(self, *, alone: bool) -> Endings:
        # Inside a transaction its own settings rule how long it waits.
        owned = and_(self._owned, *(self._dialect.short_wait() if alone else ()))
        # Steps that have all failed for certain are named by the caller.
        steps = self._table.c.steps
        nothing_ran = or_(steps.is_(None), steps == self._bind("steps"))
        return Endings(
            mark_succeeded=self._answered(owned, Status.SUCCEEDED, effects=not alone),
            mark_failed=self._answered(owned, Status.FAILED, effects=False),
            release=delete(self._table).where(owned, self._no_effects(), nothing_ran),
        )

    def _answered(
        self, owned: ColumnElement[bool], status: Status, *, effects: bool
    ) -> Update:
        columns = self._table.c
        values: dict[str, Any] = {name: self._bind(name) for name in ANSWER_COLUMNS}
        if effects:
            values["effects_committed_at"] = func.coalesce(
                columns.effects_committed_at, self._dialect.now()
            )
        # A call that ends late still owes its duplicates half a life of the key.
        half = self._later("half_ttl")
        values["expires_at"] = case(
            (columns.expires_at < half, self._later("ttl")), else_=columns.expires_at
        )
        return self._end(owned, status=status, **values)
