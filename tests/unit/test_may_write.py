"""Which statements count as a change; in doubt, all."""

from __future__ import annotations

import pytest

from flask_idempotency.store.dialects import PostgreSQL

may_write = PostgreSQL().may_write

READS = [
    "SELECT 1",
    "select name from account",
    "  \n\tSELECT 1",
    "(SELECT 1) UNION (SELECT 2)",
    "((SELECT 1))",
    "/* who */ SELECT 1",
    "/* several\nlines */ /* more */\nSELECT 1",
    "-- who\nSELECT 1",
    "-- who\n-- else\n  SELECT 1",
    "SELECT account.updated_at, account.deleted FROM account",
    "SELECT inserted_rows, merged FROM log",
    "SELECT * FROM account FOR UPDATE",
    "SELECT * FROM account FOR UPDATE OF account SKIP LOCKED",
    "SELECT * FROM account FOR NO KEY UPDATE NOWAIT",
    "SELECT * FROM account for  update",
    "SELECT * FROM account FOR SHARE",
    "SELECT * FROM account LOCK IN SHARE MODE",
    "WITH x AS (SELECT 1) SELECT * FROM x",
    "WITH RECURSIVE x AS (SELECT 1) SELECT * FROM x",
    "VALUES (1), (2)",
    "TABLE account",
    "SHOW VARIABLES LIKE 'x'",
    "EXPLAIN SELECT 1",
    "DESCRIBE account",
    "DESC account",
    "PRAGMA table_info(account)",
    "SET search_path TO x",
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    "USE shop",
    "BEGIN",
    "BEGIN IMMEDIATE",
    "START TRANSACTION",
    "SAVEPOINT sa_savepoint_1",
    "RELEASE SAVEPOINT sa_savepoint_1",
    "ROLLBACK TO SAVEPOINT sa_savepoint_1",
    "LISTEN channel",
]
WRITES = [
    "INSERT INTO account (name) VALUES ('x')",
    "insert into account values (1)",
    "  INSERT INTO account VALUES (1)",
    "(INSERT INTO account VALUES (1))",
    "UPDATE account SET name = 'x'",
    "DELETE FROM account",
    "/* read */ DELETE FROM account",
    "/* SELECT */ DELETE FROM account",
    "-- SELECT\nDELETE FROM account",
    "-- SELECT 1",
    "REPLACE INTO account VALUES (1)",
    "MERGE INTO account USING x ON true WHEN MATCHED THEN DELETE",
    "WITH x AS (INSERT INTO account VALUES (1) RETURNING id) SELECT * FROM x",
    "WITH x AS (DELETE FROM account RETURNING id) SELECT * FROM x",
    "WITH x AS (SELECT 1) UPDATE account SET name = 'x'",
    "WITH x AS (SELECT 1) INSERT INTO account SELECT * FROM x",
    "SELECT * INTO other FROM account",
    "SELECT 1 INTO OUTFILE '/tmp/x'",
    "EXPLAIN ANALYZE INSERT INTO account VALUES (1)",
    "EXPLAIN ANALYZE DELETE FROM account",
    "SELECT * FROM account FOR UPDATE; UPDATE account SET name = 'x'",
    "SELECT 1; DELETE FROM account",
    "SELECT 1; TRUNCATE account",
    "SELECT 1; DROP TABLE account",
    "SELECT 1; CALL settle()",
    "TRUNCATE account",
    "TRUNCATE TABLE account",
    "CREATE TABLE x (id INT)",
    "CREATE TABLE x AS SELECT 1",
    "DROP TABLE x",
    "ALTER TABLE x ADD y INT",
    "GRANT SELECT ON account TO x",
    "CALL settle()",
    "DO $$ BEGIN PERFORM settle(); END $$",
    "EXECUTE plan",
    "COPY account FROM STDIN",
    "LOAD DATA INFILE 'x' INTO TABLE account",
    "LOCK TABLES account WRITE",
    "NOTIFY channel",
    "VACUUM",
    "REINDEX TABLE account",
    "COMMIT",
    "PREPARE TRANSACTION 'x'",
    "HANDLER account OPEN",
    "SELECTED",
    "SETTLE",
    "",
    ";",
    "# SELECT\nDELETE FROM account",
    "/*!50000 DELETE FROM account */",
    "/*! INSERT INTO account VALUES (1) */ SELECT 1",
    "/* never closed SELECT 1",
]
#: No change, but nothing in the text proves it.
DOUBTFUL = [
    "SELECT replace(name, 'a', 'b') FROM account",
    "SELECT 'update' FROM account",
    'SELECT "delete" FROM account',
    "# who\nSELECT 1",
]


@pytest.mark.parametrize("statement", READS)
def test_read(statement: str) -> None:
    """A statement that only reads, locks or sets is no change."""
    assert may_write(statement) is False


@pytest.mark.parametrize("statement", WRITES)
def test_write(statement: str) -> None:
    """A statement that changes data in any way is a change."""
    assert may_write(statement) is True


@pytest.mark.parametrize("statement", DOUBTFUL)
def test_in_doubt_it_is_a_write(statement: str) -> None:
    """What is not certainly a read counts as a change."""
    assert may_write(statement) is True


@pytest.mark.parametrize("statement", WRITES)
def test_case_does_not_matter(statement: str) -> None:
    """SQL is written in any case."""
    assert may_write(statement.lower()) is True


@pytest.mark.parametrize("statement", READS)
def test_case_of_a_read_does_not_matter(statement: str) -> None:
    """A read in small letters is a read."""
    assert may_write(statement.lower()) is False
