"""Contests for one key: a waking owner in a process of its own against the others."""

from __future__ import annotations

import multiprocessing
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flask import request

from flask_idempotency import failpoints
from tests.shop import Shop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from tests.databases import Database

TIMEOUT = 60

# Started once, and forked for each owner: a process without our threads.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])


@dataclass(frozen=True)
class Answer:
    """What a client got."""

    status: int
    data: bytes
    replayed: bool

    @classmethod
    def of(cls, response: Any) -> Answer:
        """Take it from a response of the test client."""
        replayed = "Idempotent-Replayed" in response.headers
        return cls(response.status_code, response.data, replayed)


class Owner:
    """
    A process whose calls stop in the view, and commit when they are told to.

    Its view adds one account, and before that, if asked, one in a commit of its own.
    """

    def __init__(self, line: Connection, barrier: Any) -> None:
        self._line = line
        self._barrier = barrier

    def start(self, key: str, **asked: str) -> None:
        """
        Let it ask for an account; returns while its view runs.

        Args:
            key: The key.
            asked: Headers for the view: "part" for one in a commit of its own,
                "place" for where it meets its rivals.
        """
        self._line.send((key, asked))
        self._hear("running")

    def wake(self) -> None:
        """Let the view go on, up to where it meets its rivals."""
        self._line.send("go on")
        self._hear("waiting")

    def meet(self) -> None:
        """Start at the same moment as the owner and the other rivals."""
        self._barrier.wait(TIMEOUT)

    def answer(self) -> Answer:
        """Wait for what its client gets."""
        found = self._hear()
        assert isinstance(found, Answer)
        return found

    def end(self) -> None:
        """Let the process end by itself."""
        self._line.send(None)

    def _hear(self, expected: str | None = None) -> object:
        assert self._line.poll(TIMEOUT)
        word: object = self._line.recv()
        assert expected in {None, word}
        return word


@contextmanager
def owner_of(database: Database, *, rivals: int) -> Iterator[Owner]:
    """Run such a process for the block, with as many rivals to meet."""
    near, far = PROCESSES.Pipe()
    barrier = PROCESSES.Barrier(rivals + 1)
    process = PROCESSES.Process(target=_own, args=(database, far, barrier))
    process.start()
    owner = Owner(near, barrier)
    try:
        yield owner
        owner.end()
        process.join(TIMEOUT)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join(TIMEOUT)


def account(key: str, who: str) -> str:
    """
    Name an account after who added it.

    Two effects of one key are then two rows that no constraint keeps apart.
    """
    return f"{key} {who}"


def _own(database: Database, line: Connection, barrier: Any) -> None:
    shop = Shop(database)

    def meet(place: str) -> None:
        if place == request.headers["place"]:
            line.send("waiting")
            barrier.wait(TIMEOUT)

    def view() -> Any:
        key = request.headers["Idempotency-Key"]
        if "part" in request.headers:
            shop.add(account(key, "part"))
            shop.db.session.commit()
        line.send("running")
        assert line.recv() == "go on"
        meet("view")
        shop.add(account(key, "owner"))
        return {"by": "owner"}, 201

    shop.view(view)
    failpoints.set_failpoint("before_commit", lambda: meet("commit"))
    while (asked := line.recv()) is not None:
        key, headers = asked
        line.send(Answer.of(shop.post(key=key, headers=headers)))
    shop.close()
