"""The decision on a record, written down a second time, and the frozen values."""

from __future__ import annotations

import uuid
from dataclasses import FrozenInstanceError, replace
from datetime import datetime, timezone
from itertools import product
from typing import Any

import pytest

from flask_idempotency.exceptions import IdempotencyKeyInvalid
from flask_idempotency.lifecycle import (
    SCOPE_LENGTHS,
    Claim,
    RecordView,
    Scope,
    Status,
    Step,
    StepState,
    Verdict,
    check_text,
    first_open,
    have_run,
)
from flask_idempotency.rules import (
    EXPIRABLE,
    RULES,
    Facts,
    decide,
    facts_of,
    is_takeable,
)

# Each column is yes, no or "-" (whatever it is); the last column says whether a
# request may take the record over: never, always, or only with retry_failed.
TABLE = """
status      lapsed effects open_step gone same  verdict                        taken
processing  no     -       -         -    yes   in_progress                    never
processing  no     -       -         -    no    request_hash_conflict          never
processing  yes    no      no        no   yes   lease_lapsed                   always
processing  yes    no      no        no   no    request_hash_conflict          never
processing  yes    no      no        yes  -     expired_reusable               always
processing  yes    yes     -         no   yes   outcome_unknown                never
processing  yes    yes     -         no   no    request_hash_conflict          never
processing  yes    yes     -         yes  -     outcome_unknown                never
succeeded   -      -       -         no   yes   replayable                     never
succeeded   -      -       -         no   no    request_hash_conflict          never
succeeded   -      -       -         yes  -     expired_reusable               always
failed      -      no      no        no   yes   failed_retry_requires_opt_in   opt-in
failed      -      yes     -         no   yes   failed_retry_requires_opt_in   never
failed      -      -       -         no   no    request_hash_conflict          never
failed      -      -       no        yes  -     expired_reusable               always
failed      -      yes     yes       yes  -     outcome_unknown                never
expired     -      -       -         -    -     expired_reusable               always
"""
FACTS = ("lapsed", "effects", "open_step", "gone", "same")
ALL_FACTS = [
    facts
    for status in Status
    for flags in product((False, True), repeat=len(FACTS))
    for facts in [Facts(status=status, **dict(zip(FACTS, flags, strict=True)))]
    if facts.effects or not facts.open_step  # an open step may have had an effect
]


def rows() -> list[dict[str, str]]:
    """Return the rows of the table by column."""
    names, *lines = (line.split() for line in TABLE.strip().splitlines())
    return [dict(zip(names, line, strict=True)) for line in lines]


def row_of(facts: Facts) -> dict[str, str]:
    """Return the one row of the table that speaks of a record."""
    found = [
        row
        for row in rows()
        if row["status"] == facts.status.value
        and all(row[n] in {"-", "yes" if getattr(facts, n) else "no"} for n in FACTS)
    ]
    assert len(found) == 1, "the table of this test is ambiguous or has a gap"
    return found[0]


def described(facts: Facts) -> str:
    """Name a combination in the test's id."""
    held = [name for name in FACTS if getattr(facts, name)]
    return "-".join([facts.status.value, *held])


every_record = pytest.mark.parametrize("facts", ALL_FACTS, ids=described)


@every_record
def test_exactly_one_rule_matches(facts: Facts) -> None:
    """No record is without a rule, and none has two."""
    assert sum(rule.matches(facts) for rule in RULES) == 1


@every_record
def test_verdict(facts: Facts) -> None:
    """What a record means for a request is what the table says."""
    assert decide(facts).value == row_of(facts)["verdict"]


@every_record
@pytest.mark.parametrize("retry_failed", [False, True])
def test_take_over(facts: Facts, *, retry_failed: bool) -> None:
    """Who may take a record over is what the table says."""
    allowed = {"always", "opt-in"} if retry_failed else {"always"}
    assert is_takeable(facts, retry_failed=retry_failed) is (
        row_of(facts)["taken"] in allowed
    )


@every_record
def test_expiry(facts: Facts) -> None:
    """Reusable records are marked as expired once, the marked ones not again."""
    marked = any(rule.matches(facts) for rule in EXPIRABLE)
    due = row_of(facts)["verdict"] == "expired_reusable"
    assert marked is (due and facts.status is not Status.EXPIRED)


@every_record
def test_nothing_runs_again_after_an_effect(facts: Facts) -> None:
    """While its key lives, a record with effects is never taken over."""
    if facts.effects and not facts.gone and facts.status is not Status.EXPIRED:
        assert not is_takeable(facts, retry_failed=True)


@every_record
def test_open_step_is_never_forgotten(facts: Facts) -> None:
    """Nothing but an answer or a settlement ends the life of a key with an open step."""
    if facts.open_step and facts.status in {Status.PROCESSING, Status.FAILED}:
        assert not is_takeable(facts, retry_failed=True)
        assert not any(rule.matches(facts) for rule in EXPIRABLE)


@every_record
def test_another_request_never_takes_a_living_key(facts: Facts) -> None:
    """While the key lives, only the same request can run under it."""
    if not facts.same and not facts.gone and facts.status is not Status.EXPIRED:
        assert not is_takeable(facts, retry_failed=True)
        assert decide(facts) is Verdict.REQUEST_HASH_CONFLICT


def test_statuses() -> None:
    """The states of a record are the specified ones."""
    assert [s.value for s in Status] == ["processing", "succeeded", "failed", "expired"]


def test_verdicts() -> None:
    """The words of diagnose are the specified ones, and claimed is only a decision's."""
    assert {verdict.value for verdict in Verdict} == {
        "claimed",
        "missing",
        "replayable",
        "request_hash_conflict",
        "in_progress",
        "lease_lapsed",
        "outcome_unknown",
        "failed_retry_requires_opt_in",
        "expired_reusable",
    }


def test_every_rule_is_needed() -> None:
    """No rule is without a record that it decides on."""
    assert all(any(rule.matches(facts) for facts in ALL_FACTS) for rule in RULES)


SCOPE: dict[str, Any] = {
    "tenant_id": "t1",
    "user_id": "u1",
    "route": "POST /accounts",
    "idempotency_key": "k",
}
LENGTHS = {"tenant_id": 64, "user_id": 128, "route": 255, "idempotency_key": 255}
UNSTORABLE = ["a\0b", "\0", "\ud800", "a\udfff"]
NO_TEXT: list[Any] = [None, 1, 1.5, True, b"x", ["x"], uuid.UUID(int=1)]


def test_lengths() -> None:
    """The parts of a scope are as long as documented, and fit MySQL's index."""
    assert SCOPE_LENGTHS == LENGTHS
    assert 4 * sum(SCOPE_LENGTHS.values()) <= 3072


@pytest.mark.parametrize(("part", "length"), LENGTHS.items())
@pytest.mark.parametrize("letter", ["x", "é", "\U0001f600"])
def test_longest_scope(part: str, length: int, letter: str) -> None:
    """Each part may have its full length in characters, whatever their bytes."""
    scope = Scope(**{**SCOPE, part: letter * length})
    assert getattr(scope, part) == letter * length


@pytest.mark.parametrize(("part", "length"), LENGTHS.items())
def test_too_long_scope_is_refused(part: str, length: int) -> None:
    """A longer part is refused, never shortened."""
    error = IdempotencyKeyInvalid if part == "idempotency_key" else ValueError
    with pytest.raises(error, match=f"{length + 1} characters"):
        Scope(**{**SCOPE, part: "x" * (length + 1)})


@pytest.mark.parametrize("part", LENGTHS)
@pytest.mark.parametrize("value", [*UNSTORABLE, *NO_TEXT])
def test_unstorable_scope_is_refused(part: str, value: Any) -> None:
    """What not every database can keep unchanged is refused before any SQL."""
    error = IdempotencyKeyInvalid if part == "idempotency_key" else ValueError
    with pytest.raises(error, match=part):
        Scope(**{**SCOPE, part: value})


@pytest.mark.parametrize("part", ["tenant_id", "user_id"])
def test_absent_caller_is_the_empty_text(part: str) -> None:
    """No tenant and no user are the empty text, since NULLs never collide."""
    assert getattr(Scope(**{**SCOPE, part: ""}), part) == ""


def test_empty_key_is_refused() -> None:
    """There is no record without a key."""
    with pytest.raises(IdempotencyKeyInvalid, match="empty"):
        Scope(**{**SCOPE, "idempotency_key": ""})


@pytest.mark.parametrize("part", LENGTHS)
@pytest.mark.parametrize("other", ["K", "k ", " k", "ä", "a\u0308"])
def test_scopes_are_never_folded(part: str, other: str) -> None:
    """Parts that differ in case, blanks or code points are different scopes."""
    assert Scope(**{**SCOPE, part: other}) != Scope(**{**SCOPE, part: "k"})
    assert getattr(Scope(**{**SCOPE, part: other}), part) == other


def test_scope_is_frozen_and_keyword_only() -> None:
    """A scope is a value."""
    scope = Scope(**SCOPE)
    with pytest.raises(FrozenInstanceError):
        scope.user_id = "u2"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Scope("t1", "u1", "r", "k")  # type: ignore[call-arg]
    assert scope == Scope(**SCOPE)
    assert hash(scope) == hash(Scope(**SCOPE))


@pytest.mark.parametrize("value", ["", "x", "x" * 5, "é" * 5, "\x01", "\x7f"])
def test_check_text_returns_what_it_was_given(value: str) -> None:
    """A text that can be kept is returned as it is."""
    assert check_text("name", value, 5) is value


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("x" * 6, "'name' has 6 characters; at most 5 are kept"),
        ("a\0", "'name' contains NUL or half a surrogate pair"),
        ("\ud83d", "'name' contains NUL or half a surrogate pair"),
        (b"x", "'name' must be a str, not bytes"),
        (None, "'name' must be a str, not NoneType"),
        (5, "'name' must be a str, not int"),
    ],
)
def test_check_text_names_the_fault(value: Any, fault: str) -> None:
    """A text that cannot be kept is refused with its name and its fault."""
    with pytest.raises(ValueError, match=f"^{fault}$"):
        check_text("name", value, 5)


def claim(operation: int = 1, **values: Any) -> Claim:
    """Return a claim of an operation."""
    facts = {
        "record_id": uuid.UUID(int=100),
        "operation_id": uuid.UUID(int=operation),
        "owner_token": uuid.UUID(int=200),
        "scope": Scope(**SCOPE),
        "request_hash": "v1:x",
        "ttl_seconds": 60.0,
        **values,
    }
    return Claim(**facts)


def test_derived_id_is_stable() -> None:
    """The same operation and names give the same UUID in every process and release."""
    derived = claim().derive_id("report")
    assert derived == "02841424-d7d8-5de3-aa44-e3298b7eeaed"
    assert uuid.UUID(derived).version == 5


@pytest.mark.parametrize(
    "change",
    [
        {"attempt": 2},
        {"owner_token": uuid.UUID(int=9)},
        {"record_id": uuid.UUID(int=9)},
        {"request_hash": "v1:y"},
        {"task_id": "t"},
        {"scope": Scope(**{**SCOPE, "idempotency_key": "other"})},
    ],
    ids=lambda change: next(iter(change)),
)
def test_derived_id_belongs_to_the_operation_alone(change: dict[str, Any]) -> None:
    """A later attempt, by whichever owner, derives the same id."""
    assert replace(claim(), **change).derive_id("x") == claim().derive_id("x")


def test_derived_id_changes_with_the_operation() -> None:
    """A reused key gets new ids downstream."""
    assert claim(1).derive_id("x") != claim(2).derive_id("x")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("a",), ("b",)),
        (("a", "b"), ("b", "a")),
        (("ab",), ("a", "b")),
        (("a", "b"), ("a", "b", "")),
        (("a",), ("A",)),
        (("",), ()),
        (("a\0b",), ("a", "b")),
    ],
)
def test_derived_id_changes_with_the_names(
    first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    """Other names are another id."""
    assert claim().derive_id(*first) != claim().derive_id(*second)


def record(**values: Any) -> RecordView:
    """Return a record as it was read."""
    now = datetime(2030, 1, 1, tzinfo=timezone.utc)
    facts: dict[str, Any] = {
        "id": uuid.UUID(int=1),
        "operation_id": uuid.UUID(int=2),
        "scope": Scope(**SCOPE),
        "request_hash": "v1:x",
        "status": Status.PROCESSING,
        "owner_token": uuid.UUID(int=3),
        "attempts": 1,
        "response": None,
        "task_id": None,
        "outbox_event_id": None,
        "failure": None,
        "effects_committed_at": None,
        "locked_until": now,
        "expires_at": now,
        "created_at": now,
        "completed_at": None,
        "lapsed": False,
        "gone": True,
        "lease_seconds_left": 1.0,
        **values,
    }
    return RecordView(**facts)


def test_facts_are_those_that_the_database_saw() -> None:
    """The times of a record are judged by the database's clock, when it was read."""
    assert facts_of(record(), "v1:x") == Facts(
        status=Status.PROCESSING,
        lapsed=False,
        effects=False,
        open_step=False,
        gone=True,
        same=True,
    )


@pytest.mark.parametrize(
    ("request_hash", "same"),
    [("v1:x", True), ("v1:y", False), (None, True), ("", False)],
)
def test_hash_of_the_request_decides_sameness(
    request_hash: str | None, *, same: bool
) -> None:
    """A request without a known hash counts as the record's own."""
    assert facts_of(record(), request_hash).same is same


def test_time_of_an_effect_is_the_effect() -> None:
    """A record with a time of its first effect has effects."""
    instant = datetime(2030, 1, 1, tzinfo=timezone.utc)
    assert facts_of(record(effects_committed_at=instant), None).effects is True


def test_open_step_is_an_effect_and_unsettled() -> None:
    """What a step did that is open may be an effect, until somebody settles it."""
    facts = facts_of(record(open_step="charge"), None)
    assert (facts.effects, facts.open_step) == (True, True)
    settled = facts_of(record(open_step="charge", resolved_by="operator"), None)
    assert (settled.effects, settled.open_step) == (True, False)


STEPS = (
    Step(name="a", state=StepState.FINISHED, result='{"id": 1}'),
    Step(name="b", state=StepState.FINISHED, result="null"),
    Step(name="c", repeatable=True),
    Step(name="d", ordinal=2, state=StepState.FAILED),
    Step(name="e"),
)


def test_steps_of_a_record_are_the_results_of_the_finished_ones() -> None:
    """``recover=`` gets what is known for certain, and cannot change it."""
    steps: Any = record(all_steps=STEPS).steps
    assert dict(steps) == {"a": {"id": 1}, "b": None}
    with pytest.raises(TypeError):
        steps["a"] = 2


def test_only_a_step_that_may_not_be_repeated_is_open() -> None:
    """A finished step, a failed one and a repeatable one leave nothing unknown."""
    assert [step.open for step in STEPS] == [False, False, False, False, True]
    assert (first_open(STEPS), first_open(STEPS[:4])) == ("e", None)


def test_only_a_step_that_failed_for_certain_has_not_run() -> None:
    """A key with any other step is not freed."""
    assert [have_run((step,)) for step in STEPS] == [True, True, True, False, True]
    assert have_run(STEPS)
