"""The statements on the table of deliveries, built once for an application."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    ColumnElement,
    Float,
    and_,
    bindparam,
    case,
    delete,
    func,
    literal,
    null,
    or_,
    select,
    update,
)

from flask_idempotency.lifecycle import DeliveryState

if TYPE_CHECKING:
    from sqlalchemy import Insert, Select, Table, Update

    from flask_idempotency.store.dialects import Dialect

#: The columns of a new row that its writer gives.
GIVEN_COLUMNS = (
    "id",
    "kind",
    "name",
    "tenant_id",
    "user_id",
    "record_id",
    "task_id",
    "unique_key",
    "payload",
    "repeatable",
    "publishes",
)
_VIEW_COLUMNS = (
    "id",
    "kind",
    "name",
    "tenant_id",
    "user_id",
    "record_id",
    "task_id",
    "unique_key",
    "repeatable",
    "state",
    "publishes",
    "due_at",
    "expires_at",
    "last_error",
    "created_at",
    "published_at",
    "ended_at",
)
_UNENDED = (DeliveryState.PENDING.value, DeliveryState.PUBLISHED.value)


class DeliveryStatements:
    """
    Every statement on deliveries, for one table on one kind of database.

    Bound parameters start with ``b_``: an UPDATE reserves the columns' own names.
    """

    def __init__(self, table: Table, dialect: Dialect) -> None:
        self._table = table
        self._dialect = dialect
        columns = table.c
        # As a subquery, since PostgreSQL uses no index for a comparison with a clock
        # that moves during the statement.
        self._now = select(dialect.now()).scalar_subquery()
        self._unended = columns.state.in_(_UNENDED)
        self._named = and_(
            columns.kind == self._bind("kind"), columns.task_id == self._bind("task_id")
        )
        self._owned = and_(
            columns.id == self._bind("id"),
            columns.owner_token == self._bind("owner_token"),
            self._unended,
        )
        chosen = columns.id.in_(self._ids())
        #: For whether the message's life has an end.
        self.insert = {ends: self._insert(ends=ends) for ends in (False, True)}
        self.lock_due = self._lock_due()
        self.expire = self._end(and_(chosen, self._due(), self._gone()), "expired")
        self.bury = self._end(
            and_(chosen, self._due(), columns.publishes >= bindparam("b_max")),
            "dead",
            last_error=func.coalesce(columns.last_error, self._bind("last_error")),
        )
        self.lease = (
            update(table)
            .where(chosen, self._due())
            .values(
                publishes=columns.publishes + 1,
                owner_token=self._bind("owner_token"),
                leased_until=self._later("lease"),
            )
        )
        self.leased = (
            select(*(columns[name] for name in GIVEN_COLUMNS))
            .where(chosen, columns.owner_token == self._bind("owner_token"))
            .order_by(columns.due_at)
        )
        self.mark_published = self._mark_published()
        self.mark_unpublished = self._hand_back(
            due_at=self._after_backoff(), last_error=self._bind("last_error")
        )
        self.release = self._hand_back(publishes=columns.publishes - 1)
        self.bury_own = self._end(
            self._owned, "dead", alone=True, last_error=self._bind("last_error")
        )
        self.look = select(*self._view()).where(self._named)
        self.find_open = select(*self._view()).where(
            columns.kind == self._bind("kind"),
            columns.name == self._bind("name"),
            columns.unique_key == self._bind("unique_key"),
        )
        self.count = select(columns.kind, columns.state, func.count()).group_by(
            columns.kind, columns.state
        )
        self.count_due = select(
            func.count(), dialect.seconds_until(func.min(columns.due_at))
        ).where(self._due())

    def end(self, state: DeliveryState, *, alone: bool) -> Update:
        """Build the end of one delivery that has none yet."""
        condition = and_(self._named, self._unended)
        error = self._bind("last_error")
        return self._end(condition, state.value, alone=alone, last_error=error)

    def some(self, *filters: str) -> Select[Any]:
        """Build the list of the newest deliveries with given values."""
        return (
            select(*self._view())
            .where(*self._equal(filters))
            .order_by(self._table.c.id.desc())
            .limit(bindparam("b_limit"))
        )

    def retryable(self, *filters: str) -> tuple[Select[Any], Select[Any], Update]:
        """Return how to count, lock and move dead or failed ones back to pending."""
        columns = self._table.c
        condition = and_(
            columns.state == self._bind("state"),
            or_(columns.expires_at.is_(None), columns.expires_at > self._now),
            *self._equal(filters),
        )
        back = (
            update(self._table)
            .where(columns.id.in_(self._ids()), condition)
            .values(
                state=DeliveryState.PENDING.value,
                publishes=0,
                due_at=self._dialect.now(),
                last_error=null(),
                published_at=null(),
                ended_at=null(),
            )
        )
        return self._counted(condition), self._lock(condition), back

    def purgeable(self) -> tuple[Select[Any], Select[Any], Any]:
        """Return how to count, lock and delete what has ended long ago."""
        columns = self._table.c
        long_ago = select(
            self._dialect.later(-self._seconds("older_than"))
        ).scalar_subquery()
        condition = columns.ended_at <= long_ago
        chosen = columns.id.in_(self._ids())
        gone = delete(self._table).where(chosen, condition)
        # In the order of the index, or PostgreSQL may scan the table for a batch.
        lock = self._lock(condition).order_by(columns.ended_at)
        return self._counted(condition), lock, gone

    def _bind(self, column: str) -> ColumnElement[Any]:
        return bindparam(f"b_{column}", type_=self._table.c[column].type)

    def _ids(self) -> Any:
        return bindparam("b_ids", expanding=True, type_=self._table.c.id.type)

    def _seconds(self, name: str) -> ColumnElement[Any]:
        return bindparam(f"b_{name}", type_=Float())

    def _later(self, name: str) -> ColumnElement[Any]:
        return self._dialect.later(self._seconds(name))

    def _equal(self, filters: tuple[str, ...]) -> list[ColumnElement[bool]]:
        return [self._table.c[name] == self._bind(name) for name in filters]

    def _counted(self, condition: ColumnElement[bool]) -> Select[Any]:
        return select(func.count()).select_from(self._table).where(condition)

    def _lock(self, condition: ColumnElement[bool]) -> Select[Any]:
        return (
            select(self._table.c.id)
            .where(condition)
            .limit(bindparam("b_limit"))
            .with_for_update(skip_locked=True)
        )

    def _insert(self, *, ends: bool) -> Insert:
        values: dict[str, Any] = {name: self._bind(name) for name in GIVEN_COLUMNS}
        statement = self._dialect.insert_new(self._table).values(
            **values,
            state=DeliveryState.PENDING.value,
            # Its writer publishes it first, right after the commit.
            owner_token=self._bind("owner_token"),
            leased_until=self._later("lease"),
            due_at=self._later("due"),
            expires_at=self._later("expires") if ends else null(),
            created_at=self._dialect.now(),
        )
        return statement.execution_options(preserve_rowcount=True)

    def _view(self) -> list[ColumnElement[Any]]:
        columns = self._table.c
        leased = and_(columns.leased_until > self._now, self._unended)
        return [
            *(columns[name] for name in _VIEW_COLUMNS),
            func.length(columns.payload).label("payload_size"),
            func.coalesce(leased, literal(value=False)).label("leased"),
        ]

    def _due(self) -> ColumnElement[bool]:
        """Tell whether it is open, its time has come, and nobody is publishing it."""
        columns = self._table.c
        return and_(
            columns.ended_at.is_(None),
            columns.due_at <= self._now,
            or_(columns.leased_until.is_(None), columns.leased_until <= self._now),
        )

    def _gone(self) -> ColumnElement[bool]:
        return self._table.c.expires_at <= self._now

    def _lock_due(self) -> Select[Any]:
        columns = self._table.c
        kinds: Any = bindparam("b_kinds", expanding=True, type_=columns.kind.type)
        return (
            select(columns.id, columns.publishes, self._gone().label("gone"))
            .where(self._due(), columns.kind.in_(kinds))
            .order_by(columns.due_at)
            .limit(bindparam("b_limit"))
            .with_for_update(skip_locked=True)
        )

    def _after_backoff(self) -> ColumnElement[Any]:
        """Return the time of the next try: the pause counts from when it is due."""
        left = self._dialect.seconds_until(self._table.c.due_at)
        left = case((left > 0, left), else_=0.0)
        return self._dialect.later(left + self._seconds("backoff"))

    def _mark_published(self) -> Update:
        columns = self._table.c
        # Nobody need report the end of what is not repeatable.
        ended = case((columns.repeatable, columns.ended_at), else_=self._dialect.now())
        return self._hand_back(
            state=DeliveryState.PUBLISHED.value,
            due_at=self._after_backoff(),
            published_at=self._dialect.now(),
            ended_at=ended,
            last_error=null(),
        )

    def _hand_back(self, **values: Any) -> Update:
        return (
            update(self._table)
            .where(self._owned, *self._dialect.short_wait())
            .values(owner_token=null(), leased_until=null(), **values)
        )

    def _end(
        self,
        condition: ColumnElement[bool],
        state: str,
        *,
        alone: bool = False,
        **values: Any,
    ) -> Update:
        # Inside a transaction its own settings rule how long it waits.
        wait = self._dialect.short_wait() if alone else ()
        return (
            update(self._table)
            .where(condition, *wait)
            .values(
                state=state,
                unique_key=null(),
                owner_token=null(),
                leased_until=null(),
                ended_at=self._dialect.now(),
                **values,
            )
        )
