"""PostgreSQL: its clock, locks and errors."""

from __future__ import annotations

import math
import os
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy import Float, cast, extract, func, text, true
from sqlalchemy.dialects.postgresql import insert

from .base import Dialect

if TYPE_CHECKING:
    from collections.abc import Generator

    from sqlalchemy import ColumnElement, Connection, Executable, Insert, Table
    from sqlalchemy.exc import DBAPIError, IntegrityError

#: Where a driver connection's own isolation level is kept; a listener may have set it.
_LEVEL = "flask_idempotency_level"


class PostgreSQL(Dialect):
    """PostgreSQL through psycopg 3."""

    # READ COMMITTED, so that a row is seen as it is when its lock was got.
    begin = ("BEGIN ISOLATION LEVEL READ COMMITTED",)
    drivers = frozenset({"psycopg"})
    transient = frozenset({"40001", "40P01"})
    locked = frozenset({"55P03"})
    schema = frozenset({"42P01", "42703", "3F000"})

    timeout_query = "SELECT setting FROM pg_settings WHERE name = 'statement_timeout'"

    def timeout_seconds(self, rows: list[Any]) -> float | None:
        return float(rows[0][0]) / 1000 or None  # 0 is no limit

    def connect_arguments(self, seconds: float) -> dict[str, Any]:
        if "PGCONNECT_TIMEOUT" in os.environ:  # an argument would override it
            return {}
        # For psycopg less than 2 s is 2 s, and less than 1 s no limit at all.
        return {"connect_timeout": max(2, math.ceil(seconds))}

    def limit(self, connection: Any, seconds: float) -> None:
        # A proxy, since a connection that refers to itself would outlive its use.
        connection.wait = partial(_wait, weakref.proxy(connection), seconds)

    def lost_connection(self, error: BaseException) -> bool:
        # An error that no server has sent. psycopg may say "connection socket closed"
        # while the connection does not count as closed yet, and would be used again.
        return (
            type(error).__name__ == "OperationalError"
            and getattr(error, "sqlstate", "") is None
        )

    def upsert(self, table: Table, rows: list[dict[str, Any]]) -> Executable:
        statement = insert(table).values(rows)
        keys = [column.name for column in table.primary_key]
        others = {n: c for n, c in statement.excluded.items() if n not in keys}
        return statement.on_conflict_do_update(index_elements=keys, set_=others)

    def insert_new(self, table: Table) -> Insert:
        return insert(table).on_conflict_do_nothing()

    def short_wait(self) -> list[ColumnElement[bool]]:
        # Local to the statement's own transaction, so that a pooler leaks nothing.
        return [func.set_config("lock_timeout", "100", true()).is_not(None)]

    def now(self) -> ColumnElement[Any]:
        return func.clock_timestamp()  # now() is the transaction's start

    def later(self, seconds: ColumnElement[float]) -> ColumnElement[Any]:
        return func.clock_timestamp() + func.make_interval(
            0, 0, 0, 0, 0, 0, cast(seconds, Float)
        )

    def seconds_until(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        return cast(extract("epoch", column - func.clock_timestamp()), Float)

    def code(self, error: DBAPIError) -> object:
        return getattr(error.orig, "sqlstate", None)

    def is_duplicate(self, error: IntegrityError, constraint: str, table: str) -> bool:
        return getattr(error.orig.diag, "constraint_name", None) == constraint  # type: ignore[union-attr]

    def has_written(self, connection: Connection) -> bool:
        # Exact, also for a function that writes: a transaction gets its id with the
        # first change.
        query = text("SELECT pg_current_xact_id_if_assigned() IS NOT NULL")
        return bool(connection.execute(query).scalar())

    def commits_by_itself(self, connection: Connection) -> bool:
        return bool(connection.connection.dbapi_connection.autocommit)  # type: ignore[union-attr]

    def is_aborted(self, connection: Connection) -> bool:
        info = connection.connection.dbapi_connection.info  # type: ignore[union-attr]
        return bool(info.transaction_status.name == "INERROR")

    def hides_claims(self, connection: Connection) -> bool:
        level = connection.connection.dbapi_connection.isolation_level  # type: ignore[union-attr]
        name = level.name.replace("_", " ") if level else self._own_level(connection)
        return name in {"REPEATABLE READ", "SERIALIZABLE"}

    def _own_level(self, connection: Connection) -> str:
        """Return the level that a connection has unless told otherwise, asked once."""
        level: str | None = connection.info.get(_LEVEL)
        if level is None:
            if self.is_aborted(connection):  # which answers nothing
                return str(connection.default_isolation_level)
            query = "SHOW default_transaction_isolation"
            level = str(connection.exec_driver_sql(query).scalar_one()).upper()
            connection.info[_LEVEL] = level
        return level


def _wait(
    connection: Any, seconds: float, work: Generator[Any, Any, Any], **options: Any
) -> Any:
    """Replace ``psycopg.Connection.wait``, through which all traffic goes."""
    limited = _limited(connection, seconds, work)
    return connection.__class__.wait(connection, limited, **options)


def _limited(
    connection: Any, seconds: float, work: Generator[Any, Any, Any]
) -> Generator[Any, Any, Any]:
    """
    Pass on what psycopg waits for, and end it when that takes too long.

    psycopg comes back ten times per second. What it comes back with does not tell
    whether there is data (3.2.2 always says so), so the work goes on first, and an
    answer that has arrived counts however late it is looked at.
    """
    deadline = time.monotonic() + seconds
    try:
        wanted = next(work)
        while True:
            ready = yield wanted
            wanted = work.send(ready)
            if time.monotonic() > deadline:
                # Closed, since an answer that comes later would be taken for the next
                # statement's; SQLAlchemy replaces a connection that is closed.
                connection.close()
                raise connection.OperationalError(f"no answer within {seconds:g} s")
    except StopIteration as done:
        return done.value
