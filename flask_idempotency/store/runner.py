"""How the store's statements run: tried again where safe, errors translated once."""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy.exc import (
    DBAPIError,
    InterfaceError,
    InternalError,
    OperationalError,
    ProgrammingError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from flask_idempotency.exceptions import IdempotencyStoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection

    from .connections import Connections
    from .dialects import Dialect

T = TypeVar("T")

#: How often short work is tried, and after how long it is not tried again: a try that
#: met a silent server took as long, and is the last.
TRIES = 5
_PATIENCE_SECONDS = 5.0
#: How often it is tried when somebody else holds the lock that it needs.
LOCKED_TRIES = 2


class RecordLocked(IdempotencyStoreUnavailable):
    """Somebody else holds the record's lock, and nothing waits for that."""


class SchemaMissing(IdempotencyStoreUnavailable):
    """The table is not there: a mistake, not an outage that a route may sit out."""


class Runner:
    """
    Runs short work, on the store's own connection or in a given transaction.

    In a given transaction nothing is repeated or translated: its own errors count.
    """

    def __init__(
        self, dialect: Dialect, connections: Connections, table_name: str
    ) -> None:
        self._dialect = dialect
        self._connections = connections
        self._table_name = table_name

    def run(
        self, work: Callable[[Connection], T], connection: Connection | None = None
    ) -> T:
        """
        Do work whose every statement is durable on its own.

        Raises:
            IdempotencyStoreUnavailable: If the database cannot do it now.
        """
        if connection is not None:
            return work(connection)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        attempt = 0
        while True:
            attempt += 1
            try:
                with self._connections.connect() as own:
                    return work(own)
            except PoolTimeoutError as error:
                raise IdempotencyStoreUnavailable(str(error)) from error
            except DBAPIError as error:
                if self._is_final(error, attempt) or time.monotonic() > deadline:
                    if translated := self._translated(error):
                        raise translated from error
                    raise
            pause(attempt)

    def run_locked(
        self, work: Callable[[Connection], T], connection: Connection | None = None
    ) -> T:
        """Do work that first locks rows: in one short READ COMMITTED transaction."""
        if connection is not None or not self._connections.autocommit:
            return self.run(work, connection)

        def transacted(own: Connection) -> T:
            with self._transaction(own):
                return work(own)

        return self.run(transacted)

    @contextmanager
    def _transaction(self, connection: Connection) -> Iterator[None]:
        for statement in self._dialect.begin:
            connection.exec_driver_sql(statement)
        try:
            yield
        except BaseException:  # raised again, after the locks are gone
            if not connection.invalidated:
                connection.exec_driver_sql("ROLLBACK")
            raise
        connection.exec_driver_sql("COMMIT")

    def _is_final(self, error: DBAPIError, attempt: int) -> bool:
        if self._dialect.is_locked(error):
            return attempt == LOCKED_TRIES
        return attempt == TRIES or not self._dialect.is_transient(error)

    def _translated(self, error: DBAPIError) -> IdempotencyStoreUnavailable | None:
        if self._dialect.is_locked(error):
            return RecordLocked("Another transaction holds a lock on the record.")
        if self._dialect.is_schema_error(error):
            return SchemaMissing(
                f"The table '{self._table_name}' or one of its columns does not exist. "
                "Run your migrations: 'flask db upgrade'."
            )
        # A ProgrammingError is a right on the table that is missing.
        unable = (OperationalError, InterfaceError, InternalError, ProgrammingError)
        if isinstance(error, unable):
            first_line = str(error.orig).strip().split("\n")[0]
            return IdempotencyStoreUnavailable(
                f"The database could not answer: {first_line}"
            )
        return None


def pause(attempt: int) -> None:
    """Wait a moment, longer with each attempt, so that rivals do not march in step."""
    time.sleep(random.uniform(0, 0.01 * 2**attempt))  # noqa: S311 - jitter, no secret
