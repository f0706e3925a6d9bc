"""What differs between databases: clock, locks, errors, and the claiming INSERT."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

from sqlalchemy import Float, cast, extract, func, literal_column, text, true
from sqlalchemy.exc import DBAPIError

from flask_idempotency.exceptions import IdempotencyConfigError

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection, Engine
    from sqlalchemy.exc import IntegrityError

# The first word of statements that change nothing which a re-run could double.
_START = r"(?:\s|/\*.*?\*/|--[^\n]*\n|\()*"
_READ = re.compile(
    _START + r"(?:SELECT|SHOW|EXPLAIN|PRAGMA|SET|BEGIN|START|SAVEPOINT|RELEASE|ROLLBACK"
    r"|VALUES|TABLE|DESCRIBE|DESC|USE|LISTEN|WITH)\b",
    re.IGNORECASE | re.DOTALL,
)
_WRITE_WORD = re.compile(
    r"\b(?:INSERT|UPDATE|DELETE|MERGE|REPLACE|INTO)\b", re.IGNORECASE
)
_LOCKING = re.compile(r"\bFOR\s+(?:NO\s+KEY\s+)?UPDATE\b", re.IGNORECASE)
_COMMIT = re.compile(_START + r"(?:COMMIT|END)\b", re.IGNORECASE | re.DOTALL)


class Dialect:
    """The common part; each subclass speaks for one database."""

    #: Statements that open a short transaction on an autocommitting connection.
    begin: ClassVar[tuple[str, ...]]
    #: Drivers that are tested.
    drivers: ClassVar[frozenset[str]]
    #: Error codes of a wait for a lock that was cut short.
    locked: ClassVar[frozenset[object]] = frozenset()
    #: Error codes after which the same statement may succeed.
    transient: ClassVar[frozenset[object]] = frozenset()
    #: Error codes of a table or column that is not there.
    schema: ClassVar[frozenset[object]] = frozenset()

    def bind_text(self, value: str) -> str | bytes:
        """Return a text as the byte-exact columns of this database take it."""
        return value

    def prepare(self, connection: Any) -> None:
        """Set up a driver connection of the store's own pool."""

    def may_write(self, statement: str) -> bool:
        """Tell whether a statement may change data; in doubt it does."""
        several = ";" in statement.rstrip().rstrip(";")
        if several or not _READ.match(statement):
            return True
        return bool(_WRITE_WORD.search(_LOCKING.sub("", statement)))

    def commits(self, statement: str) -> bool:
        """Tell whether a statement sent as text commits the transaction before it."""
        return bool(_COMMIT.match(statement))

    def short_wait(self) -> list[ColumnElement[bool]]:
        """Return conditions that keep their statement from waiting for a lock."""
        return []

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
        lost = error.connection_invalidated
        return lost or self.code(error) in self.transient or self.is_locked(error)

    def ends_transaction(self, error: Exception) -> bool:
        """Tell whether the server has answered an error by rolling everything back."""
        return False

    def is_locked(self, error: DBAPIError) -> bool:
        """Tell whether somebody else holds a lock that the statement needs."""
        return self.code(error) in self.locked

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


# What stands before a parenthesis in the statements that an ORM reads with. Another
# function only makes a commit count as an effect.
_CALLED = re.compile(r"([a-zA-Z_][\w$.]*)`?\s*\(")
_BUILT_IN = frozenset(
    [
        "abs",
        "all",
        "and",
        "any",
        "as",
        "avg",
        "between",
        "by",
        "case",
        "cast",
        "ceil",
        "ceiling",
        "char",
        "coalesce",
        "concat",
        "concat_ws",
        "connection_id",
        "convert",
        "count",
        "curdate",
        "current_date",
        "current_timestamp",
        "database",
        "date",
        "date_add",
        "date_format",
        "date_sub",
        "dense_rank",
        "distinct",
        "div",
        "else",
        "exists",
        "exp",
        "extract",
        "floor",
        "for",
        "from",
        "greatest",
        "group_concat",
        "having",
        "hex",
        "if",
        "ifnull",
        "in",
        "instr",
        "interval",
        "is",
        "isnull",
        "join",
        "json_extract",
        "json_unquote",
        "lag",
        "last_insert_id",
        "lead",
        "least",
        "left",
        "length",
        "like",
        "limit",
        "ln",
        "locate",
        "log",
        "lower",
        "lpad",
        "ltrim",
        "max",
        "md5",
        "min",
        "mod",
        "not",
        "now",
        "nullif",
        "on",
        "or",
        "order",
        "over",
        "partition",
        "position",
        "pow",
        "power",
        "rand",
        "rank",
        "regexp",
        "replace",
        "right",
        "round",
        "row_number",
        "rpad",
        "rtrim",
        "select",
        "sha1",
        "sha2",
        "sign",
        "some",
        "sqrt",
        "string",
        "sum",
        "substr",
        "substring",
        "then",
        "timestampdiff",
        "trim",
        "truncate",
        "union",
        "unix_timestamp",
        "upper",
        "user",
        "using",
        "utc_timestamp",
        "values",
        "version",
        "when",
        "where",
        "with",
        "xor",
        "year",
    ]
)
# Statements after which what was open before is committed.
_IMPLICIT_COMMIT = re.compile(
    _START + r"(?:ALTER|CREATE|DROP|RENAME|TRUNCATE|BEGIN|START|LOCK|ANALYZE|OPTIMIZE"
    r"|GRANT|REVOKE|SET\s+(?:@@)?(?:SESSION\s+|session\.)?autocommit)\b",
    re.IGNORECASE | re.DOTALL,
)


class MySQL(Dialect):
    """MariaDB 10.6 and MySQL 8.0 or later through PyMySQL."""

    begin = (
        "SET TRANSACTION ISOLATION LEVEL READ COMMITTED",
        "START TRANSACTION",
    )
    drivers = frozenset({"pymysql"})
    # Deadlock, changed since the snapshot.
    transient = frozenset({1213, 1020})
    locked = frozenset({1205})
    schema = frozenset({1146, 1054})
    _DUPLICATE, _DEADLOCK = 1062, 1213
    _UNIT: ClassVar[ColumnElement[Any]] = literal_column("MICROSECOND")

    def __init__(self) -> None:
        self._snapshot_isolation: bool | None = None

    def prepare(self, connection: Any) -> None:
        with connection.cursor() as cursor:
            # 0 would be shorter, but on MariaDB breaks a COMMIT after SKIP LOCKED.
            cursor.execute("SET SESSION innodb_lock_wait_timeout = 1")

    def may_write(self, statement: str) -> bool:
        if super().may_write(statement):
            return True
        # A stored function may write; the server cannot be asked at the commit.
        return not _BUILT_IN.issuperset(map(str.lower, _CALLED.findall(statement)))

    def commits(self, statement: str) -> bool:
        return super().commits(statement) or bool(_IMPLICIT_COMMIT.match(statement))

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

    def ends_transaction(self, error: Exception) -> bool:
        return isinstance(error, DBAPIError) and self.code(error) == self._DEADLOCK

    def is_duplicate(self, error: IntegrityError, constraint: str, table: str) -> bool:
        # The words depend on the server's language, the constraint's name does not.
        return self.code(error) == self._DUPLICATE and constraint in str(error.orig)

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
    drivers = frozenset({"pysqlite"})
    # The text form in which SQLAlchemy keeps a DateTime, so that texts compare as
    # instants; SQLite's clock has milliseconds.
    _FORMAT = "%Y-%m-%d %H:%M:%f000"

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


def dialect_for(engine: Engine) -> Dialect:
    """
    Return the dialect of an engine's database.

    Raises:
        IdempotencyConfigError: If the database or its driver is not supported.
    """
    name, driver = engine.dialect.name, engine.dialect.driver
    if name not in _DIALECTS:
        raise IdempotencyConfigError(
            f"The database '{name}' is not supported; records can be kept in "
            f"{', '.join(_DIALECTS)}."
        )
    dialect = _DIALECTS[name]()
    if driver not in dialect.drivers:
        known = " or ".join(f"'{name}+{known}://'" for known in sorted(dialect.drivers))
        raise IdempotencyConfigError(
            f"The driver '{driver}' is not supported; let the database URL start with "
            f"{known}."
        )
    return dialect
