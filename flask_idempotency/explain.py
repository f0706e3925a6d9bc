"""What a verdict and the steps of a record mean, for people who ask why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lifecycle import StepState, Verdict

if TYPE_CHECKING:
    from .lifecycle import RecordView, Step

_SENTENCES = {
    Verdict.MISSING: (
        "No record of exactly this tenant, user, route and key, so a request with them "
        "runs. If one was seen, a part is spelt otherwise: 'routes' lists the routes."
    ),
    Verdict.REPLAYABLE: (
        "The operation was answered; a duplicate gets its stored answer ({code})."
    ),
    Verdict.REQUEST_HASH_CONFLICT: (
        "The key belongs to a request with another hash; this one is refused (422)."
    ),
    Verdict.IN_PROGRESS: (
        "Attempt {attempts} is running; its lease lasts {left:.1f} s more."
    ),
    Verdict.LEASE_LAPSED: (
        "The lease of attempt {attempts} lapsed and nothing was committed; the next "
        "request runs it again."
    ),
    Verdict.OUTCOME_UNKNOWN: (
        "The lease of attempt {attempts} lapsed after it had committed a part; it is "
        "never run again. The route's recover= may find its answer, or 'flask "
        "idempotency resolve' settles it."
    ),
    Verdict.FAILED_RETRY_REQUIRES_OPT_IN: (
        "The operation failed ({failure}) and nothing of it was committed; a duplicate "
        "gets the failure, unless the route has retry_failed=True."
    ),
    Verdict.EXPIRED_REUSABLE: (
        "The key's life ended; the next request runs as a new operation."
    ),
}
_FAILED_WITH_EFFECTS = (
    "The operation failed ({failure}) after it had committed a part; a duplicate gets "
    "the failure, also with retry_failed=True."
)
#: The same where nothing was committed for certain, but a step is open.
_WITH_OPEN_STEP = {
    Verdict.OUTCOME_UNKNOWN: (
        "Attempt {attempts} ended in a step that may have taken effect; it is never run "
        "again. The route's recover= may find its answer, or 'flask idempotency "
        "resolve' settles it."
    ),
    Verdict.FAILED_RETRY_REQUIRES_OPT_IN: (
        "The operation failed ({failure}) after a step that may have taken effect; a "
        "duplicate gets the failure, also with retry_failed=True."
    ),
}


def short_lease(lease_seconds: float, limit_seconds: float) -> str:
    """Return the sentence on a lease that a statement may outlive."""
    return (
        f"The lease is {lease_seconds:g} s, and the server lets a statement run "
        f"{limit_seconds:g} s. One that outlives its process and the lease holds its "
        "locks, and the retry that takes over has to wait for them. Raise the lease or "
        "lower the statement timeout."
    )


def explain(verdict: Verdict, record: RecordView | None) -> str:
    """Return the sentences that explain a verdict on a record."""
    if record is None:
        return _SENTENCES[verdict]
    explanation = _sentence(verdict, record).format(
        attempts=record.attempts,
        code=record.response.code if record.response else "none",
        failure=record.failure or "unknown reason",
        left=record.lease_seconds_left,
    )
    if record.resolved_by is not None:
        settled = f"Settled by {record.resolved_by}: {record.resolved_reason}."
        explanation = f"{settled} {explanation}"
    if record.all_steps:
        explanation += f" Steps: {describe_steps(record.all_steps)}."
    return explanation


def _sentence(verdict: Verdict, record: RecordView) -> str:
    if record.open_step is not None and verdict in _WITH_OPEN_STEP:
        return _WITH_OPEN_STEP[verdict]
    failed = verdict is Verdict.FAILED_RETRY_REQUIRES_OPT_IN
    if failed and record.effects_committed_at is not None:
        return _FAILED_WITH_EFFECTS
    return _SENTENCES[verdict]


def describe_steps(steps: tuple[Step, ...]) -> str:
    """Say in words what became of some steps."""
    return ", ".join(f"step '{step.name}' {_fate(step)}" for step in steps)


def _fate(step: Step) -> str:
    if step.state is StepState.FINISHED:
        return "has finished"
    if step.state is StepState.FAILED:
        return "failed without effect"
    again = " and may be repeated" if step.repeatable else ""
    return f"was started and not finished{again}"
