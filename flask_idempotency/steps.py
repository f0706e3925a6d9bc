"""
Steps: calls of foreign systems, each stored durably before it starts and when it ends.

What a foreign system did cannot be rolled back. So its result is kept beside the
session's transaction, under the record's owner, and a later attempt gets it from there.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import failpoints
from .exceptions import IdempotencyConfigError, LeaseLost, NestedCallError
from .ledger import has_changes, has_written
from .lifecycle import STEP_NAME_LENGTH, Step, StepState, check_text, derived_id
from .unit_of_work import connection_of, current_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .unit_of_work import Call

#: Held while a step becomes the only one of its call.
_starting = threading.Lock()
_LOST = (
    "The record of this call was taken over or removed while it ran, so step '{name}' "
    "is not called, or its result not used. The lease was too short, or the process "
    "stood still."
)
_NESTED = (
    "Step '{name}' was started inside step '{outer}', or beside it in another thread, "
    "so that what became of one could not be told from the other. Call one after the "
    "other."
)
_TWICE = (
    "Step '{name}' was called twice in this call; the second would get the result of "
    "the first and do nothing. Give each a name of its own, such as 'charge-1'."
)
_JOINED = (
    "Step '{name}' cannot be stored: the claim of this inner call is part of the outer "
    "call's transaction, which may be rolled back. Make the inner call before the "
    "session writes, or call the step in the outer one."
)
_OPEN = (
    "Step '{name}' was started before and has not finished, so nobody knows whether it "
    "took effect, and it is not called again. Let its exception end the call, or "
    "declare it repeatable=True if the other side honours the key."
)
_WROTE_BEFORE = (
    "Step '{name}' was called after the session had changed or written something, but "
    "what it does has to be stored beside the session's transaction. Call it before "
    "the first write."
)
_WROTE_INSIDE = (
    "Step '{name}' changed or wrote something in the session, so what it did could not "
    "be stored: it stays started and not finished. Only call the other side in it, and "
    "write afterwards."
)


def run_step(
    call: Call,
    name: str,
    fn: Callable[[str], object],
    *,
    repeatable: bool,
    definite: tuple[type[BaseException], ...],
) -> Any:
    """Run one step of a call, or return its stored result; see ``current_idempotency``."""
    _check_arguments(name, definite)
    with _only_one(call, name):
        if name in call.answered_steps:
            raise IdempotencyConfigError(_TWICE.format(name=name))
        result = _run(call, name, fn, repeatable=repeatable, definite=definite)
        call.answered_steps.add(name)
        return result


def _run(
    call: Call,
    name: str,
    fn: Callable[[str], object],
    *,
    repeatable: bool,
    definite: tuple[type[BaseException], ...],
) -> Any:
    _leave_transaction(call, _WROTE_BEFORE.format(name=name))
    step = _next_try(_steps_of(call), name, repeatable=repeatable)
    if step.result is not None:
        return call.results.decode(step.result)
    failpoints.reach("before_step")
    _keep(call, step)
    failpoints.reach("in_step")
    try:
        value = fn(_downstream_key(call, step))
    except definite:
        _leave_transaction(call, _WROTE_INSIDE.format(name=name))
        _keep(call, replace(step, state=StepState.FAILED))
        raise
    failpoints.reach("after_step")
    result = call.results.encode(f"step '{name}'", value)
    _leave_transaction(call, _WROTE_INSIDE.format(name=name))
    _keep(call, replace(step, state=StepState.FINISHED, result=result))
    return call.results.decode(result)


def _check_arguments(name: str, definite: tuple[type[BaseException], ...]) -> None:
    check_text("name", name, STEP_NAME_LENGTH)
    if not name:
        message = "'name' of a step is empty"
        raise ValueError(message)
    # Checked before the call: Python itself would notice it only at an exception.
    classes = definite if isinstance(definite, tuple) else (None,)
    if not all(isinstance(c, type) and issubclass(c, BaseException) for c in classes):
        message = f"'definite' must be a tuple of exception classes, not {definite!r}"
        raise TypeError(message)


@contextmanager
def _only_one(call: Call, name: str) -> Iterator[None]:
    """Make it the only step of the call, also among threads that share its context."""
    if call.lost:
        raise LeaseLost(_LOST.format(name=name))
    if call.joined:
        raise NestedCallError(_JOINED.format(name=name))
    with _starting:
        outer = next((around.step for around in call.chain() if around.step), None)
        if outer is not None:
            raise NestedCallError(_NESTED.format(name=name, outer=outer))
        call.step = name
    try:
        yield
    finally:
        call.step = None


def _leave_transaction(call: Call, wrote: str) -> None:
    """
    End the session's read transaction where it would hide the step from the fence.

    Or, on SQLite, would keep it from being stored.

    Raises:
        IdempotencyConfigError: With the text `wrote`, if it is more than that.
    """
    if call.host is None:
        call.session = call.find_session()  # another one, if the view removed the first
    session = call.session
    if has_changes(session):
        raise IdempotencyConfigError(wrote)
    atomic = call.atomic
    # An atomic call's transaction goes on between two of the session.
    if not (session.in_transaction() or (atomic and atomic.has_begun)):
        return
    connection = connection_of(call)
    if has_written(connection, unknown=False):
        raise IdempotencyConfigError(wrote)
    if call.claim is None or not call.store.dialect.hides_claims(connection):
        return
    if atomic is not None:
        atomic.roll_back()  # it begins anew when the session needs it
    else:
        session.commit()


def _steps_of(call: Call) -> tuple[Step, ...]:
    return call.claim.steps if call.claim is not None else call.unrecorded_steps


def _next_try(steps: tuple[Step, ...], name: str, *, repeatable: bool) -> Step:
    """
    Return the step as it is when it starts, or as it has finished.

    Raises:
        IdempotencyConfigError: If it may neither be called again nor has a result.
    """
    last = next((step for step in steps if step.name == name), None)
    if last is None:
        return Step(name=name, repeatable=repeatable)
    if last.open:
        raise IdempotencyConfigError(_OPEN.format(name=name))
    if last.state is StepState.FINISHED:
        return last
    # What failed for certain is something new now; the other side may remember the
    # failure under the old key.
    failed = last.state is StepState.FAILED
    return Step(name=name, ordinal=last.ordinal + failed, repeatable=repeatable)


def _downstream_key(call: Call, step: Step) -> str:
    if call.claim is not None:
        return call.claim.derive_id(*step.key_names)
    return derived_id(call.loose_id, *step.key_names)


def _keep(call: Call, step: Step) -> None:
    """
    Note a step, durably where the call is recorded.

    Raises:
        LeaseLost: If the record belongs to another owner by now.
    """
    steps = (*(s for s in _steps_of(call) if s.name != step.name), step)
    if call.claim is None:
        call.unrecorded_steps = steps
        return
    # As a claim is made, outside of any call: a connection that the store shares with
    # the session (SQLite in memory) then commits the step, and the session holds no
    # more than that.
    token = current_call.set(None)
    try:
        kept = call.store.write_steps(call.claim, steps)
    finally:
        current_call.reset(token)
    if not kept:
        call.lost = True
        raise LeaseLost(_LOST.format(name=step.name))
    call.claim = replace(call.claim, steps=steps)
