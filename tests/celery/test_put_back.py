"""A message that cannot run now is sent again for later, unless it cannot be sent."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

import pytest
from celery.app.trace import build_tracer
from kombu.exceptions import OperationalError

from flask_idempotency.lifecycle import Failure, Retried
from tests.shop import cut_off

from .bench import Bench

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.shop import Shop

MEMORY = {"broker_url": "memory://"}


@pytest.fixture
def bench(make_quick: Callable[..., Shop]) -> Iterator[Bench]:
    """Give a shop with tasks and a broker in this process."""
    bench = Bench(make_quick(CELERY=MEMORY))
    yield bench
    bench.celery.close()


def trace(bench: Bench, task: Any, *args: Any, **request: Any) -> Any:
    """Run a task as a worker does, and return how it ended, None for a success."""
    tracer = build_tracer(task.name, task, app=bench.celery)
    message = {"id": "t1", "delivery_info": {"routing_key": "celery", "exchange": ""}}
    return tracer("t1", args, {}, {**message, **request}).info


def waiting(bench: Bench) -> list[tuple[dict[str, Any], float]]:
    """Return the headers of the messages at the broker, and how long each waits."""
    found = []
    with bench.celery.connection_for_read() as connection:
        queue = connection.SimpleQueue("celery")
        while queue.qsize():
            headers = queue.get_nowait().headers
            due = dt.datetime.fromisoformat(headers["eta"])
            seconds = (due - dt.datetime.now(dt.timezone.utc)).total_seconds()
            found.append((headers, seconds))
        queue.close()
    return found


def test_message_stays_what_it_is(bench: Bench) -> None:
    """It waits for the lease that it met, with its id, retries and headers."""
    task = bench.adding(max_retries=0)
    headers = {"idempotency_user_id": "u1"}
    with bench.store() as store:
        scope = bench.shop.scope("t1", user="u1", route="task:work")
        hashed = task._request_hash(("first",), {})
        assert store.claim(scope, hashed, lease_seconds=10).claim
    assert trace(bench, task, "first", headers=headers).state == "RETRY"
    ((sent, seconds),) = waiting(bench)
    assert (sent["id"], sent["retries"]) == ("t1", 0)
    assert sent["idempotency_user_id"] == "u1"
    assert 8 < seconds <= 11
    assert bench.shop.runs == []


def test_longest_wait(bench: Bench) -> None:
    """A message is not held for long, however long the lease is."""
    task = bench.adding()
    with bench.store() as store:
        scope = bench.shop.scope("t1", user="", route="task:work")
        hashed = task._request_hash(("first",), {})
        store.claim(scope, hashed, lease_seconds=3600)
    assert trace(bench, task, "first").state == "RETRY"
    ((_sent, seconds),) = waiting(bench)
    assert 25 < seconds <= 31


def test_next_try_that_is_early(bench: Bench) -> None:
    """It waits for a moment only: the try that has sent it is about to end."""
    task = bench.adding()
    bench.claim(task._request_hash(("first",), {}))
    assert trace(bench, task, "first", retries=1).state == "RETRY"
    ((sent, seconds),) = waiting(bench)
    assert sent["retries"] == 1
    assert 0 < seconds <= 2


def test_database_is_down(bench: Bench) -> None:
    """The message comes again until the database is there."""
    task = bench.adding()
    with cut_off(bench.shop):
        assert trace(bench, task, "first").state == "RETRY"
    assert len(waiting(bench)) == 1
    assert trace(bench, task, "first") is None


def test_broker_that_does_not_take_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message goes back to where it came from, and is not dropped."""
    task = bench.adding()
    bench.claim(task._request_hash(("first",), {}))

    def fail(*_: object, **__: object) -> None:
        raise OperationalError

    monkeypatch.setattr(bench.celery, "send_task", fail)
    ended = trace(bench, task, "first")
    assert (ended.state, ended.retval.requeue) == ("REJECTED", True)


def test_stale_copy_with_other_arguments(bench: Bench) -> None:
    """It is no conflict, and does not end the task that was retried since."""
    task = bench.adding()
    claim = bench.claim(task._request_hash(("second",), {}))
    with bench.store() as store:
        retried = Retried(
            retries=1,
            request_hash=task._request_hash(("second",), {}),
            after_effects=False,
            otherwise=Failure(reason="retried"),
        )
        assert store.postpone(claim, retried)
    assert trace(bench, task, "first").state == "IGNORED"
    assert (bench.shop.runs, waiting(bench)) == ([], [])
