"""
What a record must become, move by move: plain Python, without a database.

Written from the states that are promised to users, and on purpose not from the tables
in ``flask_idempotency.lifecycle``, from which the store makes its statements.

Times are seconds of a clock that the test moves by whole thousands. Leases and lives
end at odd hundreds, so no comparison is closer than 250 seconds, and the milliseconds
that pass for real decide nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flask_idempotency import Status, Verdict

if TYPE_CHECKING:
    from uuid import UUID

    from flask_idempotency import Claim

LEASES = (500.0, 1500.0)
#: Their halves, which matter at the end of a call, are no odd hundreds.
LIVES = (2500.0, 20500.0)
#: How long an expired record stays at least.
AGES = (0.0, 1250.0)
LEASE, LIFE, AGE = LEASES[1], LIVES[0], AGES[1]
MAX_ATTEMPTS = 4


@dataclass(kw_only=True)
class Record:
    """One record, as it must be."""

    operation: UUID
    token: UUID | None
    request_hash: str
    starts: float
    lease_ends: float | None
    ends: float
    ids: tuple[str | None, str | None]
    status: Status = Status.PROCESSING
    attempts: int = 1
    effects: bool = False
    resolved: bool = False
    #: The token whose owner wrote the answer, if an owner did.
    answered_by: UUID | None = None
    answer: bytes | None = None

    def is_over(self, now: float) -> bool:
        """Tell whether the key's life has ended."""
        return self.ends <= now


@dataclass
class Model:
    """All records by key, the renewed leases, the effects and the time."""

    now: float = 0.0
    records: dict[str, Record] = field(default_factory=dict)
    renewed: dict[UUID, float] = field(default_factory=dict)
    #: Names of the effects that are durable.
    effects: list[str] = field(default_factory=list)
    #: The runs of each operation of which something became durable.
    committers: dict[UUID, set[UUID]] = field(default_factory=dict)
    #: Tokens of those who find out how an operation ended, and do not run it.
    recoveries: set[UUID] = field(default_factory=set)
    #: Every operation and every bound id that ever was.
    operations: set[UUID] = field(default_factory=set)
    ids: set[str] = field(default_factory=set)

    def has_lapsed(self, record: Record) -> bool:
        """Tell whether nobody is at work on a record any more."""
        renewed = self.renewed.get(record.token, 0.0) if record.token else 0.0
        ends = record.lease_ends
        return ends is not None and max(ends, renewed) <= self.now

    def is_unknown(self, record: Record) -> bool:
        """Tell whether an owner vanished after a part had become durable."""
        processing = record.status is Status.PROCESSING
        return processing and record.effects and self.has_lapsed(record)

    def is_expirable(self, record: Record) -> bool:
        """Tell whether ``expire`` marks a record."""
        if record.status is Status.EXPIRED or not record.is_over(self.now):
            return False
        if record.status is Status.PROCESSING:
            return self.has_lapsed(record) and not record.effects
        return True

    def meets(self, key: str, request_hash: str | None) -> Verdict:
        """Return what the next request with a key meets (None: the same request)."""
        record = self.records.get(key)
        if record is None:
            return Verdict.MISSING
        same = request_hash in {None, record.request_hash}
        over = record.is_over(self.now)
        if record.status is Status.PROCESSING:
            return self._meets_processing(record, same=same, over=over)
        if record.status is Status.EXPIRED or over:
            return Verdict.EXPIRED_REUSABLE
        if not same:
            return Verdict.REQUEST_HASH_CONFLICT
        if record.status is Status.SUCCEEDED:
            return Verdict.REPLAYABLE
        return Verdict.FAILED_RETRY_REQUIRES_OPT_IN

    def _meets_processing(self, record: Record, *, same: bool, over: bool) -> Verdict:
        if not self.has_lapsed(record):
            return Verdict.IN_PROGRESS if same else Verdict.REQUEST_HASH_CONFLICT
        if over:
            unknown = record.effects
            return Verdict.OUTCOME_UNKNOWN if unknown else Verdict.EXPIRED_REUSABLE
        if not same:
            return Verdict.REQUEST_HASH_CONFLICT
        return Verdict.OUTCOME_UNKNOWN if record.effects else Verdict.LEASE_LAPSED

    def arrive(self, key: str, request_hash: str, *, retry_failed: bool) -> str:
        """Return what a claim does: ``new``, ``again`` or the verdict's name."""
        verdict = self.meets(key, request_hash)
        if verdict in {Verdict.MISSING, Verdict.EXPIRED_REUSABLE}:
            return "new"
        record = self.records[key]
        if verdict is Verdict.LEASE_LAPSED:
            if record.attempts < MAX_ATTEMPTS:
                return "again"
            self.end(record, Status.FAILED)
            return str(Verdict.FAILED_RETRY_REQUIRES_OPT_IN.value)
        failed = verdict is Verdict.FAILED_RETRY_REQUIRES_OPT_IN
        if failed and retry_failed and not record.effects:
            return "again"
        return str(verdict.value)

    def owned(self, claim: Claim) -> Record | None:
        """Return the record that a claim still owns."""
        record = self.records.get(claim.scope.idempotency_key)
        if record is None or record.status is not Status.PROCESSING:
            return None
        return record if record.token == claim.owner_token else None

    def commit(self, claim: Claim, record: Record, effect: str | None) -> None:
        """Note that a part of the operation is durable."""
        record.effects = True
        if effect is not None:
            self.effects.append(effect)
        if claim.owner_token not in self.recoveries:
            runs = self.committers.setdefault(record.operation, set())
            runs.add(claim.owner_token)

    def finish(self, claim: Claim, record: Record, status: Status) -> None:
        """End a record by its owner; duplicates have half a life to come for it."""
        if record.ends < self.now + claim.ttl_seconds / 2:
            record.ends = self.now + claim.ttl_seconds
        self.end(record, status)
        record.answered_by = claim.owner_token

    def end(self, record: Record, status: Status) -> None:
        """End a record: nobody owns it any more."""
        record.status = status
        record.token = record.lease_ends = None
