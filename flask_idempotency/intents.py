"""
Durable intents: what is noted before something is committed beside the record.

A record is in one transaction with rows on its own engine only. Before a commit on
another one, or a statement that commits by itself, the record is marked under its
owner's token, durably. So a crash in between leaves an unknown outcome, and never a
second run; and who has lost the record commits nothing there either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import event

from . import failpoints
from .exceptions import IdempotencyConfigError, LeaseLost
from .ledger import (
    CONNECTION,
    OTHERS,
    TransactionListener,
    has_written,
    ledger_in_call,
    ledger_of,
    refuse,
    start,
)
from .unit_of_work import current_call

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection, Engine
    from sqlalchemy.orm import Session, scoped_session

    from .store import IdempotencyStore
    from .store.dialects import Dialect
    from .unit_of_work import Call

_LOST = (
    "The record of this call was taken over or removed while it ran, so what it did "
    "in another database was rolled back."
)
_NO_ROOM = (
    "What this call does in another database must be noted on its record first, and "
    "the open transaction on the record's own database is in the way: it is part of an "
    "atomic or inner call, and its snapshot, or SQLite's one lock, rules that out. "
    "Commit to the other database before you use the record's, or outside of the call; "
    "or say atomic=False on the route."
)


def commits_by_itself(connection: Connection, dialect: Dialect) -> bool:
    """Tell whether each statement on a connection is durable at once."""
    options = connection.get_execution_options()
    return options.get("isolation_level") == "AUTOCOMMIT" or (
        dialect.commits_by_itself(connection)
    )


class Intents:
    """
    Notes what calls are about to do elsewhere.

    Args:
        store: Keeps the records.
        commit_first: Writes what the commit of a transaction carries.
    """

    def __init__(
        self, store: IdempotencyStore, commit_first: Callable[[Connection], None]
    ) -> None:
        self._store = store
        self._commit_first = commit_first

    def track_connections(self, sessions: scoped_session[Any], engine: Engine) -> None:
        """Know which connections a session holds, and which to the records' engine."""

        def after_begin(session: Session, _: Any, connection: Connection) -> None:
            if connection.engine.pool is engine.pool:
                session.info[CONNECTION] = connection
            else:
                others = session.info.setdefault(OTHERS, {})
                others[connection.engine.url] = connection

        event.listen(sessions, "after_begin", after_begin)

    def note(self, call: Call, connection: Connection) -> None:
        """
        Note on the running calls that a part of them becomes durable by `connection`.

        Raises:
            LeaseLost: If a record belongs to another owner; then it is rolled back.
            IdempotencyConfigError: If it cannot be noted beside what is open.
            IdempotencyStoreUnavailable: If the database cannot do it now.
        """
        try:
            if self._store.can_renew:  # in memory nothing outlives a crash anyway
                self._make_room(call)
                self._mark(call)
        except Exception:  # whatever it is, nothing may be committed without the note
            refuse(connection)
            raise
        for running in call.chain():
            running.partly_committed = True
        failpoints.reach("after_intent")

    def _mark(self, call: Call) -> None:
        for running in call.chain():
            if running.claim is None or running.store is not self._store:
                continue
            if running.lost or not self._store.mark_effects(running.claim):
                running.lost = True
                raise LeaseLost(_LOST)

    def _make_room(self, call: Call) -> None:
        """Commit the session's transaction where it would not let the record be marked."""
        main: Connection | None = call.session.info.get(CONNECTION)
        if main is None or main.closed or not main.in_transaction():
            return
        if not self._store.dialect.hides_claims(main):
            return
        ledger = ledger_of(main)
        if call.atomic is not None or ledger is None or ledger.savepoints:
            raise IdempotencyConfigError(_NO_ROOM)
        # Its session is just committing all that it has, in an order of its own; by
        # the driver, since SQLAlchemy will do it once more.
        self._commit_first(main)
        main.engine.dialect.do_commit(main.connection)
        start(main)


class OtherEngine(TransactionListener):
    """
    The listeners of an engine that holds no records.

    Args:
        intents: Notes what is about to happen.
        dialect: Tells which statements write.
        autocommit: Each statement on the engine is durable at once.
    """

    def __init__(self, intents: Intents, dialect: Dialect, *, autocommit: bool) -> None:
        self._intents = intents
        self._dialect = dialect
        self._autocommit = autocommit

    def execute(self, connection: Connection, statement: str) -> None:
        """Note what a statement is about to do."""
        call = current_call.get()
        if call is None or not self._dialect.may_write(statement):
            return
        ledger_in_call(connection).note_write()
        for running in call.chain():
            running.elsewhere = True
        at_once = self._autocommit or commits_by_itself(connection, self._dialect)
        if not at_once:
            self._dialect.begin_before_write(connection, statement)
        commits = self._dialect.commits(statement)
        if at_once or commits or self._dialect.may_commit(statement):
            self._intents.note(call, connection)

    def commit(self, connection: Connection) -> None:
        """Note what a commit is about to do."""
        call = current_call.get()
        if call is None or not has_written(connection):
            return
        if not self._dialect.is_aborted(connection):  # then nothing is committed
            self._intents.note(call, connection)
