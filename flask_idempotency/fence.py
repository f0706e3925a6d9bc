"""
The fence that every real commit of a running call passes.

It sits in the engine's commit event: whichever session or connection commits, the
record is written in that very transaction under its owner's token, or the transaction
is rolled back. So an owner whose record was taken over commits nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import event
from sqlalchemy.exc import InvalidRequestError

from .exceptions import IdempotencyConfigError, LeaseLost
from .unit_of_work import connection_of, current_call, write_ending

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TypeGuard

    from sqlalchemy import Connection, Engine
    from sqlalchemy.engine import ExceptionContext

    from .lifecycle import Claim
    from .store import IdempotencyStore
    from .unit_of_work import Call, Ending

_LEDGER = "flask_idempotency"
_SAVEPOINT = re.compile(
    r"\s*(SAVEPOINT|RELEASE|ROLLBACK)\s+(?:TO\s+)?(?:SAVEPOINT\s+)?[`\"]?(\w+)",
    re.IGNORECASE,
)
_LOST = (
    "The record of this call was taken over or removed while it ran, so its "
    "transaction was rolled back. The lease was too short, or the process stood still."
)
_ONE_COMMIT = (
    "An atomic call is committed once, by its guard, and this commit is another one: it "
    "was rolled back. Use db.session, or a session that register_session() knows; or do "
    "it outside of the call."
)
_COMMITTING_STATEMENT = (
    "This statement would commit the transaction of an atomic call, or begin another: "
    "'{statement}'. Run it outside of the call, as a migration."
)
_ABORTED = (
    "The server has aborted this transaction, so its commit would be a rollback. "
    "An error was swallowed after the flush, in a listener of the session?"
)


@dataclass
class _Ledger:
    """
    What one open transaction holds for guarded calls.

    Attributes:
        wrote_at: How many savepoints were open when it may have changed data, the
            fewest of what is not undone; ``None`` if it has not.
        released: Something was done in a savepoint that is released by now.
        savepoints: Names of those that are open.
        held: Calls whose effect and ending it carries, each with the number of
            savepoints that were open then: a rollback to one of these undoes it.
    """

    wrote_at: int | None = None
    released: bool = False
    savepoints: list[str] = field(default_factory=list)
    held: list[tuple[int, Call]] = field(default_factory=list)

    def follow(self, statement: str) -> None:
        """Keep book of savepoints; the engine's events do not tell their names."""
        found = _SAVEPOINT.match(statement)
        if found is None:
            return
        verb, name = found[1].upper(), found[2]
        if verb == "SAVEPOINT":
            self.savepoints.append(name)
        elif name in self.savepoints:
            depth = self.savepoints.index(name)
            if verb == "ROLLBACK":
                self.undo_after(depth)
            else:
                del self.savepoints[depth:]
                self.released = True
                if self.wrote_at is not None:
                    self.wrote_at = min(depth, self.wrote_at)
                self.held = [(min(depth, at), call) for at, call in self.held]

    def note_write(self) -> None:
        """Note that data may have been changed now."""
        depth = len(self.savepoints)
        self.wrote_at = depth if self.wrote_at is None else min(depth, self.wrote_at)

    def undo(self) -> None:
        """Drop what the whole transaction did."""
        self.undo_after(-1)

    def undo_after(self, depth: int) -> None:
        """Drop what was done since the savepoint at `depth` was set."""
        del self.savepoints[max(depth, 0) :]
        if self.wrote_at is not None and self.wrote_at > depth:
            self.wrote_at = None
        for at, call in self.held:
            if at > depth:
                call.settled = False
                if call.joined:
                    call.claim = None  # its record was rolled back, too
        self.held = [(at, call) for at, call in self.held if at <= depth]


def has_written(connection: Connection, *, unknown: bool = True) -> bool:
    """
    Tell whether the open transaction may have changed data.

    Args:
        connection: Of the engine of the records.
        unknown: The answer for a transaction that is older than the fence.
    """
    ledger: _Ledger | None = connection.info.get(_LEDGER)
    return unknown if ledger is None else ledger.wrote_at is not None


def keeps_work(connection: Connection) -> bool:
    """Tell whether the open transaction still has what was done in a savepoint."""
    ledger: _Ledger | None = connection.info.get(_LEDGER)
    return ledger is not None and ledger.released


def hold(call: Call) -> None:
    """Tie a call to the session's transaction: they are committed or undone together."""
    ledger = connection_of(call).info.setdefault(_LEDGER, _Ledger(wrote_at=0))
    if all(call is not held for _, held in ledger.held):
        ledger.held.append((len(ledger.savepoints), call))


def attach_fence(engine: Engine, store: IdempotencyStore) -> None:
    """
    Put the fence on an engine, once.

    Not fenced are raw driver connections, COMMIT sent as text, AUTOCOMMIT
    connections and threads that do not carry the context of the call.
    """
    fence = _Fence(store)
    for name in (
        "begin",
        "begin_twophase",
        "before_cursor_execute",
        "savepoint",
        "rollback",
        "rollback_twophase",
        "commit",
        "prepare_twophase",
        "handle_error",
    ):
        event.listen(engine, name, getattr(fence, name))


class _Fence:
    """The listeners of one engine, for the records of one store."""

    def __init__(self, store: IdempotencyStore) -> None:
        self._store = store

    def begin(self, connection: Connection) -> None:
        connection.info[_LEDGER] = _Ledger()

    def begin_twophase(self, connection: Connection, _xid: Any) -> None:
        connection.info[_LEDGER] = _Ledger()

    def before_cursor_execute(
        self,
        connection: Connection,
        _cursor: Any,
        statement: str,
        _parameters: Any,
        _context: Any,
        _executemany: bool,  # noqa: FBT001 - SQLAlchemy's signature
    ) -> None:
        ledger = connection.info.get(_LEDGER)
        if ledger is None:
            return
        dialect, call = self._store.dialect, current_call.get()
        if call is not None:
            ledger.follow(statement)
        if dialect.may_write(statement):
            ledger.note_write()
        if call is not None and dialect.commits(statement):
            if call.atomic is not None:
                text = statement.strip().split("\n")[0]
                raise IdempotencyConfigError(
                    _COMMITTING_STATEMENT.format(statement=text)
                )
            self.commit(connection)
            connection.info[_LEDGER] = _Ledger(wrote_at=0)

    def savepoint(self, connection: Connection, _name: str | None) -> None:
        if current_call.get() is not None:
            self._store.dialect.begin_before_savepoint(connection)

    def rollback(self, connection: Connection) -> None:
        if ledger := connection.info.get(_LEDGER):
            ledger.undo()

    def rollback_twophase(self, connection: Connection, _xid: Any, _: Any) -> None:
        self.rollback(connection)

    def handle_error(self, context: ExceptionContext) -> None:
        """Undo what a failed COMMIT, or a server that rolled back, has undone."""
        connection, error = context.connection, context.sqlalchemy_exception
        ledger = connection.info.get(_LEDGER) if _is_usable(connection) else None
        if ledger is None or error is None:
            return
        committing = any(call.settled for _, call in ledger.held)
        undone = self._store.dialect.ends_transaction(error)
        if committing or undone:
            ledger.undo()
        call = current_call.get()
        atomic = call.atomic if call else None
        if undone and atomic is not None and atomic.connection is connection:
            atomic.undone = True

    def prepare_twophase(self, connection: Connection, _xid: Any) -> None:
        self.commit(connection)

    def commit(self, connection: Connection) -> None:
        current = current_call.get()
        ledger = connection.info.get(_LEDGER)
        if current is None or ledger is None:
            return
        self._refuse_second_commit(current, connection, ledger)
        if self._store.dialect.is_aborted(connection):
            ledger.undo()
            if current.ending is not None:  # the guard's own commit
                raise InvalidRequestError(_ABORTED)
            return
        held = [call for _, call in ledger.held if call.ending is not None]
        running = [c for c in current.chain() if c not in held]
        try:
            if self._writes(connection, exactly=bool(self._recorded(running))):
                self._mark(connection, running)
            self._carry(connection, self._recorded(held))
        except LeaseLost:
            # Before raising: some drivers' reset would commit what is left open.
            connection.engine.dialect.do_rollback(connection.connection)
            ledger.undo()
            raise

    def _refuse_second_commit(
        self, current: Call, connection: Connection, ledger: _Ledger
    ) -> None:
        """Refuse what would be durable beside the one commit of an atomic call."""
        atomic = current.atomic
        own = atomic is not None and atomic.connection is connection
        if atomic is None or (own and atomic.committing):
            return
        if own or self._writes(connection, exactly=True):
            connection.engine.dialect.do_rollback(connection.connection)
            ledger.undo()
            atomic.undone = atomic.undone or own
            raise IdempotencyConfigError(_ONE_COMMIT)

    def _recorded(self, calls: Iterable[Call]) -> list[Call]:
        return [c for c in calls if c.claim is not None and c.store is self._store]

    def _writes(self, connection: Connection, *, exactly: bool) -> bool:
        if has_written(connection) or not exactly:
            return has_written(connection)
        return self._store.dialect.has_written(connection)

    def _mark(self, connection: Connection, running: list[Call]) -> None:
        """Note on calls that go on that a part of them becomes durable."""
        for call in self._recorded(running):
            claim = cast("Claim", call.claim)
            if call.lost or not self._store.mark_effects(claim, connection):
                call.lost = True
                raise LeaseLost(_LOST)
        for call in running:
            call.committed = True

    def _carry(self, connection: Connection, held: list[Call]) -> None:
        """Write the outcomes of the calls whose effect is being committed."""
        for call in held:
            if call.lost or not self._write(call, connection):
                call.lost = True
                raise LeaseLost(_LOST)
        for call in held:
            call.settled = True

    def _write(self, call: Call, connection: Connection) -> bool:
        claim, ending = cast("Claim", call.claim), cast("Ending", call.ending)
        return write_ending(self._store, claim, ending, connection)


def _is_usable(connection: Connection | None) -> TypeGuard[Connection]:
    return connection is not None and not (connection.closed or connection.invalidated)
