"""The decision table, row by row, on real rows of every database."""

from __future__ import annotations

import itertools
import uuid
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import insert

from flask_idempotency.lifecycle import (
    Failure,
    Resolution,
    Status,
    StoredResponse,
    Verdict,
)
from flask_idempotency.rules import Facts, decide, facts_of

if TYPE_CHECKING:
    from tests.shop import Shop

HASH, OTHER = "v1:same", "v1:other"
NOW = datetime.now(timezone.utc)
PAST, FUTURE = NOW - timedelta(hours=1), NOW + timedelta(hours=1)
FLAGS = list(itertools.product([False, True], repeat=5))


def store_record(shop: Shop, key: str, facts: Facts) -> uuid.UUID:
    """Write a record with the given facts, as if it had come about."""
    table = shop.idempotency.Record.__table__
    keep = shop.idempotency.store.dialect.bind_text
    row_id = uuid.uuid4()
    processing = facts.status is Status.PROCESSING
    values = {
        "id": row_id,
        "operation_id": row_id,
        "tenant_id": keep(""),
        "user_id": keep("u1"),
        "route": keep("POST /accounts"),
        "idempotency_key": keep(key),
        "request_hash": keep(HASH if facts.same else OTHER),
        "status": facts.status.value,
        "owner_token": row_id if processing else None,
        "version": 1,
        "attempts": 3,
        "task_id": keep("task"),
        "locked_until": (PAST if facts.lapsed else FUTURE) if processing else None,
        "expires_at": PAST if facts.gone else FUTURE,
        "effects_committed_at": PAST if committed(facts) else None,
        "open_step": keep("charge") if facts.open_step else None,
        "created_at": PAST,
    }
    if shop.database.name != "postgresql":
        values = {k: _naive(v) for k, v in values.items()}
    with shop.db.engine.begin() as connection:
        connection.execute(insert(table).values(**values))
    return row_id


def committed(facts: Facts) -> bool:
    """Tell whether a record's effects are more than those of its open step."""
    return facts.effects and not facts.open_step


def _naive(value: Any) -> Any:
    return value.replace(tzinfo=None) if isinstance(value, datetime) else value


def all_facts(status: Status) -> list[Facts]:
    """Return every combination that a record of a status can have."""
    return [
        Facts(
            status=status,
            lapsed=lapsed,
            effects=effects,
            open_step=open_step,
            gone=gone,
            same=same,
        )
        for lapsed, effects, open_step, gone, same in FLAGS
        if (status is Status.PROCESSING or not lapsed) and effects >= open_step
    ]


@pytest.mark.parametrize("status", Status)
@pytest.mark.parametrize("retry_failed", [False, True])
def test_claim_follows_the_table(
    shop: Shop, status: Status, *, retry_failed: bool
) -> None:
    """Each record is taken, or stands in the way, exactly as the table says."""
    with shop.app.app_context():
        for number, facts in enumerate(all_facts(status)):
            key = f"k{number}"
            before = store_record(shop, key, facts)
            store = shop.idempotency.store
            assert store.diagnose(shop.scope(key), HASH).diagnosis is decide(facts)
            decision = store.claim(shop.scope(key), HASH, retry_failed=retry_failed)
            check(decision, facts, before, retry_failed=retry_failed)


def check(
    decision: Any, facts: Facts, before: uuid.UUID, *, retry_failed: bool
) -> None:
    """Compare a decision with what the facts ask for."""
    verdict = decide(facts)
    retried = (
        retry_failed
        and verdict is Verdict.FAILED_RETRY_REQUIRES_OPT_IN
        and not facts.effects
    )
    if verdict is Verdict.EXPIRED_REUSABLE:
        assert decision.outcome is Verdict.CLAIMED, facts
        assert decision.claim.operation_id != before
        assert (decision.claim.attempt, decision.claim.task_id) == (1, None)
    elif verdict is Verdict.LEASE_LAPSED or retried:
        assert decision.outcome is Verdict.CLAIMED, facts
        assert decision.claim.operation_id == before
        assert (decision.claim.attempt, decision.claim.task_id) == (4, "task")
    else:
        assert decision.outcome is verdict, facts
        assert decision.claim is None


@pytest.mark.parametrize("status", Status)
def test_expire_marks_what_is_over_and_nothing_else(shop: Shop, status: Status) -> None:
    """Only finished or lapsed records without a doubt are marked."""
    with shop.app.app_context():
        facts = dict(enumerate(all_facts(status)))
        for number, fact in facts.items():
            store_record(shop, f"k{number}", fact)
        due = {
            f"k{number}"
            for number, fact in facts.items()
            if decide(fact) is Verdict.EXPIRED_REUSABLE and status is not Status.EXPIRED
        }
        store = shop.idempotency.store
        assert store.count_expirable() == len(due)
        assert store.expire(limit=100) == len(due)
        for number in facts:
            record = store.look(shop.scope(f"k{number}"))
            assert record is not None
            expected = Status.EXPIRED if f"k{number}" in due else status
            assert record.status is expected
            assert record.status is Status.PROCESSING or record.locked_until is None


@pytest.mark.parametrize("move", ["mark_succeeded", "mark_failed", "release"])
@pytest.mark.parametrize("status", Status)
def test_only_the_owner_moves_a_record(shop: Shop, move: str, status: Status) -> None:
    """A call whose token is not on a processing record changes nothing."""
    with shop.app.app_context():
        store = shop.idempotency.store
        claim = store.claim(shop.scope(), HASH).claim
        assert claim is not None
        late = claim
        with shop.db.engine.begin() as connection:
            connection.execute(shop.idempotency.Record.__table__.delete())
        store_record(shop, "k", all_facts(status)[0])
        arguments: dict[str, list[Any]] = {
            "mark_succeeded": [StoredResponse(code=200)],
            "mark_failed": [Failure(reason="late")],
            "release": [],
        }
        before = store.look(shop.scope())
        assert getattr(store, move)(late, *arguments[move]) is False
        after = store.look(shop.scope())
        assert before is not None
        assert after is not None
        assert (before.status, before.attempts) == (after.status, after.attempts)


def test_release_needs_a_record_without_effects(shop: Shop) -> None:
    """Once a part is durable, not even the owner frees the key."""
    with shop.app.app_context():
        store = shop.idempotency.store
        claim = store.claim(shop.scope(), HASH).claim
        assert claim is not None
        with shop.db.engine.begin() as connection:
            assert store.mark_effects(claim, connection)
        assert store.release(claim) is False
        assert shop.record() is not None


@pytest.mark.parametrize("status", Status)
@pytest.mark.parametrize("force", [False, True])
def test_resolve_settles_what_is_unknown(
    shop: Shop, status: Status, *, force: bool
) -> None:
    """An operator settles an unknown outcome; by force also one that is to come."""
    resolution = Resolution(ending=Failure(reason="x"), by="operator", reason="y")
    with shop.app.app_context():
        for number, facts in enumerate(all_facts(status)):
            key = f"k{number}"
            store_record(shop, key, facts)
            # Whatever the hash is: an operator speaks of the key.
            unknown = decide(replace(facts, same=True)) is Verdict.OUTCOME_UNKNOWN
            # Also before its end: an answer was given, but nobody knows what it did.
            unknown |= status is Status.FAILED and facts.open_step
            coming = status is Status.PROCESSING
            store = shop.idempotency.store
            record = store.resolve(shop.scope(key), resolution, force=force)
            assert (record is not None) is (unknown or (force and coming)), facts
            if record is not None:
                assert record.open_step == ("charge" if facts.open_step else None)
                assert facts_of(record, None).open_step is False


@pytest.mark.parametrize("status", Status)
def test_recovery_claims_what_is_unknown(shop: Shop, status: Status) -> None:
    """Every unknown outcome of the same request can be recovered, and nothing else."""
    with shop.app.app_context():
        for number, facts in enumerate(all_facts(status)):
            key = f"k{number}"
            store_record(shop, key, facts)
            store = shop.idempotency.store
            claim = store.claim_recovery(shop.scope(key), HASH)
            unknown = decide(facts) is Verdict.OUTCOME_UNKNOWN and facts.same
            assert (claim is not None) is unknown, facts
            if claim is not None:
                assert store.mark_succeeded(claim, StoredResponse(code=201))


def test_a_locked_row_counts_as_in_progress(shop: Shop) -> None:
    """Nothing waits for a record's lock: the claim answers at once."""
    if shop.database.name == "sqlite":
        pytest.skip("SQLite locks the database, not rows")
    facts = Facts(
        status=Status.SUCCEEDED,
        lapsed=False,
        effects=False,
        open_step=False,
        gone=True,
        same=True,
    )
    with shop.app.app_context():
        row_id = store_record(shop, "k", facts)
        table = shop.idempotency.Record.__table__
        with shop.db.engine.begin() as connection:
            connection.execute(
                table.update().where(table.c.id == row_id).values(version=9)
            )
            decision = shop.idempotency.store.claim(shop.scope(), HASH)
            assert shop.idempotency.store.expire(limit=10) == 0
        assert decision.outcome is Verdict.IN_PROGRESS
        assert shop.idempotency.store.claim(shop.scope(), HASH).claim is not None


def test_late_success_still_owes_half_a_life(shop: Shop) -> None:
    """An answer that comes after the key's life is kept for duplicates."""
    with shop.app.app_context():
        store = shop.idempotency.store
        claim = store.claim(shop.scope(), HASH, ttl_seconds=3600).claim
        assert claim is not None
        shop.outlive()
        assert store.mark_succeeded(claim, StoredResponse(code=200))
        record = store.look(shop.scope())
        assert record is not None
        assert record.expires_at > NOW + timedelta(minutes=50)


def test_purge_deletes_by_age_and_owner(shop: Shop) -> None:
    """Only expired records past the retention are deleted, as filtered."""
    with shop.app.app_context():
        for number, status in enumerate(Status):
            facts = all_facts(status)[-1]
            store_record(shop, f"k{number}", facts)
        store = shop.idempotency.store
        assert store.purge(limit=10) == 0
        assert store.purge(limit=10, older_than_seconds=0, user_id="u2") == 0
        assert store.count_purgeable(older_than_seconds=60) == 1
        assert store.purge(limit=10, older_than_seconds=60, user_id="u1") == 1


def test_batches_are_bounded(shop: Shop) -> None:
    """One batch marks no more than its limit."""
    facts = Facts(
        status=Status.SUCCEEDED,
        lapsed=False,
        effects=False,
        open_step=False,
        gone=True,
        same=True,
    )
    with shop.app.app_context():
        for number in range(5):
            store_record(shop, f"k{number}", facts)
        store = shop.idempotency.store
        assert [store.expire(limit=2) for _ in range(4)] == [2, 2, 1, 0]
        assert [store.purge(limit=3, older_than_seconds=0) for _ in range(3)] == [
            3,
            2,
            0,
        ]
