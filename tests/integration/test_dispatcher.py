"""Dispatchers as processes: several at once, killed, stopped, cut off."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text

from flask_idempotency import failpoints
from flask_idempotency.exceptions import IdempotencyStoreUnavailable
from flask_idempotency.outbox import Dispatcher, Report
from flask_idempotency.outbox import dispatcher as module
from flask_idempotency.state import get_state
from tests.outbox import KIND, Books, Outbox
from tests.shop import Shop, cut_off

from .test_crashes import die, end_process

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Barrier
    from pathlib import Path

    from flask_idempotency.outbox import Delivery
    from tests.databases import Database

_PROCESSES = multiprocessing.get_context("forkserver")
TIMEOUT = 60
on_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


@pytest.fixture
def outbox(shop: Shop, tmp_path: Path) -> Outbox:
    """Give the deliveries of an application on each kind of database."""
    return Outbox(shop, tmp_path / "books")


def _dispatch_all(database: Database, path: Path, barrier: Barrier) -> None:
    outbox = Outbox(Shop(database), path)
    barrier.wait(TIMEOUT)
    while outbox.dispatch(limit=3).claimed:
        pass


def test_two_dispatchers_publish_each_delivery_once(
    outbox: Outbox, database: Database, tmp_path: Path
) -> None:
    """However their batches fall, no message is sent twice and none is left."""
    expected = [f"t{number:02}" for number in range(40)]
    for task_id in expected:
        outbox.add(task_id)
    barrier = _PROCESSES.Barrier(2)
    processes = [
        _PROCESSES.Process(
            target=_dispatch_all, args=(database, tmp_path / "books", barrier)
        )
        for _ in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT)
        assert process.exitcode == 0
    assert sorted(outbox.books.published) == expected


def _dispatch_and_die(database: Database, path: Path, place: str) -> None:
    failpoints.set_failpoint(place, end_process)
    Outbox(Shop(database), path).dispatch()


@pytest.mark.parametrize("repeatable", [False, True], ids=["once", "repeatable"])
@pytest.mark.parametrize(
    ("place", "sent"), [("before_publish", 0), ("after_publish", 1)]
)
def test_a_killed_dispatcher_loses_nothing(
    outbox: Outbox,
    database: Database,
    tmp_path: Path,
    place: str,
    sent: int,
    *,
    repeatable: bool,
) -> None:
    """
    Its delivery is published after the lease, under the same task id.

    Also where it had been published and not noted: nobody can tell that, and never
    lost comes before never doubled.
    """
    outbox.add("t1", repeatable=repeatable)
    die(_dispatch_and_die, database, tmp_path / "books", place)
    assert outbox.books.published == ["t1"] * sent
    assert outbox.dispatch() == Report()  # it may only be slow
    assert outbox.state() == "pending"
    outbox.move("t1", "leased_until")
    assert outbox.dispatch() == Report(published=1)
    assert outbox.books.published == ["t1"] * (sent + 1)
    assert (outbox.state(), outbox.look().publishes) == ("published", 3)


def test_a_late_publisher_notes_nothing(outbox: Outbox) -> None:
    """One that was taken for dead cannot overwrite what the next one noted."""
    slow = outbox.add("t1", leased=True, repeatable=True)
    assert slow is not None
    outbox.move("t1", "leased_until")
    outbox.dispatch()
    before = outbox.look()
    with outbox.shop.app.app_context():
        assert not outbox.deliveries.mark_published(slow)
        assert not outbox.deliveries.release(slow)
        outbox.deliveries.mark_unpublished(slow, "late")
    assert outbox.look() == before


def test_publishing_does_not_begin_when_the_lease_may_end(outbox: Outbox) -> None:
    """A delivery that waited too long in its batch is handed back."""
    delivery = outbox.add("t1", leased=True)
    assert delivery is not None
    late = replace(delivery, start_before=0.0)
    with outbox.shop.app.app_context():
        state = get_state()
        report = Dispatcher(state.deliveries, state.publishers).publish(late)
    assert (report, outbox.books.published) == (Report(released=1), [])
    assert outbox.look().publishes == 0
    assert outbox.dispatch() == Report(published=1)


def test_the_writer_publishes_first(outbox: Outbox) -> None:
    """Right after the commit, so that no dispatcher need run for it."""
    delivery = outbox.add("t1", leased=True)
    assert delivery is not None
    with outbox.shop.app.app_context():
        state = get_state()
        report = Dispatcher(state.deliveries, state.publishers).publish(delivery)
    assert (report, outbox.state()) == (Report(published=1), "published")


def test_a_stop_hands_back_what_is_claimed(outbox: Outbox) -> None:
    """A delivery that was not tried is due at once for others, on every database."""
    outbox.add("t1")
    stop = threading.Event()
    stop.set()
    with outbox.shop.app.app_context():
        state = get_state()
        dispatcher = Dispatcher(state.deliveries, state.publishers)
        assert dispatcher.run_once(stop=stop) == Report(released=1)
    assert outbox.books.published == []
    assert outbox.dispatch() == Report(published=1)


class Signalling(Books):
    """A publisher in whose first publishing the process is told to stop."""

    signal_number = signal.SIGTERM

    def publish(self, delivery: Delivery) -> None:
        """Publish after the signal."""
        if not self.published:
            os.kill(os.getpid(), self.signal_number)
        super().publish(delivery)


def _loop(
    database: Database, path: Path, number: signal.Signals, to: Connection
) -> None:
    from tests.acceptance.test_cli import run  # noqa: PLC0415 - in the child alone

    outbox = Outbox(Shop(database), path)
    publisher = Signalling(path)
    publisher.signal_number = number
    with outbox.shop.app.app_context():
        get_state().publishers[KIND] = publisher
    result = run(outbox.shop.app, "outbox", "dispatch", "--loop", "--json")
    to.send((result.exit_code, result.stdout))


def _stopped(outbox: Outbox, database: Database, path: Path, number: Any) -> None:
    for task_id in ("t1", "t2", "t3"):
        outbox.add(task_id)
    ours, theirs = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_loop, args=(database, path, number, theirs))
    process.start()
    assert ours.poll(TIMEOUT)
    exit_code, stdout = ours.recv()
    process.join(TIMEOUT)
    assert (process.exitcode, exit_code) == (0, 0)
    assert '"published": 1, "released": 2' in stdout
    assert outbox.books.published == ["t1"]
    # At once, since the leases were handed back.
    assert outbox.dispatch() == Report(published=2)


def test_sigterm_in_a_loop(outbox: Outbox, database: Database, tmp_path: Path) -> None:
    """The message in hand is published and noted, the others are handed back."""
    _stopped(outbox, database, tmp_path / "books", signal.SIGTERM)


@on_sqlite
def test_sigint_in_a_loop(outbox: Outbox, database: Database, tmp_path: Path) -> None:
    """Ctrl-C does the same."""
    _stopped(outbox, database, tmp_path / "books", signal.SIGINT)


class Telling(Books):
    """A publisher that tells when it has published."""

    to: Connection

    def publish(self, delivery: Delivery) -> None:
        """Publish and tell."""
        super().publish(delivery)
        self.to.send(os.getpid())


def _idle(database: Database, path: Path, to: Connection) -> None:
    from tests.acceptance.test_cli import run  # noqa: PLC0415 - in the child alone

    outbox = Outbox(Shop(database), path)
    publisher = Telling(path)
    publisher.to = to
    with outbox.shop.app.app_context():
        get_state().publishers[KIND] = publisher
    run(outbox.shop.app, "outbox", "dispatch", "--loop", "--poll", "600")


@on_sqlite
def test_sigterm_ends_a_pause(
    outbox: Outbox, database: Database, tmp_path: Path
) -> None:
    """A dispatcher that waits for work need not be waited for."""
    outbox.add("t1")
    ours, theirs = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(
        target=_idle, args=(database, tmp_path / "books", theirs)
    )
    process.start()
    assert ours.poll(TIMEOUT)
    os.kill(ours.recv(), signal.SIGTERM)
    process.join(TIMEOUT)
    assert process.exitcode == 0


class Stopping(logging.Handler):
    """Ends a loop at its first log record."""

    def __init__(self, stop: threading.Event) -> None:
        super().__init__()
        self.stop = stop

    def emit(self, _record: logging.LogRecord) -> None:
        """Set the event."""
        self.stop.set()


def test_an_outage_is_sat_out(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop goes on after the database was away; a single round says so."""
    monkeypatch.setattr("flask_idempotency.store.runner._PATIENCE_SECONDS", 0.0)
    outbox.add("t1")
    stop = threading.Event()
    handler = Stopping(stop)
    module.log.addHandler(handler)
    with outbox.shop.app.app_context():
        state = get_state()
        dispatcher = Dispatcher(state.deliveries, state.publishers)
        with cut_off(outbox.shop):
            assert dispatcher.run(stop, poll_seconds=0.01) == Report()
            with pytest.raises(IdempotencyStoreUnavailable):
                dispatcher.run_once()
    module.log.removeHandler(handler)
    assert outbox.dispatch() == Report(published=1)


@on_sqlite
def test_a_missing_table_ends_a_loop(outbox: Outbox) -> None:
    """It is a mistake, and no time heals it."""
    with outbox.shop.app.app_context():
        with outbox.shop.db.engine.begin() as connection:
            connection.execute(text("DROP TABLE idempotency_delivery"))
        state = get_state()
        dispatcher = Dispatcher(state.deliveries, state.publishers)
        with pytest.raises(IdempotencyStoreUnavailable) as raised:
            dispatcher.run(threading.Event())
    assert "flask db upgrade" in raised.value.reason
