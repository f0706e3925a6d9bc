"""MySQL and MariaDB: their clock, locks and errors, and what may write there."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

from sqlalchemy import func, literal_column, text
from sqlalchemy.dialects.mysql import insert
from sqlalchemy.exc import DBAPIError

from .base import START, Dialect

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection, Executable, Table
    from sqlalchemy.exc import IntegrityError

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
    START + r"(?:ALTER|(?:CREATE|DROP)(?!\s+(?:OR\s+REPLACE\s+)?TEMPORARY\b)|RENAME"
    r"|TRUNCATE|BEGIN|START|LOCK|ANALYZE|OPTIMIZE|CHECK|REPAIR|CACHE|LOAD\s+INDEX"
    r"|FLUSH|RESET|INSTALL|UNINSTALL|GRANT|REVOKE|SET\b.*\bautocommit)\b",
    re.IGNORECASE | re.DOTALL,
)

# What they run may be a COMMIT.
_CALL = re.compile(START + r"(?:CALL|EXECUTE)\b", re.IGNORECASE | re.DOTALL)


class MySQL(Dialect):
    """MariaDB 10.6 and MySQL 8.0 or later through PyMySQL."""

    begin = (
        "SET TRANSACTION ISOLATION LEVEL READ COMMITTED",
        "START TRANSACTION",
    )
    drivers = frozenset({"pymysql"})
    # Deadlock, changed since the snapshot: the server has rolled everything back.
    transient = frozenset({1213, 1020})
    locked = frozenset({1205})
    schema = frozenset({1146, 1054})
    # MariaDB's, in seconds, and MySQL's, in milliseconds.
    timeout_query = (
        "SHOW VARIABLES WHERE Variable_name "
        "IN ('max_statement_time', 'max_execution_time')"
    )
    _DUPLICATE = 1062
    _UNIT: ClassVar[ColumnElement[Any]] = literal_column("MICROSECOND")

    def upsert(self, table: Table, rows: list[dict[str, Any]]) -> Executable:
        statement = insert(table).values(rows)
        keys = [column.name for column in table.primary_key]
        others = {n: c for n, c in statement.inserted.items() if n not in keys}
        return statement.on_duplicate_key_update(**others)

    def __init__(self) -> None:
        self._snapshot_isolation: bool | None = None

    def timeout_seconds(self, rows: list[Any]) -> float | None:
        if not rows:
            return None
        name, value = rows[0]
        scale = 1 if name == "max_statement_time" else 1000
        return float(value) / scale or None  # 0 is no limit

    def connect_arguments(self, seconds: float) -> dict[str, Any]:
        return {
            "connect_timeout": seconds,
            "read_timeout": seconds,
            "write_timeout": seconds,
        }

    def limit(self, connection: Any, seconds: float) -> None:
        # Already there, unless the engine has a `creator`, which gets no arguments;
        # PyMySQL has no public way to set them later.
        for name in ("_read_timeout", "_write_timeout"):
            if getattr(connection, name, None) is None:
                setattr(connection, name, seconds)

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

    def may_commit(self, statement: str) -> bool:
        return bool(_CALL.match(statement))

    def commits_by_itself(self, connection: Connection) -> bool:
        # What the server said last; no question is sent.
        return bool(connection.connection.dbapi_connection.get_autocommit())  # type: ignore[union-attr]

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
        return isinstance(error, DBAPIError) and self.code(error) in self.transient

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
