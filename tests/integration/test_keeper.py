"""Leases of running calls are renewed, and only of those."""

from __future__ import annotations

import os
import threading
import time
import uuid
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text

from flask_idempotency import current_idempotency
from flask_idempotency.keeper import LeaseKeeper, keeper
from tests.shop import elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable

    from flask_idempotency import RecordView
    from tests.databases import Database
    from tests.proxy import Proxy
    from tests.shop import Shop

TIMEOUT = 30


def until(condition: Callable[[], object]) -> None:
    """Look again and again until something is so."""
    pause = threading.Event()
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.02)


def record_of(shop: Shop) -> RecordView:
    """Return the record of the running call, as another process sees it."""
    record = elsewhere(shop.record)
    assert record is not None
    return record


def is_renewed(shop: Shop) -> bool:
    """Tell whether the first lease is over, and the call's is not."""
    record = record_of(shop)
    assert record.locked_until is not None
    over = record.locked_until < datetime.now(timezone.utc)
    return over and not record.lapsed and record.lease_seconds_left > 0


def leases(shop: Shop) -> int:
    """Count the renewed leases."""
    with shop.app.app_context(), shop.db.engine.connect() as connection:
        query = text("SELECT count(*) FROM idempotency_lease")
        return int(connection.execute(query).scalar_one())


@pytest.mark.parametrize("level", [None, "REPEATABLE READ", "SERIALIZABLE"])
def test_slow_call_keeps_its_key(
    make_shop: Callable[..., Shop], database: Database, level: str | None
) -> None:
    """A call that outlives its lease is in progress, and commits, at any level."""
    if level == "REPEATABLE READ" and database.name == "sqlite":
        pytest.skip("SQLite has no such level")
    options = {"isolation_level": level} if level else {}
    shop = make_shop(SQLALCHEMY_ENGINE_OPTIONS=options)

    def view() -> Any:
        until(lambda: is_renewed(shop))
        assert elsewhere(shop.post).status_code == 409
        return shop.create()

    shop.view(view, lease=1)
    assert shop.post().status_code == 201
    assert shop.post().headers["Idempotent-Replayed"] == "true"
    assert (shop.accounts(), shop.runs) == (["first"], ["first"])
    until(lambda: leases(shop) == 0)


def test_slow_call_with_an_open_snapshot_keeps_its_key(shop: Shop) -> None:
    """A renewal does not touch the record, which the call writes in the end."""

    def view() -> Any:
        shop.db.session.query(shop.Account).first()
        until(lambda: is_renewed(shop))
        return shop.create()

    shop.view(view, lease=1)
    assert shop.post().status_code == 201
    assert shop.accounts() == ["first"]


def test_call_that_hangs_is_not_renewed_for_ever(shop: Shop) -> None:
    """After its longest runtime a call lapses, and another one takes over."""

    def view() -> Any:
        shop.runs.append("run")
        if len(shop.runs) == 1:
            until(lambda: record_of(shop).lapsed)
            assert elsewhere(shop.post).data == b"second"
            shop.db.session.add(shop.Account(name="late"))
            return "late"
        return "second"

    shop.view(view, lease=1, max_runtime=1)
    answer = shop.post()
    assert (answer.data, answer.headers["Idempotent-Replayed"]) == (b"second", "true")
    assert shop.accounts() == []


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.usefixtures("impatient")
def test_short_outage_is_survived(
    make_far_shop: Callable[..., Shop], proxy: Proxy, shop: Shop
) -> None:
    """A renewal that fails is tried again, before the lease is over."""
    far = make_far_shop()

    def view() -> Any:
        until(lambda: leases(shop) == 1)
        proxy.freeze()
        threading.Event().wait(1)  # the outage itself: longer than two renewals
        proxy.thaw()
        until(lambda: is_renewed(shop))
        return "made", 201

    far.view(view, lease=3)
    assert far.post().status_code == 201


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("in_thread", [False, True], ids=["view", "thread"])
def test_forked_child_leaves_the_call_to_its_parent(
    shop: Shop, *, in_thread: bool
) -> None:
    """A child has no running call, renews nothing, and its parent goes on."""

    def child() -> int:
        try:
            _ = current_idempotency.active
        except RuntimeError:
            return 0 if not keeper._calls and keeper._thread is None else 2
        return 1

    def fork() -> int:
        pid = os.fork()
        if pid == 0:
            code = 3
            try:
                code = child()
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def view() -> Any:
        until(lambda: is_renewed(shop))
        code = elsewhere(lambda: _in_context(shop, fork)) if in_thread else fork()
        assert code == 0
        return shop.create()

    shop.view(view, lease=1)
    assert shop.post().status_code == 201
    assert shop.accounts() == ["first"]


def _in_context(shop: Shop, function: Callable[[], int]) -> int:
    with shop.app.app_context():
        return function()


def test_stopped_keeper_leaves_no_lease_behind(shop: Shop) -> None:
    """What a process does at its end: the leases of ended calls go, then the thread."""

    def view() -> Any:
        until(lambda: is_renewed(shop))
        return shop.create()

    shop.view(view, lease=1)
    assert shop.post().status_code == 201
    keeper.stop()
    assert leases(shop) == 0
    assert keeper._thread is None


def test_leases_of_dead_processes_are_purged(shop: Shop) -> None:
    """What a killed process leaves is removed with the next purge."""
    with shop.app.app_context():
        store = shop.idempotency.store
        store.renew({uuid.uuid4(): -7200.0, uuid.uuid4(): 60.0})
        assert leases(shop) == 2
        assert store.purge_leases() == 1
    assert leases(shop) == 1


def test_slow_calls_do_not_stop_new_ones(shop: Shop) -> None:
    """Whatever leases there are, another key is claimed and looked at as ever."""
    shop.creating_view()
    with shop.app.app_context():
        store = shop.idempotency.store
        claims = [store.claim(shop.scope(key), "hash").claim for key in ("a", "b")]
        store.renew({claim.owner_token: 60.0 for claim in claims if claim})
    assert leases(shop) == 2
    assert [shop.post().status_code for _ in range(2)] == [201, 201]


class Renewals:
    """What a keeper asks of its store."""

    def __init__(self) -> None:
        self.asked: list[set[uuid.UUID]] = []
        self.stuck: uuid.UUID | None = None

    def renew(self, leases: dict[uuid.UUID, float]) -> None:
        """Fail if one of the leases is stuck."""
        if self.stuck in leases:
            message = "locked"
            raise RuntimeError(message)
        self.asked.append(set(leases))

    def forget_leases(self, tokens: list[uuid.UUID]) -> None:
        """Note what has ended."""


def test_lease_that_is_stuck_does_not_stop_the_others() -> None:
    """When the renewal of all fails, each is tried by itself."""
    renewals, stuck, free = Renewals(), uuid.uuid4(), uuid.uuid4()
    renewals.stuck = stuck
    own = LeaseKeeper()
    options = {"lease_seconds": 0.3, "max_runtime_seconds": 60.0}
    with (
        own.keeping(renewals, stuck, **options),
        own.keeping(renewals, free, **options),
    ):
        until(lambda: len(renewals.asked) >= 2)
    assert renewals.asked[0] == {free}


def test_thread_ends_when_there_is_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An idle keeper leaves no thread behind, and starts one again when needed."""
    monkeypatch.setattr("flask_idempotency.keeper._IDLE_SECONDS", 0.05)
    renewals = Renewals()
    own = LeaseKeeper()
    for _ in range(2):
        token = uuid.uuid4()
        with own.keeping(renewals, token, lease_seconds=0.1, max_runtime_seconds=60.0):
            until(lambda token=token: {token} in renewals.asked)  # type: ignore[misc]
        until(lambda: own._thread is None)


def test_call_with_a_shorter_lease_is_renewed_in_time() -> None:
    """The thread looks as often as the shortest lease needs."""
    renewals, slow, quick = Renewals(), uuid.uuid4(), uuid.uuid4()
    own = LeaseKeeper()
    with (
        own.keeping(renewals, slow, lease_seconds=600.0, max_runtime_seconds=6000.0),
        own.keeping(renewals, quick, lease_seconds=0.2, max_runtime_seconds=60.0),
    ):
        until(lambda: {quick} in renewals.asked)
    assert all(slow not in asked for asked in renewals.asked)


def test_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process has no thread left the call runs, and the next one tries again."""
    renewals, own = Renewals(), LeaseKeeper()
    options = {"lease_seconds": 0.1, "max_runtime_seconds": 60.0}

    def start(_thread: threading.Thread) -> None:
        message = "can't start new thread"
        raise RuntimeError(message)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with own.keeping(renewals, uuid.uuid4(), **options):
            pass
    token = uuid.uuid4()
    with own.keeping(renewals, token, **options):
        until(lambda: {token} in renewals.asked)
