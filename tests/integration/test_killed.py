"""The server ends a connection, at each point of a call."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from flask_idempotency import failpoints
from tests.proxy import reconnect
from tests.shop import elsewhere, is_replay, unavailable

from .test_keeper import is_renewed, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection

    from tests.backends import Backends
    from tests.proxy import Proxy
    from tests.shop import Shop

pytestmark = pytest.mark.parametrize(
    "database", ["postgresql", "mariadb"], indirect=True
)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Give threads for requests that the test watches."""
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Do something when a call reaches a place for the first time."""

    def set_once(place: str, action: Callable[[], object]) -> None:
        def once() -> None:
            failpoints._set.pop(place)
            action()

        monkeypatch.setitem(failpoints._set, place, once)

    return set_once


class Views:
    """Views that meet the end of all connections in different places."""

    def __init__(self, shop: Shop, kill: Callable[[], None]) -> None:
        self._shop, self._kill = shop, kill

    @property
    def _first(self) -> bool:
        return len(self._shop.runs) == 1

    def plain(self) -> Any:
        """Leave the commit to the guard."""
        return self._shop.create()

    def killed_before_its_rows(self) -> Any:
        """Lose the connection with which it has only read."""
        self._shop.db.session.query(self._shop.Account).all()
        if not self._shop.runs:
            self._shop.runs.append("read")
            self._kill()
        return self._shop.create()

    def killed_after_its_flush(self) -> Any:
        """Lose the connection that has the account."""
        answer = self._shop.create()
        if self._first:
            self._kill()
        return answer

    def killed_after_its_commit(self) -> Any:
        """Lose everything after a commit of its own, and do nothing more."""
        answer = self._shop.create()
        self._shop.db.session.commit()
        if self._first:
            self._kill()
        return answer

    def committing(self) -> Any:
        """Commit by itself."""
        answer = self._shop.create()
        self._shop.db.session.commit()
        return answer

    def refusing(self) -> Any:
        """Answer an error, so that the account is rolled back."""
        self._shop.add()
        return "no", 404

    def freeing(self) -> Any:
        """Answer an error that frees the key."""
        self._shop.add()
        return "not now", 429

    def broken(self) -> Any:
        """Raise, so that the account is rolled back."""
        self._shop.add()
        message = "broken"
        raise RuntimeError(message)


@dataclass(frozen=True)
class Loss:
    """
    Where all connections end, and what is right then.

    Attributes:
        view: Name of the view that runs.
        place: Where it happens; None if the view does it.
        answer: Status that the client gets.
        status: Of the record; None where there is none.
        stays: Whether the account is there.
        again: Status of the next request, on a route that retries failures.
    """

    view: str
    place: str | None
    answer: int
    status: str | None
    stays: bool
    again: int

    def __str__(self) -> str:
        """Name it in a test's id."""
        return f"{self.view}-{self.place or 'in_view'}"


LOSSES = [
    Loss("plain", "before_claim", 201, "succeeded", stays=True, again=201),
    Loss("plain", "after_claim", 201, "succeeded", stays=True, again=201),
    Loss("killed_before_its_rows", None, 500, "failed", stays=False, again=201),
    Loss("killed_after_its_flush", None, 500, "failed", stays=False, again=201),
    Loss("killed_after_its_commit", None, 201, "succeeded", stays=True, again=201),
    Loss("plain", "after_view", 500, "failed", stays=False, again=201),
    Loss("plain", "before_commit", 500, "failed", stays=False, again=201),
    Loss("plain", "after_commit", 201, "succeeded", stays=True, again=201),
    Loss("committing", "before_outcome", 201, "succeeded", stays=True, again=201),
    Loss("refusing", "before_outcome", 404, "succeeded", stays=False, again=404),
    Loss("freeing", "before_outcome", 429, None, stays=False, again=429),
    Loss("broken", "before_outcome", 500, "failed", stays=False, again=500),
]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_all_connections_end(
    shop: Shop, backends: Backends, at: Callable[..., None], loss: Loss
) -> None:
    """The answer says what became of the account, and the next request works."""

    def end_all() -> None:
        backends.kill_all()
        # Idle ones of the application are its own to replace ("pool_pre_ping").
        reconnect(shop)

    shop.view(getattr(Views(shop, end_all), loss.view), retry_failed=True)
    if loss.place:
        at(loss.place, end_all)
    assert shop.post().status_code == loss.answer
    assert shop.status() == loss.status
    assert shop.accounts() == (["first"] if loss.stays else [])
    assert [shop.post().status_code for _ in range(2)] == [loss.again] * 2
    there = loss.stays or loss.again == 201
    assert shop.accounts() == (["first"] if there else [])


@pytest.mark.parametrize("times", [1, 2])
def test_waiting_claim_is_killed(
    shop: Shop, backends: Backends, pool: ThreadPoolExecutor, times: int
) -> None:
    """A claim whose connection ends while it waits for a lock is sent again."""
    shop.creating_view()
    with backends.locked("idempotency_record") as unlock:
        answer = pool.submit(shop.post)
        for _ in range(times):
            backends.kill(backends.waiting())
        backends.waiting()
        unlock()
        assert answer.result().status_code == 201
    record = shop.record()
    assert record is not None
    assert (record.attempts, shop.runs, shop.accounts()) == (1, ["first"], ["first"])


def test_claim_that_is_always_killed_is_503(
    shop: Shop, backends: Backends, pool: ThreadPoolExecutor
) -> None:
    """After some tries the request is refused, without a run, and may come back."""
    shop.creating_view()
    with backends.locked("idempotency_record"):
        answer = pool.submit(shop.post)
        for _ in range(5):
            backends.kill(backends.waiting())
        unavailable(answer.result())
    assert (shop.runs, shop.status()) == ([], None)
    assert [shop.post().status_code for _ in range(2)] == [201, 201]
    assert shop.accounts() == ["first"]


@pytest.mark.parametrize(
    ("view", "status", "again"),
    [("refusing", 404, True), ("broken", 500, True), ("freeing", 429, False)],
)
def test_outcome_is_killed_while_it_waits(
    shop: Shop,
    backends: Backends,
    pool: ThreadPoolExecutor,
    at: Callable[..., None],
    view: str,
    status: int,
    *,
    again: bool,
) -> None:
    """An outcome that is written on its own is written again on a new connection."""
    shop.view(getattr(Views(shop, backends.kill_all), view))
    lock = backends.locked("idempotency_record")
    at("before_outcome", lambda: unlocks.append(lock.__enter__()))
    unlocks: list[Callable[[], None]] = []
    answer = pool.submit(shop.post)
    backends.kill(backends.waiting())
    backends.waiting()
    unlocks[0]()
    lock.__exit__(None, None, None)
    assert answer.result().status_code == status
    second = shop.post()
    assert (second.status_code, is_replay(second)) == (status, again)
    assert shop.accounts() == []


def test_renewal_is_killed_while_it_waits(shop: Shop, backends: Backends) -> None:
    """The lease of a call is renewed on a new connection, and its key stays its own."""

    def view() -> Any:
        with backends.locked("idempotency_lease") as unlock:
            backends.kill(backends.waiting())
            backends.waiting()
            unlock()
        until(lambda: is_renewed(shop))
        assert elsewhere(shop.post).status_code == 409
        return shop.create()

    shop.view(view, lease=1)
    assert [shop.post().status_code for _ in range(2)] == [201, 201]
    assert (shop.accounts(), shop.runs) == (["first"], ["first"])


def test_rollback_of_a_lost_connection_outside_of_calls(
    shop: Shop, backends: Backends
) -> None:
    """Where no guarded call runs, a lost connection is what it always was."""
    with shop.app.app_context():
        session = shop.db.session
        backends.kill(backends.number_of(session))
        with pytest.raises(OperationalError):
            session.execute(text("SELECT 1"))
        session.rollback()
        assert session.execute(text("SELECT 1")).scalar() == 1


def test_flush_on_a_lost_connection_raises_what_the_driver_says(
    shop: Shop, backends: Backends
) -> None:
    """A failed flush is seen as such, by the application and in the record."""

    def view() -> Any:
        backends.kill(backends.number_of(shop.db.session))
        return shop.create()

    shop.view(view)
    shop.app.testing = True
    with pytest.raises(OperationalError):
        shop.post()
    record = shop.record()
    assert record is not None
    assert record.failure == "sqlalchemy.exc.OperationalError"


GATE = """
    CREATE FUNCTION pass_gate() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NULL; END $$
"""


@pytest.fixture
def gate(shop: Shop, backends: Backends) -> Iterator[Connection]:
    """Let each COMMIT of an account wait until the gate is opened."""
    if shop.database.name != "postgresql":
        pytest.skip("a COMMIT can be held up by a deferred trigger alone")
    backends.execute(
        GATE,
        "CREATE CONSTRAINT TRIGGER gate AFTER INSERT ON account "
        "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION pass_gate()",
    )
    keeper = backends.connect()
    keeper.execute(text("SELECT pg_advisory_lock(1)"))
    yield keeper
    keeper.close()


def test_commit_is_killed(
    shop: Shop, backends: Backends, pool: ThreadPoolExecutor, gate: Connection
) -> None:
    """A transaction that the server ends during COMMIT is a failure without rows."""
    shop.creating_view(retry_failed=True)
    answer = pool.submit(shop.post)
    backends.kill(backends.waiting())
    assert answer.result().status_code == 500
    assert (shop.status(), shop.accounts()) == ("failed", [])
    gate.close()
    assert [shop.post().status_code for _ in range(2)] == [201, 201]
    assert shop.accounts() == ["first"]


def test_commit_that_goes_on_without_its_client(
    make_far_shop: Callable[..., Shop],
    shop: Shop,
    proxy: Proxy,
    backends: Backends,
    pool: ThreadPoolExecutor,
    gate: Connection,
) -> None:
    """While the server still commits nothing is known: 503, and then the answer."""
    far = make_far_shop()
    far.creating_view()
    shop.creating_view()
    answer = pool.submit(far.post)
    backends.waiting()
    proxy.cut()
    unavailable(answer.result())
    assert (shop.status(), shop.post().status_code) == ("processing", 409)
    gate.close()
    until(lambda: shop.status() == "succeeded")
    second = shop.post()
    assert (second.status_code, is_replay(second)) == (201, True)
    assert (shop.accounts(), shop.runs) == (["first"], [])


def test_commit_that_the_server_heard(far_shop: Shop, proxy: Proxy) -> None:
    """Its answer is lost on the way, and the record has it: once, and at once."""
    far_shop.post("warm", key="warm")
    proxy.break_at(b"COMMIT", delivered=True, noticed=False)
    answers = [far_shop.post() for _ in range(2)]
    assert [(a.status_code, is_replay(a)) for a in answers] == [
        (201, False),
        (201, True),
    ]
    assert far_shop.accounts() == ["warm", "first"]


def test_commit_that_the_server_never_heard(
    make_far_shop: Callable[..., Shop], proxy: Proxy
) -> None:
    """Once the server has noticed nothing is there: a failure, which may be retried."""
    shop = make_far_shop()
    shop.creating_view(retry_failed=True)
    shop.post("warm", key="warm")
    proxy.break_at(b"COMMIT", delivered=False, noticed=True)
    assert shop.post().status_code == 500
    assert (shop.status(), shop.accounts()) == ("failed", ["warm"])
    assert [shop.post().status_code for _ in range(2)] == [201, 201]
    assert shop.accounts() == ["warm", "first"]


def test_commit_that_is_on_its_way_for_ever(
    far_shop: Shop, proxy: Proxy, backends: Backends
) -> None:
    """While the server waits for it, nothing is known: 503, and later a take-over."""
    far_shop.post("warm", key="warm")
    proxy.break_at(b"COMMIT", delivered=False, noticed=False)
    unavailable(far_shop.post())
    assert (far_shop.status(), far_shop.post().status_code) == ("processing", 409)
    proxy.cut()
    backends.kill_all()
    reconnect(far_shop)
    far_shop.lapse()
    assert [far_shop.post().status_code for _ in range(2)] == [201, 201]
    assert far_shop.accounts() == ["warm", "first"]
