"""The connections of a database server, as its operator sees and ends them."""

from __future__ import annotations

import re
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection

    from .databases import Database

_SECONDS = 30
_NUMBER = {"postgresql": "SELECT pg_backend_pid()", "mariadb": "SELECT CONNECTION_ID()"}
_ALL = {
    "postgresql": "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
    "AND pid <> pg_backend_pid()",
    "mariadb": "SELECT id FROM information_schema.processlist WHERE db = DATABASE() "
    "AND id <> CONNECTION_ID()",
}
# Whoever waits for a table, a row or an advisory lock; on MariaDB for a table alone.
_WAITING = {
    "postgresql": "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
    "AND wait_event_type = 'Lock'",
    "mariadb": "SELECT id FROM information_schema.processlist WHERE db = DATABASE() "
    "AND state LIKE 'Waiting for table%lock'",
}
# MariaDB's table of transactions is a copy, which stays old while it is read often.
_ROW_WAIT = re.compile(r"\nLOCK WAIT [^\n]*\n\w+ thread id (\d+)")


class Backends:
    """
    Looks at the connections to one database, over one of its own, and ends them.

    Args:
        database: On a server.
    """

    def __init__(self, database: Database) -> None:
        self._name = database.name
        self.engine = create_engine(database.url, poolclass=NullPool)
        self._operator = self.connect()

    def connect(self) -> Connection:
        """Make a connection whose every statement is a transaction."""
        return self.engine.connect().execution_options(isolation_level="AUTOCOMMIT")

    def close(self) -> None:
        """Close what is still open."""
        self._operator.close()

    def execute(self, *statements: str) -> None:
        """Change the database as a rival would, at once."""
        for statement in statements:
            self._operator.execute(text(statement))

    def numbers(self, query: dict[str, str] | None = None) -> set[int]:
        """Return the server's numbers of all connections but our own."""
        rows = self._operator.execute(text((query or _ALL)[self._name]))
        return set(rows.scalars())

    def number_of(self, connection: Any) -> int:
        """Return the server's number of a connection or a session's connection."""
        return int(connection.execute(text(_NUMBER[self._name])).scalar_one())

    def waiting(self) -> int:
        """Return the one connection that waits for a lock, once there is one."""
        return int(self._until(lambda: next(iter(self._all_waiting()), None)))

    def _all_waiting(self) -> set[int]:
        waiting = self.numbers(_WAITING)
        if self._name == "mariadb":
            status = self._operator.execute(text("SHOW ENGINE INNODB STATUS")).one()
            waiting |= {int(n) for n in _ROW_WAIT.findall(status[2])} & self.numbers()
        return waiting

    def kill(self, number: int) -> None:
        """End a connection, and return when it is gone."""
        if self._name == "postgresql":
            self.execute(f"SELECT pg_terminate_backend({number})")
        else:
            with suppress(OperationalError):  # it has ended by itself
                self.execute(f"KILL CONNECTION {number}")
        self._until(lambda: number not in self.numbers())

    def kill_all(self) -> None:
        """End every other connection, as a server does that is started anew."""
        for number in self.numbers():
            self.kill(number)

    @contextmanager
    def locked(self, table: str) -> Iterator[Callable[[], None]]:
        """Let everybody else wait for a table; yields what ends that."""
        holder = self.connect()
        if self._name == "postgresql":
            holder.execute(text("BEGIN"))
            holder.execute(text(f"LOCK TABLE {table}"))
        else:
            holder.execute(text(f"LOCK TABLES {table} WRITE"))
        try:
            yield holder.close
        finally:
            holder.close()

    @staticmethod
    def _until(condition: Callable[[], Any]) -> Any:
        pause, deadline = threading.Event(), time.monotonic() + _SECONDS
        while not (found := condition()):
            assert time.monotonic() < deadline
            pause.wait(0.01)
        return found
