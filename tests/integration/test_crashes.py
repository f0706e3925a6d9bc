"""A process that is killed at each named place of a call, and the next request."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, select

from flask_idempotency import current_idempotency, failpoints
from tests.shop import Shop

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from pathlib import Path

    from flask_idempotency import RecordView
    from tests.databases import Database

# Started once, and forked for each crash: a process of its own without our threads.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__])


def end_process(*_arguments: Any) -> Any:
    """Die at once, as by a power cut."""
    os.kill(os.getpid(), signal.SIGKILL)


class Views:
    """Views that end in different ways; each adds the account first."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop

    def plain(self) -> Any:
        """Leave the commit to the guard."""
        return self._shop.create()

    def committing(self) -> Any:
        """Commit by itself."""
        answer = self._shop.create()
        self._shop.db.session.commit()
        return answer

    def refusing(self) -> Any:
        """Answer an error, so that the account is rolled back."""
        self._shop.add()
        return "no", 404

    def broken(self) -> Any:
        """Raise, so that the account is rolled back."""
        self._shop.add()
        message = "broken"
        raise RuntimeError(message)

    def dying(self) -> Any:
        """Die in the middle."""
        self._shop.add()
        end_process()

    def dying_after_commit(self) -> Any:
        """Die after its own commit."""
        self.committing()
        end_process()


@dataclass(frozen=True)
class Crash:
    """
    A place of death, and what is right then.

    Attributes:
        view: Name of the view that runs.
        place: Where the process dies; None if the view dies by itself.
        stays: Whether the account is there when the process is gone.
        runs_again: Whether the next request runs the view, once the lease is over.
        known: Whether an answer is known without running it.
    """

    view: str
    place: str | None
    stays: bool = False
    runs_again: bool = False
    known: bool = False

    @property
    def unknown(self) -> bool:
        """Whether the outcome is neither known nor safe to find out by a run."""
        return not self.known and not self.runs_again

    def __str__(self) -> str:
        """Name it in a test's id."""
        return f"{self.view}-{self.place or 'in_view'}"


CRASHES = [
    Crash("plain", "before_claim", runs_again=True),
    Crash("plain", "after_claim", runs_again=True),
    Crash("dying", None, runs_again=True),
    Crash("plain", "after_view", runs_again=True),
    Crash("plain", "before_commit", runs_again=True),
    Crash("plain", "after_commit", stays=True, known=True),
    Crash("plain", "before_response", stays=True, known=True),
    Crash("dying_after_commit", None, stays=True),
    Crash("committing", "after_view", stays=True),
    Crash("committing", "before_outcome", stays=True),
    Crash("committing", "after_outcome", stays=True, known=True),
    Crash("committing", "before_response", stays=True, known=True),
    Crash("refusing", "after_view", runs_again=True),
    Crash("refusing", "before_outcome", runs_again=True),
    Crash("refusing", "after_outcome", known=True),
    Crash("broken", "before_outcome", runs_again=True),
    Crash("broken", "after_outcome", known=True),
]
ANSWERS = {"refusing": 404, "broken": 500}


def _crash(database: Database, crash: Crash) -> None:
    shop = Shop(database)
    if crash.place is not None:
        failpoints.set_failpoint(crash.place, end_process)
    shop.view(getattr(Views(shop), crash.view))
    shop.post()


def die(target: Callable[..., None], *arguments: Any) -> None:
    """Run something in a process that has to be killed by what it does."""
    process = _PROCESSES.Process(target=target, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def settle_down(shop: Shop) -> None:
    """Let the lease of a call that is gone end; until then its key is in progress."""
    record = shop.record()
    if record is not None and record.status.value == "processing":
        assert shop.post().status_code == 409
        shop.lapse()


@pytest.mark.parametrize(
    ("crash", "recover"),
    [
        *(pytest.param(crash, False, id=str(crash)) for crash in CRASHES),
        *(pytest.param(c, True, id=f"{c}-recover") for c in CRASHES if c.unknown),
    ],
)
def test_next_request_after_a_kill(
    database: Database, shop: Shop, crash: Crash, *, recover: bool
) -> None:
    """
    The account exists at most once, and exactly once where the answer says so.

    What is neither known nor safe to run is recovered by the route, or unknown.
    """
    die(_crash, database, crash)
    assert shop.accounts() == (["first"] if crash.stays else [])

    def find(_record: RecordView) -> Any:
        shop.runs.append("recovered")
        name = shop.db.session.scalar(select(shop.Account.name))
        return {"name": name}, 201

    view = {"dying": "plain", "dying_after_commit": "committing"}
    shop.view(
        getattr(Views(shop), view.get(crash.view, crash.view)),
        recover=find if recover else None,
    )
    settle_down(shop)
    status = ANSWERS.get(crash.view, 201)
    if crash.unknown and not recover:
        status = 409
    assert [shop.post().status_code for _ in range(2)] == [status, status]
    runs = ["first"] if crash.runs_again else ["recovered"] if recover else []
    assert shop.runs == runs
    there = crash.stays or (crash.runs_again and status < 400)
    assert shop.accounts() == (["first"] if there else [])


class Provider:
    """
    A provider whose books are a file, which outlives whoever is killed.

    Args:
        books: Where it writes the key of each request.
        dies: Whether it takes its caller with it.
    """

    def __init__(self, books: Path, *, dies: bool = False) -> None:
        self._books = books
        self._dies = dies

    @property
    def keys(self) -> list[str]:
        """The key of each request for a charge."""
        return self._books.read_text().split() if self._books.exists() else []

    def charge(self, key: str) -> dict[str, Any]:
        """Charge under a key."""
        with self._books.open("a") as books:
            books.write(f"{key}\n")
        if self._dies:
            end_process()
        return {"id": len(self.keys)}


@dataclass(frozen=True)
class StepCrash:
    """
    A place of death around a step, and what is right then.

    Attributes:
        place: Where the process dies; None: at the provider, which has charged.
        repeatable: Whether the step may be called again with its key.
        calls: How often the provider was asked when the process is gone.
        again: How often it is asked by the next request; None if that must not run.
        stays: Whether the account is there when the process is gone.
    """

    place: str | None
    repeatable: bool = False
    calls: int = 1
    again: int | None = 0
    stays: bool = False

    def __str__(self) -> str:
        """Name it in a test's id."""
        kind = "repeatable" if self.repeatable else "once"
        return f"{self.place or 'at_provider'}-{kind}"


STEP_CRASHES = [
    StepCrash("before_step", calls=0, again=1),
    StepCrash("in_step", calls=0, again=None),
    StepCrash("in_step", repeatable=True, calls=0, again=1),
    StepCrash(None, again=None),
    StepCrash(None, repeatable=True, again=1),
    StepCrash("after_step", again=None),
    StepCrash("after_step", repeatable=True, again=1),
    StepCrash("after_view"),
    StepCrash("before_commit"),
    StepCrash("after_commit", stays=True),
]


def _pay(shop: Shop, provider: Provider, crash: StepCrash) -> None:
    """Serve a view that charges in a step, then adds the account."""

    def view() -> Any:
        charge = current_idempotency.run_step(
            "charge", provider.charge, repeatable=crash.repeatable
        )
        shop.add()
        return charge, 201

    shop.view(view)


def _crash_around_step(database: Database, books: Path, crash: StepCrash) -> None:
    shop = Shop(database)
    if crash.place is not None:
        failpoints.set_failpoint(crash.place, end_process)
    _pay(shop, Provider(books, dies=crash.place is None), crash)
    shop.post()


@pytest.mark.parametrize("crash", STEP_CRASHES, ids=str)
def test_next_request_after_a_kill_around_a_step(
    database: Database, shop: Shop, tmp_path: Path, crash: StepCrash
) -> None:
    """
    A charge is neither doubled nor forgotten.

    One that may be asked for again is asked for under the same key.
    """
    provider = Provider(tmp_path / "books")
    die(_crash_around_step, database, tmp_path / "books", crash)
    assert len(provider.keys) == crash.calls
    assert shop.accounts() == (["first"] if crash.stays else [])
    _pay(shop, provider, crash)
    settle_down(shop)
    status = 409 if crash.again is None else 201
    answers = [shop.post() for _ in range(2)]
    assert [answer.status_code for answer in answers] == [status, status]
    assert len(provider.keys) == crash.calls + (crash.again or 0)
    assert len(set(provider.keys)) <= 1
    assert shop.accounts() == ([] if crash.again is None else ["first"])
    record = shop.record()
    assert record is not None
    if crash.again is None:
        assert (record.open_step, record.attempts) == ("charge", 1)
    else:
        assert record.steps == {"charge": {"id": len(provider.keys)}}


def _crash_in_commit(database: Database) -> None:
    shop = Shop(database)

    def before_execute(_c: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if statement.startswith("UPDATE idempotency_record"):
            event.listen(engine, "after_cursor_execute", end_process)

    with shop.app.app_context():
        engine = shop.db.engine
    event.listen(engine, "before_cursor_execute", before_execute)
    shop.creating_view()
    shop.post()


def test_kill_between_the_record_and_the_commit(database: Database, shop: Shop) -> None:
    """The record is written in the transaction of the rows: both are gone."""
    die(_crash_in_commit, database)
    assert shop.accounts() == []
    shop.creating_view()
    settle_down(shop)
    assert shop.post().status_code == 201
    assert shop.accounts() == ["first"]


def _crash_in_renewal(database: Database) -> None:
    shop = Shop(database)

    def view() -> Any:
        shop.add()
        threading.Event().wait(60)

    failpoints.set_failpoint("in_renewal", end_process)
    shop.view(view, lease=1)
    shop.post()


def test_kill_in_a_renewal(database: Database, shop: Shop) -> None:
    """A call that dies while its lease is renewed is taken over after it."""
    die(_crash_in_renewal, database)
    assert shop.accounts() == []
    shop.creating_view()
    settle_down(shop)
    assert [shop.post().status_code for _ in range(2)] == [201, 201]
    assert (shop.accounts(), shop.runs) == (["first"], ["first"])


def _crash_in_recovery(database: Database) -> None:
    shop = Shop(database)
    shop.creating_view(recover=end_process)
    shop.post()


def test_kill_in_a_recovery(database: Database, shop: Shop) -> None:
    """A recovery that dies is tried again, and the view never runs."""
    die(_crash, database, Crash("dying_after_commit", None))
    shop.lapse()
    die(_crash_in_recovery, database)
    shop.creating_view(recover=lambda _record: ("recovered", 201))
    settle_down(shop)
    assert shop.post().data == b"recovered"
    assert (shop.runs, shop.accounts()) == ([], ["first"])


def _sleep_in_view(database: Database, line: Connection, own_commit: bool) -> None:  # noqa: FBT001 - by position through a process
    shop = Shop(database)

    def view() -> Any:
        line.send("running")
        assert line.recv() == "go on"
        answer = shop.create()
        if own_commit:
            shop.db.session.commit()
        return answer

    shop.view(view)
    answer = shop.post()
    line.send(
        (answer.status_code, answer.data, "Idempotent-Replayed" in answer.headers)
    )
    shop.close()


@pytest.mark.parametrize("own_commit", [False, True], ids=["guard", "own commit"])
def test_process_that_wakes_up_late_doubles_nothing(
    database: Database, shop: Shop, *, own_commit: bool
) -> None:
    """A process that stood still past its lease gives the answer of who took over."""
    line, far_end = _PROCESSES.Pipe()
    process = _PROCESSES.Process(
        target=_sleep_in_view, args=(database, far_end, own_commit)
    )
    process.start()
    assert line.poll(30)
    assert line.recv() == "running"
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    shop.creating_view()
    settle_down(shop)
    assert shop.post().status_code == 201
    os.kill(pid, signal.SIGCONT)
    line.send("go on")
    assert line.poll(30)
    status, data, replayed = line.recv()
    process.join(60)
    assert (status, replayed, process.exitcode) == (201, True, 0)
    assert data == shop.post().data
    assert shop.accounts() == ["first"]


def test_failpoint_has_a_name_that_exists() -> None:
    """A place that nobody reaches is a mistake in a test."""
    with pytest.raises(ValueError, match="none of before_claim"):
        failpoints.set_failpoint("after_lunch", end_process)
