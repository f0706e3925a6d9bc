"""
Atomic calls: one real transaction, in which a view's own commits are savepoints.

Sessions join it as SQLAlchemy describes for an external transaction. A savepoint at
its very beginning, the sentinel, tells at the end whether it is still the same one: a
deadlock on MySQL undoes it with all that was released inside, and a COMMIT that went
past SQLAlchemy ends it.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from .exceptions import IdempotencyConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection, NestedTransaction
    from sqlalchemy.orm import Session, scoped_session, sessionmaker

    from .store.dialects import Dialect

log = logging.getLogger(__name__)

_JOINS = "__idempotency_joins__"
_MODES = ("conditional_savepoint", "create_savepoint")
_ENDED = (
    "The transaction of this atomic call is over before the call is: the server rolled "
    "it back (a deadlock?), or something ended it past the session, such as a COMMIT "
    "through the driver. So the call is not committed."
)
_TWO_SESSIONS = (
    "Two sessions have open work in one atomic call, where a commit or rollback of one "
    "would take the other's along. Commit the first before you use the second, or use "
    "one session."
)
_NOT_JOINABLE = (
    "A session with {option} cannot take part in an atomic call. Leave the option out, "
    "or the route's atomic=True."
)


class AtomicTransaction:
    """
    The one real transaction of an atomic call; it begins when a session needs it.

    Args:
        engine: The engine of the records.
        dialect: Speaks for its database.
    """

    def __init__(self, engine: Engine, dialect: Dialect) -> None:
        self._engine = engine
        self._dialect = dialect
        self._sentinel: NestedTransaction | None = None
        self._session: Session | None = None
        self.connection: Connection | None = None
        #: Its commit is being made; any other one is not ours.
        self.committing = False
        #: The server has undone all of it.
        self.undone = False
        #: It had ended before we did so, and was not undone: a part may be durable.
        self.escaped = False

    @property
    def has_begun(self) -> bool:
        """Whether a session has done something in it."""
        return self._sentinel is not None

    def bind_of(self, session: Session, bind: Engine | Connection) -> Any:
        """
        Return what a session is to use in place of `bind`.

        Raises:
            IdempotencyConfigError: If the session cannot join.
            IdempotencyStoreUnavailable: If SQLite's lock is not to be had.
        """
        if not isinstance(bind, Engine) or bind.pool is not self._engine.pool:
            return bind
        if session.twophase:
            raise IdempotencyConfigError(_NOT_JOINABLE.format(option="twophase=True"))
        if session.join_transaction_mode not in _MODES:
            option = f"join_transaction_mode='{session.join_transaction_mode}'"
            raise IdempotencyConfigError(_NOT_JOINABLE.format(option=option))
        other = self._session
        if other is not None and other is not session and other.in_transaction():
            raise IdempotencyConfigError(_TWO_SESSIONS)
        self._session = session
        return self._begun()

    def _begun(self) -> Connection:
        if self.connection is None:
            connection = self._engine.connect()
            if connection.in_transaction():  # by a listener on new connections
                connection.commit()
            self.connection = connection
        if self._sentinel is None:
            self.connection.begin()
            self._dialect.lock_for_writing(self.connection)
            self._sentinel = self.connection.begin_nested()
        elif not self.connection.in_transaction():
            raise IdempotencyConfigError(_ENDED)
        return self.connection

    def release(self, session: Session) -> None:
        """
        Leave the last savepoint, so that nothing but the commit remains to be done.

        Args:
            session: The call's, with nothing open. Of any other one, what is open is
                dropped: nobody has committed it.

        Raises:
            IdempotencyConfigError: If it is not the transaction any more that began.
        """
        if self._session is not session:
            self._roll_back_session()
        try:
            if self._sentinel is not None:
                self._sentinel.commit()
        except SQLAlchemyError as error:
            raise IdempotencyConfigError(_ENDED) from error

    def commit(self) -> None:
        """Make durable what the call has done."""
        if self.connection is None:
            return
        self.committing = True
        try:
            self.connection.commit()
        finally:
            self.committing = False

    def roll_back(self) -> None:
        """Undo all of it; a later use begins anew."""
        self._roll_back_session()
        sentinel, self._sentinel = self._sentinel, None
        if self.connection is None:
            return
        try:
            if sentinel is not None and not self.undone:
                self.escaped = self.escaped or not _still_there(sentinel)
            self.connection.rollback()
        except SQLAlchemyError:
            log.warning("A connection was lost before its rollback.", exc_info=True)
            self.connection.invalidate()

    def end(self) -> None:
        """Undo what is not committed, and give the connection back."""
        self.roll_back()
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _roll_back_session(self) -> None:
        session, self._session = self._session, None
        if session is None or not session.in_transaction():
            return
        try:
            session.rollback()
        except SQLAlchemyError:  # its savepoint is gone, and it is clean all the same
            log.info("A savepoint was gone before its rollback.", exc_info=True)


def _still_there(sentinel: NestedTransaction) -> bool:
    """Tell whether a transaction that is to be undone is the one that began."""
    if not sentinel.is_active:  # ended through SQLAlchemy, by a rollback
        return True
    try:
        sentinel.rollback()
    except DBAPIError as error:
        if error.connection_invalidated:
            raise
        return False
    return True


def join_atomic_calls(
    sessions: scoped_session[Any] | sessionmaker[Any],
    current: Callable[[], AtomicTransaction | None],
) -> None:
    """
    Let the sessions of a factory take part in atomic calls.

    Args:
        sessions: The factory, or the registry on one. Each has a class of its own,
            made so that something can be set on it.
        current: Gives the transaction of the running call, if it is atomic.

    Raises:
        IdempotencyConfigError: If it makes its sessions by a plain function.
    """
    factory = getattr(sessions, "session_factory", sessions)
    session_class: Any = getattr(factory, "class_", None)
    if session_class is None:
        raise IdempotencyConfigError(
            f"{sessions!r} is neither a sessionmaker nor a scoped_session on one, so "
            "its sessions cannot take part in atomic calls."
        )
    original = session_class.get_bind
    if hasattr(original, _JOINS):
        return

    @functools.wraps(original)
    def get_bind(session: Session, *args: Any, **kwargs: Any) -> Any:
        bind = original(session, *args, **kwargs)
        transaction = current()
        return bind if transaction is None else transaction.bind_of(session, bind)

    setattr(get_bind, _JOINS, True)
    session_class.get_bind = get_bind
