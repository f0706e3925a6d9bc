"""Migrations and models are one schema, on every database."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import flask_migrate
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

from example_app import create_app
from example_app.extensions import MIGRATIONS, db, idempotency

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sqlalchemy import Inspector

    from tests.databases import Database


class Schema:
    """The example's schema on one database."""

    def __init__(self, database: Database) -> None:
        self.app = create_app({"SQLALCHEMY_DATABASE_URI": database.url})

    def close(self) -> None:
        """Close every connection."""
        with self.app.app_context():
            db.engine.dispose()
            idempotency.store.close()

    def upgrade(self, directory: Path = MIGRATIONS) -> None:
        """Run every migration."""
        with self.app.app_context():
            flask_migrate.upgrade(str(directory))

    def downgrade(self) -> None:
        """Take every migration back."""
        with self.app.app_context():
            flask_migrate.downgrade(revision="base")

    def generate(self, directory: Path) -> str:
        """Write a first migration by autogenerate and return its text."""
        shutil.copytree(MIGRATIONS, directory, ignore=shutil.ignore_patterns("0*"))
        with self.app.app_context():
            flask_migrate.migrate(str(directory), rev_id="made")
        (path,) = (directory / "versions").glob("made_*.py")
        return path.read_text(encoding="utf-8")

    def create_all(self) -> None:
        """Create the models' tables without migrations."""
        with self.app.app_context():
            db.create_all()

    def table_names(self) -> list[str]:
        """Return the names of all tables."""
        with self.app.app_context():
            return sorted(inspect(db.engine).get_table_names())

    def reflect(self) -> dict[str, dict[str, Any]]:
        """Return all that the database says of its tables, but Alembic's own."""
        with self.app.app_context():
            inspector = inspect(db.engine)
            names = [n for n in inspector.get_table_names() if n != "alembic_version"]
            return {name: _reflected(inspector, name) for name in names}

    def differences(self) -> list[Any]:
        """Return what autogenerate would put into a new migration."""
        with self.app.app_context(), db.engine.connect() as connection:
            options = {"compare_type": True}
            context = MigrationContext.configure(connection, opts=options)
            return list(compare_metadata(context, db.metadata))

    def storage_options(self) -> list[str]:
        """Return PostgreSQL's options of the record's table."""
        query = "SELECT reloptions FROM pg_class WHERE relname = 'idempotency_record'"
        with self.app.app_context(), db.engine.connect() as connection:
            return list(connection.execute(text(query)).scalar_one())


def _reflected(inspector: Inspector, table: str) -> dict[str, Any]:
    """Return what is known of a table; the order of constraints means nothing."""
    return {
        "columns": _texts(inspector.get_columns(table)),
        "primary key": repr(inspector.get_pk_constraint(table)),
        "unique": sorted(_texts(inspector.get_unique_constraints(table))),
        "indexes": sorted(_texts(inspector.get_indexes(table))),
        "checks": sorted(_texts(inspector.get_check_constraints(table))),
        "foreign keys": sorted(_texts(inspector.get_foreign_keys(table))),
    }


def _texts(items: list[Any]) -> list[str]:
    """Return reflected items in a form that can be compared and sorted."""
    return [repr(sorted(item.items())) for item in items]


@pytest.fixture
def make_schema() -> Iterator[Callable[[Database], Schema]]:
    """Make schemas that are closed after the test."""
    made: list[Schema] = []

    def make(database: Database) -> Schema:
        schema = Schema(database)
        made.append(schema)
        return schema

    yield make
    for schema in made:
        schema.close()


@pytest.fixture
def schema(make_schema: Callable[[Database], Schema], database: Database) -> Schema:
    """Give the example's schema on an empty database."""
    return make_schema(database)


@pytest.fixture
def expected(
    make_schema: Callable[[Database], Schema], make_database: Callable[[], Database]
) -> dict[str, dict[str, Any]]:
    """Give what a database says of tables that the models themselves created."""
    created = make_schema(make_database())
    created.create_all()
    return created.reflect()


def test_upgrade_gives_the_models_schema(
    schema: Schema, expected: dict[str, dict[str, Any]]
) -> None:
    """Columns, keys, indexes and checks are those that ``create_all`` makes."""
    schema.upgrade()

    assert schema.reflect() == expected


def test_every_table_has_its_constraints(
    schema: Schema, expected: dict[str, dict[str, Any]]
) -> None:
    """The comparison is not one of nothing with nothing."""
    schema.upgrade()

    record = expected["idempotency_record"]
    assert "uq_idempotency_record_scope" in "".join(record["unique"])
    assert "ix_idempotency_record_expires_at" in "".join(record["indexes"])
    assert "ck_idempotency_record_status" in "".join(record["checks"])


def test_autogenerate_finds_nothing_after_upgrade(schema: Schema) -> None:
    """A migrated database needs no further migration."""
    schema.upgrade()

    assert schema.differences() == []


def test_downgrade_leaves_nothing(schema: Schema) -> None:
    """Taking every migration back leaves Alembic's own table alone."""
    schema.upgrade()
    schema.downgrade()

    assert schema.table_names() == ["alembic_version"]


def test_upgrade_works_after_downgrade(
    schema: Schema, expected: dict[str, dict[str, Any]]
) -> None:
    """Nothing is left behind that a second upgrade would trip over."""
    schema.upgrade()
    schema.downgrade()
    schema.upgrade()

    assert schema.reflect() == expected


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_pages_of_the_record_keep_room(schema: Schema) -> None:
    """On PostgreSQL the record's table has its fill factor."""
    schema.upgrade()

    assert schema.storage_options() == ["fillfactor=70"]


def test_generated_migration_gives_the_models_schema(
    schema: Schema, expected: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """A migration that a user lets autogenerate write works as it is."""
    schema.generate(tmp_path / "migrations")
    schema.upgrade(tmp_path / "migrations")

    assert schema.reflect() == expected


def test_generated_migration_suits_every_database(
    schema: Schema, tmp_path: Path
) -> None:
    """Wherever it was generated, it needs only SQLAlchemy and keeps all variants."""
    source = schema.generate(tmp_path / "migrations")

    assert "flask_idempotency" not in source
    for dialect in ("mysql", "mariadb", "postgresql"):
        assert f"'{dialect}')" in source
