"""The ``flask idempotency`` commands: parse, call, print."""

from __future__ import annotations

from flask.cli import AppGroup

from .records import diagnose, expire, purge

idempotency = AppGroup("idempotency", help="Look after idempotency records.")
for command in (diagnose, expire, purge):
    idempotency.add_command(command)

__all__ = ["idempotency"]
