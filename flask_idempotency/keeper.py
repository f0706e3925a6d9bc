"""
Renews the leases of running calls, so that a slow call is not taken for a dead one.

One thread per process, started with the first call and ended when there is nothing to
do. Renewals have a table of their own: nothing here ever touches a record, or waits for
its lock.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from . import failpoints

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

log = logging.getLogger(__name__)

#: A lease is renewed when this part of it has passed, and looked at twice as often.
_DUE = 1 / 3
#: How long the thread stays without a call to look after.
_IDLE_SECONDS = 30.0
#: Longest wait for the thread's last statement when the process ends.
_STOP_SECONDS = 2.0

_FIRST_CALL = threading.Lock()


class Store(Protocol):
    """What the keeper asks of the store of a call."""

    def renew(self, leases: dict[UUID, float]) -> None:
        """Give owner tokens a new lease, each of its own length in seconds."""

    def forget_leases(self, tokens: list[UUID]) -> None:
        """Remove the leases of calls that have ended."""


@dataclass(kw_only=True)
class _Kept:
    """A running call; times are those of ``time.monotonic``."""

    store: Store
    lease_seconds: float
    renewed_at: float
    ends_at: float
    #: There is a row to remove when the call has ended.
    has_row: bool = False


class LeaseKeeper:
    """Looks after the running calls of one process."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start without calls, as a forked child does: its parent's are not its own."""
        # Made at the first call: a server may load the application before it decides
        # what threads and locks are (gevent).
        self._condition: threading.Condition | None = None
        self._calls: dict[UUID, _Kept] = {}
        self._ended: list[tuple[Store, UUID]] = []
        self._thread: threading.Thread | None = None
        self._tick_seconds = _IDLE_SECONDS

    @property
    def _changed(self) -> threading.Condition:
        if self._condition is None:
            with _FIRST_CALL:
                self._condition = self._condition or threading.Condition()
        return self._condition

    @contextmanager
    def keeping(
        self,
        store: Store,
        token: UUID,
        *,
        lease_seconds: float,
        max_runtime_seconds: float,
    ) -> Iterator[None]:
        """
        Renew the lease of a call while the block runs.

        Args:
            store: Keeps the call's record.
            token: Of the call's owner.
            lease_seconds: How long each renewal lasts.
            max_runtime_seconds: After this time a call that hangs is left to lapse.
        """
        now = time.monotonic()
        kept = _Kept(
            store=store,
            lease_seconds=lease_seconds,
            renewed_at=now,
            ends_at=now + max_runtime_seconds,
        )
        with self._changed:
            self._calls[token] = kept
            self._wake_for(lease_seconds * _DUE / 2)
        try:
            yield
        finally:
            with self._changed:
                self._calls.pop(token, None)
                if kept.has_row:
                    self._ended.append((store, token))

    def _wake_for(self, tick_seconds: float) -> None:
        """Have the thread run, and look often enough."""
        if self._thread is None:
            self._tick_seconds = tick_seconds
            self._thread = threading.Thread(
                target=self._run, name="idempotency-leases", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError:  # no more threads, or the interpreter ends
                self._thread = None  # the next call tries it again
                log.warning("Leases are not renewed for now.", exc_info=True)
        elif tick_seconds < self._tick_seconds:
            self._tick_seconds = tick_seconds
            self._changed.notify()

    def stop(self) -> None:
        """
        End the thread, after it has removed the leases of the calls that ended.

        The next call starts another one.
        """
        with self._changed:
            thread, self._thread = self._thread, None
            self._changed.notify()
        if thread is not None:
            thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        idle_since = time.monotonic()
        stopping = False
        while not stopping:
            with self._changed:
                started, tick = time.monotonic(), self._tick_seconds
                if self._calls or self._ended:
                    idle_since = started
                elif started - idle_since >= _IDLE_SECONDS:
                    self._thread = None
                    return
                if self._is_current:
                    self._changed.wait(tick)
                stopping = not self._is_current
                late_seconds = time.monotonic() - started - tick
                due = {} if stopping else self._due(late_seconds=late_seconds)
                ended, self._ended = self._ended, []
            self._work(due, ended)

    @property
    def _is_current(self) -> bool:
        return self._thread is threading.current_thread()

    def _due(self, *, late_seconds: float) -> dict[Store, dict[UUID, float]]:
        now = time.monotonic()
        due: dict[Store, dict[UUID, float]] = {}
        for token, kept in self._calls.items():
            if late_seconds > kept.lease_seconds / 2:
                log.warning(
                    "The renewal of a lease came %.1f s late: this process stood still.",
                    late_seconds,
                )
            if (
                now < kept.ends_at
                and now - kept.renewed_at >= kept.lease_seconds * _DUE
            ):
                due.setdefault(kept.store, {})[token] = kept.lease_seconds
                kept.has_row = True
        return due

    def _work(
        self,
        due: dict[Store, dict[UUID, float]],
        ended: list[tuple[Store, UUID]],
    ) -> None:
        for store, leases in due.items():
            if not self._try(store, leases) and len(leases) > 1:
                for token, seconds in leases.items():  # one may not stop the others
                    self._try(store, {token: seconds})
        over: dict[Store, list[UUID]] = {}
        for store, token in ended:
            over.setdefault(store, []).append(token)
        for store, tokens in over.items():
            self._clear(store, tokens)

    def _clear(self, store: Store, tokens: list[UUID]) -> None:
        try:
            store.forget_leases(tokens)
        except Exception:  # the next purge removes them
            log.warning("Leases of ended calls stay for now.", exc_info=True)

    def _try(self, store: Store, due: dict[UUID, float]) -> bool:
        started = time.monotonic()
        try:
            failpoints.reach("in_renewal")
            store.renew(due)
        except Exception:  # tried again with the next tick; the fence decides
            log.warning("%s leases could not be renewed.", len(due), exc_info=True)
            return False
        with self._changed:
            for token in due:
                if token in self._calls:
                    self._calls[token].renewed_at = started
        return True


#: Of this process.
keeper = LeaseKeeper()
atexit.register(keeper.stop)

if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=keeper.reset)
