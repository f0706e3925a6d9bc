"""
States of a record, and the frozen values.

No database and no Flask here. What a state means for a request is in ``rules``.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .exceptions import IdempotencyKeyInvalid

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

#: Characters that each part of a scope may have (the unique key of MySQL holds
#: 3,072 bytes; these are 2,808 in utf8mb4).
SCOPE_LENGTHS = {"tenant_id": 64, "user_id": 128, "route": 255, "idempotency_key": 255}
#: Longest hash of a request, task id and event id.
REQUEST_HASH_LENGTH = 128
BOUND_ID_LENGTH = 255
#: Longest name of who settled an unknown outcome, and why.
RESOLVED_BY_LENGTH = 255
RESOLVED_REASON_LENGTH = 1000
#: Longest name of a step.
STEP_NAME_LENGTH = 100
#: Characters of the texts of a delivery; tenant, user and task id are as on a record.
KIND_LENGTH = 16
DELIVERY_NAME_LENGTH = 255
UNIQUE_KEY_LENGTH = 255
LAST_ERROR_LENGTH = 255


class Status(str, Enum):
    """The states that a record can have."""

    #: Claimed by one owner, until its lease lapses.
    PROCESSING = "processing"
    #: Finished with an answer that duplicates get.
    SUCCEEDED = "succeeded"
    #: The handler raised, or answered 500 or above.
    FAILED = "failed"
    #: Past its ``expires_at`` and marked so; the next request starts anew.
    EXPIRED = "expired"


class DeliveryState(str, Enum):
    """The states that a delivery can have; all but the first two are ends."""

    #: Not known to be published.
    PENDING = "pending"
    #: Handed over. Published again if no end is reported and it is repeatable.
    PUBLISHED = "published"
    #: The work succeeded.
    DONE = "done"
    #: The work failed for good.
    FAILED = "failed"
    #: Somebody called the work off.
    REVOKED = "revoked"
    #: The message's life was over before the work began.
    EXPIRED = "expired"
    #: The work took too long and was stopped.
    TIME_LIMIT = "time_limit"
    #: Published, or tried, as often as makes sense, and no end was reported.
    DEAD = "dead"


class Verdict(str, Enum):
    """What a record means for the next request; the words of ``diagnose``."""

    #: Only in a ``Decision``: the record is ours, the handler runs.
    CLAIMED = "claimed"
    #: No record: the request runs.
    MISSING = "missing"
    #: The stored answer is given out.
    REPLAYABLE = "replayable"
    #: The key belongs to another request.
    REQUEST_HASH_CONFLICT = "request_hash_conflict"
    #: An owner with a live lease is at work.
    IN_PROGRESS = "in_progress"
    #: The owner is gone and nothing was committed: the request runs again.
    LEASE_LAPSED = "lease_lapsed"
    #: The owner is gone after a part was committed, or may have taken effect in a step:
    #: the request is not run.
    OUTCOME_UNKNOWN = "outcome_unknown"
    #: The stored failure is given out, unless the caller opts in to a retry.
    FAILED_RETRY_REQUIRES_OPT_IN = "failed_retry_requires_opt_in"
    #: The key's life is over: the request runs as a new operation.
    EXPIRED_REUSABLE = "expired_reusable"


def check_text(name: str, value: object, length: int) -> str:
    """
    Return `value` if the database can keep it unchanged.

    Raises:
        ValueError: If it is no text, too long, or has characters that not every
            database can store. Nothing is ever shortened or replaced.
    """
    if not isinstance(value, str):
        message = f"'{name}' must be a str, not {type(value).__name__}"
        raise ValueError(message)  # noqa: TRY004 - one error for the whole check
    if len(value) > length:
        message = f"'{name}' has {len(value)} characters; at most {length} are kept"
        raise ValueError(message)
    if "\0" in value or not value.isascii():
        try:
            storable = b"\0" not in value.encode()
        except UnicodeEncodeError:
            storable = False
        if not storable:
            message = f"'{name}' contains NUL or half a surrogate pair"
            raise ValueError(message)
    return value


@dataclass(frozen=True, kw_only=True)
class Scope:
    """
    What a key is bound to: one record exists per scope.

    Args:
        tenant_id: The tenant, ``""`` for a single-tenant application.
        user_id: The caller, ``""`` for anonymous callers.
        route: A stable, readable name such as ``"POST /accounts"``.
        idempotency_key: The client's key.

    Raises:
        IdempotencyKeyInvalid: If the key is empty, too long or not storable.
        ValueError: If another part is too long or not storable.
    """

    tenant_id: str
    user_id: str
    route: str
    idempotency_key: str

    def __post_init__(self) -> None:
        """Refuse what the database could not keep unchanged."""
        for name in ("tenant_id", "user_id", "route"):
            check_text(name, getattr(self, name), SCOPE_LENGTHS[name])
        try:
            check_text(
                "idempotency_key",
                self.idempotency_key,
                SCOPE_LENGTHS["idempotency_key"],
            )
        except ValueError as error:
            raise IdempotencyKeyInvalid(f"The idempotency key: {error}.") from error
        if not self.idempotency_key:
            raise IdempotencyKeyInvalid("The idempotency key is empty.")


class StepState(str, Enum):
    """What became of a step."""

    #: Started, and for all we know it may have taken effect.
    STARTED = "started"
    #: Its result is stored; it is never called again.
    FINISHED = "finished"
    #: It failed for certain, without effect; the next try has a new key.
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Step:
    """
    A step of an operation, as its record keeps it.

    Attributes:
        name: Which one of the operation's steps it is.
        ordinal: Number of its downstream key: 1 until it fails for certain.
        repeatable: Whether it may be called again with the same key.
        result: The JSON text of its result, once it is finished.
    """

    name: str
    ordinal: int = 1
    state: StepState = StepState.STARTED
    repeatable: bool = False
    result: str | None = None

    @property
    def key_names(self) -> tuple[str, ...]:
        """Of what its downstream key is derived."""
        return ("step", self.name, str(self.ordinal))

    @property
    def open(self) -> bool:
        """Whether nobody can tell if it took effect, nor find out by a repetition."""
        return self.state is StepState.STARTED and not self.repeatable


def first_open(steps: tuple[Step, ...]) -> str | None:
    """Return the name of the first open step."""
    return next((step.name for step in steps if step.open), None)


def have_run(steps: tuple[Step, ...]) -> bool:
    """Tell whether any step took effect, or may have."""
    return any(step.state is not StepState.FAILED for step in steps)


def derived_id(namespace: uuid.UUID, *names: str) -> str:
    """Return the UUID of some names (version 5, RFC 9562 section 5.5)."""
    return str(uuid.uuid5(namespace, json.dumps(names)))


@dataclass(frozen=True, kw_only=True)
class Claim:
    """
    The right of one call to run an operation and to record its outcome.

    Attributes:
        record_id: Primary key of the record.
        operation_id: What the key stands for in this life of the record; new when
            an expired key is reused.
        owner_token: Proof of ownership; every UPDATE of an owner repeats it.
        attempt: 1 for the first run of the operation.
        retries: Of a task: which of its tries it has come to, 0 for the first.
    """

    record_id: uuid.UUID
    operation_id: uuid.UUID
    owner_token: uuid.UUID
    scope: Scope
    request_hash: str
    #: Life of the key in seconds, counted from the first claim.
    ttl_seconds: float
    attempt: int = 1
    retries: int = 0
    task_id: str | None = None
    outbox_event_id: str | None = None
    #: The steps of the operation so far, also those of earlier attempts.
    steps: tuple[Step, ...] = ()

    def derive_id(self, *names: str) -> str:
        """
        Return a UUID (version 5, RFC 9562 section 5.5) that belongs to the operation.

        The same names give the same id in every attempt and every process, and a
        new one when the key is reused after its expiry.
        """
        return derived_id(self.operation_id, *names)


#: Makes an identifier of a claimed operation; pure, its result may be dropped.
IdBuilder = Callable[[Claim], str]


@dataclass(frozen=True, kw_only=True)
class StoredResponse:
    """
    An answer as it is kept for duplicates.

    Attributes:
        code: The HTTP status, or its like for a service.
        headers: Name and value pairs in the order of the answer.
        body: The bytes; ``None`` if they were not kept.
    """

    code: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = b""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """
    Why an operation failed, and what its duplicates get.

    Attributes:
        reason: A short text without values of the request, such as the name of the
            exception's class.
        response: The answer of 500 or above; ``None`` after an exception.
    """

    reason: str
    response: StoredResponse | None = None


@dataclass(frozen=True, kw_only=True)
class Retried:
    """
    The end of a task's run after which another message runs it again.

    Attributes:
        retries: Those of that message.
        request_hash: Of its arguments.
        after_effects: Whether it may follow what this run has committed.
        otherwise: What is recorded where it may not.
    """

    retries: int
    request_hash: str
    after_effects: bool
    otherwise: Failure


@dataclass(frozen=True, kw_only=True)
class RecordView:
    """A record as it was read, with the database's view of its times."""

    id: uuid.UUID
    operation_id: uuid.UUID
    scope: Scope
    request_hash: str
    status: Status
    owner_token: uuid.UUID | None
    attempts: int
    response: StoredResponse | None
    task_id: str | None
    outbox_event_id: str | None
    failure: str | None
    #: Of a task that is tried again: the retries of the message that does so.
    retries: int | None = None
    #: Who settled its unknown outcome, and why.
    resolved_by: str | None = None
    resolved_reason: str | None = None
    effects_committed_at: datetime | None
    #: The steps that were ever started, in their order.
    all_steps: tuple[Step, ...] = ()
    #: Name of a step that was started, not finished, and may not be repeated.
    open_step: str | None = None
    locked_until: datetime | None
    expires_at: datetime
    created_at: datetime
    completed_at: datetime | None
    #: ``locked_until`` had passed when the row was read.
    lapsed: bool
    #: ``expires_at`` had passed when the row was read.
    gone: bool
    #: Seconds until ``locked_until``; 0 when there is no lease.
    lease_seconds_left: float

    def step_key(self, name: str) -> str | None:
        """
        Return the downstream key of a step, by which the provider can be asked.

        ``None`` if no step of that name was started.
        """
        keys = (
            derived_id(self.operation_id, *step.key_names)
            for step in self.all_steps
            if step.name == name
        )
        return next(keys, None)

    @property
    def steps(self) -> Mapping[str, Any]:
        """The results of the finished steps by name."""
        return MappingProxyType(
            {
                step.name: json.loads(step.result)
                for step in self.all_steps
                if step.result is not None
            }
        )


@dataclass(frozen=True, kw_only=True)
class Decision:
    """
    The answer of ``claim()``: a claim, or the record that stands in the way.

    With both, the claim is one to recover the record's unknown outcome.
    """

    outcome: Verdict
    claim: Claim | None = None
    record: RecordView | None = None


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """
    How somebody settles a call whose outcome is unknown.

    Attributes:
        ending: What duplicates get from now on; ``None`` frees the key.
        by: Who settles it.
        reason: How that is known.

    Raises:
        ValueError: If name or reason are empty, too long or not storable.
    """

    ending: StoredResponse | Failure | None
    by: str
    reason: str

    def __post_init__(self) -> None:
        """Refuse what the database could not keep unchanged."""
        check_text("by", self.by, RESOLVED_BY_LENGTH)
        check_text("reason", self.reason, RESOLVED_REASON_LENGTH)
        if not self.by.strip() or not self.reason.strip():
            message = "'by' and 'reason' must say something"
            raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the next request with a scope (and hash) would meet, and the record."""

    diagnosis: Verdict
    scope: Scope
    record: RecordView | None = None
    #: One sentence that says why.
    explanation: str = ""
