"""Real workers at real brokers, which are killed and get messages twice."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from celery import chain, chord

from tests.brokers import BROKERS
from tests.conftest import ABSENT
from tests.databases import Server
from tests.servers import Hook

from .workers import Workplace

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.slow,
    # Celery 5.4 uses what the newest client of Redis would rather not have used.
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="workers fork on POSIX alone"),
]


@pytest.fixture(scope="module", params=BROKERS)
def workplace(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workplace]:
    """Give a worker at each kind of broker."""
    broker: str = request.param
    for needed in (broker, "postgresql"):
        if needed in request.config.stash[ABSENT]:
            pytest.skip(f"{needed} is absent")
    server = Server("postgresql")
    url = server.create()
    workplace = Workplace(broker, url, tmp_path_factory.mktemp(broker))
    workplace.wait_for(" ready.")  # else a lease may lapse before
    yield workplace
    workplace.close()
    server.drop(url)


@pytest.fixture
def name() -> str:
    """Give a name, and task id, that no other test has."""
    return uuid4().hex[:8]


@pytest.fixture
def hook() -> Iterator[Hook]:
    """Give a hook where a task waits."""
    hook = Hook()
    yield hook
    hook.close()


def test_message_published_twice(workplace: Workplace, name: str, hook: Hook) -> None:
    """The second one waits for the first, and gets its result."""
    message = workplace.message("add", name, hook.port, task_id=name)
    result = message.apply_async()
    hook.process()
    message.apply_async()
    workplace.wait_for(f"Task add[{name}] was put back")
    hook.let_go()
    assert workplace.get(result) == [name, 0]
    workplace.wait_for(f"Task add[{name}] was not run: it has succeeded before")
    assert workplace.accounts(name) == [name]


def test_put_back_in_a_chain(workplace: Workplace, name: str) -> None:
    """The chain goes on once, and no retry is used."""
    workplace.hold("add", name, name)
    first = workplace.message("add", name, task_id=name)
    result = chain(first, workplace.message("follow")).apply_async()
    assert workplace.get(result) == [name, 0]
    workplace.wait_for(f"Task add[{name}] was put back")
    assert workplace.accounts(name) == [name, f"after {name}"]


def test_put_back_in_a_chord(workplace: Workplace, name: str) -> None:
    """The chord's body runs once, after the member that had to wait."""
    if workplace.broker != "redis":
        pytest.skip("chords are counted by the result backend, here that of Redis")
    workplace.hold("add", name, name)
    members = [
        workplace.message("add", name, task_id=name),
        workplace.message("add", f"{name}-2"),
    ]
    body = workplace.message("follow")
    result = chord(members, body, app=workplace.celery).apply_async()
    assert workplace.get(result) == [[name, 0], [f"{name}-2", 0]]
    workplace.wait_for(f"Task add[{name}] was put back")
    done = [f"{name}-2", name]
    assert workplace.accounts(name) == [*done, f"after {[name, 0]}"]


def test_retry(workplace: Workplace, name: str) -> None:
    """Both tries count for Celery, and one of them for the database."""
    message = workplace.message("retry", name, task_id=name)
    result = message.apply_async(headers={"idempotency_user_id": "u2"})
    assert workplace.get(result) == [name, 1]
    assert workplace.accounts(name) == [name]
    record = workplace.shop.record(name, user="u2", route="task:retry")
    assert record is not None
    assert (record.status.value, record.retries) == ("succeeded", 1)


def test_killed_process(workplace: Workplace, name: str, hook: Hook) -> None:
    """The message comes back, and the row of the killed run does not stay."""
    result = workplace.message("add", name, hook.port, task_id=name).apply_async()
    os.kill(hook.process(), signal.SIGKILL)
    hook.process()
    hook.let_go()
    assert workplace.get(result) == [name, 0]
    assert workplace.accounts(name) == [name]


def test_killed_worker(workplace: Workplace, name: str, hook: Hook) -> None:
    """Another worker gets the message, and waits for the dead one's lease."""
    result = workplace.message("add", name, hook.port, task_id=name).apply_async()
    hook.process()
    workplace.kill()
    workplace.start()
    hook.process()
    hook.let_go()
    assert workplace.get(result) == [name, 0]
    assert workplace.accounts(name) == [name]
