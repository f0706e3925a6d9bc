"""
The running calls, and the fence that every real commit of them passes.

The fence sits in the engine's commit event: whichever session or connection commits,
the record is written in that very transaction under its owner's token, or the
transaction is rolled back. So an owner whose record was taken over commits nothing.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy import event
from sqlalchemy.exc import SQLAlchemyError

from .exceptions import LeaseLost
from .lifecycle import Failure, StoredResponse
from .store.dialects import may_write

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection, Engine
    from sqlalchemy.orm import Session

    from .lifecycle import Claim
    from .store import IdempotencyStore

log = logging.getLogger(__name__)

_WROTE = "flask_idempotency_wrote"
_LOST = (
    "The record of this call was taken over or removed while it ran, so its "
    "transaction was rolled back. The lease was too short, or the process stood still."
)


@dataclass(frozen=True)
class Release:
    """The ending of an inner call that leaves no record."""


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
        ending: What the next commit writes as the outcome.
        completed: Calls inside this one that ended and wait for its commit.
        lost: The record is no longer ours; nothing of this call may be committed.
    """

    claim: Claim | None
    store: IdempotencyStore
    session: Session
    parent: Call | None = None
    ending: Ending | None = None
    completed: list[Call] = field(default_factory=list)
    lost: bool = False

    @property
    def host(self) -> Call | None:
        """The nearest call around this one in the same session: its commit is ours."""
        around = self.parent.chain() if self.parent else iter(())
        return next((call for call in around if call.session is self.session), None)

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


current_call: ContextVar[Call | None] = ContextVar("flask_idempotency", default=None)


@contextmanager
def running(call: Call) -> Iterator[None]:
    """Make `call` the current one, so that commits inside pass its fence."""
    token = current_call.set(call)
    try:
        yield
    finally:
        current_call.reset(token)


def has_written(connection: Connection) -> bool:
    """Tell whether the open transaction may have changed data; in doubt it has."""
    return bool(connection.info.get(_WROTE, True))


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
    event.listen(engine, "begin", fence.begin)
    event.listen(engine, "begin_twophase", fence.begin_twophase)
    event.listen(engine, "before_cursor_execute", fence.before_cursor_execute)
    event.listen(engine, "savepoint", fence.savepoint)
    event.listen(engine, "commit", fence.commit)
    event.listen(engine, "prepare_twophase", fence.prepare_twophase)


class _Fence:
    """The listeners of one engine, for the records of one store."""

    def __init__(self, store: IdempotencyStore) -> None:
        self._store = store

    def begin(self, connection: Connection) -> None:
        connection.info[_WROTE] = False

    def begin_twophase(self, connection: Connection, _xid: Any) -> None:
        connection.info[_WROTE] = False

    def before_cursor_execute(
        self,
        connection: Connection,
        _cursor: Any,
        statement: str,
        _parameters: Any,
        _context: Any,
        _executemany: bool,  # noqa: FBT001 - SQLAlchemy's signature
    ) -> None:
        if not connection.info.get(_WROTE) and may_write(statement):
            connection.info[_WROTE] = True

    def savepoint(self, connection: Connection, _name: str | None) -> None:
        if current_call.get() is not None:
            self._store.dialect.begin_before_savepoint(connection)

    def prepare_twophase(self, connection: Connection, _xid: Any) -> None:
        self.commit(connection)

    def commit(self, connection: Connection) -> None:
        calls = self._calls()
        if not calls or self._store.dialect.is_aborted(connection):
            return  # an aborted transaction makes nothing durable
        if all(call.ending is None for call in calls) and not self._writes(connection):
            return
        for call in calls:
            if call.lost or not self._carry(call, connection):
                call.lost = True
                # Before raising: some drivers' reset would commit what is left open.
                connection.engine.dialect.do_rollback(connection.connection)
                raise LeaseLost(_LOST)

    def _writes(self, connection: Connection) -> bool:
        return has_written(connection) or self._store.dialect.has_written(connection)

    def _calls(self) -> list[Call]:
        """Return the recorded calls that a commit on this engine concerns."""
        innermost = current_call.get()
        if innermost is None:
            return []
        return [
            call
            for running in innermost.chain()
            for call in (running, *running.completed)
            if call.claim is not None and call.store is self._store
        ]

    def _carry(self, call: Call, connection: Connection) -> bool:
        """Write the record of a call into the transaction that is being committed."""
        claim, store = call.claim, self._store
        assert claim is not None  # noqa: S101 - for mypy; see `_calls`
        if call.ending is None:
            return store.mark_effects(claim, connection)
        if isinstance(call.ending, Release):
            return store.release(claim, connection=connection)
        if isinstance(call.ending, Failure):
            done = store.mark_failed(claim, call.ending, connection=connection)
        else:
            done = store.mark_succeeded(claim, call.ending, connection=connection)
        # An inner call may have been carried by an earlier commit of the view.
        return done or store.is_settled(claim, connection)
