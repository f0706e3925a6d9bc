"""
Where the store's short statements run: a small pool of its own.

A request that holds the session's only connection can still claim, and what a claim
commits never commits anything of the application.
"""

from __future__ import annotations

import contextlib
import os
import threading
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from sqlalchemy import create_engine, event
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.pool import QueuePool, SingletonThreadPool, StaticPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection, Engine
    from sqlalchemy.engine import ExceptionContext
    from sqlalchemy.orm import Session

    from .dialects import Dialect

#: Longest wait for a connection of the store's pool.
WAIT_SECONDS = 5.0
#: Longest wait for the server: for one answer, and for a new connection.
ANSWER_SECONDS = 5.0

#: Set while a store's pool hands out a connection, which it may have to make first.
_connecting: ContextVar[Dialect | None] = ContextVar("connecting", default=None)

_POOLS: WeakSet[OwnPool] = WeakSet()


class Connections(Protocol):
    """Gives connections for statements that are durable when the block ends."""

    #: Whether each statement commits by itself.
    autocommit: bool

    def connect(self) -> contextlib.AbstractContextManager[Connection]:
        """Lend a connection."""

    def close(self) -> None:
        """Close what is not in use."""


class OwnPool:
    """
    Autocommitting connections beside those of the application's engine.

    Args:
        engine: The application's engine. Its pool's connect listeners (pragmas,
            ``search_path``, tokens) apply here too, since the pool is a copy of it.
        pool_size: Connections that may be in use at once.
        dialect: Speaks for the database.
    """

    autocommit = True

    def __init__(self, engine: Engine, *, pool_size: int, dialect: Dialect) -> None:
        self._source = engine
        self._dialect = dialect
        # The copy of a pool may be smaller than `pool_size`. Slots bound the use of
        # any kind of pool, so that the wait is ours and never the pool's own timeout.
        if isinstance(engine.pool, QueuePool) and engine.pool.size():
            pool_size = min(pool_size, engine.pool.size())
        self._pool_size = pool_size
        self._copy: Engine | None = None
        self.forget()
        _POOLS.add(self)

    def forget(self) -> None:
        """Leave connections to the process that made them, after a fork."""
        if self._copy is not None:
            self._copy.dispose(close=False)
        self._copy = None
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(self._pool_size)

    @property
    def engine(self) -> Engine:
        """Copied at first use, so that listeners set up after ``init_app`` count."""
        with self._lock:
            if self._copy is None:
                self._copy = self._make_copy()
            return self._copy

    def _make_copy(self) -> Engine:
        # The pool's copy connects through the source, so that is where to listen.
        if not event.contains(self._source, "do_connect", _connect):
            event.listen(self._source, "do_connect", _connect)
        pool = self._source.pool.recreate()
        # Before everything that asks the server, also SQLAlchemy itself.
        event.listen(pool, "connect", self._limit, insert=True)
        copy = create_engine(
            self._source.url,
            pool=pool,
            isolation_level="AUTOCOMMIT",
            # Parameters hold keys and answers, which belong in no log.
            hide_parameters=True,
        )
        event.listen(copy, "connect", lambda raw, _record: self._dialect.prepare(raw))
        event.listen(copy, "handle_error", self._note_disconnect)
        options = dict(self._source.get_execution_options())
        options.pop("isolation_level", None)
        return copy.execution_options(**options)

    def _limit(self, raw: Any, _record: object) -> None:
        self._dialect.limit(raw, ANSWER_SECONDS)

    def _note_disconnect(self, context: ExceptionContext) -> None:
        lost = self._dialect.lost_connection(context.original_exception)
        if lost and context.connection is not None:
            context.is_disconnect = True

    def _check_out(self) -> Connection:
        token = _connecting.set(self._dialect)
        try:
            return self.engine.connect()
        finally:
            _connecting.reset(token)

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        """
        Lend a connection, waiting for one at most ``WAIT_SECONDS``.

        Whatever then stays without an answer for ``ANSWER_SECONDS`` fails, and the
        connection is not used again.

        Raises:
            sqlalchemy.exc.TimeoutError: If none became free in time.
        """
        if not self._slots.acquire(timeout=WAIT_SECONDS):
            message = f"The store's pool had no free connection for {WAIT_SECONDS:g} s."
            raise PoolTimeoutError(message)
        try:
            with self._check_out() as connection:
                yield connection
        finally:
            self._slots.release()

    def close(self) -> None:
        """Close the connections that are not in use; new ones are made on demand."""
        self.engine.dispose()


class SharedConnection:
    """
    The session's own connection, for SQLite in memory, which has only that one.

    Outside a unit of work each block is committed, as with a pool of its own.
    """

    autocommit = False

    def __init__(
        self, session: Callable[[], Session], in_unit: Callable[[], bool]
    ) -> None:
        self._session = session
        self._in_unit = in_unit

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        """Lend the session's connection and commit, unless a unit of work is open."""
        session = self._session()
        try:
            yield session.connection()
        except BaseException:
            if not self._in_unit():
                session.rollback()
            raise
        if not self._in_unit():
            session.commit()

    def close(self) -> None:
        """Do nothing: the connection is the session's."""


def _connect(
    sql_dialect: Any, record: Any, cargs: list[Any], cparams: dict[str, Any]
) -> Any:
    """
    Connect with limits where the connection is for a store, and only there.

    A listener on the application's engine. The limits cannot just be added to
    `cparams`: SQLAlchemy 2.0 would keep them for the application's connections, too.
    """
    dialect = _connecting.get()
    if dialect is None:
        return None
    cparams = {**dialect.connect_arguments(ANSWER_SECONDS), **cparams}
    listeners = list(sql_dialect.dispatch.do_connect)
    # Those before this one have been called; those after it are not, once it connects.
    for listener in listeners[listeners.index(_connect) + 1 :]:
        raw = listener(sql_dialect, record, cargs, cparams)
        if raw is not None:
            break
    else:
        raw = sql_dialect.connect(*cargs, **cparams)
    # Already here, since listeners on all pools come before those on the store's.
    dialect.limit(raw, ANSWER_SECONDS)
    return raw


def shares_one_connection(engine: Engine) -> bool:
    """Tell whether a pool of its own would see another database (SQLite in memory)."""
    return isinstance(engine.pool, (StaticPool, SingletonThreadPool))


def _forget_all() -> None:
    for pool in _POOLS:
        pool.forget()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_forget_all)
