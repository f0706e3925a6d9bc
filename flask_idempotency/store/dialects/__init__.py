"""What differs between databases: one module for each, and which one is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flask_idempotency.exceptions import IdempotencyConfigError

from .base import Dialect
from .mysql import MySQL
from .postgresql import PostgreSQL
from .sqlite import SQLite

if TYPE_CHECKING:
    from sqlalchemy import Engine

__all__ = ["Dialect", "MySQL", "PostgreSQL", "SQLite", "dialect_for", "dialect_of"]

_DIALECTS: dict[str, type[Dialect]] = {
    "postgresql": PostgreSQL,
    "mysql": MySQL,
    "mariadb": MySQL,
    "sqlite": SQLite,
}


def dialect_of(engine: Engine) -> Dialect:
    """Return what is known of any engine's database, also of one that keeps no records."""
    return _DIALECTS.get(engine.dialect.name, Dialect)()


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
