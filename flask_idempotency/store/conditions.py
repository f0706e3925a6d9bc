"""
The state of a record as SQL: what a reader sees, and on what a move depends.

Each condition is made from the rows of the decision table in ``rules``, so that an
UPDATE repeats exactly what was decided on.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    ColumnElement,
    Float,
    and_,
    bindparam,
    exists,
    false,
    func,
    or_,
    select,
)

from flask_idempotency.lifecycle import Status, Verdict
from flask_idempotency.models import SCOPE_COLUMNS, delivery_table, lease_table
from flask_idempotency.rules import RETRYABLE, RULES, TAKEABLE, Rule

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy import Select, Table

    from .dialects import Dialect

#: The columns that a reader of a record gets.
_RECORD_COLUMNS = (
    "id",
    "operation_id",
    *SCOPE_COLUMNS,
    "request_hash",
    "status",
    "owner_token",
    "attempts",
    "retries",
    "response_code",
    "response_headers",
    "response_body",
    "response_encoding",
    "task_id",
    "outbox_event_id",
    "failure",
    "resolved_by",
    "resolved_reason",
    "effects_committed_at",
    "steps",
    "open_step",
    "locked_until",
    "expires_at",
    "created_at",
    "completed_at",
)


class Conditions:
    """
    What can be asked of the records of one table, on one kind of database.

    Bound parameters start with ``b_``: an UPDATE reserves the columns' own names.
    """

    def __init__(self, table: Table, dialect: Dialect) -> None:
        self._table = table
        self._leases = lease_table(table)
        self._deliveries = delivery_table(table)
        self._dialect = dialect
        columns = table.c
        self._scope = and_(*(columns[n] == self._bind(n) for n in SCOPE_COLUMNS))
        self._owned = and_(
            columns.id == self._bind("id"),
            columns.owner_token == self._bind("owner_token"),
            columns.status == Status.PROCESSING.value,
        )

    def _bind(self, column: str) -> ColumnElement[Any]:
        return bindparam(f"b_{column}", type_=self._table.c[column].type)

    def _bind_seconds(self, name: str) -> Any:
        return bindparam(f"b_{name}", type_=Float())

    def _ids(self) -> Any:
        return bindparam("b_ids", expanding=True, type_=self._table.c.id.type)

    def _later(self, name: str) -> ColumnElement[Any]:
        return self._dialect.later(self._bind_seconds(name))

    def _view(self) -> list[ColumnElement[Any]]:
        columns, now = self._table.c, self._dialect.now
        left = self._dialect.seconds_until(columns.locked_until)
        return [
            *(columns[name] for name in _RECORD_COLUMNS),
            func.coalesce(self._lapsed(), false()).label("lapsed"),
            (columns.expires_at <= now()).label("gone"),
            func.coalesce(left, 0.0).label("lease_seconds_left"),
            func.coalesce(self._renewed_left(), 0.0).label("renewed_seconds_left"),
        ]

    def _lapsed(self) -> ColumnElement[bool]:
        """Tell whether the lease is over, which a renewal prolongs."""
        now = self._dialect.now()
        renewed = exists().where(
            self._leases.c.owner_token == self._table.c.owner_token,
            self._leases.c.until > now,
        )
        return and_(self._table.c.locked_until <= now, ~renewed)

    def _renewed_left(self) -> ColumnElement[Any]:
        leases = self._leases.c
        return (
            select(self._dialect.seconds_until(leases.until))
            .where(leases.owner_token == self._table.c.owner_token)
            .scalar_subquery()
        )

    def _same(self) -> ColumnElement[bool]:
        return self._table.c.request_hash == self._bind("request_hash")

    @cached_property
    def _tests(self) -> dict[tuple[str, bool], ColumnElement[bool]]:
        """Hold the test of each fact; built once, since many statements share them."""
        columns, now = self._table.c, self._dialect.now
        lapsed = self._lapsed()
        no_effects, no_open_step = self._no_effects(), self._no_open_step()
        return {
            ("lapsed", True): lapsed,
            ("lapsed", False): ~lapsed,
            ("effects", True): ~no_effects,
            ("effects", False): no_effects,
            ("open_step", True): ~no_open_step,
            ("open_step", False): no_open_step,
            ("gone", True): columns.expires_at <= now(),
            ("gone", False): columns.expires_at > now(),
            ("same", True): self._same(),
            ("same", False): columns.request_hash != self._bind("request_hash"),
        }

    def _condition(self, rule: Rule) -> ColumnElement[bool]:
        return and_(
            self._table.c.status == rule.status.value,
            *(self._tests[item] for item in rule.conditions().items()),
        )

    def _no_effects(self) -> ColumnElement[bool]:
        columns = self._table.c
        return and_(columns.effects_committed_at.is_(None), columns.open_step.is_(None))

    def _no_open_step(self) -> ColumnElement[bool]:
        columns = self._table.c
        return or_(columns.open_step.is_(None), columns.resolved_by.is_not(None))

    def _any_of(self, rules: Iterable[Rule]) -> ColumnElement[bool]:
        return or_(*(self._condition(rule) for rule in rules))

    def _takeable(self, *, retry_failed: bool) -> ColumnElement[bool]:
        return self._any_of((*TAKEABLE, RETRYABLE) if retry_failed else TAKEABLE)

    def _exhausted(self) -> ColumnElement[bool]:
        lapsed = [r for r in RULES if r.verdict is Verdict.LEASE_LAPSED]
        attempts = self._table.c.attempts >= bindparam("b_max_attempts")
        return and_(self._any_of(lapsed), attempts)

    def _lock(
        self, *conditions: ColumnElement[bool], batch: bool = False
    ) -> Select[Any]:
        """
        Build a locking SELECT of ids that nobody else has locked.

        With each id comes whether the record starts a new operation when taken.
        ``key_share``: rows of the application may refer to the record.
        """
        columns = self._table.c
        anew = or_(
            columns.expires_at <= self._dialect.now(),
            columns.status == Status.EXPIRED.value,
        )
        query = select(columns.id, anew.label("anew")).where(*conditions)
        if batch:
            query = query.limit(bindparam("b_limit"))
        return query.with_for_update(skip_locked=True, key_share=True)
