"""The business rows. The record of keys is a table of flask_idempotency's own."""

from __future__ import annotations

from sqlalchemy import LargeBinary, String, Text
from sqlalchemy.dialects import mysql
from sqlalchemy.orm import Mapped, mapped_column

from .extensions import Model

#: Longest names and media types that a client may send.
TEXT_LENGTH = 100


class Account(Model):
    """An account of a tenant."""

    __tablename__ = "account"

    id: Mapped[int] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64), index=True)
    name: Mapped[str] = mapped_column(String(TEXT_LENGTH))

    def as_dict(self) -> dict[str, object]:
        """Return what clients see."""
        return {"id": self.id, "name": self.name}


class StoredFile(Model):
    """An upload and, once the client says so, a complete file."""

    __tablename__ = "stored_file"

    id: Mapped[int] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64), index=True)
    name: Mapped[str] = mapped_column(String(TEXT_LENGTH))
    media_type: Mapped[str] = mapped_column(String(TEXT_LENGTH))
    size: Mapped[int]
    sha256: Mapped[str] = mapped_column(String(64))
    # MySQL's plain BLOB ends at 64 KiB.
    content: Mapped[bytes] = mapped_column(
        LargeBinary().with_variant(mysql.MEDIUMBLOB(), "mysql", "mariadb")
    )
    status: Mapped[str] = mapped_column(String(16), default="uploaded")

    def as_dict(self) -> dict[str, object]:
        """Return what clients see."""
        names = ("id", "name", "media_type", "size", "sha256", "status")
        return {name: getattr(self, name) for name in names}


class Job(Model):
    """A report that somebody asked for; a worker would build it."""

    __tablename__ = "job"

    id: Mapped[int] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64))
    task_id: Mapped[str] = mapped_column(String(36), unique=True)
    month: Mapped[str] = mapped_column(String(TEXT_LENGTH))
    status: Mapped[str] = mapped_column(String(16), default="queued")

    def as_dict(self) -> dict[str, object]:
        """Return what clients see."""
        names = ("task_id", "month", "status")
        return {name: getattr(self, name) for name in names}


class Payment(Model):
    """A charge that the provider made for a tenant."""

    __tablename__ = "payment"

    id: Mapped[int] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64))
    reference: Mapped[str] = mapped_column(String(64), unique=True)
    amount: Mapped[int]
    status: Mapped[str] = mapped_column(String(16), default="charged")

    def as_dict(self) -> dict[str, object]:
        """Return what clients see."""
        names = ("id", "reference", "amount", "status")
        return {name: getattr(self, name) for name in names}


class ProviderEvent(Model):
    """
    A webhook that was handled.

    The event's id is not unique on purpose: here the idempotency key alone keeps the
    second delivery out, and the demo counts these rows.
    """

    __tablename__ = "provider_event"

    id: Mapped[int] = mapped_column(primary_key=True)
    event_id: Mapped[str] = mapped_column(String(255), index=True)
    # MySQL's plain TEXT ends at 64 KiB.
    payload: Mapped[str] = mapped_column(
        Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")
    )
