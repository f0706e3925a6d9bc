"""Observe mode: record and compare, never change an answer."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from flask_idempotency import current_idempotency, fingerprint, signals
from tests.shop import ROUTE, cut_off, elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.shop import Shop

TIMEOUT = 30


@pytest.fixture
def observing(make_shop: Callable[..., Shop]) -> Shop:
    """Give an application that only observes."""
    shop = make_shop(IDEMPOTENCY_MODE="observe")
    shop.view(lambda: run(shop))
    return shop


def run(shop: Shop) -> tuple[str, int]:
    """Run a view that says how often it has run."""
    shop.runs.append(1)
    return f"run {len(shop.runs)}", 201


@pytest.fixture
def would(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Collect what would have been answered; check that log and signals agree."""
    caplog.set_level(logging.INFO)
    seen: list[str] = []

    def replayed(_sender: Any, *, route: str, enforced: bool) -> None:
        assert (route, enforced) == (ROUTE, False)
        seen.append("replayed")

    def refused(_sender: Any, *, route: str, error_code: str, enforced: bool) -> None:
        assert (route, enforced) == (ROUTE, False)
        seen.append(error_code)

    with signals.replayed.connected_to(replayed), signals.refused.connected_to(refused):
        yield seen
    assert [
        r.message.partition(" The database")[0]
        for r in caplog.get_records("call")
        if "would have" in r.message
    ] == [
        f"Observed: a request of '{ROUTE}' would have "
        + ("been replayed." if what == "replayed" else f"got {what}.")
        for what in seen
    ]


def test_duplicate_runs_again_and_is_noted(observing: Shop, would: list[str]) -> None:
    """A duplicate gets the view's own answer; the log says it would be a replay."""
    answers = [observing.post() for _ in range(3)]
    assert [answer.data for answer in answers] == [b"run 1", b"run 2", b"run 3"]
    assert all("Idempotent-Replayed" not in answer.headers for answer in answers)
    assert would == ["replayed", "replayed"]


def test_first_answer_is_recorded(observing: Shop) -> None:
    """The record is that of the first request, so that ``enforce`` can follow."""
    observing.post()
    observing.post()
    record = observing.record()
    assert record is not None
    assert record.response is not None
    assert (record.status.value, record.response.body) == ("succeeded", b"run 1")


def test_conflict_is_noted(observing: Shop, would: list[str]) -> None:
    """Another request under the key runs, too."""
    observing.post()
    assert observing.post("other").status_code == 201
    assert would == ["IDEMPOTENCY_KEY_CONFLICT"]


def test_call_in_progress_is_noted(
    make_shop: Callable[..., Shop], would: list[str]
) -> None:
    """A duplicate beside a running call runs, too, at once."""
    shop = make_shop(IDEMPOTENCY_MODE="observe", IDEMPOTENCY_WAIT=TIMEOUT * 10)

    def view() -> tuple[str, int]:
        answer = run(shop)
        if answer[0] == "run 1":
            assert elsewhere(shop.post).data == b"run 2"
        return answer

    shop.view(view)
    assert shop.post().data == b"run 1"
    assert would == ["IDEMPOTENCY_IN_PROGRESS"]


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ({"key": None}, "IDEMPOTENCY_KEY_MISSING"),
        ({"key": '"'}, "IDEMPOTENCY_KEY_INVALID"),
        ({"user": ""}, "IDEMPOTENCY_CALLER_UNKNOWN"),
    ],
    ids=["missing", "malformed", "caller"],
)
def test_what_would_be_refused_runs(
    observing: Shop, would: list[str], sent: dict[str, Any], code: str
) -> None:
    """A request that enforcement would refuse gets the view's answer."""
    assert observing.post(**sent).data == b"run 1"
    assert would == [code]


def test_service_route_is_observed_too(
    make_quick: Callable[..., Shop], would: list[str]
) -> None:
    """With ``claim=False`` a missing key is noted, not refused."""
    quick = make_quick(IDEMPOTENCY_MODE="observe")
    quick.view(lambda: run(quick), claim=False)
    assert quick.post(key=None).status_code == 201
    assert would == ["IDEMPOTENCY_KEY_MISSING"]


def test_store_that_is_down_changes_nothing(observing: Shop, would: list[str]) -> None:
    """An outage of the store is noted; the view answers."""
    with cut_off(observing):
        assert observing.post().data == b"run 1"
    assert would == ["IDEMPOTENCY_STORE_UNAVAILABLE"]


def test_loader_that_raises_changes_nothing(
    quick: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """A mistake of the set-up is logged; the view answers."""

    def loader() -> str:
        message = "broken loader"
        raise RuntimeError(message)

    quick.view(lambda: run(quick), user_id=loader, mode="observe")
    assert quick.post().status_code == 201
    assert "broken loader" in caplog.text


def test_exception_is_recorded_and_goes_on(quick: Shop, would: list[str]) -> None:
    """A view that raises does so as if undecorated, each time."""

    def view() -> None:
        quick.runs.append(1)
        message = "broken"
        raise RuntimeError(message)

    quick.view(view, mode="observe")
    assert [quick.post().status_code for _ in range(2)] == [500, 500]
    assert (quick.runs, quick.status()) == ([1, 1], "failed")
    assert would == ["IDEMPOTENCY_PREVIOUS_FAILURE"]


def test_freed_key_is_observed(quick: Shop, would: list[str]) -> None:
    """An answer that says "nothing was done" leaves no record."""
    quick.view(lambda: ("later", 429), mode="observe")
    assert [quick.post().status_code for _ in range(2)] == [429, 429]
    assert (quick.status(), would) == (None, [])


def test_lapsed_lease_takes_nothing_away(shop: Shop) -> None:
    """A call that outlives its lease keeps its rows and its answer."""
    running, let_go = threading.Event(), threading.Event()

    def view() -> tuple[str, int]:
        answer = run(shop)
        shop.db.session.add(shop.Account(name=answer[0]))
        shop.db.session.flush()
        if answer[0] == "run 1":
            # SQLite has one writer at a time: let the other request in.
            shop.db.session.commit()
            running.set()
            assert let_go.wait(TIMEOUT)
        return answer

    shop.view(view, mode="observe")

    def late() -> None:
        assert running.wait(TIMEOUT)
        shop.lapse()
        assert shop.post().data == b"run 2"
        let_go.set()

    thread = threading.Thread(target=late)
    thread.start()
    assert shop.post().data == b"run 1"
    thread.join(TIMEOUT)
    assert shop.accounts() == ["run 1", "run 2"]


def test_rows_are_one_unit_of_work(shop: Shop) -> None:
    """Views without a commit keep their rows, as under enforcement."""
    shop.view(shop.create, mode="observe")
    shop.post("a")
    shop.post("b")
    assert shop.accounts() == ["a", "b"]


def test_observed_call_is_not_active(quick: Shop) -> None:
    """For the view there is no key, as if undecorated."""

    def view() -> dict[str, bool]:
        return {"active": current_idempotency.active}

    quick.view(view, mode="observe")
    assert quick.post().json == {"active": False}


def test_enforcement_answers_with_what_was_observed(
    make_shop: Callable[..., Shop],
) -> None:
    """After the switch the keys that were observed are replayed."""
    observing, enforcing = make_shop(IDEMPOTENCY_MODE="observe"), make_shop()
    for shop in (observing, enforcing):
        shop.view(lambda shop=shop: run(shop))
    observing.post()
    answer = enforcing.post()
    assert (answer.data, enforcing.runs) == (b"run 1", [])


def test_route_can_enforce_alone(make_quick: Callable[..., Shop]) -> None:
    """A route's own mode comes before the application's."""
    shop = make_quick(IDEMPOTENCY_MODE="observe")
    shop.view(lambda: run(shop), mode="enforce")
    assert [shop.post().data for _ in range(2)] == [b"run 1", b"run 1"]


def test_services_are_observed(
    make_quick: Callable[..., Shop], would: list[str]
) -> None:
    """Under the application's mode ``run()`` observes as well."""
    shop = make_quick(IDEMPOTENCY_MODE="observe")
    with shop.app.app_context():
        results = [
            shop.idempotency.guard.run(
                shop.scope(), fingerprint(1), lambda: run(shop)[0]
            )
            for _ in range(2)
        ]
    assert [result.value for result in results] == ["run 1", "run 2"]
    assert would == ["replayed"]


@pytest.mark.parametrize("ending", ["raise", "release"])
def test_committed_part_is_noted(shop: Shop, ending: str) -> None:
    """What an observed call has committed is known when it is enforced later."""

    def view() -> Any:
        shop.add()
        shop.db.session.commit()
        if ending == "raise":
            message = "broken"
            raise RuntimeError(message)
        return "later", 429

    shop.view(view, mode="observe")
    shop.post()
    record = shop.record()
    assert record is not None
    assert record.effects_committed_at is not None
    assert record.status.value == ("failed" if ending == "raise" else "succeeded")


def test_inner_call_is_not_recorded_before_the_outer_one_ends(
    make_shop: Callable[..., Shop],
) -> None:
    """A service whose rows the observed view rolls back leaves no success behind."""
    shop = make_shop(IDEMPOTENCY_MODE="observe")

    def view() -> None:
        scope = shop.scope(route="accounts.create")
        shop.idempotency.guard.run(scope, fingerprint(1), shop.add)
        message = "broken"
        raise RuntimeError(message)

    shop.view(view)
    begun = time.monotonic()
    assert shop.post().status_code == 500
    assert time.monotonic() - begun < 4  # nothing has waited for the session's lock
    assert shop.record(route="accounts.create") is None
    assert (shop.accounts(), shop.status()) == ([], "failed")


def test_writes_before_the_view_are_said_to_be_in_the_way(
    make_quick: Callable[..., Shop], caplog: pytest.LogCaptureFixture
) -> None:
    """What enforcement would refuse is logged, and nothing waits for a lock."""
    shop = make_quick(IDEMPOTENCY_MODE="observe")

    @shop.app.before_request
    def write() -> None:
        shop.db.session.add(shop.Account(name="early"))
        shop.db.session.flush()

    shop.view(lambda: run(shop))
    assert shop.post().data == b"run 1"
    assert "IDEMPOTENCY_BEFORE_VIEW_WRITES" in caplog.text
    assert shop.accounts() == ["early"]


def test_service_gets_no_scope_where_it_would_be_refused(
    make_quick: Callable[..., Shop], would: list[str]
) -> None:
    """In a service's route a request without key or caller runs unrecorded."""
    shop = make_quick(IDEMPOTENCY_MODE="observe")
    scopes: list[Any] = []

    def view() -> str:
        scopes.append(shop.idempotency.scope("accounts.create"))
        return "done"

    shop.view(view, claim=False)
    assert shop.post(key=None).status_code == 200
    assert shop.post(user="").status_code == 200
    assert scopes == [None, None]
    assert set(would) == {"IDEMPOTENCY_KEY_MISSING", "IDEMPOTENCY_CALLER_UNKNOWN"}


def test_release_that_raises_leaves_no_call_in_progress(quick: Shop) -> None:
    """A mistake in ``release_on`` is logged; the record says that the call ended."""

    def release_on(_response: Any) -> bool:
        message = "broken"
        raise RuntimeError(message)

    quick.view(lambda: ("no", 404), release_on=release_on, mode="observe")
    assert quick.post().status_code == 404
    assert quick.status() == "failed"


def test_answer_that_was_not_kept_is_noted_as_such(
    quick: Shop, would: list[str]
) -> None:
    """What a duplicate could not have is no replay."""
    quick.view(lambda: run(quick), store_body=False, mode="observe")
    quick.post()
    quick.post()
    assert would == ["IDEMPOTENCY_RESPONSE_UNAVAILABLE"]


@pytest.mark.parametrize("mode", ["observe", "enforce"])
def test_receiver_that_fails_fails_nothing(quick: Shop, mode: Any) -> None:
    """Whoever counts may not change what is counted."""

    def receiver(_sender: Any, **_payload: Any) -> None:
        message = "broken receiver"
        raise RuntimeError(message)

    quick.view(lambda: run(quick), mode=mode)
    with (
        signals.claimed.connected_to(receiver),
        signals.replayed.connected_to(receiver),
        signals.refused.connected_to(receiver),
    ):
        assert [quick.post().status_code for _ in range(2)] == [201, 201]
        assert quick.status() == "succeeded"
        quick.post("other")


def test_odd_status_is_an_answer_like_any_other(quick: Shop) -> None:
    """A status that HTTP does not know is answered as undecorated, and replayed."""
    quick.view(lambda: ("odd", 999))
    assert [quick.post().status_code for _ in range(2)] == [999, 999]
