"""What differs between databases: clock, locks, errors, and the claiming INSERT."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

from sqlalchemy import Float, cast, extract, func, literal_column, text

from flask_idempotency.exceptions import IdempotencyConfigError

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection
    from sqlalchemy.exc import DBAPIError, IntegrityError

# The first word of statements that change nothing which a re-run could double.
_READ = re.compile(
    r"(?:\s|/\*.*?\*/|--[^\n]*\n|\()*"
    r"(?:SELECT|SHOW|EXPLAIN|PRAGMA|SET|BEGIN|START|SAVEPOINT|RELEASE|ROLLBACK|VALUES"
    r"|TABLE|DESCRIBE|DESC|USE|LISTEN|WITH)\b",
    re.IGNORECASE | re.DOTALL,
)
_WRITE_WORD = re.compile(
    r"\b(?:INSERT|UPDATE|DELETE|MERGE|REPLACE|INTO)\b", re.IGNORECASE
)
_LOCKING = re.compile(r"\bFOR\s+(?:NO\s+KEY\s+)?UPDATE\b", re.IGNORECASE)


def may_write(statement: str) -> bool:
    """Tell whether a statement may change data; in doubt it does."""
    several = ";" in statement.rstrip().rstrip(";")
    if several or not _READ.match(statement):
        return True
    return bool(_WRITE_WORD.search(_LOCKING.sub("", statement)))


class Dialect:
    """The common part; each subclass speaks for one database."""

    #: Statements that open a short transaction on an autocommitting connection.
    begin: ClassVar[tuple[str, ...]]
    #: Error codes after which the same statement may succeed.
    transient: ClassVar[frozenset[object]] = frozenset()
    #: Error codes of a table or column that is not there.
    schema: ClassVar[frozenset[object]] = frozenset()

    def bind_text(self, value: str) -> str | bytes:
        """Return a text as the byte-exact columns of this database take it."""
        return value

    def now(self) -> ColumnElement[Any]:
        """Return the database's clock at the moment of the statement, in UTC."""
        raise NotImplementedError

    def later(self, seconds: ColumnElement[float]) -> ColumnElement[Any]:
        """Return the instant that is `seconds` from now."""
        raise NotImplementedError

    def seconds_until(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        """Return the seconds from now until the instant in `column`."""
        raise NotImplementedError

    def code(self, error: DBAPIError) -> object:
        """Return the database's own code of an error."""
        raise NotImplementedError

    def is_transient(self, error: DBAPIError) -> bool:
        """Tell whether the same short statement may be sent again."""
        return error.connection_invalidated or self.code(error) in self.transient

    def is_schema_error(self, error: DBAPIError) -> bool:
        """Tell whether a table or column is missing."""
        return self.code(error) in self.schema

    def is_duplicate(self, error: IntegrityError, constraint: str, table: str) -> bool:
        """Tell whether an INSERT met the unique constraint of the scope."""
        raise NotImplementedError

    def has_written(self, connection: Connection) -> bool:
        """Ask the database whether the transaction changed anything, if it can tell."""
        return False

    def is_aborted(self, connection: Connection) -> bool:
        """Tell whether the server will turn this transaction's COMMIT into ROLLBACK."""
        return False

    def hides_claims(self, connection: Connection) -> bool:
        """
        Tell whether the open transaction cannot see what is claimed from now on.

        Or, on SQLite, would keep it from being claimed at all.
        """
        return False

    def begin_before_savepoint(self, connection: Connection) -> None:
        """Make a savepoint part of a transaction where the driver would not."""


class PostgreSQL(Dialect):
    """PostgreSQL through psycopg 3."""

    begin = ("BEGIN ISOLATION LEVEL READ COMMITTED",)
    transient = frozenset({"40001", "40P01"})
    schema = frozenset({"42P01", "42703", "3F000"})

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


class MySQL(Dialect):
    """MariaDB 10.6 and MySQL 8.0 or later through PyMySQL."""

    begin = (
        "SET TRANSACTION ISOLATION LEVEL READ COMMITTED",
        "START TRANSACTION",
    )
    # Deadlock, lock wait timeout, changed since the snapshot.
    transient = frozenset({1213, 1205, 1020})
    schema = frozenset({1146, 1054})
    _DUPLICATE = 1062
    _UNIT: ClassVar[ColumnElement[Any]] = literal_column("MICROSECOND")

    def __init__(self) -> None:
        self._snapshot_isolation: bool | None = None

    def bind_text(self, value: str) -> bytes:
        return value.encode()

    def now(self) -> ColumnElement[Any]:
        return func.utc_timestamp(literal_column("6"))

    def later(self, seconds: ColumnElement[float]) -> ColumnElement[Any]:
        microseconds = func.round(seconds * 1_000_000)
        return func.timestampadd(self._UNIT, microseconds, self.now())

    def seconds_until(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        return func.timestampdiff(self._UNIT, self.now(), column) / 1e6

    def code(self, error: DBAPIError) -> object:
        arguments = getattr(error.orig, "args", ())
        return arguments[0] if arguments else None

    def is_duplicate(self, error: IntegrityError, constraint: str, table: str) -> bool:
        # "Duplicate entry '…' for key 'name'": the entry is the client's text, so
        # only the end of the message is looked at.
        message = str(error.orig.args[-1]) if error.orig else ""
        key = re.search(r"for key '(?:[^'.]*\.)?([^'.]*)'$", message)
        return (
            self.code(error) == self._DUPLICATE
            and key is not None
            and key[1] == constraint
        )

    def hides_claims(self, connection: Connection) -> bool:
        # With snapshot isolation (the default from MariaDB 11.8) an UPDATE of a row
        # that is younger than the snapshot fails with 1020.
        if self._snapshot_isolation is None:
            query = text("SHOW VARIABLES LIKE 'innodb_snapshot_isolation'")
            row = connection.execute(query).first()
            self._snapshot_isolation = row is not None and row[1] == "ON"
        return self._snapshot_isolation


class SQLite(Dialect):
    """SQLite through the standard library's driver."""

    begin = ("BEGIN IMMEDIATE",)
    # The text form in which SQLAlchemy keeps a DateTime, so that texts compare as
    # instants; SQLite's clock has milliseconds.
    _FORMAT = "%Y-%m-%d %H:%M:%f000"

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

    def begin_before_savepoint(self, connection: Connection) -> None:
        # In the driver's legacy mode a savepoint opens no transaction, and releasing
        # it would commit.
        if not self._in_transaction(connection):
            connection.exec_driver_sql("BEGIN")

    def _in_transaction(self, connection: Connection) -> bool:
        return bool(connection.connection.dbapi_connection.in_transaction)  # type: ignore[union-attr]


_DIALECTS: dict[str, type[Dialect]] = {
    "postgresql": PostgreSQL,
    "mysql": MySQL,
    "mariadb": MySQL,
    "sqlite": SQLite,
}


def dialect_for(name: str) -> Dialect:
    """
    Return the dialect of a database by SQLAlchemy's name for it.

    Raises:
        IdempotencyConfigError: If the database is not supported.
    """
    if name not in _DIALECTS:
        known = ", ".join(_DIALECTS)
        raise IdempotencyConfigError(
            f"The database '{name}' is not supported; records can be kept in {known}."
        )
    return _DIALECTS[name]()
