"""Duplicates that wait for the first call."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine, event

from flask_idempotency import fingerprint
from flask_idempotency.exceptions import (
    IdempotencyInProgress,
    IdempotencyPreviousFailure,
)
from flask_idempotency.waiting import Waiters
from tests.shop import statements_sent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.proxy import Proxy
    from tests.shop import Shop

TIMEOUT = 30


class Held:
    """A view that runs until it is let go."""

    def __init__(self, shop: Shop, **options: Any) -> None:
        self.shop = shop
        self.started, self.let_go = threading.Event(), threading.Event()
        self.result: Any = ("made", 201)
        shop.view(self.view, **options)

    def view(self) -> Any:
        """Run until ``let_go``; the first run only."""
        self.shop.runs.append(1)
        if len(self.shop.runs) == 1:
            self.started.set()
            assert self.let_go.wait(TIMEOUT)
            if isinstance(self.result, Exception):
                raise self.result
            return self.result
        return "run again", 202


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Run requests at the same time."""
    with ThreadPoolExecutor(max_workers=60) as pool:
        yield pool


@contextmanager
def until_asked(waiters: int = 1) -> Iterator[None]:
    """Stay until one of the waiters that come in the block has asked the database."""
    asked, reads = threading.Event(), []

    def listen(_c: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if "FROM idempotency_record" in statement:
            reads.append(statement)
        if len(reads) > waiters:  # each one's claim, and a question
            asked.set()

    event.listen(Engine, "after_cursor_execute", listen)
    try:
        yield
        assert asked.wait(TIMEOUT)
    finally:
        event.remove(Engine, "after_cursor_execute", listen)


def test_waiter_gets_the_first_answer_when_it_is_there(
    shop: Shop, pool: ThreadPoolExecutor
) -> None:
    """A duplicate waits for the first call and gets its answer as a replay."""
    held = Held(shop, wait=TIMEOUT)
    first = pool.submit(shop.post)
    assert held.started.wait(TIMEOUT)
    with until_asked():
        second = pool.submit(shop.post)
    assert not second.done()
    held.let_go.set()
    assert first.result(TIMEOUT).status_code == 201
    answer = second.result(TIMEOUT)
    assert (answer.status_code, answer.data) == (201, b"made")
    assert answer.headers["Idempotent-Replayed"] == "true"
    assert shop.runs == [1]


def test_wait_is_cut_by_its_limit(shop: Shop, pool: ThreadPoolExecutor) -> None:
    """After the limit the answer is 409, with the lease that is left by then."""
    # Half a second on either side: Retry-After is rounded up.
    held = Held(shop, wait=1, lease=29.5)
    first = pool.submit(shop.post)
    assert held.started.wait(TIMEOUT)
    begun = time.monotonic()
    answer = shop.post()
    held.let_go.set()
    assert time.monotonic() - begun >= 1
    assert answer.status_code == 409
    assert answer.json is not None
    assert answer.json["code"] == "IDEMPOTENCY_IN_PROGRESS"
    assert 20 <= int(answer.headers["Retry-After"]) <= 29
    assert first.result(TIMEOUT).status_code == 201


def test_conflict_does_not_wait(shop: Shop, pool: ThreadPoolExecutor) -> None:
    """Another request under the key is refused at once."""
    held = Held(shop, wait=TIMEOUT * 10)
    first = pool.submit(shop.post)
    assert held.started.wait(TIMEOUT)
    assert shop.post("other").status_code == 422
    held.let_go.set()
    first.result(TIMEOUT)


def test_application_has_a_default(
    make_shop: Callable[..., Shop], pool: ThreadPoolExecutor
) -> None:
    """``IDEMPOTENCY_WAIT`` is the wait of routes that say nothing."""
    shop = make_shop(IDEMPOTENCY_WAIT=timedelta(seconds=TIMEOUT))
    held = Held(shop)
    first = pool.submit(shop.post)
    assert held.started.wait(TIMEOUT)
    with until_asked():
        second = pool.submit(shop.post)
    held.let_go.set()
    codes = {first.result(TIMEOUT).status_code, second.result(TIMEOUT).status_code}
    assert (codes, shop.runs) == ({201}, [1])


def test_waiter_runs_what_was_freed(shop: Shop, pool: ThreadPoolExecutor) -> None:
    """A first call that says "nothing was done" leaves its turn to a waiter."""
    held = Held(shop, wait=TIMEOUT)
    held.result = ("later", 429)
    first = pool.submit(shop.post)
    assert held.started.wait(TIMEOUT)
    with until_asked(5):
        others = [pool.submit(shop.post) for _ in range(5)]
    held.let_go.set()
    assert first.result(TIMEOUT).status_code == 429
    answers = [other.result(TIMEOUT) for other in others]
    assert {answer.data for answer in answers} == {b"run again"}
    assert sum("Idempotent-Replayed" in answer.headers for answer in answers) == 4
    assert shop.runs == [1, 1]


def test_waiter_retries_what_failed(shop: Shop, pool: ThreadPoolExecutor) -> None:
    """With ``retry_failed`` one waiter runs a failed operation again."""
    held = Held(shop, wait=TIMEOUT, retry_failed=True)
    held.result = RuntimeError("broken")
    first = pool.submit(shop.post)
    assert held.started.wait(TIMEOUT)
    with until_asked(5):
        others = [pool.submit(shop.post) for _ in range(5)]
    held.let_go.set()
    assert first.result(TIMEOUT).status_code == 500
    assert {other.result(TIMEOUT).data for other in others} == {b"run again"}
    assert shop.runs == [1, 1]


def test_waiter_gets_a_failure(shop: Shop, pool: ThreadPoolExecutor) -> None:
    """Without it the waiters get the failure."""
    held = Held(shop, wait=TIMEOUT)
    held.result = RuntimeError("broken")
    first = pool.submit(shop.post)
    assert held.started.wait(TIMEOUT)
    with until_asked():
        second = pool.submit(shop.post)
    held.let_go.set()
    first.result(TIMEOUT)
    answer = second.result(TIMEOUT)
    assert answer.json is not None
    assert answer.json["code"] == "IDEMPOTENCY_PREVIOUS_FAILURE"


def test_waiter_takes_a_lapsed_lease_over(shop: Shop, pool: ThreadPoolExecutor) -> None:
    """A waiter does not wait for a call that is gone."""
    held = Held(shop, wait=TIMEOUT)
    first = pool.submit(shop.post)
    assert held.started.wait(TIMEOUT)
    with until_asked():
        second = pool.submit(shop.post)
    shop.lapse()
    assert second.result(TIMEOUT).data == b"run again"
    held.let_go.set()
    assert first.result(TIMEOUT).data == b"run again"


def test_fifty_waiters_ask_few_questions(
    make_shop: Callable[..., Shop], pool: ThreadPoolExecutor
) -> None:
    """The waiters of a process share one question, asked ever more seldom."""
    shop = make_shop()
    held = Held(shop, wait=3)
    first = pool.submit(shop.post)
    assert held.started.wait(TIMEOUT)
    with statements_sent() as statements:
        others = [pool.submit(shop.post) for _ in range(50)]
        answers = [other.result(TIMEOUT) for other in others]
    held.let_go.set()
    first.result(TIMEOUT)
    assert Counter(answer.status_code for answer in answers) == {409: 50}
    looks = [s for s in statements if "FROM idempotency_record" in s]
    claims_per_waiter = 1
    assert len(looks) - 50 * claims_per_waiter < 20


def test_waiter_holds_no_connection(
    make_shop: Callable[..., Shop], pool: ThreadPoolExecutor
) -> None:
    """A pool of one connection serves the first call while others wait."""
    shop = make_shop(
        SQLALCHEMY_ENGINE_OPTIONS={
            "pool_size": 1,
            "max_overflow": 0,
            "pool_timeout": 20,
        }
    )

    @shop.app.before_request
    def load_user() -> None:
        shop.db.session.query(shop.Account).first()

    waiting, arrived = threading.Event(), threading.Event()

    def view() -> Any:
        shop.runs.append(1)
        shop.db.session.rollback()  # gives the connection up while it waits
        arrived.set()
        assert waiting.wait(TIMEOUT)
        shop.db.session.query(shop.Account).first()
        return "made", 201

    shop.view(view, wait=TIMEOUT)
    first = pool.submit(shop.post)
    assert arrived.wait(TIMEOUT)
    with until_asked(3):
        others = [pool.submit(shop.post) for _ in range(3)]
    waiting.set()
    codes = {call.result(TIMEOUT).status_code for call in (first, *others)}
    assert (codes, shop.runs) == ({201}, [1])


def test_request_that_has_written_does_not_wait(
    make_quick: Callable[..., Shop], pool: ThreadPoolExecutor
) -> None:
    """A transaction with changes is not kept open for a wait: the first may need it."""
    shop = make_quick()
    held = Held(shop, wait=TIMEOUT * 10)

    @shop.app.before_request
    def write() -> None:
        if held.started.is_set():
            shop.db.session.add(shop.Account(name="early"))

    first = pool.submit(shop.post)
    assert held.started.wait(TIMEOUT)
    assert shop.post().status_code == 409
    held.let_go.set()
    assert first.result(TIMEOUT).status_code == 201


def test_service_waits_too(shop: Shop, pool: ThreadPoolExecutor) -> None:
    """``run(wait=…)`` gives a service the first call's result."""
    started, let_go = threading.Event(), threading.Event()

    def handler() -> dict[str, int]:
        shop.runs.append(1)
        started.set()
        assert let_go.wait(TIMEOUT)
        return {"id": 1}

    def call(wait: float) -> Any:
        with shop.app.app_context():
            return shop.idempotency.guard.run(
                shop.scope(), fingerprint(1), handler, wait=wait
            )

    first = pool.submit(call, 0)
    assert started.wait(TIMEOUT)
    with pytest.raises(IdempotencyInProgress):
        call(0)
    with until_asked():
        second = pool.submit(call, TIMEOUT)
    let_go.set()
    assert first.result(TIMEOUT).value == second.result(TIMEOUT).value == {"id": 1}
    assert (second.result().replayed, shop.runs) == (True, [1])


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.usefixtures("impatient")
def test_waiter_never_runs_unprotected(
    make_far_shop: Callable[..., Shop], proxy: Proxy, pool: ThreadPoolExecutor
) -> None:
    """A store that falls silent during the wait does not open what fails open."""
    shop = make_far_shop()
    held = Held(shop, wait=TIMEOUT, fail_open=True)
    first = pool.submit(shop.post)
    assert held.started.wait(TIMEOUT)
    with until_asked():
        second = pool.submit(shop.post)
    proxy.freeze()
    answer = second.result(TIMEOUT)
    proxy.thaw()
    assert answer.status_code == 409
    assert shop.runs == [1]
    held.let_go.set()
    first.result(TIMEOUT)


def test_waiter_that_dies_leaves_its_turn(quick: Shop) -> None:
    """The next waiter asks when the one that was asking, or was to ask, is gone."""
    looks: list[int] = []
    asking, die = threading.Event(), threading.Event()

    def look(_scope: Any) -> None:
        looks.append(1)
        if len(looks) == 1:
            asking.set()
            assert die.wait(TIMEOUT)
            raise KeyboardInterrupt

    waiters = Waiters(look)

    def wait() -> Any:
        deadline = time.monotonic() + TIMEOUT
        return waiters.wait(quick.scope(), deadline=deadline, retry_failed=False)

    with ThreadPoolExecutor(max_workers=2) as both:
        first = both.submit(wait)
        assert asking.wait(TIMEOUT)
        second = both.submit(wait)
        die.set()
        with pytest.raises(KeyboardInterrupt):
            first.result(TIMEOUT)
        assert second.result(TIMEOUT) is None
    assert waiters._watches == {}


def test_waiter_at_its_deadline_takes_its_turn(quick: Shop) -> None:
    """The turn that comes just when a waiter gives up is not lost to the others."""
    record = object()
    asking, hold = threading.Event(), threading.Event()

    def look(_scope: Any) -> Any:
        asking.set()
        assert hold.wait(TIMEOUT)
        return None

    waiters = Waiters(look)

    def wait(seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        try:
            return waiters.wait(quick.scope(), deadline=deadline, retry_failed=False)
        except TimeoutError:
            return record

    with ThreadPoolExecutor(max_workers=3) as both:
        first = both.submit(wait, TIMEOUT)
        assert asking.wait(TIMEOUT)
        late, last = both.submit(wait, 0.01), both.submit(wait, TIMEOUT)
        assert late.result(TIMEOUT) is record
        hold.set()
        assert first.result(TIMEOUT) is None
        assert last.result(TIMEOUT) is None


def test_waiter_that_would_retry_is_not_given_the_failure(
    shop: Shop, pool: ThreadPoolExecutor
) -> None:
    """Each waiter's own ``retry_failed`` counts, whoever asks for all of them."""
    started, let_go = threading.Event(), threading.Event()

    def broken() -> None:
        started.set()
        assert let_go.wait(TIMEOUT)
        message = "broken"
        raise RuntimeError(message)

    def call(handler: Any, *, retry_failed: bool) -> Any:
        with shop.app.app_context():
            return shop.idempotency.guard.run(
                shop.scope(),
                fingerprint(1),
                handler,
                wait=TIMEOUT,
                retry_failed=retry_failed,
            )

    first = pool.submit(call, broken, retry_failed=False)
    assert started.wait(TIMEOUT)
    with until_asked(2):
        plain = pool.submit(call, dict, retry_failed=False)
        again = pool.submit(call, dict, retry_failed=True)
    let_go.set()
    assert isinstance(first.exception(TIMEOUT), RuntimeError)
    assert again.result(TIMEOUT).value == {}
    error = plain.exception(TIMEOUT)
    assert error is None or isinstance(error, IdempotencyPreviousFailure)
