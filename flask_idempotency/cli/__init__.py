"""The ``flask idempotency`` commands: parse, call, print."""

from __future__ import annotations

from flask.cli import AppGroup

from .doctor import doctor
from .outbox import outbox
from .records import diagnose, expire, purge
from .resolve import resolve
from .routes import routes

idempotency = AppGroup("idempotency", help="Look after idempotency records and routes.")
for command in (diagnose, doctor, expire, outbox, purge, resolve, routes):
    idempotency.add_command(command)

__all__ = ["idempotency"]
