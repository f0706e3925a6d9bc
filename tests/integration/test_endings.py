"""
The owner's call ends: each row of the table, by a call that ends that way.

How a lost answer of the COMMIT is settled is in ``test_lost_answers``, and what a
process leaves that dies in ``test_crashes``.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError

from .tables import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable

    from .tables import World

PATH = "/plain"
_numbers = itertools.count()


class _LastBreathError(BaseException):
    """What no handler of exceptions catches, like the end of a greenlet."""


@pytest.fixture
def key() -> str:
    """Give a key that no other test uses."""
    return f"e{next(_numbers)}"


def answering(answer: Any) -> Callable[[World], Any]:
    """Let the view give an answer."""
    return lambda _world: answer


def raising(error: type[BaseException]) -> Callable[[World], Any]:
    """Let the view raise."""

    def end(_world: World) -> None:
        raise error

    return end


def forgetting(world: World) -> None:
    """Leave nothing to commit."""
    world.db.session.rollback()


def colliding(world: World) -> None:
    """Leave two rows for the guard's flush of which only one can be."""
    world.insert("twin")
    world.insert("twin")


def swallowing(world: World) -> None:
    """Catch the error of a flush, which leaves the session inactive."""
    colliding(world)
    with suppress(IntegrityError):
        world.db.session.flush()


def aborting(world: World) -> None:
    """Catch an error of the server, which leaves its transaction aborted."""
    if world.database.name != "postgresql":
        pytest.skip("only PostgreSQL aborts a transaction after an error")
    world.db.session.flush()
    with suppress(DBAPIError):
        world.db.session.connection().execute(text("SELECT 1 / 0"))


@dataclass(frozen=True, kw_only=True)
class Row:
    """
    One row of the table.

    Attributes:
        end: How the view ends, after it has added an account.
        part: The view has committed a part before.
        status: Of the record afterwards; None if there is none.
        noted: That something became durable is on the record.
        client: The status that the client gets; None if the call raises.
        effects: What is there afterwards.
    """

    name: str
    end: Callable[[World], Any]
    part: bool = False
    status: str | None
    noted: bool
    client: int | None
    effects: tuple[str, ...] = ()


ONE, PART, ALL = ("run 1",), ("part",), ("part", "rest")
OK, NOT_FOUND, TOO_MANY = ("fine", 200), ("no", 404), ("later", 429)
DOWN = ("down", 502)

# fmt: off
ROWS = [
    Row(name="answer below 400", end=answering(OK), status="succeeded", noted=True, client=200, effects=ONE),
    Row(name="answer below 400, effects", end=answering(OK), part=True, status="succeeded", noted=True, client=200, effects=ALL),
    Row(name="answer below 400, nothing to commit", end=forgetting, status="succeeded", noted=False, client=201),
    Row(name="session is inactive", end=swallowing, status="succeeded", noted=False, client=201),
    Row(name="session is inactive, effects", end=swallowing, part=True, status="succeeded", noted=True, client=201, effects=PART),
    Row(name="transaction is aborted", end=aborting, status="succeeded", noted=False, client=201),
    Row(name="commit fails", end=colliding, status="failed", noted=False, client=500),
    Row(name="commit fails, effects", end=colliding, part=True, status="failed", noted=True, client=500, effects=PART),
    Row(name="answer 400-499", end=answering(NOT_FOUND), status="succeeded", noted=False, client=404),
    Row(name="answer 400-499, effects", end=answering(NOT_FOUND), part=True, status="succeeded", noted=True, client=404, effects=PART),
    Row(name="release_on", end=answering(TOO_MANY), status=None, noted=False, client=429),
    Row(name="release_on, effects", end=answering(TOO_MANY), part=True, status="succeeded", noted=True, client=429, effects=PART),
    Row(name="exception", end=raising(KeyError), status="failed", noted=False, client=500),
    Row(name="exception, effects", end=raising(KeyError), part=True, status="failed", noted=True, client=500, effects=PART),
    Row(name="answer from 500 on", end=answering(DOWN), status="failed", noted=False, client=502),
    Row(name="answer from 500 on, effects", end=answering(DOWN), part=True, status="failed", noted=True, client=502, effects=PART),
    Row(name="BaseException", end=raising(_LastBreathError), status="failed", noted=False, client=None),
    Row(name="BaseException, effects", end=raising(_LastBreathError), part=True, status="failed", noted=True, client=None, effects=PART),
    Row(name="exit", end=raising(SystemExit), status="failed", noted=False, client=None),
]
# fmt: on


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_ending(world: World, key: str, row: Row) -> None:
    """The record, the rows and the client's answer are as the row says."""

    def plan() -> Any:
        if row.part:
            world.commit_a_part()
        return row.end(world)

    world.plans[key] = [plan]
    if row.client is None:
        with pytest.raises((_LastBreathError, SystemExit)):
            world.ask(key, PATH)
    else:
        assert world.ask(key, PATH).status_code == row.client
    record = world.of(key, PATH)
    assert (record.status.value if record else None) == row.status
    if record is not None:
        assert (record.effects_committed_at is not None) is row.noted
        assert (record.owner_token, record.locked_until) == (None, None)
        assert world.ask(key, PATH).status_code == (row.client or 500)
        assert world.counted[key] == 1  # that was a replay
    assert tuple(world.effects(key)) == row.effects


def test_lease_lost_to_an_owner_who_is_done(world: World, key: str) -> None:
    """The late owner writes nothing and gives the winner's answer."""
    with world.hanging(key, PATH) as late:
        world.lapse(key)
        assert world.ask(key, PATH).json == {"by": "run 2"}
    answer = late.result(TIMEOUT)
    assert (answer.status_code, answer.json) == (201, {"by": "run 2"})
    assert answer.headers["Idempotent-Replayed"] == "true"
    assert world.effects(key) == ["run 2"]


def test_lease_lost_to_an_owner_at_work(world: World, key: str) -> None:
    """The late owner's client is told to come again."""
    with ExitStack() as first, ExitStack() as second:
        late = first.enter_context(world.hanging(key, PATH))
        world.lapse(key)
        second.enter_context(world.hanging(key, PATH))
        first.close()
        answer = late.result(TIMEOUT)
        assert answer.status_code == 409
        assert answer.json is not None
        assert answer.json["code"] == "IDEMPOTENCY_IN_PROGRESS"
    assert world.effects(key) == ["run 2"]


def test_lease_lost_and_the_row_is_gone(world: World, key: str) -> None:
    """After expiry and purge nothing is written, and the client may try again."""
    with world.hanging(key, PATH) as late:
        world.lapse(key)
        world.expire(key)
        with world.app.app_context():
            world.idempotency.store.purge(limit=100, older_than_seconds=0)
        assert world.of(key, PATH) is None
    answer = late.result(TIMEOUT)
    assert answer.status_code == 503
    assert answer.json is not None
    assert answer.json["code"] == "IDEMPOTENCY_LEASE_LOST"
    assert (world.effects(key), world.of(key, PATH)) == ([], None)


def test_outcome_that_cannot_be_written(world: World, key: str) -> None:
    """While somebody holds the row nothing is written, and the lease decides."""
    if world.database.name == "sqlite":
        pytest.skip("SQLite locks the database, not rows")
    with ExitStack() as hanging:
        late = hanging.enter_context(world.hanging(key, PATH, answer=NOT_FOUND))
        with world.locked(key):
            hanging.close()
            assert late.result(TIMEOUT).status_code == 503
    record = world.of(key, PATH)
    assert record is not None
    assert record.status.value == "processing"
    world.lapse(key)
    assert world.ask(key, PATH).json == {"by": "run 2"}
    assert world.effects(key) == ["run 2"]


def test_end_after_the_key_s_life(world: World, key: str) -> None:
    """Duplicates still get the answer, for at least half a life of a key."""
    with world.hanging(key, PATH) as late:
        world.outlive(key)
    assert late.result(TIMEOUT).status_code == 201
    record = world.of(key, PATH)
    assert record is not None
    assert record.completed_at is not None
    assert record.expires_at - record.completed_at > timedelta(hours=12)
    assert world.ask(key, PATH).headers["Idempotent-Replayed"] == "true"
    assert world.effects(key) == ["run 1"]
