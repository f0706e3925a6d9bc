"""
An application whose clock is wrong by more than the life of a key changes nothing.

On PostgreSQL and MariaDB, whose own clock decides. SQLite has none: it asks that of the
machine, and its processes share one.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.clerk import Clerk
from tests.databases import SERVERS, Database, Server
from tests.shop import Shop

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Longer than the life of a key.
SKEW_SECONDS = 36 * 3600.0
_numbers = itertools.count()
_ROOT = Path(__file__).resolve().parents[2]


class WrongClerk:
    """A clerk in a process of its own."""

    def __init__(self, seconds: float, database: Database) -> None:
        self.seconds = seconds
        self._process = subprocess.Popen(  # noqa: S603 - our own command, no shell
            [
                *(sys.executable, "-m", "tests.skewed"),
                *(str(seconds), database.name, database.url),
            ],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )

    def do(self, what: str, key: str = "") -> Any:
        """Have it do something, and return what came of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, key]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """Let it end by itself."""
        self._process.communicate(timeout=30)
        assert self._process.returncode == 0


@pytest.fixture(scope="module", params=SERVERS)
def shop(request: pytest.FixtureRequest) -> Iterator[Shop]:
    """Give a shop for all tests, each of which uses keys of its own."""
    server = Server(request.param)
    if absence := server.absence():
        pytest.skip(absence)
    shop = Shop(Database(server.name, server.create()))
    shop.creating_view()
    yield shop
    shop.close()
    server.drop(shop.database.url)


@pytest.fixture(scope="module", params=[SKEW_SECONDS, -SKEW_SECONDS], ids=["+", "-"])
def wrong(shop: Shop, request: pytest.FixtureRequest) -> Iterator[WrongClerk]:
    """Give somebody whose clock is fast, or slow."""
    clerk = WrongClerk(request.param, shop.database)
    yield clerk
    clerk.close()


@pytest.fixture
def right(shop: Shop) -> Clerk:
    """Give somebody whose clock is right."""
    return Clerk(shop)


@pytest.fixture
def key() -> str:
    """Give a key that no other test uses."""
    return f"key{next(_numbers)}"


def pairs(
    right: Clerk, wrong: WrongClerk
) -> list[tuple[Clerk | WrongClerk, Clerk | WrongClerk]]:
    """Give both the part of the first and of the second."""
    return [(right, wrong), (wrong, right)]


def test_clock_is_wrong(wrong: WrongClerk) -> None:
    """What follows would prove nothing if it were not."""
    for clock in wrong.do("clocks"):
        assert abs(clock - time.time() - wrong.seconds) < 60


def test_claim_lasts_as_long_as_it_should(
    right: Clerk, wrong: WrongClerk, key: str
) -> None:
    """Whoever has claimed it, a key is in progress for both, and for 30 seconds."""
    for number, (first, second) in enumerate(pairs(right, wrong)):
        claimed = f"{key}-{number}"
        assert first.do("claim", claimed) == ["claimed", 1]
        assert second.do("claim", claimed) == ["in_progress", None]
        for clerk in (first, second):
            verdict, seconds_left = clerk.do("diagnose", claimed)
            assert verdict == "in_progress"
            assert 0 < seconds_left <= 30
        assert first.do("finish", claimed) is True
        assert second.do("claim", claimed) == ["replayable", None]


def test_lapsed_lease_is_taken_over(
    shop: Shop, right: Clerk, wrong: WrongClerk, key: str
) -> None:
    """Whoever was late has lost its key to the other."""
    for number, (first, second) in enumerate(pairs(right, wrong)):
        claimed = f"{key}-{number}"
        assert first.do("claim", claimed) == ["claimed", 1]
        shop.lapse(claimed)
        assert second.do("claim", claimed) == ["claimed", 2]
        assert first.do("finish", claimed) is False
        assert second.do("finish", claimed) is True


def test_renewal_lasts_as_long_as_it_should(
    shop: Shop, right: Clerk, wrong: WrongClerk, key: str
) -> None:
    """A renewed lease is live for both."""
    for number, (first, second) in enumerate(pairs(right, wrong)):
        claimed = f"{key}-{number}"
        first.do("claim", claimed)
        shop.lapse(claimed)
        first.do("renew", claimed)
        verdict, seconds_left = second.do("diagnose", claimed)
        assert verdict == "in_progress"
        assert 30 < seconds_left <= 60


def test_request_is_answered_once(
    shop: Shop, right: Clerk, wrong: WrongClerk, key: str
) -> None:
    """One of them runs it, the other one replays it, and the record has the time."""
    for number, (first, second) in enumerate(pairs(right, wrong)):
        asked = f"{key}-{number}"
        assert first.do("post", asked) == [201, False]
        assert second.do("post", asked) == [201, True]
        record = shop.record(asked)
        assert record is not None
        assert abs(record.created_at.timestamp() - time.time()) < 60


def test_key_ends_when_its_life_does(
    shop: Shop, right: Clerk, wrong: WrongClerk, key: str
) -> None:
    """A wrong clock expires and purges nothing early, and nothing late."""
    assert right.do("claim", key) == ["claimed", 1]
    assert right.do("finish", key) is True
    assert (wrong.do("expire"), wrong.do("purge")) == (0, 0)
    assert wrong.do("claim", key) == ["replayable", None]
    shop.outlive(key)
    assert wrong.do("diagnose", key)[0] == "expired_reusable"
    assert (wrong.do("expire"), wrong.do("purge")) == (1, 1)
    assert right.do("diagnose", key) == ["missing", None]
