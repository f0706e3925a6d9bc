"""
Publishes what was committed and not published yet, or published and never heard of.

Publishing is at least once. Between a message that is handed over and the note of it
lies an instant at which a process can die, and nobody can tell afterwards on which side
of it. Such a delivery is published again, also where it is not repeatable: never lost
comes before never doubled. Work that guards itself by its task id is done once all the
same; other work may run twice then.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from flask_idempotency import failpoints
from flask_idempotency.exceptions import IdempotencyStoreUnavailable
from flask_idempotency.store.runner import SchemaMissing

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping

    from .deliveries import Deliveries
    from .models import Delivery

log = logging.getLogger(__name__)

#: Deliveries that a dispatcher claims at once: no more than it publishes in a lease.
BATCH_SIZE = 100
#: How long a dispatcher that finds nothing waits before it looks again.
POLL_SECONDS = 1.0


class Publisher(Protocol):
    """Hands deliveries of one kind over to whoever does the work."""

    def publish(self, delivery: Delivery) -> None:
        """
        Hand a delivery over; it is published when this returns.

        With a limit on its own time well below the lease of 30 s.

        Raises:
            Exception: Whatever it is, the delivery is tried again later.
        """


@dataclass(frozen=True, kw_only=True)
class Report:
    """
    What a dispatcher did.

    Attributes:
        published: Handed over.
        failed: Not handed over, to be tried again.
        released: Handed back without a try, because of a stop or for lack of time.
        expired: Ended, since the message's life was over.
        dead: Ended, since it was published or tried too often.
    """

    published: int = 0
    failed: int = 0
    released: int = 0
    expired: int = 0
    dead: int = 0

    @property
    def claimed(self) -> int:
        """How many deliveries were looked at."""
        return sum(vars(self).values())

    def __add__(self, other: Report) -> Report:
        """Return the sum of two reports."""
        return Report(**(Counter(vars(self)) + Counter(vars(other))))


class Dispatcher:
    """
    Publishes deliveries, each by the publisher of its kind.

    Any number of them may run at once, on any number of machines.

    Args:
        deliveries: The application's.
        publishers: By kind. What is of another kind is left to other processes.
    """

    def __init__(
        self, deliveries: Deliveries, publishers: Mapping[str, Publisher]
    ) -> None:
        self._deliveries = deliveries
        self._publishers = publishers

    def publish(self, delivery: Delivery) -> Report:
        """
        Publish one delivery that is leased to us, and note what became of it.

        Args:
            delivery: Claimed, or written and committed just now.

        Raises:
            IdempotencyStoreUnavailable: If it cannot be noted; a dispatcher then
                publishes it again when the lease has ended.
        """
        if time.monotonic() >= delivery.start_before:
            self._deliveries.release(delivery)
            return Report(released=1)
        publisher = self._publishers[delivery.kind]
        failpoints.reach("before_publish")
        try:
            publisher.publish(delivery)
        except Exception as error:
            # Whatever a broker's client raises must not stop the other deliveries.
            kind = type(error)
            failure = f"{kind.__module__}.{kind.__qualname__}"
            dead = self._deliveries.mark_unpublished(delivery, failure)
            log.warning(
                "A delivery could not be published%s.",
                ", and is dead now" if dead else "",
                exc_info=True,
                extra={
                    "idempotency_kind": delivery.kind,
                    "idempotency_name": delivery.name,
                    "idempotency_task_id": delivery.task_id,
                },
            )
            return Report(dead=1) if dead else Report(failed=1)
        failpoints.reach("after_publish")
        self._deliveries.mark_published(delivery)
        return Report(published=1)

    def run_once(
        self, limit: int = BATCH_SIZE, stop: threading.Event | None = None
    ) -> Report:
        """
        Claim and publish one batch.

        Args:
            limit: Most deliveries of the batch.
            stop: When it is set, what is not published yet is handed back.

        Raises:
            IdempotencyStoreUnavailable: If the database cannot be reached.
        """
        batch = self._deliveries.claim_due(limit, tuple(self._publishers))
        report = Report(expired=batch.expired, dead=batch.dead)
        for delivery in batch.deliveries:
            if stop is not None and stop.is_set():
                self._deliveries.release(delivery)
                report += Report(released=1)
            else:
                report += self.publish(delivery)
        return report

    def run(
        self,
        stop: threading.Event,
        *,
        limit: int = BATCH_SIZE,
        poll_seconds: float = POLL_SECONDS,
    ) -> Report:
        """
        Publish batch after batch until told to stop.

        An outage of the database is sat out.

        Args:
            stop: Set it to end the run; what is claimed is published or handed back.
            limit: Most deliveries of a batch.
            poll_seconds: How long to wait when nothing is due.

        Returns:
            What was done in all.
        """
        total = Report()
        while not stop.is_set():
            report = Report()
            try:
                report = self.run_once(limit, stop)
            except SchemaMissing:
                raise
            except IdempotencyStoreUnavailable:
                log.exception("The dispatcher cannot reach the database.")
            total += report
            if report.claimed < limit:
                stop.wait(poll_seconds)
        return total
