"""
Any order of moves by clients, owners alive and dead, operators, and time.

Hypothesis makes the orders. After each move the database is compared with the model,
and every owner that ever was may wake up at any time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    MultipleResults,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import select

from flask_idempotency import Claim, Failure, Resolution, Status, StoredResponse
from flask_idempotency.lifecycle import Retried
from tests.conftest import SAMPLE

from .clients import ACCOUNTS, KEYS, Clients, flags, hashes, keys, leases
from .model import AGE, AGES, LEASE, LIFE, MAX_ATTEMPTS, Record

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.shop import Shop

#: Real seconds of one order of moves, at most.
TOLERANCE = 250
#: Whole thousands, between which leases and lives end.
STEPS = (1000.0, 2000.0, 3000.0, 21000.0)
ENDINGS: dict[Status, StoredResponse | Failure | None] = {
    Status.SUCCEEDED: StoredResponse(code=200, body=b"settled"),
    Status.FAILED: Failure(reason="resolved as failed"),
    Status.EXPIRED: None,
}


class StoreMachine(Clients):
    """Everybody who may touch a record, with those who clean up."""

    # What happens to an unknown outcome.

    @rule(target=Clients.owners, late=Clients.owners, lease=leases, sleeps=flags)
    def claim_recovery(
        self, *, late: Claim, lease: float, sleeps: bool
    ) -> Claim | MultipleResults[Claim]:
        """Find out how an owner's operation ended, by a claim that runs nothing."""
        if sleeps:
            self.wait(2000.0)
        key, request_hash = late.scope.idempotency_key, late.request_hash
        record = self.model.records.get(key)
        same = record is not None and record.request_hash == request_hash
        claim = self.store.claim_recovery(
            self.shop.scope(key), request_hash, lease_seconds=lease
        )
        if record is None or not same or not self.model.is_unknown(record):
            assert claim is None
            return multiple()
        assert claim is not None
        self.take(record, claim, lease)
        self.model.recoveries.add(claim.owner_token)
        return claim

    @rule(claim=Clients.owners, request_hash=hashes)
    def postpone(self, *, claim: Claim, request_hash: str) -> None:
        """Leave a task to its next message, which nothing durable may precede."""
        owned = self.model.owned(claim)
        retried = Retried(
            retries=1,
            request_hash=request_hash,
            after_effects=False,
            otherwise=Failure(reason="retried"),
        )
        done = owned is not None and not owned.effects
        assert self.store.postpone(claim, retried) is done
        if owned is not None and done:
            owned.token, owned.lease_ends = None, self.model.now
            owned.request_hash, owned.attempts = request_hash, 0

    @rule(
        key=keys,
        status=st.sampled_from(list(ENDINGS)),
        force=flags,
    )
    def resolve(self, *, key: str, status: Status, force: bool) -> None:
        """Settle a call as an operator does."""
        resolution = Resolution(ending=ENDINGS[status], by="me", reason="seen")
        record = self.model.records.get(key)
        found = self.store.resolve(self.shop.scope(key), resolution, force=force)
        running = record is not None and record.status is Status.PROCESSING
        open_ = record is not None and self.model.is_unknown(record)
        assert (found is not None) is (running and (force or open_))
        if found is None or record is None:
            return
        self.model.end(record, status)
        record.resolved = True
        record.ends = self.model.now + (0 if status is Status.EXPIRED else LIFE)
        record.answer = b"settled" if status is Status.SUCCEEDED else None

    # What time does.

    @rule(seconds=st.sampled_from(STEPS))
    def nothing_happens(self, *, seconds: float) -> None:
        """Let everybody sleep for a while."""
        self.wait(seconds)

    @rule()
    def expire(self) -> None:
        """Mark every record whose key's life is over."""
        due = [r for r in self.model.records.values() if self.model.is_expirable(r)]
        assert self.store.count_expirable() == len(due)
        assert self.store.expire(limit=10) == len(due)
        for record in due:
            self.model.end(record, Status.EXPIRED)

    @rule(age=st.sampled_from([None, *AGES]))
    def purge(self, *, age: float | None) -> None:
        """Delete the expired records that are old enough, and dead leases."""
        model = self.model
        limit = model.now - (AGE if age is None else age)
        due = [
            key
            for key, record in model.records.items()
            if record.status is Status.EXPIRED and record.ends <= limit
        ]
        assert self.store.purge(limit=10, older_than_seconds=age) == len(due)
        for key in due:
            del model.records[key]
        self.store.purge_leases()

    # What is always so.

    @invariant()
    def database_is_as_the_model(self) -> None:
        """Each record, and each effect, is there as it must be, and no other."""
        for key in KEYS:
            self._compare(key, self.model.records.get(key))
        with self.engine.connect() as connection:
            names = connection.execute(select(ACCOUNTS.c.name)).scalars().all()
        assert sorted(names) == sorted(self.model.effects)

    @invariant()
    def no_operation_ran_on_after_an_effect(self) -> None:
        """What became durable of an operation is the work of one run."""
        assert all(len(runs) == 1 for runs in self.model.committers.values())

    def _compare(self, key: str, expected: Record | None) -> None:
        record = self.store.look(self.shop.scope(key))
        if expected is None:
            assert record is None
            return
        assert record is not None
        assert record.status is expected.status
        assert record.operation_id == expected.operation
        assert record.owner_token == expected.token
        assert record.attempts == expected.attempts
        assert record.request_hash == expected.request_hash
        assert (record.task_id, record.outbox_event_id) == expected.ids
        assert (record.effects_committed_at is not None) is expected.effects
        assert (record.resolved_by is not None) is expected.resolved
        life = (record.expires_at - record.created_at).total_seconds()
        assert abs(life - (expected.ends - expected.starts)) < TOLERANCE
        assert record.gone is expected.is_over(self.model.now)
        assert record.lapsed is self.model.has_lapsed(expected)
        assert (record.locked_until is None) is (expected.lease_ends is None)
        if record.status is Status.SUCCEEDED:
            assert record.response is not None
            assert record.response.body == expected.answer


def test_any_order_of_moves(make_shop: Callable[..., Shop], rounds: int) -> None:
    """Whoever moves, and whenever: each record is what the promise says."""
    shop = make_shop(
        IDEMPOTENCY_LEASE=LEASE,
        IDEMPOTENCY_TTL=LIFE,
        IDEMPOTENCY_RETENTION=AGE,
        IDEMPOTENCY_MAX_ATTEMPTS=MAX_ATTEMPTS,
    )
    orders = settings(
        max_examples=rounds * 2,
        stateful_step_count=60,
        deadline=None,
        database=None,
        derandomize=rounds == SAMPLE,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )

    class Machine(StoreMachine):
        pass

    Machine.shop = shop
    with shop.app.app_context():
        run_state_machine_as_test(Machine, settings=orders)
