"""What the databases need: their own settings, and a hint while there are no tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from flask import abort, current_app
from sqlalchemy import event, inspect
from sqlalchemy.exc import OperationalError
from werkzeug.routing import IntegerConverter

from .extensions import db
from .models import Account

if TYPE_CHECKING:
    from sqlite3 import Connection

    from flask import Flask
    from sqlalchemy.pool import ConnectionPoolEntry
    from werkzeug.routing import Map

NO_TABLES = (
    "The database has no tables yet. "
    "Run this first: python -m flask --app example_app db upgrade"
)
_READY = "example_app.tables"


class RowId(IntegerConverter):
    """``<row_id:name>`` in a rule: a number that every database's INTEGER can hold."""

    regex = r"\d{1,10}"  # Python itself refuses numbers of thousands of digits

    def __init__(self, url_map: Map) -> None:
        super().__init__(url_map, max=2**31 - 1)


def configure_sqlite(app: Flask) -> None:
    """Let readers and one writer of an SQLite file work side by side."""
    with app.app_context():
        if db.engine.dialect.name == "sqlite":
            event.listen(db.engine, "connect", _set_pragmas)


def _set_pragmas(connection: Connection, _entry: ConnectionPoolEntry) -> None:
    # First of all wait for others, also while the journal mode is changed.
    for pragma in ("busy_timeout = 5000", "journal_mode = WAL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}").close()


def refuse_without_tables() -> None:
    """Answer 503 with the next step until the tables were seen once."""
    if _READY not in current_app.extensions:
        if problem := _problem():
            abort(503, problem)
        current_app.extensions[_READY] = True


def hint_at_missing_tables(app: Flask) -> None:
    """Print the next step where a person starts the server."""
    context = click.get_current_context(silent=True)
    if context is None or context.info_name != "run":
        return
    with app.app_context():
        if problem := _problem():
            click.echo(problem, err=True)


def _problem() -> str | None:
    try:
        if inspect(db.engine).has_table(Account.__tablename__):
            return None
    except OperationalError:
        current_app.logger.exception("The tables could not be looked for.")
        return "The database cannot be reached."
    return NO_TABLES
