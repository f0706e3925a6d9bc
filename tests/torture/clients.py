"""
What clients do, and owners: also one whose lease is long over.

Each move is made on the real store, and must come out as the model says.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    multiple,
    rule,
)
from sqlalchemy import column, delete, insert, table

from flask_idempotency import Failure, Status, StoredResponse, Verdict
from flask_idempotency.models import lease_table

from .clock import pass_time
from .model import (
    LEASES,
    LIVES,
    Model,
    Record,
)

if TYPE_CHECKING:
    from flask_idempotency import Claim
    from tests.shop import Shop

#: With three of them a new one may be claimed while two calls are renewed.
KEYS = ("k1", "k2", "k3")
#: Most requests with a key are the same one.
HASHES = ("v1:a", "v1:a", "v1:a", "v1:b")
ACCOUNTS = table("account", column("id"), column("name"))

# Most moves are about one key, where they meet.
keys = st.sampled_from((*KEYS[:1] * 3, *KEYS))
hashes, flags = st.sampled_from(HASHES), st.booleans()
leases, lives = st.sampled_from(LEASES), st.sampled_from(LIVES)


class Undo(Exception):  # noqa: N818 - no error: the owner rolls back
    """Ends a transaction of an owner without its commit."""


class Clients(RuleBasedStateMachine):
    """Everybody who wants something done, or does it."""

    #: Gives the store and, by its accounts, the effects.
    shop: ClassVar[Shop]

    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.store = self.shop.idempotency.store
        self.engine = self.shop.db.engine
        self.model = Model()
        self.written = 0
        records = self.shop.idempotency.Record.__table__
        with self.engine.begin() as connection:
            for emptied in (records, lease_table(records), ACCOUNTS):
                connection.execute(delete(emptied))

    # What a client does.

    @rule(
        target=owners,
        key=keys,
        request_hash=hashes,
        retry_failed=flags,
        lease=leases,
        life=lives,
        bound=flags,
        then=st.sampled_from(["hang", "commit a part", "commit a part", "succeed"]),
    )
    def arrive(
        self,
        *,
        key: str,
        request_hash: str,
        retry_failed: bool,
        lease: float,
        life: float,
        bound: bool,
        then: str,
    ) -> Claim | MultipleResults[Claim]:
        """Claim a key, with identifiers or without, and start to work or hang."""
        before = self.model.records.get(key)
        expected = self.model.arrive(key, request_hash, retry_failed=retry_failed)
        decision = self.store.claim(
            self.shop.scope(key),
            request_hash,
            ttl_seconds=life,
            lease_seconds=lease,
            retry_failed=retry_failed,
            task_id_builder=_task_id if bound else None,
            outbox_event_id_builder=_event_id if bound else None,
        )
        claim = decision.claim
        if claim is None:
            assert decision.outcome.value == expected
            assert decision.record is not None
            return multiple()
        assert (decision.outcome, decision.record) == (Verdict.CLAIMED, None)
        if expected == "new":
            self._start(claim, request_hash, lease=lease, life=life, bound=bound)
        else:
            assert expected == "again"
            assert before is not None
            self.take(before, claim, lease)
            before.answer, before.resolved, before.effects = None, False, False
        if then == "commit a part":
            self.commit_a_part(claim=claim, dies=False)
        elif then == "succeed":
            self.succeed(claim=claim, carried=True, dies=False)
        return claim

    def _start(
        self, claim: Claim, request_hash: str, *, lease: float, life: float, bound: bool
    ) -> None:
        model = self.model
        ids = (claim.task_id, claim.outbox_event_id)
        assert claim.operation_id not in model.operations
        assert ids == ((_task_id(claim), _event_id(claim)) if bound else (None, None))
        assert not model.ids.intersection(ids)
        model.ids.update(name for name in ids if name)
        model.operations.add(claim.operation_id)
        model.records[claim.scope.idempotency_key] = Record(
            operation=claim.operation_id,
            token=claim.owner_token,
            request_hash=request_hash,
            starts=model.now,
            lease_ends=model.now + lease,
            ends=model.now + life,
            ids=ids,
        )

    def take(self, record: Record, claim: Claim, lease: float) -> None:
        """Give a record to a new owner who goes on with the same operation."""
        assert claim.operation_id == record.operation
        assert claim.owner_token != record.token
        assert (claim.task_id, claim.outbox_event_id) == record.ids
        record.status, record.token = Status.PROCESSING, claim.owner_token
        record.lease_ends = self.model.now + lease
        record.attempts += 1

    @rule(key=keys, request_hash=st.one_of(st.none(), hashes))
    def diagnose(self, *, key: str, request_hash: str | None) -> None:
        """Ask what the next request would meet."""
        diagnosis = self.store.diagnose(self.shop.scope(key), request_hash)
        assert diagnosis.diagnosis is self.model.meets(key, request_hash)
        assert diagnosis.explanation

    # What an owner does, also one whose lease is long over.

    @rule(claim=owners, dies=flags)
    def commit_a_part(self, *, claim: Claim, dies: bool) -> None:
        """Commit a row under the fence, or die just before the COMMIT."""
        owned = self.model.owned(claim)
        with contextlib.suppress(Undo), self.engine.begin() as connection:
            effect = self._write(connection)
            kept = self.store.mark_effects(claim, connection)
            assert kept is (owned is not None)
            if dies or not kept:
                raise Undo
        if owned is not None and not dies:
            self.model.commit(claim, owned, effect)

    @rule(claim=owners)
    def intend_a_part(self, *, claim: Claim) -> None:
        """Note, before an effect elsewhere, that there may be one."""
        owned = self.model.owned(claim)
        assert self.store.mark_effects(claim) is (owned is not None)
        if owned is not None:
            self.model.commit(claim, owned, None)

    @rule(
        target=owners,
        claim=owners,
        how=st.sampled_from(["succeed", "die", "answer", "fail", "release", "return"]),
        asks_again=flags,
    )
    def end(
        self, *, claim: Claim, how: str, asks_again: bool
    ) -> Claim | MultipleResults[Claim]:
        """End a call, whose client may ask again; one rule, as most calls go on."""
        if how in {"succeed", "die", "answer"}:
            self.succeed(claim=claim, carried=how != "answer", dies=how == "die")
        elif how == "fail":
            self.fail(claim)
        elif how == "release":
            self.release(claim)
        else:
            self.hand_back(claim)
        if not asks_again:
            return multiple()
        return self.arrive(
            key=claim.scope.idempotency_key,
            request_hash=claim.request_hash,
            retry_failed=True,
            lease=LEASES[0],
            life=LIVES[0],
            bound=False,
            then="hang",
        )

    def succeed(self, *, claim: Claim, carried: bool, dies: bool) -> None:
        """Answer: with a row in one commit, or without any."""
        owned, answer = self.model.owned(claim), f"answer {self.written}".encode()
        response = StoredResponse(code=201, body=answer)
        if not carried:
            assert self.store.mark_succeeded(claim, response) is (owned is not None)
        else:
            with contextlib.suppress(Undo), self.engine.begin() as connection:
                effect = self._write(connection)
                kept = self.store.mark_succeeded(claim, response, connection=connection)
                assert kept is (owned is not None)
                if dies or not kept:
                    raise Undo
        if owned is None or (carried and dies):
            return
        if carried:
            self.model.commit(claim, owned, effect)
        self.model.finish(claim, owned, Status.SUCCEEDED)
        owned.answer = answer

    def fail(self, claim: Claim) -> None:
        """Raise, after whatever became durable before."""
        owned = self.model.owned(claim)
        failure = Failure(reason="builtins.ValueError")
        assert self.store.mark_failed(claim, failure) is (owned is not None)
        if owned is not None:
            self.model.finish(claim, owned, Status.FAILED)

    def release(self, claim: Claim) -> None:
        """Say that nothing was done, which has to be true."""
        owned = self.model.owned(claim)
        free = owned is not None and not owned.effects
        assert self.store.release(claim) is free
        if free:
            del self.model.records[claim.scope.idempotency_key]

    def hand_back(self, claim: Claim) -> None:
        """Give a recovery up."""
        owned = self.model.owned(claim)
        assert self.store.hand_back(claim) is (owned is not None)
        if owned is not None:
            owned.token, owned.lease_ends = None, self.model.now

    @rule(claim=owners, lease=leases, works_on=flags)
    def renew(self, *, claim: Claim, lease: float, works_on: bool) -> None:
        """Renew a lease, also one that is over or another's by now, and work on."""
        self.store.renew({claim.owner_token: lease})
        self.model.renewed[claim.owner_token] = self.model.now + lease
        if works_on:
            self.wait(1000.0)

    def wait(self, seconds: float) -> None:
        """Let time pass, for the database too."""
        pass_time(self.shop, seconds)
        self.model.now += seconds

    @rule(claim=owners)
    def forget_lease(self, *, claim: Claim) -> None:
        """Remove a renewed lease, as the keeper does after the end of a call."""
        self.store.forget_leases([claim.owner_token])
        self.model.renewed.pop(claim.owner_token, None)

    @rule(claim=owners)
    def settle(self, *, claim: Claim) -> None:
        """Ask what became of a commit whose answer was lost."""
        record = self.model.records.get(claim.scope.idempotency_key)
        found = self.store.settle(claim)
        answered = record is not None and record.answered_by == claim.owner_token
        if answered and record is not None and record.status is Status.SUCCEEDED:
            assert found is Status.SUCCEEDED
        elif self.model.owned(claim):
            assert found is Status.PROCESSING
        else:
            assert found in {None, Status.PROCESSING}

    def _write(self, connection: Any) -> str:
        """Add a row: an effect, if it is committed."""
        self.written += 1
        name = f"effect {self.written}"
        connection.execute(insert(ACCOUNTS).values(name=name))
        return name


def _task_id(claim: Claim) -> str:
    return claim.derive_id("task")


def _event_id(claim: Claim) -> str:
    return claim.derive_id("event")
