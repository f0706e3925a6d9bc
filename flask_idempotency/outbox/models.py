"""Deliveries as values: what a publisher gets, and what a reader sees."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flask_idempotency.keys import new_id
from flask_idempotency.lifecycle import (
    BOUND_ID_LENGTH,
    DELIVERY_NAME_LENGTH,
    KIND_LENGTH,
    SCOPE_LENGTHS,
    UNIQUE_KEY_LENGTH,
    check_text,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from uuid import UUID

    from flask_idempotency.lifecycle import DeliveryState

#: How long nobody else publishes a delivery that somebody has written or claimed.
LEASE_SECONDS = 30.0
#: The part of it in which publishing may still begin, so that it ends in time.
_START_WITHIN_SECONDS = LEASE_SECONDS / 2

_LENGTHS = {
    "kind": KIND_LENGTH,
    "name": DELIVERY_NAME_LENGTH,
    "tenant_id": SCOPE_LENGTHS["tenant_id"],
    "user_id": SCOPE_LENGTHS["user_id"],
    "task_id": BOUND_ID_LENGTH,
}


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """
    A message to publish, leased to who holds this value.

    Attributes:
        kind: Which publisher it is for, such as ``"celery"``.
        name: What is to be done: the task's name.
        task_id: Identifies the message; one delivery exists per kind and task id.
        payload: The message, which only the publisher of its kind understands.
        tenant_id: Whose it is.
        user_id: Who asked for it.
        record_id: The record of the operation that it belongs to.
        unique_key: Of one kind and name, one delivery with this key is open at a time.
            Nothing else bounds it: what belongs to one tenant says so in the key.
        repeatable: It may be published again although it has been published, because
            the work itself is guarded and reports its end.
        id: Primary key.
        token: Proof of the lease.
        publishes: How often publishing was begun, this time included.
        start_before: The moment of ``time.monotonic()`` from which on publishing must
            not begin, since the lease may end before it does.

    Raises:
        ValueError: If a text is empty where it must not be, too long or not storable,
            or if a key is given for what reports no end.
    """

    kind: str
    name: str
    task_id: str
    payload: bytes
    tenant_id: str = ""
    user_id: str = ""
    record_id: UUID | None = None
    unique_key: str | None = None
    repeatable: bool = False
    id: UUID = field(default_factory=new_id)
    token: UUID = field(default_factory=new_id)
    publishes: int = 1
    start_before: float = field(
        default_factory=lambda: time.monotonic() + _START_WITHIN_SECONDS, compare=False
    )

    def __post_init__(self) -> None:
        """Refuse what the database could not keep unchanged."""
        for name, length in _LENGTHS.items():
            check_text(name, getattr(self, name), length)
        for name in ("kind", "name", "task_id"):
            if not getattr(self, name):
                message = f"'{name}' is empty"
                raise ValueError(message)
        if self.unique_key is not None:
            check_text("unique_key", self.unique_key, UNIQUE_KEY_LENGTH)
            if not self.repeatable:
                # It would be held for ever.
                message = "'unique_key' needs a delivery that reports its end"
                raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a dispatcher claimed, and what it found to be over instead."""

    deliveries: tuple[Delivery, ...] = ()
    expired: int = 0
    dead: int = 0


@dataclass(frozen=True, kw_only=True)
class DeliveryView:
    """
    A delivery as it was read, without its message.

    Attributes:
        payload_size: Bytes of the message.
        leased: Somebody is publishing it, by the database's clock.
        due_at: It is not published before, or again before, while it is open.
        expires_at: End of the message's life.
        ended_at: Since when nothing more is to be done with it. Also set where it is
            ``published`` and not repeatable: its end need not be reported.
    """

    id: UUID
    kind: str
    name: str
    tenant_id: str
    user_id: str
    record_id: UUID | None
    task_id: str
    unique_key: str | None
    payload_size: int
    repeatable: bool
    state: DeliveryState
    publishes: int
    leased: bool
    due_at: datetime
    expires_at: datetime | None
    last_error: str | None
    created_at: datetime
    published_at: datetime | None
    ended_at: datetime | None


@dataclass(frozen=True, kw_only=True)
class DeliveryStats:
    """
    How many deliveries there are.

    Attributes:
        counts: Number by kind and state, where there are any.
        due: How many wait for a dispatcher now.
        oldest_due_seconds: How long the first of them has waited; ``None`` if none does.
    """

    counts: Mapping[tuple[str, DeliveryState], int]
    due: int
    oldest_due_seconds: float | None
