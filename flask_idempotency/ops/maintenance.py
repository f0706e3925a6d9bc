"""
Expiry and purge in batches, as the commands and scheduled jobs run them.

One batch is one short transaction of the store; here are the loops around it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from flask_idempotency.lifecycle import DeliveryState
    from flask_idempotency.outbox import Deliveries
    from flask_idempotency.store import IdempotencyStore

    Progress = Callable[[int], object]

#: Records of one batch: long enough to be quick, short enough to hold no lock long.
BATCH_SIZE = 500
#: Databases bound the parameters of a statement.
MAX_BATCH_SIZE = 10_000


def expire(
    store: IdempotencyStore, progress: Progress, *, batch_size: int = BATCH_SIZE
) -> int:
    """
    Mark every record whose key's life is over, batch by batch.

    Args:
        store: The application's store.
        progress: Called with the number of records of each batch.
        batch_size: Records of one transaction.

    Returns:
        How many records were marked.
    """
    return _in_batches(lambda: store.expire(limit=batch_size), progress)


def purge(
    store: IdempotencyStore,
    progress: Progress,
    *,
    batch_size: int = BATCH_SIZE,
    older_than_seconds: float | None = None,
    tenant_id: str | None = None,
    user_id: str | None = None,
) -> int:
    """
    Delete expired records, batch by batch.

    Args:
        store: The application's store.
        progress: Called with the number of records of each batch.
        batch_size: Records of one transaction.
        older_than_seconds: Time since the end of the key's life; the application's
            retention if not given.
        tenant_id: Only this tenant's.
        user_id: Only this user's.

    Returns:
        How many records were deleted.
    """
    store.purge_leases()
    return _in_batches(
        lambda: store.purge(
            limit=batch_size,
            older_than_seconds=older_than_seconds,
            tenant_id=tenant_id,
            user_id=user_id,
        ),
        progress,
    )


def retry_deliveries(
    deliveries: Deliveries, state: DeliveryState, **chosen: str | None
) -> int:
    """
    Have every failed or dead delivery published again, batch by batch.

    Args:
        deliveries: The application's.
        state: ``failed`` or ``dead``.
        chosen: Values of ``kind``, ``name``, ``tenant_id``, ``task_id``.

    Returns:
        How many deliveries were moved.
    """
    return _in_batches(
        lambda: deliveries.retry(state, limit=BATCH_SIZE, **chosen), lambda _count: None
    )


def purge_deliveries(
    deliveries: Deliveries,
    progress: Progress,
    *,
    batch_size: int = BATCH_SIZE,
    older_than_seconds: float | None = None,
) -> int:
    """
    Delete the deliveries that ended long ago, batch by batch.

    Args:
        deliveries: The application's.
        progress: Called with the number of deliveries of each batch.
        batch_size: Deliveries of one transaction.
        older_than_seconds: Time since their end; the application's retention if not
            given.

    Returns:
        How many deliveries were deleted.
    """
    return _in_batches(
        lambda: deliveries.purge(
            limit=batch_size, older_than_seconds=older_than_seconds
        ),
        progress,
    )


def _in_batches(batch: Callable[[], int], progress: Progress) -> int:
    total = 0
    while count := batch():
        total += count
        progress(count)
    return total
