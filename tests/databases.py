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
        url = self.url.set(database=name)
        return url.render_as_string(hide_password=False)

    def drop(self, url: str) -> None:
        """Drop a database that this run made, whoever is connected to it."""
        name = make_url(url).database
        force = " WITH (FORCE)" if self.name == "postgresql" else ""
        self._execute(f"DROP DATABASE IF EXISTS {name}{force}")

    def empty(self, url: str) -> None:
        """Drop everything in a database, and end what is left connected to it."""
        name = make_url(url).database
        if self.name == "postgresql":
            self._execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = :name",
                name=str(name),
            )
            engine = create_engine(
                url, poolclass=NullPool, isolation_level="AUTOCOMMIT"
            )
            with engine.connect() as connection:
                connection.execute(text("DROP SCHEMA public CASCADE"))
                connection.execute(text("CREATE SCHEMA public"))
        else:
            self._execute(f"DROP DATABASE {name}")
            self._execute(f"CREATE DATABASE {name}")

    def _admin(self) -> Engine:
        return create_engine(self.url, poolclass=NullPool, isolation_level="AUTOCOMMIT")

    def _execute(self, statement: str, **values: str) -> None:
        with self._admin().connect() as connection:
            connection.execute(text(statement), values)


def sqlite_database(folder: Path, name: str = "test") -> Database:
    """Return a SQLite database in a file of its own."""
    return Database("sqlite", f"sqlite:///{(folder / f'{name}.db').as_posix()}")
