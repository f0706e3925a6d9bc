"""PostgreSQL: its clock, locks and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import Float, cast, extract, func, text, true

from .base import Dialect

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection
    from sqlalchemy.exc import DBAPIError, IntegrityError


class PostgreSQL(Dialect):
    """PostgreSQL through psycopg 3."""

    # READ COMMITTED, so that a row is seen as it is when its lock was got.
    begin = ("BEGIN ISOLATION LEVEL READ COMMITTED",)
    drivers = frozenset({"psycopg"})
    transient = frozenset({"40001", "40P01"})
    locked = frozenset({"55P03"})
    schema = frozenset({"42P01", "42703", "3F000"})

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

    def is_aborted(self, connection: Connection) -> bool:
        info = connection.connection.dbapi_connection.info  # type: ignore[union-attr]
        return bool(info.transaction_status.name == "INERROR")

    def hides_claims(self, connection: Connection) -> bool:
        level = connection.connection.dbapi_connection.isolation_level  # type: ignore[union-attr]
        name = level.name if level else str(connection.default_isolation_level)
        return name.replace("_", " ") in {"REPEATABLE READ", "SERIALIZABLE"}
