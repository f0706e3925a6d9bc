"""Brokers for tests, where they answer."""

from __future__ import annotations

import os
from typing import Any

from kombu.connection import Connection

BROKERS = {
    "redis": ("IDEMPOTENCY_TEST_REDIS_URL", "redis://127.0.0.1:6379/14"),
    "rabbitmq": (
        "IDEMPOTENCY_TEST_RABBITMQ_URL",
        "amqp://guest:guest@127.0.0.1:5672//",
    ),
}


def broker_url(name: str) -> str:
    """Return where a broker is."""
    variable, default = BROKERS[name]
    return os.environ.get(variable, default)


def broker_absence(name: str) -> str | None:
    """Return why a broker cannot be used, or None."""
    connection: Any = Connection(broker_url(name), connect_timeout=2)  # type: ignore[no-untyped-call]
    with connection:
        try:
            connection.ensure_connection(max_retries=1, timeout=2)
        except connection.connection_errors as error:
            variable, _default = BROKERS[name]
            where = connection.as_uri()  # without the password
            return f"{name} does not answer at {where} ({variable}): {error}"
    return None
