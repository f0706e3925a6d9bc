"""
The record as a mixin, and its model built on the application's own ``db``.

Only types of SQLAlchemy are used, so that a migration made by autogenerate needs no
import of this package.
"""

from __future__ import annotations

import uuid  # noqa: TC003 - SQLAlchemy reads the annotations
from datetime import datetime  # noqa: TC003
from typing import TYPE_CHECKING, Any, ClassVar, cast

from sqlalchemy import (
    DDL,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    UniqueConstraint,
    Uuid,
)
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.orm import Mapped, declared_attr, mapped_column
from sqlalchemy.sql.elements import conv

from .exceptions import IdempotencyConfigError
from .lifecycle import (
    BOUND_ID_LENGTH,
    DELIVERY_NAME_LENGTH,
    KIND_LENGTH,
    LAST_ERROR_LENGTH,
    REQUEST_HASH_LENGTH,
    RESOLVED_BY_LENGTH,
    RESOLVED_REASON_LENGTH,
    SCOPE_LENGTHS,
    STEP_NAME_LENGTH,
    UNIQUE_KEY_LENGTH,
    DeliveryState,
    Status,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from flask_sqlalchemy import SQLAlchemy

SCOPE_COLUMNS = tuple(SCOPE_LENGTHS)
_MYSQL = ("mysql", "mariadb")
_INFO_KEY = "flask_idempotency"


def exact_text(length: int) -> String:
    """
    Return a text type that compares bytes.

    Every text collation of MySQL and MariaDB merges something: letters that differ
    in case or accent, or trailing blanks. Up to four bytes are kept a character.
    """
    return String(length).with_variant(mysql.VARBINARY(4 * length), *_MYSQL)


_UUID = Uuid(native_uuid=False).with_variant(postgresql.UUID(), "postgresql")
_INSTANT = DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), *_MYSQL)
_BYTES = LargeBinary().with_variant(mysql.LONGBLOB(), *_MYSQL)
# Room on each page, so that completing a record is a HOT update. SQLAlchemy 2.0 has
# no table option for it.
_FILLFACTOR = DDL("ALTER TABLE %(fullname)s SET (fillfactor = 70)").execute_if(  # type: ignore[no-untyped-call]
    dialect="postgresql"
)


class IdempotencyRecordMixin:
    """
    The columns and constraints of a record; subclass it for a table of your own.

    On MySQL and MariaDB the texts are read as ``bytes`` (see ``exact_text``); the
    store's ``RecordView`` has them as ``str`` on every database.
    """

    __tablename__ = "idempotency_record"
    if TYPE_CHECKING:
        __table__: ClassVar[Table]  # made by SQLAlchemy for each model

    id: Mapped[uuid.UUID] = mapped_column(_UUID, primary_key=True)
    operation_id: Mapped[uuid.UUID] = mapped_column(_UUID)
    tenant_id: Mapped[str] = mapped_column(exact_text(SCOPE_LENGTHS["tenant_id"]))
    user_id: Mapped[str] = mapped_column(exact_text(SCOPE_LENGTHS["user_id"]))
    route: Mapped[str] = mapped_column(exact_text(SCOPE_LENGTHS["route"]))
    idempotency_key: Mapped[str] = mapped_column(
        exact_text(SCOPE_LENGTHS["idempotency_key"])
    )
    request_hash: Mapped[str] = mapped_column(exact_text(REQUEST_HASH_LENGTH))
    status: Mapped[str] = mapped_column(String(16))
    owner_token: Mapped[uuid.UUID | None] = mapped_column(_UUID)
    version: Mapped[int] = mapped_column(Integer)
    attempts: Mapped[int] = mapped_column(Integer)
    retries: Mapped[int | None] = mapped_column(Integer)
    response_code: Mapped[int | None] = mapped_column(Integer)
    response_headers: Mapped[bytes | None] = mapped_column(_BYTES)
    response_body: Mapped[bytes | None] = mapped_column(_BYTES)
    response_encoding: Mapped[str | None] = mapped_column(String(16))
    task_id: Mapped[str | None] = mapped_column(exact_text(BOUND_ID_LENGTH))
    outbox_event_id: Mapped[str | None] = mapped_column(exact_text(BOUND_ID_LENGTH))
    failure: Mapped[str | None] = mapped_column(String(255))
    resolved_by: Mapped[str | None] = mapped_column(exact_text(RESOLVED_BY_LENGTH))
    resolved_reason: Mapped[str | None] = mapped_column(
        exact_text(RESOLVED_REASON_LENGTH)
    )
    effects_committed_at: Mapped[datetime | None] = mapped_column(_INSTANT)
    steps: Mapped[bytes | None] = mapped_column(_BYTES)
    open_step: Mapped[str | None] = mapped_column(exact_text(STEP_NAME_LENGTH))
    locked_until: Mapped[datetime | None] = mapped_column(_INSTANT)
    expires_at: Mapped[datetime] = mapped_column(_INSTANT)
    created_at: Mapped[datetime] = mapped_column(_INSTANT)
    completed_at: Mapped[datetime | None] = mapped_column(_INSTANT)

    @declared_attr.directive
    def __table_args__(cls) -> tuple[Any, ...]:  # noqa: N805 - a class by contract
        """Constraints and index, named after the table."""
        return record_table_args(cls.__tablename__)


def record_table_args(table_name: str) -> tuple[Any, ...]:
    """
    Return what the ``__table_args__`` of a record's model must contain.

    ``conv`` keeps a naming convention of the application's metadata from changing
    the names, by which the store knows a duplicate.

    Args:
        table_name: The model's ``__tablename__``.
    """
    statuses = ", ".join(f"'{status.value}'" for status in Status)
    return (
        UniqueConstraint(*SCOPE_COLUMNS, name=conv(f"uq_{table_name}_scope")),
        CheckConstraint(
            f"status IN ({statuses})", name=conv(f"ck_{table_name}_status")
        ),
        Index(conv(f"ix_{table_name}_expires_at"), "expires_at"),
        {"listeners": [("after_create", _FILLFACTOR)]},
    )


def lease_table(record: Table) -> Table:
    """
    Return the table of renewed leases beside a record's table.

    A renewal must not touch the record: under REPEATABLE READ the transaction of a
    call that was renewed could not write it any more.
    """
    return _beside(
        record,
        "lease",
        lambda _name: (
            Column("owner_token", _UUID, primary_key=True),
            Column("until", _INSTANT, nullable=False),
        ),
    )


def delivery_table(record: Table) -> Table:
    """
    Return the table of messages to publish beside a record's table.

    `record_id` is no foreign key, since either row may be purged first.
    """
    return _beside(record, "delivery", _delivery_columns)


def _delivery_columns(table_name: str) -> tuple[Any, ...]:
    states = ", ".join(f"'{state.value}'" for state in DeliveryState)
    return (
        Column("id", _UUID, primary_key=True),
        Column("kind", exact_text(KIND_LENGTH), nullable=False),
        Column("name", exact_text(DELIVERY_NAME_LENGTH), nullable=False),
        Column("tenant_id", exact_text(SCOPE_LENGTHS["tenant_id"]), nullable=False),
        Column("user_id", exact_text(SCOPE_LENGTHS["user_id"]), nullable=False),
        Column("record_id", _UUID),
        Column("task_id", exact_text(BOUND_ID_LENGTH), nullable=False),
        Column("unique_key", exact_text(UNIQUE_KEY_LENGTH)),
        Column("payload", _BYTES, nullable=False),
        Column("repeatable", Boolean, nullable=False),
        Column("state", String(16), nullable=False),
        Column("publishes", Integer, nullable=False),
        Column("owner_token", _UUID),
        Column("leased_until", _INSTANT),
        Column("due_at", _INSTANT, nullable=False),
        Column("expires_at", _INSTANT),
        Column("last_error", exact_text(LAST_ERROR_LENGTH)),
        Column("created_at", _INSTANT, nullable=False),
        Column("published_at", _INSTANT),
        Column("ended_at", _INSTANT),
        UniqueConstraint("kind", "task_id", name=conv(f"uq_{table_name}_task_id")),
        # NULLs never collide, so only deliveries that are open do.
        UniqueConstraint(
            "kind", "name", "unique_key", name=conv(f"uq_{table_name}_unique_key")
        ),
        CheckConstraint(f"state IN ({states})", name=conv(f"ck_{table_name}_state")),
        # `ended_at` is NULL: the due ones in their order; else: those to purge.
        Index(conv(f"ix_{table_name}_due_at"), "ended_at", "due_at"),
        # With both columns, or SQLite looks at all open ones for each record to purge.
        Index(conv(f"ix_{table_name}_record_id"), "record_id", "ended_at"),
    )


def _beside(record: Table, what: str, parts: Callable[[str], tuple[Any, ...]]) -> Table:
    name = f"{record.name.removesuffix('_record')}_{what}"
    key = f"{record.schema}.{name}" if record.schema else name
    if key in record.metadata.tables:
        return record.metadata.tables[key]
    return Table(name, record.metadata, *parts(name), schema=record.schema)


def add_tables_beside(record: Table) -> None:
    """Make the other tables known to migrations and ``create_all``."""
    lease_table(record)
    delivery_table(record)


def build_record_class(db: SQLAlchemy) -> type[IdempotencyRecordMixin]:
    """
    Return the record's model on `db`, the same one at every call.

    The class is kept beside the metadata, since SQLAlchemy's own registry is weak
    and a second class for one table is an error.
    """
    if _INFO_KEY not in db.metadata.info:
        bases = (IdempotencyRecordMixin, cast("type", db.Model))
        model = type("IdempotencyRecord", bases, {"__module__": __name__})
        add_tables_beside(cast("Any", model).__table__)
        db.metadata.info[_INFO_KEY] = model
    return cast("type[IdempotencyRecordMixin]", db.metadata.info[_INFO_KEY])


def scope_constraint(table: Table) -> UniqueConstraint:
    """
    Return the unique constraint on which every claim rests.

    Raises:
        IdempotencyConfigError: If a record class of the application lost it, or made
            one of its columns nullable, so that duplicates would not collide.
    """
    nullable = [name for name in SCOPE_COLUMNS if table.c[name].nullable]
    unique = [c for c in table.constraints if isinstance(c, UniqueConstraint)]
    for constraint in unique:
        scoped = tuple(constraint.columns.keys()) == SCOPE_COLUMNS
        if scoped and constraint.name and not nullable:
            return constraint
    fault = (
        f"makes {', '.join(nullable)} nullable"
        if nullable
        else f"has no named UNIQUE constraint on {', '.join(SCOPE_COLUMNS)}"
    )
    raise IdempotencyConfigError(
        f"The record table '{table.name}' {fault}, so duplicates would not collide. "
        "If the class has its own __table_args__, add to them what "
        f"flask_idempotency.record_table_args('{table.name}') returns."
    )
