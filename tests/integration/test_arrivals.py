"""
A request arrives: each row of the decision table, come about as it does in life.

Owners hang in their view past the end of their lease, fail, or have answered. Those
that hang wake up at the end of the test and must neither add nor spoil anything.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from flask_idempotency import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from werkzeug.test import TestResponse

    from flask_idempotency import RecordView

    from .tables import World

    Situation = Callable[[World, str, str], Iterator[None]]


def missing(_world: World, _key: str, _path: str) -> Iterator[None]:
    """Nobody has used the key."""
    yield


def live(world: World, key: str, path: str) -> Iterator[None]:
    """An owner is at work."""
    with world.hanging(key, path):
        yield


def live_after_commit(world: World, key: str, path: str) -> Iterator[None]:
    """An owner is at work, and has committed a part."""
    with world.hanging(key, path, commits=True):
        yield


def lapsed(world: World, key: str, path: str) -> Iterator[None]:
    """An owner stands still past the end of its lease."""
    with world.hanging(key, path):
        world.lapse(key)
        yield


def lapsed_twice(world: World, key: str, path: str) -> Iterator[None]:
    """So did its successor, and that is often enough."""
    with world.hanging(key, path):
        world.lapse(key)
        with world.hanging(key, path):
            world.lapse(key)
            yield


def lapsed_after_commit(world: World, key: str, path: str) -> Iterator[None]:
    """An owner stands still that has committed a part."""
    with world.hanging(key, path, commits=True):
        world.lapse(key)
        yield


def succeeded(world: World, key: str, path: str) -> Iterator[None]:
    """The key has its answer."""
    assert world.ask(key, path).status_code == 201
    yield


def failed(world: World, key: str, path: str) -> Iterator[None]:
    """The owner's view raised."""
    world.plans[key] = [_raise]
    assert world.ask(key, path).status_code == 500
    yield


def failed_after_commit(world: World, key: str, path: str) -> Iterator[None]:
    """The owner's view committed a part and raised."""

    def plan() -> None:
        world.commit_a_part()
        _raise()

    world.plans[key] = [plan]
    assert world.ask(key, path).status_code == 500
    yield


def expired(world: World, key: str, path: str) -> Iterator[None]:
    """The key's life is over, and marked as such."""
    assert world.ask(key, path).status_code == 201
    world.expire(key)
    yield


def locked(world: World, key: str, path: str) -> Iterator[None]:
    """The key is free, but at this moment somebody else holds its row."""
    if world.database.name == "sqlite":
        pytest.skip("SQLite locks the database, not rows")
    assert world.ask(key, path).status_code == 201
    world.outlive(key)
    with world.locked(key):
        yield


def _raise() -> None:
    message = "broken"
    raise RuntimeError(message)


@dataclass(frozen=True, kw_only=True)
class Row:
    """
    One row of the table.

    Attributes:
        name: Its number, and what sets it apart.
        before: How the record comes about.
        over: The key's life ends then.
        other: Another request arrives, not the same one.
        path: The route, which has its options.
        means: What ``diagnose`` says before.
        answer: Who answers: a run, the recovery, or an error's code.
        attempts: Of the record afterwards, and those of a new operation are 1.
        new: A new operation starts.
        replayed: The answer is a stored one.
        effects: What is there when also a hanging owner has ended.
    """

    name: str
    before: Situation
    over: bool = False
    other: bool = False
    path: str = "/plain"
    means: Verdict
    answer: str
    attempts: int = 1
    new: bool = False
    replayed: bool = False
    effects: tuple[str, ...]


RUNNING, CONFLICT = "IDEMPOTENCY_IN_PROGRESS", "IDEMPOTENCY_KEY_CONFLICT"
UNKNOWN, FAILURE = "IDEMPOTENCY_OUTCOME_UNKNOWN", "IDEMPOTENCY_PREVIOUS_FAILURE"
V = Verdict
ONE, TWO, PART, ALL = ("run 1",), ("run 2",), ("part",), ("part", "rest")
IN_PROGRESS, OTHER_HASH = V.IN_PROGRESS, V.REQUEST_HASH_CONFLICT
REUSABLE, OPT_IN = V.EXPIRED_REUSABLE, V.FAILED_RETRY_REQUIRES_OPT_IN

# fmt: off
ROWS = [
    Row(name="1", before=missing, means=V.MISSING, answer="run 1", new=True, effects=ONE),
    Row(name="2", before=live, means=IN_PROGRESS, answer=RUNNING, effects=ONE),
    Row(name="2 over", before=live, over=True, means=IN_PROGRESS, answer=RUNNING, effects=ONE),
    Row(name="2 effects", before=live_after_commit, means=IN_PROGRESS, answer=RUNNING, effects=ALL),
    Row(name="3", before=live, other=True, means=OTHER_HASH, answer=CONFLICT, effects=ONE),
    Row(name="3 over effects", before=live_after_commit, over=True, other=True, means=OTHER_HASH, answer=CONFLICT, effects=ALL),
    Row(name="4", before=lapsed, means=V.LEASE_LAPSED, answer="run 2", attempts=2, effects=TWO),
    Row(name="4 too often", before=lapsed_twice, means=V.LEASE_LAPSED, answer=FAILURE, attempts=2, replayed=True, effects=()),
    Row(name="5", before=lapsed, other=True, means=OTHER_HASH, answer=CONFLICT, effects=ONE),
    Row(name="6", before=lapsed_after_commit, means=V.OUTCOME_UNKNOWN, answer=UNKNOWN, effects=ALL),
    Row(name="6 over", before=lapsed_after_commit, over=True, means=V.OUTCOME_UNKNOWN, answer=UNKNOWN, effects=ALL),
    Row(name="6 recover", before=lapsed_after_commit, path="/recover", means=V.OUTCOME_UNKNOWN, answer="recovery", attempts=2, effects=PART),
    Row(name="6 recover over", before=lapsed_after_commit, over=True, path="/recover", means=V.OUTCOME_UNKNOWN, answer="recovery", attempts=2, effects=PART),
    Row(name="7", before=lapsed_after_commit, other=True, path="/recover", means=OTHER_HASH, answer=CONFLICT, effects=ALL),
    Row(name="7 over", before=lapsed_after_commit, over=True, other=True, path="/recover", means=V.OUTCOME_UNKNOWN, answer=UNKNOWN, effects=ALL),
    Row(name="8", before=lapsed, over=True, means=REUSABLE, answer="run 2", new=True, effects=TWO),
    Row(name="8 other", before=lapsed, over=True, other=True, means=REUSABLE, answer="run 2", new=True, effects=TWO),
    Row(name="10", before=succeeded, means=V.REPLAYABLE, answer="run 1", replayed=True, effects=ONE),
    Row(name="10 other", before=succeeded, other=True, means=OTHER_HASH, answer=CONFLICT, effects=ONE),
    Row(name="11", before=succeeded, over=True, means=REUSABLE, answer="run 2", new=True, effects=("run 1", "run 2")),
    Row(name="11 other", before=succeeded, over=True, other=True, means=REUSABLE, answer="run 2", new=True, effects=("run 1", "run 2")),
    Row(name="12", before=failed, means=OPT_IN, answer=FAILURE, replayed=True, effects=()),
    Row(name="12 retry", before=failed, path="/retry", means=OPT_IN, answer="run 2", attempts=2, effects=TWO),
    Row(name="13", before=failed, other=True, means=OTHER_HASH, answer=CONFLICT, effects=()),
    Row(name="13 retry", before=failed, other=True, path="/retry", means=OTHER_HASH, answer=CONFLICT, effects=()),
    Row(name="13 effects", before=failed_after_commit, other=True, path="/retry", means=OTHER_HASH, answer=CONFLICT, effects=PART),
    Row(name="14", before=failed_after_commit, means=OPT_IN, answer=FAILURE, replayed=True, effects=PART),
    Row(name="14 retry", before=failed_after_commit, path="/retry", means=OPT_IN, answer=FAILURE, replayed=True, effects=PART),
    Row(name="15", before=failed_after_commit, over=True, means=REUSABLE, answer="run 2", new=True, effects=("part", "run 2")),
    Row(name="15 other", before=failed_after_commit, over=True, other=True, means=REUSABLE, answer="run 2", new=True, effects=("part", "run 2")),
    Row(name="15 no effects", before=failed, over=True, means=REUSABLE, answer="run 2", new=True, effects=TWO),
    Row(name="17", before=expired, means=REUSABLE, answer="run 2", new=True, effects=("run 1", "run 2")),
    Row(name="17 other", before=expired, other=True, means=REUSABLE, answer="run 2", new=True, effects=("run 1", "run 2")),
    Row(name="18", before=locked, means=REUSABLE, answer=RUNNING, effects=ONE),
]
# fmt: on
STATUSES = {RUNNING: 409, CONFLICT: 422, UNKNOWN: 409, FAILURE: 500}
_numbers = itertools.count()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_arrival(world: World, row: Row) -> None:
    """The request gets what the row says, and the record becomes what it says."""
    key = f"a{next(_numbers)}"
    with contextmanager(row.before)(world, key, row.path):
        if row.over:
            world.outlive(key)
        before = world.of(key, row.path)
        check_diagnosis(world, key, row, before)
        answer = world.ask(key, row.path, same=not row.other)
        check_answer(answer, row)
        check_record(before, world.of(key, row.path), row)
    assert tuple(world.effects(key)) == row.effects


def check_diagnosis(
    world: World, key: str, row: Row, before: RecordView | None
) -> None:
    """Check the word that ``diagnose`` has for the request that comes."""
    asked = None
    if before is not None:
        rules = before.request_hash.partition(":")[0]
        asked = f"{rules}:other" if row.other else before.request_hash
    scope = world.scope(key, route=f"POST {row.path}")
    with world.app.app_context():
        diagnosis = world.idempotency.store.diagnose(scope, asked)
    assert diagnosis.diagnosis is row.means


def check_answer(answer: TestResponse, row: Row) -> None:
    """Check status, who has answered, and whether it is marked as a replay."""
    assert answer.status_code == STATUSES.get(row.answer, 201)
    assert answer.json is not None
    assert answer.json["code" if row.answer in STATUSES else "by"] == row.answer
    assert ("Idempotent-Replayed" in answer.headers) is row.replayed
    assert ("Retry-After" in answer.headers) is (row.answer == RUNNING)
    if row.name == "18":
        assert answer.headers["Retry-After"] == "1"


def check_record(before: RecordView | None, after: RecordView | None, row: Row) -> None:
    """Check whether the operation goes on, and how often it was tried."""
    assert after is not None
    assert after.attempts == row.attempts
    if row.new:
        assert before is None or before.operation_id != after.operation_id
    else:
        assert before is not None
        assert before.operation_id == after.operation_id
