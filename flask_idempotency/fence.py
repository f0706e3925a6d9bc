"""
The fence that every real commit of a running call passes.

It sits in the engine's commit event: whichever session or connection commits, the
record is written in that very transaction under its owner's token, or the transaction
is rolled back. So an owner whose record was taken over commits nothing.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy.exc import InvalidRequestError

from .exceptions import IdempotencyConfigError, LeaseLost
from .intents import Intents, commits_by_itself
from .ledger import (
    TransactionListener,
    has_written,
    ledger_in_call,
    ledger_of,
    refuse,
    start,
)
from .unit_of_work import FORGOTTEN, Effect, current_call, write_ending

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy import Connection, Engine
    from sqlalchemy.engine import ExceptionContext

    from .ledger import Ledger
    from .lifecycle import Claim
    from .store import IdempotencyStore
    from .unit_of_work import Call, Ending

log = logging.getLogger(__name__)

#: The endpoint whose call has ended in this context.
_late_endpoint: ContextVar[str | None] = ContextVar("late_endpoint", default=None)
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
_TORN = (
    "The server has rolled back the first part of this transaction (a deadlock?), which "
    "went on without it, so its commit was refused. Call the session's rollback() after "
    "such an error, and then do everything again."
)


def watch_late_commits(endpoint: str | None) -> None:
    """Report commits of this context as late ones of an endpoint; None: no longer."""
    _late_endpoint.set(endpoint)


def attach_fence(engine: Engine, store: IdempotencyStore) -> Intents:
    """
    Put the fence on the engine of the records, once.

    Not fenced are raw driver connections, and threads that do not carry the context of
    the call. What commits beside the fence, but visibly, is noted before.

    Returns:
        What notes it, for other engines.
    """
    fence = _Fence(store)
    fence.attach(engine)
    return fence.intents


class _Fence(TransactionListener):
    """The listeners of the engine that holds the records of one store."""

    events = (
        *TransactionListener.events,
        "savepoint",
        "rollback",
        "rollback_twophase",
        "handle_error",
    )

    def __init__(self, store: IdempotencyStore) -> None:
        self._store = store
        self.intents = Intents(store, self.commit)

    def execute(self, connection: Connection, statement: str) -> None:
        dialect, call = self._store.dialect, current_call.get()
        ledger = ledger_of(connection) if call is None else ledger_in_call(connection)
        if ledger is None:
            return
        if call is not None:
            ledger.follow(statement)
        if dialect.may_write(statement):
            ledger.note_write()
            if call is not None and commits_by_itself(connection, dialect):
                self._note_autocommit(call, connection)
            elif call is not None:
                dialect.begin_before_write(connection, statement)
        if call is not None and dialect.commits(statement):
            self._commit_by_text(call, connection, statement)
        elif call is not None and dialect.may_commit(statement):
            self._note_call(call, connection, ledger)

    def _commit_by_text(self, call: Call, connection: Connection, text: str) -> None:
        if call.atomic is not None:
            line = text.strip().split("\n")[0]
            raise IdempotencyConfigError(_COMMITTING_STATEMENT.format(statement=line))
        self.commit(connection)
        start(connection, wrote_at=0)

    def _note_call(self, call: Call, connection: Connection, ledger: Ledger) -> None:
        """Write what is to be known, should a procedure commit; else it is undone."""
        if call.atomic is None:
            self.commit(connection)
        else:  # which finds out at its end
            self._mark(connection, [*call.chain(), *(c for _, c in ledger.held)])

    def savepoint(self, connection: Connection, _name: str | None) -> None:
        if current_call.get() is not None:
            self._store.dialect.begin_before_savepoint(connection)

    def rollback(self, connection: Connection) -> None:
        if ledger := ledger_of(connection):
            ledger.undo()

    def rollback_twophase(self, connection: Connection, _xid: Any, _: Any) -> None:
        self.rollback(connection)

    def handle_error(self, context: ExceptionContext) -> None:
        """Undo what a failed COMMIT, or a server that rolled back, has undone."""
        connection, error = context.connection, context.sqlalchemy_exception
        ledger = None if connection is None else ledger_of(connection)
        if ledger is None or error is None:
            return
        committing = any(call.effect is not Effect.OPEN for _, call in ledger.held)
        committing = committing or any(hook.due for _, hook in ledger.hooks)
        undone = self._store.dialect.ends_transaction(error)
        if undone:
            ledger.lose()
        elif committing:
            ledger.undo()
        call = current_call.get()
        atomic = call.atomic if call else None
        if undone and atomic is not None and atomic.connection is connection:
            atomic.undone = True

    def commit(self, connection: Connection) -> None:
        current = current_call.get()
        if current is None:
            if ledger_of(connection) is not None:
                self._report_late(connection)
            return
        ledger = ledger_in_call(connection)
        self._refuse_forgotten(current, connection)
        self._refuse_second_commit(current, connection)
        if self._store.dialect.is_aborted(connection):
            ledger.undo()
            if current.ending is not None:  # the guard's own commit
                raise InvalidRequestError(_ABORTED)
            return
        try:
            self._pass(current, connection, ledger)
        except (LeaseLost, InvalidRequestError):
            refuse(connection)
            raise

    def _pass(self, current: Call, connection: Connection, ledger: Ledger) -> None:
        """Write into a transaction what its commit says of the calls."""
        if ledger.torn:
            raise InvalidRequestError(_TORN)
        ended = [call for _, call in ledger.held if call.ending is not None]
        held = [call for call in ended if not call.elsewhere]
        apart = [call for call in ended if call.elsewhere]
        running = [c for c in current.chain() if c not in ended] + apart
        if self._writes(connection, exactly=bool(self._recorded(running))):
            self._mark(connection, running)
        self._carry(connection, self._recorded(held))
        for call in apart:
            call.effect = Effect.COMMITTED
        for _, hook in ledger.hooks:
            hook.due = True

    def _report_late(self, connection: Connection) -> None:
        endpoint = _late_endpoint.get()
        if endpoint is not None and has_written(connection):
            _late_endpoint.set(None)
            log.warning(
                "Something was committed after the call of '%s' had ended (by an "
                "after_request function?). It is done for each replay, too; what is to "
                "be done once belongs in the view.",
                endpoint,
            )

    def _refuse_forgotten(self, current: Call, connection: Connection) -> None:
        """Refuse what no record would know of."""
        if any(call.forgotten for call in current.chain()):
            refuse(connection)
            raise IdempotencyConfigError(FORGOTTEN)

    def _refuse_second_commit(self, current: Call, connection: Connection) -> None:
        """Refuse what would be durable beside the one commit of an atomic call."""
        atomic = current.atomic
        own = atomic is not None and atomic.connection is connection
        if atomic is None or (own and atomic.committing):
            return
        if own or self._writes(connection, exactly=True):
            refuse(connection)
            atomic.undone = atomic.undone or own
            raise IdempotencyConfigError(_ONE_COMMIT)

    def _note_autocommit(self, call: Call, connection: Connection) -> None:
        if call.atomic is not None:
            raise IdempotencyConfigError(_ONE_COMMIT)
        for running in call.chain():
            running.elsewhere = True
        self.intents.note(call, connection)

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
            call.partly_committed = True

    def _carry(self, connection: Connection, held: list[Call]) -> None:
        """Write the outcomes of the calls whose effect is being committed."""
        for call in held:
            if call.lost or not self._write(call, connection):
                call.lost = True
                raise LeaseLost(_LOST)
        for call in held:
            call.effect = Effect.SETTLED

    def _write(self, call: Call, connection: Connection) -> bool:
        claim, ending = cast("Claim", call.claim), cast("Ending", call.ending)
        return write_ending(self._store, claim, ending, connection)
