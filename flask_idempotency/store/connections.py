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
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from sqlalchemy import create_engine, event
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.pool import QueuePool, SingletonThreadPool, StaticPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection, Engine
    from sqlalchemy.orm import Session

#: Longest wait for a connection of the store's pool.
WAIT_SECONDS = 5.0


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
        prepare: Called with each new driver connection.
    """

    autocommit = True

    def __init__(
        self, engine: Engine, *, pool_size: int, prepare: Callable[[Any], None]
    ) -> None:
        self._source = engine
        self._prepare = prepare
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
        pool = self._source.pool.recreate()
        copy = create_engine(
            self._source.url,
            pool=pool,
            isolation_level="AUTOCOMMIT",
            # Parameters hold keys and answers, which belong in no log.
            hide_parameters=True,
        )
        event.listen(copy, "connect", lambda raw, _record: self._prepare(raw))
        options = dict(self._source.get_execution_options())
        options.pop("isolation_level", None)
        return copy.execution_options(**options)

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        """
        Lend a connection, waiting for one at most ``WAIT_SECONDS``.

        Raises:
            sqlalchemy.exc.TimeoutError: If none became free in time.
        """
        if not self._slots.acquire(timeout=WAIT_SECONDS):
            message = f"The store's pool had no free connection for {WAIT_SECONDS:g} s."
            raise PoolTimeoutError(message)
        try:
            with self.engine.connect() as connection:
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


def shares_one_connection(engine: Engine) -> bool:
    """Tell whether a pool of its own would see another database (SQLite in memory)."""
    return isinstance(engine.pool, (StaticPool, SingletonThreadPool))


def _forget_all() -> None:
    for pool in _POOLS:
        pool.forget()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_forget_all)
