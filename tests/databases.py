"""Databases for tests: SQLite always, servers where they answer."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import URL, Engine

SERVERS = {
    "postgresql": (
        "IDEMPOTENCY_TEST_POSTGRESQL_URL",
        "postgresql+psycopg://postgres@127.0.0.1:5432/postgres",
    ),
    "mariadb": (
        "IDEMPOTENCY_TEST_MARIADB_URL",
        "mysql+pymysql://root@127.0.0.1:3306/",
    ),
}
_TERMINATE_OTHERS = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
_SCHEMAS = """
    SELECT nspname FROM pg_namespace
    WHERE nspname NOT LIKE 'pg\\_%' AND nspname <> 'information_schema'
"""
NAMES = ("sqlite", *SERVERS)


@dataclass(frozen=True)
class Database:
    """An empty database that belongs to one test."""

    name: str
    url: str


class Server:
    """A database server on which this run makes and drops its own databases."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.variable, default = SERVERS[name]
        self.url: URL = make_url(os.environ.get(self.variable, default))

    def absence(self) -> str | None:
        """Return why the server cannot be used, or None."""
        try:
            with self._admin().connect():
                return None
        except OperationalError as error:
            reason = str(error.orig).strip().split("\n")[0]
            where = self.url.render_as_string()
            return f"{self.name} does not answer at {where} ({self.variable}): {reason}"

    def create(self) -> str:
        """Make a uniquely named database and return its URL."""
        name = f"idempotency_test_{os.getpid()}_{uuid.uuid4().hex[:8]}"
        self._execute(f"CREATE DATABASE {name}")
        return self.url.set(database=name).render_as_string(hide_password=False)

    def drop(self, url: str) -> None:
        """Drop a database that this run made, whoever is connected to it."""
        force = " WITH (FORCE)" if self.name == "postgresql" else ""
        self._execute(f"DROP DATABASE IF EXISTS {make_url(url).database}{force}")

    def empty(self, url: str) -> None:
        """Remove everything in a database, and end what is left connected to it."""
        if self.name == "postgresql":  # where a new database takes half a second
            self._drop_schemas(url)
            return
        self.drop(url)
        self._execute(f"CREATE DATABASE {make_url(url).database}")

    def _drop_schemas(self, url: str) -> None:
        engine = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(_TERMINATE_OTHERS))
            for schema in connection.execute(text(_SCHEMAS)).scalars().all():
                connection.execute(text(f'DROP SCHEMA "{schema}" CASCADE'))
            connection.execute(text("CREATE SCHEMA public"))

    def _admin(self) -> Engine:
        return create_engine(self.url, poolclass=NullPool, isolation_level="AUTOCOMMIT")

    def _execute(self, statement: str) -> None:
        with self._admin().connect() as connection:
            connection.execute(text(statement))


def sqlite_database(folder: Path, name: str = "test") -> Database:
    """Return a SQLite database in a file of its own."""
    return Database("sqlite", f"sqlite:///{(folder / f'{name}.db').as_posix()}")
