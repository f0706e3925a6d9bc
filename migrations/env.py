"""Run the migrations of the current application's database."""

from __future__ import annotations

import logging
from logging.config import fileConfig
from typing import TYPE_CHECKING, Any

from alembic import context
from flask import current_app

if TYPE_CHECKING:
    from alembic.operations import MigrationScript
    from alembic.runtime.migration import MigrationContext
    from sqlalchemy import Engine, MetaData

config = context.config
logger = logging.getLogger("alembic.env")
# An application or a test run that has set logging up keeps it.
if config.config_file_name and not logging.getLogger().handlers:
    fileConfig(config.config_file_name, disable_existing_loggers=False)


def get_engine() -> Engine:
    """Return the engine of the default bind."""
    return current_app.extensions["migrate"].db.engine


def get_metadata() -> MetaData:
    """Return the models' tables of the default bind."""
    return current_app.extensions["migrate"].db.metadatas[None]


def run_migrations_offline() -> None:
    """Print the SQL instead of running it."""
    url = get_engine().url.render_as_string(hide_password=False)
    context.configure(url=url, target_metadata=get_metadata(), literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()


def run_migrations_online() -> None:
    """Run the migrations over a connection of the application's engine."""
    options: dict[str, Any] = dict(current_app.extensions["migrate"].configure_args)
    options.setdefault("process_revision_directives", drop_empty_migration)
    with get_engine().connect() as connection:
        context.configure(
            connection=connection, target_metadata=get_metadata(), **options
        )
        with context.begin_transaction():
            context.run_migrations()


def drop_empty_migration(
    _context: MigrationContext, _revision: object, directives: list[MigrationScript]
) -> None:
    """Write no file where autogenerate found nothing to do."""
    if getattr(config.cmd_opts, "autogenerate", False):
        operations = directives[0].upgrade_ops
        if operations is not None and operations.is_empty():
            directives[:] = []
            logger.info("No changes in schema detected.")


if context.is_offline_mode():
    run_migrations_offline()
else:
    run_migrations_online()
