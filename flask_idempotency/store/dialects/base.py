"""What the store asks of every database: clock, locks, errors."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

from sqlalchemy import insert

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection, Executable, Insert, Table
    from sqlalchemy.exc import DBAPIError, IntegrityError

# The first word of statements that change nothing which a re-run could double.
START = r"(?:\s|/\*.*?\*/|--[^\n]*\n|\()*"
_READ = re.compile(
    START + r"(?:SELECT|SHOW|EXPLAIN|PRAGMA|SET|BEGIN|START|SAVEPOINT|RELEASE|ROLLBACK"
    r"|VALUES|TABLE|DESCRIBE|DESC|USE|LISTEN|WITH)\b",
    re.IGNORECASE | re.DOTALL,
)
_WRITE_WORD = re.compile(
    r"\b(?:INSERT|UPDATE|DELETE|MERGE|REPLACE|INTO)\b", re.IGNORECASE
)
_LOCKING = re.compile(r"\bFOR\s+(?:NO\s+KEY\s+)?UPDATE\b", re.IGNORECASE)
_COMMIT = re.compile(START + r"(?:COMMIT|END)\b", re.IGNORECASE | re.DOTALL)
# Not END, with which bodies of functions and triggers end.
_COMMIT_AMID = re.compile(";" + START + r"COMMIT\b", re.IGNORECASE | re.DOTALL)


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

    #: Asks for what limits a statement of a session; empty where nothing does.
    timeout_query: ClassVar[str] = ""

    def timeout_seconds(self, rows: list[Any]) -> float | None:
        """Return the longest time for a statement, of the rows of that query."""
        return None

    def bind_text(self, value: str) -> str | bytes:
        """Return a text as the byte-exact columns of this database take it."""
        return value

    def connect_arguments(self, seconds: float) -> dict[str, Any]:
        """Return arguments that let the driver give up what stays unanswered."""
        return {}

    def limit(self, connection: Any, seconds: float) -> None:
        """
        Let what is sent on a driver connection fail if the server stays silent.

        By means of the client only: behind a pooler, what is set on the server would
        reach sessions of the application. A connection may be limited twice.
        """

    def prepare(self, connection: Any) -> None:
        """Set up a driver connection of the store's own pool."""

    def may_write(self, statement: str) -> bool:
        """Tell whether a statement may change data; in doubt it does."""
        several = ";" in statement.rstrip().rstrip(";")
        if several or not _READ.match(statement):
            return True
        return bool(_WRITE_WORD.search(_LOCKING.sub("", statement)))

    def commits(self, statement: str) -> bool:
        """Tell whether a text that is sent commits the transaction before it."""
        return bool(_COMMIT.match(statement) or _COMMIT_AMID.search(statement))

    def may_commit(self, statement: str) -> bool:
        """Tell whether a statement may commit what it, and those before, have done."""
        return False

    def lost_connection(self, error: BaseException) -> bool:
        """Tell whether a connection is gone, beyond what SQLAlchemy knows of."""
        return False

    def upsert(self, table: Table, rows: list[dict[str, Any]]) -> Executable:
        """Return the statement that inserts rows by primary key, or replaces them."""
        raise NotImplementedError

    def insert_new(self, table: Table) -> Insert:
        """
        Return an INSERT that leaves the transaction usable where a row is in its way.

        It then inserts nothing, or fails alone with an error of a duplicate.
        """
        return insert(table)

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

    def lock_for_writing(self, connection: Connection) -> None:
        """
        Make a transaction that has just begun one that can write, where that matters.

        Raises:
            IdempotencyStoreUnavailable: If another one does not let it in time.
        """

    def commits_by_itself(self, connection: Connection) -> bool:
        """Tell whether the driver has been set to commit each statement by itself."""
        return False

    def begin_before_write(self, connection: Connection, statement: str) -> None:
        """Make a statement part of a transaction where the driver would not."""

    def begin_before_savepoint(self, connection: Connection) -> None:
        """Make a savepoint part of a transaction where the driver would not."""
