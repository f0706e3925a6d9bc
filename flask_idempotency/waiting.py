"""
Waiting for a first call in progress, without load on the database.

The waiters of one process share one question: whoever came first asks, in growing
intervals, and what ends the wait is told to all.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .lifecycle import Verdict
from .rules import facts_of, is_takeable, verdict_on

if TYPE_CHECKING:
    from collections.abc import Callable

    from .lifecycle import RecordView, Scope

_FIRST_SECONDS, _LONGEST_SECONDS, _GROWTH = 0.05, 1.0, 1.5


@dataclass(eq=False)
class _Watch:
    """The waiters on one scope."""

    condition: threading.Condition = field(default_factory=threading.Condition)
    #: Guarded by the lock of all watches.
    waiters: int = 0
    #: Whether one of them is asking; guarded by the condition.
    asking: bool = False
    #: Only the one that asks reads and writes it.
    interval_seconds: float = _FIRST_SECONDS
    #: What ended the wait for everybody; set once, under the condition.
    ended: RecordView | None = None


class Waiters:
    """
    Lets duplicates wait for the first call.

    Args:
        look: Reads the record of a scope; a short statement that holds nothing.
    """

    def __init__(self, look: Callable[[Scope], RecordView | None]) -> None:
        self._look = look
        self._lock = threading.Lock()
        self._watches: dict[Scope, _Watch] = {}

    def wait(
        self, scope: Scope, *, deadline: float, retry_failed: bool
    ) -> RecordView | None:
        """
        Wait until the call in progress has ended.

        Args:
            scope: What the call's key is bound to.
            deadline: When to give up, on the clock of ``time.monotonic``.
            retry_failed: Whether the waiter would run a failed operation again.

        Returns:
            The record that answers the waiter; ``None`` if the waiter may have a
            chance to claim it. Only one waiter at a time is told so.

        Raises:
            TimeoutError: If the call is still in progress at the deadline.
        """
        with self._lock:
            watch = self._watches.setdefault(scope, _Watch())
            watch.waiters += 1
        try:
            if self._is_first(watch, deadline):
                return self._ask(scope, watch, deadline, retry_failed=retry_failed)
            return watch.ended
        finally:
            with watch.condition:
                if not watch.asking:  # also if this waiter was to ask next, and died
                    watch.condition.notify()
            with self._lock:
                watch.waiters -= 1
                over = watch.ended is not None or not watch.waiters
                if over and self._watches.get(scope) is watch:
                    del self._watches[scope]

    def _is_first(self, watch: _Watch, deadline: float) -> bool:
        """Become the one that asks, or wait until it has an answer for all."""
        with watch.condition:
            # wait_for looks once more after its timeout, so that no notice is lost.
            if not watch.condition.wait_for(
                lambda: watch.ended is not None or not watch.asking,
                max(0.0, deadline - time.monotonic()),
            ):
                raise TimeoutError
            first = watch.ended is None
            watch.asking = watch.asking or first
            return first

    def _ask(
        self, scope: Scope, watch: _Watch, deadline: float, *, retry_failed: bool
    ) -> RecordView | None:
        """Ask until the wait is over for all, or hand the asking over to another."""
        record: RecordView | None = None
        final = False
        try:
            while not final:
                self._pause(watch, deadline)
                record = self._look(scope)
                if record is None or is_takeable(
                    facts_of(record, None), retry_failed=retry_failed
                ):
                    return None
                final = verdict_on(record, None) is not Verdict.IN_PROGRESS
            return record
        finally:
            with watch.condition:
                watch.asking = False
                if final:
                    watch.ended = record
                    watch.condition.notify_all()
                else:
                    watch.condition.notify()

    def _pause(self, watch: _Watch, deadline: float) -> None:
        """Sleep until the next question, or the deadline if that is much earlier."""
        left = max(0.0, deadline - time.monotonic())
        seconds = watch.interval_seconds * random.uniform(0.75, 1.25)  # noqa: S311 - jitter, no secret
        watch.interval_seconds = min(watch.interval_seconds * _GROWTH, _LONGEST_SECONDS)
        time.sleep(min(seconds, left))
        # Waiters that came together end together: they do not ask one by one then.
        if left < seconds / 2:
            raise TimeoutError
