"""What a guarded call gives back: the first answer, or what a duplicate gets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .exceptions import (
    IdempotencyHTTPException,
    IdempotencyInProgress,
    IdempotencyKeyConflict,
    IdempotencyOutcomeUnknown,
    IdempotencyPreviousFailure,
    IdempotencyResponseUnavailable,
)
from .lifecycle import Status, Verdict, have_run

if TYPE_CHECKING:
    from uuid import UUID

    from .lifecycle import Claim, Decision, RecordView, StoredResponse

R = TypeVar("R")


_PARTLY_FAILED = (
    "The request with this idempotency key failed after a part of it had taken effect, "
    "or may have. It is not run again; look the operation up before it is asked for "
    "under a new key."
)
_REFUSALS: dict[Verdict, type[IdempotencyHTTPException]] = {
    Verdict.REQUEST_HASH_CONFLICT: IdempotencyKeyConflict,
    Verdict.IN_PROGRESS: IdempotencyInProgress,
    Verdict.OUTCOME_UNKNOWN: IdempotencyOutcomeUnknown,
    # Seen only after another owner took the record over and stopped in its turn.
    Verdict.LEASE_LAPSED: IdempotencyInProgress,
}


@dataclass(frozen=True, kw_only=True)
class Answer(Generic[R]):
    """
    The end of a guarded call.

    Attributes:
        stored: The answer as it is kept.
        result: The handler's own result; ``None`` on a replay.
        replayed: Whether the handler was not run for this call.
        record: Of a replay: the record as it was read.
    """

    stored: StoredResponse
    result: R | None = None
    replayed: bool = False
    record: RecordView | None = None
    task_id: str | None = None
    outbox_event_id: str | None = None
    record_id: UUID | None = None


def first_answer(claim: Claim | None, stored: StoredResponse, result: R) -> Answer[R]:
    """Return the answer of the call that ran."""
    if claim is None:
        return Answer(stored=stored, result=result)
    return Answer(
        stored=stored,
        result=result,
        task_id=claim.task_id,
        outbox_event_id=claim.outbox_event_id,
        record_id=claim.record_id,
    )


def duplicate_answer(decision: Decision) -> Answer[Any]:
    """
    Replay what is stored, or raise the error that says why there is nothing.

    The body may be missing: see ``refuse_without_body``.
    """
    record = decision.record
    if record is None:  # every try met a row that vanished again
        raise IdempotencyInProgress(retry_after_seconds=1)
    facts = _facts(record)
    if decision.outcome in _REFUSALS:
        refusal = _REFUSALS[decision.outcome]
        if decision.outcome is Verdict.OUTCOME_UNKNOWN:
            del facts["expires_at"]  # it never does
        if refusal.retryable:
            facts["retry_after_seconds"] = _retry_after(record)
        raise refusal(**facts)
    response = record.response
    if response is None or (record.status is Status.FAILED and response.body is None):
        # Certain by the record alone: nothing was committed or called.
        safe = not (record.effects_committed_at or have_run(record.all_steps))
        raise IdempotencyPreviousFailure(
            None if safe else _PARTLY_FAILED,
            **facts,
            replayed=True,
            safe_new_key=safe,
        )
    return Answer(
        stored=response,
        replayed=True,
        record=record,
        task_id=record.task_id,
        outbox_event_id=record.outbox_event_id,
        record_id=record.id,
    )


def refuse_without_body(answer: Answer[Any]) -> None:
    """
    Refuse to replay an answer whose body was not kept.

    Raises:
        IdempotencyResponseUnavailable: If that is so.
    """
    if answer.stored.body is None:
        facts = _facts(answer.record) if answer.record else {}
        raise IdempotencyResponseUnavailable(**facts)


def _facts(record: RecordView) -> dict[str, Any]:
    return {
        "task_id": record.task_id,
        "outbox_event_id": record.outbox_event_id,
        "expires_at": record.expires_at,
    }


def _retry_after(record: RecordView) -> int:
    return max(1, math.ceil(record.lease_seconds_left))
