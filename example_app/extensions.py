"""The extensions, made once and set up for each application by ``create_app``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flask_migrate import Migrate
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import MetaData
from sqlalchemy.orm import DeclarativeBase

from flask_idempotency import Idempotency

MIGRATIONS = Path(__file__).resolve().parents[1] / "migrations"


class Base(DeclarativeBase):
    """Gives every constraint a name, so that migrations can speak of it."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


db = SQLAlchemy(model_class=Base)
migrate = Migrate(directory=str(MIGRATIONS))
# Adds the model of the record to `db`, so that migrations see its table.
idempotency = Idempotency(db=db)

if TYPE_CHECKING:
    # Type checkers cannot follow a base class that is made at run time.
    Model = Base
else:
    Model = db.Model
