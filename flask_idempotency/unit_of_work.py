"""
The running calls, and the fence that every real commit of them passes.

The fence sits in the engine's commit event: whichever session or connection commits,
the record is written in that very transaction under its owner's token, or the
transaction is rolled back. So an owner whose record was taken over commits nothing.
"""

from __future__ import annotations

import logging
import os
import re
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID, uuid4

from sqlalchemy import event
from sqlalchemy.exc import InvalidRequestError, SQLAlchemyError

from .exceptions import LeaseLost
from .lifecycle import Failure, StoredResponse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import TypeGuard

    from sqlalchemy import Connection, Engine
    from sqlalchemy.engine import ExceptionContext
    from sqlalchemy.orm import Session

    from .lifecycle import Claim
    from .store import IdempotencyStore

log = logging.getLogger(__name__)

_LEDGER = "flask_idempotency"
_SAVEPOINT = re.compile(
    r"\s*(SAVEPOINT|RELEASE|ROLLBACK)\s+(?:TO\s+)?(?:SAVEPOINT\s+)?[`\"]?(\w+)",
    re.IGNORECASE,
)
_LOST = (
    "The record of this call was taken over or removed while it ran, so its "
    "transaction was rolled back. The lease was too short, or the process stood still."
)
_ABORTED = (
    "The server has aborted this transaction, so its commit would be a rollback. "
    "An error was swallowed after the flush, in a listener of the session?"
)


@dataclass(frozen=True)
class Release:
    """
    The ending of a call that leaves no record.

    Attributes:
        otherwise: What is recorded if a part of the call is durable already.
    """

    otherwise: StoredResponse | Failure


#: What a commit writes as the outcome of a call.
Ending = StoredResponse | Failure | Release


@dataclass(kw_only=True, eq=False)
class Call:
    """
    One guarded call while it runs.

    Attributes:
        claim: ``None`` for a call that is not recorded.
        session: The session whose commit completes the call.
        parent: The call around it.
        lease_seconds: How long its claim lasts, and each renewal of it.
        max_runtime_seconds: After this time it is not renewed any more.
        recovering: It finds out how an earlier call ended, and runs no handler.
        joined: The claim is part of the session's transaction, and ends with it.
        ending: What the commit of the transaction that holds its effect writes.
        settled: That commit went through.
        completed: Of an outermost call: the recorded calls that ended inside it.
        committed: A part of it became durable before its end.
        lost: The record is no longer ours; nothing of this call may be committed.
    """

    claim: Claim | None
    store: IdempotencyStore
    session: Session
    parent: Call | None = None
    lease_seconds: float = 0.0
    max_runtime_seconds: float = 0.0
    recovering: bool = False
    joined: bool = False
    ending: Ending | None = None
    settled: bool = False
    completed: list[Call] = field(default_factory=list)
    committed: bool = False
    lost: bool = False

    @cached_property
    def loose_id(self) -> UUID:
        """Stands for the operation where there is no claim."""
        return uuid4()

    @property
    def host(self) -> Call | None:
        """The outermost call around this one in the same session: its commit is ours."""
        around = self.parent.chain() if self.parent else iter(())
        hosts = [call for call in around if call.session is self.session]
        return hosts[-1] if hosts else None

    def abandon(self) -> None:
        """Write nothing more for this call: what became of its commit is not known."""
        self.claim = None
        self.completed.clear()

    def chain(self) -> Iterator[Call]:
        """Yield this call and those around it, from the inside out."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.parent


@dataclass
class _Ledger:
    """
    What one open transaction holds for guarded calls.

    Attributes:
        wrote: It may have changed data.
        savepoints: Names of those that are open.
        held: Calls whose effect and ending it carries, each with the number of
            savepoints that were open then: a rollback to one of these undoes it.
    """

    wrote: bool = False
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
                self.held = [(min(depth, at), call) for at, call in self.held]

    def undo(self) -> None:
        """Drop what the whole transaction did."""
        self.undo_after(-1)

    def undo_after(self, depth: int) -> None:
        """Drop what was done since the savepoint at `depth` was set."""
        del self.savepoints[max(depth, 0) :]
        for at, call in self.held:
            if at > depth:
                call.settled = False
                if call.joined:
                    call.claim = None  # its record was rolled back, too
        self.held = [(at, call) for at, call in self.held if at <= depth]


current_call: ContextVar[Call | None] = ContextVar("flask_idempotency", default=None)


@contextmanager
def running(call: Call) -> Iterator[None]:
    """Make `call` the current one, so that commits inside pass its fence."""
    token = current_call.set(call)
    try:
        yield
    finally:
        current_call.reset(token)


def _disown() -> None:
    """Leave the calls of the parent to the parent, in a process that was forked."""
    call = current_call.get()
    if call is not None:
        for inherited in call.chain():
            inherited.lost = True
        current_call.set(None)


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_disown)


def has_written(connection: Connection, *, unknown: bool = True) -> bool:
    """
    Tell whether the open transaction may have changed data.

    Args:
        connection: Of the engine of the records.
        unknown: The answer for a transaction that is older than the fence.
    """
    ledger: _Ledger | None = connection.info.get(_LEDGER)
    return unknown if ledger is None else ledger.wrote


def hold(call: Call) -> None:
    """Tie a call to the session's transaction: they are committed or undone together."""
    ledger = connection_of(call).info.setdefault(_LEDGER, _Ledger(wrote=True))
    if all(call is not held for _, held in ledger.held):
        ledger.held.append((len(ledger.savepoints), call))


def connection_of(call: Call) -> Connection:
    """Return the session's connection to the engine of the records."""
    return call.session.connection(bind_arguments=call.store.bind_arguments)


def can_commit(call: Call) -> bool:
    """
    Tell whether a commit of the session would make its work durable.

    Not after a flush error that the view caught, in a transaction that the server
    has aborted, or when the connection is gone.
    """
    if not call.session.is_active:
        return False
    if not call.session.in_transaction():
        return True
    try:
        connection = connection_of(call)
        # A view that committed this very connection has left the session without one.
        gone = connection.invalidated or not connection.in_transaction()
        return not (gone or call.store.dialect.is_aborted(connection))
    except SQLAlchemyError:
        return False


def roll_back(session: Session) -> None:
    """Roll back, also when the connection is gone and its transaction with it."""
    try:
        session.rollback()
    except SQLAlchemyError:
        log.warning("A connection was lost before its rollback.", exc_info=True)
        session.invalidate()


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
        dialect = self._store.dialect
        ledger.wrote = ledger.wrote or dialect.may_write(statement)
        if current_call.get() is None:
            return
        ledger.follow(statement)
        if dialect.commits(statement):
            self.commit(connection)
            connection.info[_LEDGER] = _Ledger(wrote=True)

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
        if committing or self._store.dialect.ends_transaction(error):
            ledger.undo()

    def prepare_twophase(self, connection: Connection, _xid: Any) -> None:
        self.commit(connection)

    def commit(self, connection: Connection) -> None:
        current = current_call.get()
        ledger = connection.info.get(_LEDGER)
        if current is None or ledger is None:
            return
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


def write_ending(
    store: IdempotencyStore,
    claim: Claim,
    ending: Ending,
    connection: Connection | None = None,
) -> bool:
    """
    Write how a call ended.

    Args:
        store: Keeps its record.
        claim: Its claim.
        ending: The outcome.
        connection: The transaction that carries it; without one it is written on its
            own.

    Returns:
        Whether the record still belonged to the claim.
    """
    if isinstance(ending, Release):
        if store.release(claim, connection=connection):
            return True
        ending = ending.otherwise
    if isinstance(ending, Failure):
        return store.mark_failed(claim, ending, connection=connection)
    return store.mark_succeeded(claim, ending, connection=connection)


def _is_usable(connection: Connection | None) -> TypeGuard[Connection]:
    return connection is not None and not (connection.closed or connection.invalidated)
