"""Unknown outcomes: recovered by a call of their own, or settled by an operator."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import insert, select

from flask_idempotency import (
    Failure,
    Fingerprint,
    Resolution,
    StoredResponse,
    fingerprint,
)
from flask_idempotency.config import Config
from flask_idempotency.exceptions import IdempotencyOutcomeUnknown
from flask_idempotency.request_hash import request_hash
from tests.shop import elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable

    from flask_idempotency import RecordView
    from tests.shop import Shop

TIMEOUT = 30


def vanish(shop: Shop) -> None:
    """Leave what a process leaves that committed its account and died."""
    sent = {"method": "POST", "json": {"name": "first"}}
    with shop.app.test_request_context("/accounts", **sent):
        hashed = request_hash("POST /accounts", Config(), Fingerprint())
    with shop.app.app_context():
        store = shop.idempotency.store
        claim = store.claim(shop.scope(), hashed).claim
        assert claim is not None
        with shop.db.engine.begin() as connection:
            connection.execute(insert(shop.Account).values(name="first"))
            assert store.mark_effects(claim, connection)
    shop.runs.append("first")
    shop.lapse()


def find(shop: Shop) -> Callable[[RecordView], Any]:
    """Return a ``recover=`` that looks the account up."""

    def recover(_record: RecordView) -> Any:
        shop.runs.append("recovered")
        name = shop.db.session.scalar(select(shop.Account.name))
        return ({"name": name}, 201) if name else None

    return recover


def test_recovered_answer_is_given_and_kept(shop: Shop) -> None:
    """The view never runs again; ``recover=`` finds its answer, once."""
    shop.creating_view(recover=find(shop))
    vanish(shop)
    answers = [shop.post() for _ in range(3)]
    assert [(a.status_code, a.json) for a in answers] == [(201, {"name": "first"})] * 3
    assert "Idempotent-Replayed" in answers[1].headers
    assert (shop.runs, shop.accounts()) == (["first", "recovered"], ["first"])
    assert shop.status() == "succeeded"


def test_ten_duplicates_recover_once(shop: Shop) -> None:
    """The recovery has a claim of its own; the others wait or are told to."""
    entered, let_go = threading.Event(), threading.Event()
    found = find(shop)

    def recover(record: RecordView) -> Any:
        entered.set()
        assert let_go.wait(TIMEOUT)
        return found(record)

    shop.creating_view(recover=recover)
    vanish(shop)
    with ThreadPoolExecutor(max_workers=10) as pool:
        first = pool.submit(shop.post)
        assert entered.wait(TIMEOUT)
        others = [pool.submit(shop.post) for _ in range(9)]
        codes = {other.result(TIMEOUT).status_code for other in others}
        let_go.set()
        assert first.result(TIMEOUT).status_code == 201
    assert codes == {409}
    assert shop.runs.count("recovered") == 1


@pytest.mark.parametrize("raises", [True, False], ids=["raises", "None"])
def test_recovery_that_finds_nothing_leaves_it_open(
    shop: Shop, *, raises: bool
) -> None:
    """The outcome stays unknown, at once: the next request tries again."""
    tries: list[int] = []

    def recover(_record: RecordView) -> Any:
        tries.append(1)
        if raises:
            message = "provider is down"
            raise RuntimeError(message)

    shop.creating_view(recover=recover)
    vanish(shop)
    codes = [shop.post().status_code for _ in range(2)]
    assert codes == ([500, 500] if raises else [409, 409])
    assert (len(tries), shop.runs) == (2, ["first"])
    record = shop.record()
    assert record is not None
    assert (record.status.value, record.lapsed) == ("processing", True)


def test_other_request_is_a_conflict_and_recovers_nothing(shop: Shop) -> None:
    """A recovery belongs to the request whose key it is."""
    shop.creating_view(recover=find(shop))
    vanish(shop)
    assert shop.post("other").status_code == 422
    shop.outlive()
    assert shop.post("other").status_code == 409
    assert shop.runs == ["first"]


def test_recovery_that_dies_can_be_tried_again(shop: Shop) -> None:
    """A crash during the recovery is one more unknown outcome."""
    shop.creating_view(recover=find(shop))
    vanish(shop)
    record = shop.record()
    assert record is not None
    with shop.app.app_context():
        store = shop.idempotency.store
        assert store.claim_recovery(shop.scope(), record.request_hash) is not None
        assert store.claim_recovery(shop.scope(), record.request_hash) is None
    assert shop.post().status_code == 409
    shop.lapse()
    assert shop.post().status_code == 201


def test_service_recovers_too(shop: Shop) -> None:
    """``run(recover=…)`` returns what the handler would have returned."""
    shop.creating_view()
    vanish(shop)
    record = shop.record()
    assert record is not None
    with shop.app.app_context():
        guard = shop.idempotency.guard
        with pytest.raises(IdempotencyOutcomeUnknown):
            guard.run(shop.scope(), record.request_hash, dict)
        results = [
            guard.run(
                shop.scope(), record.request_hash, dict, recover=lambda _r: {"id": 7}
            )
            for _ in range(2)
        ]
    assert [(r.value, r.replayed) for r in results] == [
        ({"id": 7}, False),
        ({"id": 7}, True),
    ]


@pytest.mark.parametrize(
    ("ending", "status", "runs"),
    [
        (StoredResponse(code=202, body=b"settled"), 202, 1),
        (Failure(reason="resolved as failed"), 500, 1),
        (None, 201, 2),
    ],
    ids=["succeeded", "failed", "released"],
)
def test_resolution_is_what_duplicates_get(
    shop: Shop, ending: StoredResponse | Failure | None, status: int, runs: int
) -> None:
    """An operator's word settles it, also long after the key's life."""
    shop.creating_view(retry_failed=True)
    vanish(shop)
    shop.outlive()
    with shop.app.app_context():
        shop.db.session.query(shop.Account).delete()
        shop.db.session.commit()
        resolution = Resolution(
            ending=ending, by="operator", reason="seen in the books"
        )
        record = shop.idempotency.store.resolve(shop.scope(), resolution)
    assert record is not None
    assert (record.resolved_by, record.resolved_reason) == (
        "operator",
        "seen in the books",
    )
    assert [shop.post().status_code for _ in range(2)] == [status, status]
    assert len(shop.runs) == runs


def test_resolution_wins_over_a_waking_owner(shop: Shop) -> None:
    """A call that still runs, and is settled by force, commits nothing."""
    resolution = Resolution(
        ending=StoredResponse(code=200, body=b"settled"), by="operator", reason="hung"
    )

    def resolve() -> None:
        with shop.app.app_context():
            store = shop.idempotency.store
            assert store.resolve(shop.scope(), resolution) is None
            assert store.resolve(shop.scope(), resolution, force=True) is not None

    def view() -> str:
        elsewhere(resolve)
        shop.add()
        return "late"

    shop.view(view)
    assert shop.post().data == b"settled"
    assert shop.accounts() == []


def test_known_outcome_is_not_resolved(shop: Shop) -> None:
    """What has ended, or never was, is not settled by anybody."""
    shop.creating_view()
    shop.post()
    resolution = Resolution(ending=None, by="operator", reason="why not")
    with shop.app.app_context():
        store = shop.idempotency.store
        for force in (False, True):
            assert store.resolve(shop.scope(), resolution, force=force) is None
            assert store.resolve(shop.scope("no"), resolution, force=force) is None
    assert shop.status() == "succeeded"


@pytest.mark.parametrize(
    ("by", "reason"),
    [("", "why"), ("me", " "), ("m" * 256, "why"), ("me", "w" * 1001), ("a\0", "b")],
)
def test_resolution_says_who_and_why(by: str, reason: str) -> None:
    """Nobody settles anything for no reason."""
    with pytest.raises(ValueError, match=r"by|reason"):
        Resolution(ending=None, by=by, reason=reason)


def test_fingerprint_of_a_service_matters(shop: Shop) -> None:
    """A recovery of another request is refused as any other."""
    shop.creating_view()
    vanish(shop)
    with (
        shop.app.app_context(),
        pytest.raises(Exception, match="different request"),
    ):
        shop.idempotency.guard.run(
            shop.scope(), fingerprint("other"), dict, recover=lambda _r: {}
        )
