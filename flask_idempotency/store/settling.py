"""The statements on records of unknown outcome."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, and_, bindparam, null, or_, update

from flask_idempotency.lifecycle import Status
from flask_idempotency.rules import UNKNOWN

from .statements import ANSWER_COLUMNS, Statements

if TYPE_CHECKING:
    from sqlalchemy import Select, Update


@dataclass(frozen=True, kw_only=True)
class Resolvable:
    """How an operator settles a record: lock it, then one of the updates."""

    lock: Select[Any]
    update: dict[Status, Update]


class SettlingStatements(Statements):
    """Every statement that the store sends, with those that settle a call."""

    @cached_property
    def lock_unknown(self) -> Select[Any]:
        """Locks a record of unknown outcome."""
        return self._lock(self._scope, self._unknown)

    @cached_property
    def _unknown(self) -> ColumnElement[bool]:
        return and_(self._any_of(UNKNOWN), self._same())

    @cached_property
    def postpone(self) -> dict[bool, Update]:
        """Leaves a task to its next message; for whether that may follow effects."""
        return {
            True: self._postpone(self._table.c.open_step.is_(None)),
            False: self._postpone(self._no_effects()),
        }

    @cached_property
    def resolvable(self) -> dict[bool, Resolvable]:
        """For whether a call that still has its lease is settled, too."""
        return {
            force: Resolvable(
                lock=self._lock(self._scope, self._resolvable(force=force)),
                update={
                    status: self._resolve(status, self._resolvable(force=force))
                    for status in (Status.SUCCEEDED, Status.FAILED, Status.EXPIRED)
                },
            )
            for force in (False, True)
        }

    @cached_property
    def recover(self) -> Update:
        """Give a call of unknown outcome to who finds out; its effects stay noted."""
        columns = self._table.c
        return (
            update(self._table)
            .where(columns.id == self._bind("id"), self._unknown)
            .values(
                status=Status.PROCESSING.value,
                version=columns.version + 1,
                # So that a waking owner does not take what is recovered for its own.
                attempts=columns.attempts + 1,
                owner_token=self._bind("owner_token"),
                locked_until=self._later("lease"),
            )
        )

    @cached_property
    def hand_back(self) -> Update:
        """Gives a call up: nobody's, and lapsed."""
        columns = self._table.c
        # What is handed back for another try is no crash.
        spent = bindparam("b_spent", type_=columns.attempts.type)
        return (
            update(self._table)
            .where(self._owned)
            .values(
                version=columns.version + 1,
                attempts=columns.attempts - spent,
                owner_token=null(),
                locked_until=self._dialect.now(),
            )
        )

    def _postpone(self, allowed: ColumnElement[bool]) -> Update:
        """Leave a task to its next message, whose run is one of its own."""
        return self.hand_back.where(allowed).values(
            retries=self._bind("retries"),
            request_hash=self._bind("request_hash"),
            # What is counted is crashes, and this is none.
            attempts=0,
            effects_committed_at=null(),
        )

    def _resolvable(self, *, force: bool) -> ColumnElement[bool]:
        # Whatever the hash is: an operator speaks of the key. And a failed call with
        # an open step need not have come to the end of its key's life.
        unknown = self._any_of(replace(r, same=None, gone=None) for r in UNKNOWN)
        processing = self._table.c.status == Status.PROCESSING.value
        return or_(processing, unknown) if force else unknown

    def _resolve(self, status: Status, resolvable: ColumnElement[bool]) -> Update:
        columns = self._table.c
        values = {name: self._bind(name) for name in ANSWER_COLUMNS}
        if status is Status.EXPIRED:
            lasts: Any = self._dialect.now()
        else:
            # It may be long past: duplicates get the answer for a whole life of a key.
            lasts = self._later("ttl")
        return self._end(
            and_(columns.id == self._bind("id"), resolvable),
            status=status,
            resolved_by=self._bind("resolved_by"),
            resolved_reason=self._bind("resolved_reason"),
            expires_at=lasts,
            **values,
        )
