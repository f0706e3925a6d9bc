"""SQLite: its clock, locks and errors."""

from __future__ import annotations

import re
import sqlite3
from typing import TYPE_CHECKING, Any

from sqlalchemy import func
from sqlalchemy.dialects.sqlite import insert

from flask_idempotency.exceptions import IdempotencyStoreUnavailable

from .base import START, Dialect

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection, Executable, Insert, Table
    from sqlalchemy.exc import DBAPIError, IntegrityError

# Statements that SQLite refuses in a transaction, or that would end it at once.
_ALONE = re.compile(
    START + r"(?:VACUUM|ATTACH|DETACH|COMMIT|END)\b", re.IGNORECASE | re.DOTALL
)


class SQLite(Dialect):
    """SQLite through the standard library's driver."""

    begin = ("BEGIN IMMEDIATE",)
    drivers = frozenset({"pysqlite"})
    # The text form in which SQLAlchemy keeps a DateTime, so that texts compare as
    # instants; SQLite's clock has milliseconds.
    _FORMAT = "%Y-%m-%d %H:%M:%f000"

    def upsert(self, table: Table, rows: list[dict[str, Any]]) -> Executable:
        statement = insert(table).values(rows)
        keys = [column.name for column in table.primary_key]
        others = {n: c for n, c in statement.excluded.items() if n not in keys}
        return statement.on_conflict_do_update(index_elements=keys, set_=others)

    def insert_new(self, table: Table) -> Insert:
        return insert(table).on_conflict_do_nothing()

    def prepare(self, connection: Any) -> None:
        # From Python 3.12 on an application may choose the driver's new mode, in
        # which SQLAlchemy's AUTOCOMMIT has no effect.
        if getattr(connection, "autocommit", None) is False:
            connection.autocommit = True

    def now(self) -> ColumnElement[Any]:
        return func.strftime(self._FORMAT, "now")

    def later(self, seconds: ColumnElement[float]) -> ColumnElement[Any]:
        return func.strftime(self._FORMAT, "now", func.printf("%+.3f seconds", seconds))

    def seconds_until(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        return (func.julianday(column) - func.julianday("now")) * 86400.0

    def code(self, error: DBAPIError) -> object:
        return str(error.orig)

    def is_transient(self, error: DBAPIError) -> bool:
        return "database is locked" in str(error.orig)

    def is_schema_error(self, error: DBAPIError) -> bool:
        return str(error.orig).startswith(("no such table", "no such column")) or (
            "has no column named" in str(error.orig)
        )

    def is_duplicate(self, error: IntegrityError, constraint: str, table: str) -> bool:
        return f"{table}.idempotency_key" in str(error.orig)

    def hides_claims(self, connection: Connection) -> bool:
        return self._in_transaction(connection)

    def lock_for_writing(self, connection: Connection) -> None:
        # A transaction that reads first can be refused at its first change, at once.
        # By the driver: in its legacy mode it has begun nothing yet, but a listener or
        # the newer mode may have.
        raw: Any = connection.connection.dbapi_connection
        try:
            if raw.in_transaction:
                raw.execute("ROLLBACK")
            raw.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            raise IdempotencyStoreUnavailable(
                f"SQLite has one writer at a time, and was not free: {error}"
            ) from error

    def commits_by_itself(self, connection: Connection) -> bool:
        # The driver's mode since Python 3.12, in which its commit() does nothing.
        return (
            getattr(connection.connection.dbapi_connection, "autocommit", None) is True
        )

    def begin_before_write(self, connection: Connection, statement: str) -> None:
        # In its legacy mode the driver begins before a statement whose first word is
        # INSERT, UPDATE, DELETE or REPLACE, so "WITH … UPDATE" would be durable at
        # once; with isolation_level=None all would.
        if self._in_transaction(connection) or _ALONE.match(statement):
            return
        raw: Any = connection.connection.dbapi_connection
        raw.execute(f"BEGIN {raw.isolation_level or ''}")

    def begin_before_savepoint(self, connection: Connection) -> None:
        # In the driver's legacy mode a savepoint opens no transaction, and releasing
        # it would commit.
        if not self._in_transaction(connection):
            connection.exec_driver_sql("BEGIN")

    def _in_transaction(self, connection: Connection) -> bool:
        return bool(connection.connection.dbapi_connection.in_transaction)  # type: ignore[union-attr]
