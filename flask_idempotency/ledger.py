"""
What one open transaction holds for guarded calls, kept beside its connection.

What is to happen at its commit belongs in ``fence`` and ``intents``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from sqlalchemy import event

from .store.dialects.base import START
from .unit_of_work import Effect, Hook, connection_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection, Engine
    from sqlalchemy.orm import Session

    from .unit_of_work import Call

_KEY = "flask_idempotency"
#: Where a session has the connection to the records' engine that it used last.
CONNECTION = "flask_idempotency_connection"
#: The same for each other engine.
OTHERS = "flask_idempotency_other_connections"
_SAVEPOINT = re.compile(
    START + r"(SAVEPOINT|RELEASE|ROLLBACK)\s+(?:(?:WORK|TRANSACTION)\s+)?"
    r"(?:TO\s+)?(?:SAVEPOINT\s+)?(`[^`]+`|\"[^\"]+\"|\w+)",
    re.IGNORECASE | re.DOTALL,
)
_ROLLBACK = re.compile(
    START + r"(?:ROLLBACK|ABORT)(?:\s+(?:WORK|TRANSACTION))?"
    r"(?:\s+AND\s+(?:NO\s+)?CHAIN)?\s*;?\s*$",
    re.IGNORECASE | re.DOTALL,
)


@dataclass
class Ledger:
    """
    What one open transaction holds for guarded calls.

    Attributes:
        wrote_at: How many savepoints were open when it may have changed data, the
            fewest of what is not undone; ``None`` if it has not.
        released_at: The same for what was done in a savepoint that was released.
        savepoints: Names of those that are open.
        held: Calls whose effect and ending it carries, each with the number of
            savepoints that were open then: a rollback to one of these undoes it.
        hooks: The same for what is to be done after its commit.
        wrote_before: It may have changed data before the last statement.
        cut: The server has undone such changes, without being asked.
        torn: It went on after that. Who made a savepoint takes what was before it for
            safe; who writes again, takes it for a whole.
    """

    wrote_at: int | None = None
    released_at: int | None = None
    savepoints: list[str] = field(default_factory=list)
    held: list[tuple[int, Call]] = field(default_factory=list)
    hooks: list[tuple[int, Hook]] = field(default_factory=list)
    wrote_before: bool = False
    cut: bool = False
    torn: bool = False

    def follow(self, statement: str) -> None:
        """Keep book of savepoints; the engine's events do not tell their names."""
        self.wrote_before = self.wrote_at is not None
        if _ROLLBACK.match(statement):  # sent as text, past the engine's event
            self.undo()
            return
        found = _SAVEPOINT.match(statement)
        if found is None:
            return
        verb, name = found[1].upper(), found[2].strip('`"').lower()
        if verb == "SAVEPOINT":
            self.savepoints.append(name)
        elif name in self.savepoints:
            # Of several of one name the last one is meant, as in SQL.
            depth = len(self.savepoints) - 1 - self.savepoints[::-1].index(name)
            if verb == "ROLLBACK":
                self.undo_after(depth)
            else:
                del self.savepoints[depth:]
                self.released_at = _lower(self.released_at, depth)
                if self.wrote_at is not None:
                    self.wrote_at = min(depth, self.wrote_at)
                self.held = [(min(depth, at), call) for at, call in self.held]
                self.hooks = [(min(depth, at), hook) for at, hook in self.hooks]

    def note_write(self) -> None:
        """Note that data may have been changed now."""
        self.torn = self.torn or self.cut
        self.wrote_at = _lower(self.wrote_at, len(self.savepoints))

    def undo(self) -> None:
        """Drop what the whole transaction did."""
        self.cut = self.torn = False
        self.undo_after(-1)

    def lose(self) -> None:
        """Drop it, and remember that nobody has asked for that."""
        cut = self.cut or self.wrote_before
        torn = self.torn or (cut and bool(self.savepoints))
        self.undo()
        self.cut, self.torn = cut, torn

    def undo_after(self, depth: int) -> None:
        """Drop what was done since the savepoint at `depth` was set."""
        del self.savepoints[depth + 1 :]  # that one is still there
        if self.wrote_at is not None and self.wrote_at > depth:
            self.wrote_at = None
        if self.released_at is not None and self.released_at > depth:
            self.released_at = None
        for at, call in self.held:
            if at > depth:
                call.effect = Effect.OPEN
                if call.joined:
                    call.claim = None  # its record was rolled back, too
                    call.forgotten = call.ending is None
        for at, hook in self.hooks:
            if at > depth:
                hook.due = False
        self.held = [(at, call) for at, call in self.held if at <= depth]
        self.hooks = [(at, hook) for at, hook in self.hooks if at <= depth]


def _lower(depth: int | None, other: int) -> int:
    return other if depth is None else min(depth, other)


def start(connection: Connection, *, wrote_at: int | None = None) -> Ledger:
    """Begin a new ledger, with a transaction."""
    ledger = connection.info[_KEY] = Ledger(wrote_at=wrote_at)
    return ledger


def ledger_in_call(connection: Connection) -> Ledger:
    """Return the ledger; of a transaction older than the fence nothing is known."""
    return ledger_of(connection) or start(connection, wrote_at=0)


def ledger_of(connection: Connection) -> Ledger | None:
    """Return the ledger of the open transaction, if it began under our eyes."""
    if connection.closed or connection.invalidated:
        return None  # one that the server has ended has no info, and asking raises
    ledger: Ledger | None = connection.info.get(_KEY)
    return ledger


class TransactionListener(ABC):
    """Listens to one engine, and keeps a ledger of each of its transactions."""

    #: Events of the engine; each has a method of its name.
    events: ClassVar[tuple[str, ...]] = (
        "begin",
        "begin_twophase",
        "before_cursor_execute",
        "commit",
        "prepare_twophase",
    )

    def attach(self, engine: Engine) -> None:
        """Listen to an engine, once."""
        for name in self.events:
            event.listen(engine, name, getattr(self, name))

    def begin(self, connection: Connection) -> None:
        """Start to keep book."""
        start(connection)

    def begin_twophase(self, connection: Connection, _xid: Any) -> None:
        """Start to keep book."""
        start(connection)

    def before_cursor_execute(
        self,
        connection: Connection,
        _cursor: Any,
        statement: str,
        _parameters: Any,
        _context: Any,
        _executemany: bool,  # noqa: FBT001 - SQLAlchemy's signature
    ) -> None:
        """Take what matters of the event."""
        self.execute(connection, statement)

    def prepare_twophase(self, connection: Connection, _xid: Any) -> None:
        """Treat it as the commit, which can only follow."""
        self.commit(connection)

    @abstractmethod
    def execute(self, connection: Connection, statement: str) -> None:
        """Note what a statement is about to do."""

    @abstractmethod
    def commit(self, connection: Connection) -> None:
        """Note, carry or refuse what a commit is about to make durable."""


def refuse(connection: Connection) -> None:
    """
    Undo a transaction whose commit is refused, before the error is raised.

    On the driver's connection: some drivers' reset would commit what is left open.
    """
    connection.engine.dialect.do_rollback(connection.connection)
    if ledger := ledger_of(connection):
        ledger.undo()


def has_written(connection: Connection, *, unknown: bool = True) -> bool:
    """
    Tell whether the open transaction may have changed data.

    Args:
        connection: Of the engine of the records.
        unknown: The answer for a transaction that is older than the fence.
    """
    ledger = ledger_of(connection)
    return unknown if ledger is None else ledger.wrote_at is not None


def has_changes(session: Session) -> bool:
    """Tell whether a session holds changes that are not committed, flushed or not."""
    if session.new or session.dirty or session.deleted:
        return True
    own: Connection | None = session.info.get(CONNECTION)
    connections = [own, *session.info.get(OTHERS, {}).values()]
    return any(
        connection is not None
        and not connection.closed
        and connection.in_transaction()
        and has_written(connection, unknown=False)
        for connection in connections
    )


def keeps_work(connection: Connection) -> bool:
    """Tell whether the open transaction still has what was done in a savepoint."""
    ledger = ledger_of(connection)
    return ledger is not None and ledger.released_at is not None


def hold(call: Call) -> None:
    """Tie a call to the session's transaction: they are committed or undone together."""
    ledger = ledger_in_call(connection_of(call))
    if all(call is not held for _, held in ledger.held):
        ledger.held.append((len(ledger.savepoints), call))


def after_commit(call: Call, run: Callable[[], object]) -> None:
    """
    Do something at the end of the outermost call, if what it now writes is durable then.

    Not for a commit that is a savepoint, or that is undone by one. An exception is
    logged; what must not be lost needs a row in the same transaction, too.

    Args:
        call: The running call.
        run: What to do.
    """
    hook = Hook(run)
    ledger = ledger_in_call(connection_of(call))
    ledger.hooks.append((len(ledger.savepoints), hook))
    (call.host or call).hooks.append(hook)
