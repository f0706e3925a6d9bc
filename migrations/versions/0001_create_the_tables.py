"""
Create the tables.

Revision ID: 0001
Revises:
Create Date: 2026-12-02 00:48:25
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# A migration keeps its own copy of these types, so that it stays what it was. Each has
# a variant for both names under which SQLAlchemy knows MySQL's family.
MYSQL = ("mysql", "mariadb")
UUID = sa.Uuid(native_uuid=False).with_variant(sa.UUID(), "postgresql")
INSTANT = sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), *MYSQL)
LONG_BYTES = sa.LargeBinary().with_variant(mysql.LONGBLOB(), *MYSQL)
MEDIUM_BYTES = sa.LargeBinary().with_variant(mysql.MEDIUMBLOB(), *MYSQL)
MEDIUM_TEXT = sa.Text().with_variant(mysql.MEDIUMTEXT(), *MYSQL)


def exact_text(length: int) -> sa.String:
    """Return a text type that compares bytes; MySQL's collations do not."""
    return sa.String(length).with_variant(sa.VARBINARY(4 * length), *MYSQL)


def upgrade() -> None:
    """Create every table."""
    create_idempotency_record()
    create_idempotency_lease()
    create_idempotency_delivery()
    create_accounts_and_files()
    create_jobs()
    create_payments_and_events()


def downgrade() -> None:
    """Drop every table, with its indexes."""
    for table in (
        "provider_event",
        "payment",
        "job",
        "stored_file",
        "account",
        "idempotency_delivery",
        "idempotency_lease",
        "idempotency_record",
    ):
        op.drop_table(table)


def create_idempotency_record() -> None:
    """Create the record of keys."""
    op.create_table(
        "idempotency_record",
        sa.Column("id", UUID, nullable=False),
        sa.Column("operation_id", UUID, nullable=False),
        sa.Column("tenant_id", exact_text(64), nullable=False),
        sa.Column("user_id", exact_text(128), nullable=False),
        sa.Column("route", exact_text(255), nullable=False),
        sa.Column("idempotency_key", exact_text(255), nullable=False),
        sa.Column("request_hash", exact_text(128), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("owner_token", UUID, nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("retries", sa.Integer(), nullable=True),
        sa.Column("response_code", sa.Integer(), nullable=True),
        sa.Column("response_headers", LONG_BYTES, nullable=True),
        sa.Column("response_body", LONG_BYTES, nullable=True),
        sa.Column("response_encoding", sa.String(16), nullable=True),
        sa.Column("task_id", exact_text(255), nullable=True),
        sa.Column("outbox_event_id", exact_text(255), nullable=True),
        sa.Column("failure", sa.String(255), nullable=True),
        sa.Column("resolved_by", exact_text(255), nullable=True),
        sa.Column("resolved_reason", exact_text(1000), nullable=True),
        sa.Column("effects_committed_at", INSTANT, nullable=True),
        sa.Column("steps", LONG_BYTES, nullable=True),
        sa.Column("open_step", exact_text(100), nullable=True),
        sa.Column("locked_until", INSTANT, nullable=True),
        sa.Column("expires_at", INSTANT, nullable=False),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.Column("completed_at", INSTANT, nullable=True),
        sa.CheckConstraint(
            "status IN ('processing', 'succeeded', 'failed', 'expired')",
            name=op.f("ck_idempotency_record_status"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_idempotency_record")),
        # Every claim rests on this constraint.
        sa.UniqueConstraint(
            "tenant_id",
            "user_id",
            "route",
            "idempotency_key",
            name=op.f("uq_idempotency_record_scope"),
        ),
    )
    if op.get_context().dialect.name == "postgresql":
        # Room on each page, so that completing a record is a HOT update.
        op.execute("ALTER TABLE idempotency_record SET (fillfactor = 70)")
    op.create_index(
        op.f("ix_idempotency_record_expires_at"), "idempotency_record", ["expires_at"]
    )


def create_idempotency_lease() -> None:
    """Create the table of renewed leases."""
    op.create_table(
        "idempotency_lease",
        sa.Column("owner_token", UUID, nullable=False),
        sa.Column("until", INSTANT, nullable=False),
        sa.PrimaryKeyConstraint("owner_token", name=op.f("pk_idempotency_lease")),
    )


def create_idempotency_delivery() -> None:
    """Create the table of messages to publish."""
    op.create_table(
        "idempotency_delivery",
        sa.Column("id", UUID, nullable=False),
        sa.Column("kind", exact_text(16), nullable=False),
        sa.Column("name", exact_text(255), nullable=False),
        sa.Column("tenant_id", exact_text(64), nullable=False),
        sa.Column("user_id", exact_text(128), nullable=False),
        sa.Column("record_id", UUID, nullable=True),
        sa.Column("task_id", exact_text(255), nullable=False),
        sa.Column("unique_key", exact_text(255), nullable=True),
        sa.Column("payload", LONG_BYTES, nullable=False),
        sa.Column("repeatable", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("publishes", sa.Integer(), nullable=False),
        sa.Column("owner_token", UUID, nullable=True),
        sa.Column("leased_until", INSTANT, nullable=True),
        sa.Column("due_at", INSTANT, nullable=False),
        sa.Column("expires_at", INSTANT, nullable=True),
        sa.Column("last_error", exact_text(255), nullable=True),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.Column("published_at", INSTANT, nullable=True),
        sa.Column("ended_at", INSTANT, nullable=True),
        sa.CheckConstraint(
            "state IN ('pending', 'published', 'done', 'failed', 'revoked', "
            "'expired', 'time_limit', 'dead')",
            name=op.f("ck_idempotency_delivery_state"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_idempotency_delivery")),
        sa.UniqueConstraint(
            "kind", "task_id", name=op.f("uq_idempotency_delivery_task_id")
        ),
        sa.UniqueConstraint(
            "kind",
            "name",
            "unique_key",
            name=op.f("uq_idempotency_delivery_unique_key"),
        ),
    )
    op.create_index(
        op.f("ix_idempotency_delivery_due_at"),
        "idempotency_delivery",
        ["ended_at", "due_at"],
    )
    op.create_index(
        op.f("ix_idempotency_delivery_record_id"),
        "idempotency_delivery",
        ["record_id", "ended_at"],
    )


def create_accounts_and_files() -> None:
    """Create the tables of accounts and uploads."""
    op.create_table(
        "account",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_account")),
    )
    op.create_index(op.f("ix_account_tenant_id"), "account", ["tenant_id"])
    op.create_table(
        "stored_file",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("media_type", sa.String(100), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("content", MEDIUM_BYTES, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stored_file")),
    )
    op.create_index(op.f("ix_stored_file_tenant_id"), "stored_file", ["tenant_id"])


def create_jobs() -> None:
    """Create the table of submitted reports."""
    op.create_table(
        "job",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("task_id", sa.String(36), nullable=False),
        sa.Column("month", sa.String(100), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job")),
        sa.UniqueConstraint("task_id", name=op.f("uq_job_task_id")),
    )


def create_payments_and_events() -> None:
    """Create the tables of payments and the provider's webhooks."""
    op.create_table(
        "payment",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("reference", sa.String(64), nullable=False),
        sa.Column("amount", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_payment")),
        sa.UniqueConstraint("reference", name=op.f("uq_payment_reference")),
    )
    op.create_table(
        "provider_event",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("event_id", sa.String(255), nullable=False),
        sa.Column("payload", MEDIUM_TEXT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_provider_event")),
    )
    op.create_index(op.f("ix_provider_event_event_id"), "provider_event", ["event_id"])
