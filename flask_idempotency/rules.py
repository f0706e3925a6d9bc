"""
The table that decides on a request that finds a record.

The conditions of the store's statements are made from its rows, too, so that an UPDATE
repeats exactly what was decided on.
"""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from .lifecycle import Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .lifecycle import RecordView

# The version of the rules at the start of a hash; see ``fingerprint``.
_RULES_OF = re.compile(r"v[0-9]+:")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What decides on a request that finds a record, all by the database's clock."""

    status: Status
    #: ``locked_until`` has passed.
    lapsed: bool
    #: Effects are possible: a part of the operation is durable
    #: (``effects_committed_at`` is set), or a step is open.
    effects: bool
    #: A step that may not be repeated was started and not finished, and nobody has
    #: settled what became of it.
    open_step: bool
    #: ``expires_at`` has passed.
    gone: bool
    #: The request hash is the record's.
    same: bool


@dataclass(frozen=True)
class Rule:
    """One row of the decision table; ``None`` means "whatever it is"."""

    status: Status
    verdict: Verdict
    _: KW_ONLY
    lapsed: bool | None = None
    effects: bool | None = None
    open_step: bool | None = None
    gone: bool | None = None
    same: bool | None = None

    def conditions(self) -> dict[str, bool]:
        """Return the facts that this rule asks for, besides the status."""
        names = ("lapsed", "effects", "open_step", "gone", "same")
        return {n: getattr(self, n) for n in names if getattr(self, n) is not None}

    def matches(self, facts: Facts) -> bool:
        """Tell whether the rule speaks of a record with these facts."""
        return self.status is facts.status and all(
            getattr(facts, name) is wanted for name, wanted in self.conditions().items()
        )


_P, _S, _F, _E = Status.PROCESSING, Status.SUCCEEDED, Status.FAILED, Status.EXPIRED

#: The decision table. Exactly one rule matches any record. The conditions of the
#: store's UPDATEs are made from these same rows.
RULES: tuple[Rule, ...] = (
    Rule(_P, Verdict.IN_PROGRESS, lapsed=False, same=True),
    Rule(_P, Verdict.REQUEST_HASH_CONFLICT, lapsed=False, same=False),
    Rule(_P, Verdict.LEASE_LAPSED, lapsed=True, effects=False, gone=False, same=True),
    Rule(_P, Verdict.OUTCOME_UNKNOWN, lapsed=True, effects=True, gone=False, same=True),
    Rule(_P, Verdict.REQUEST_HASH_CONFLICT, lapsed=True, gone=False, same=False),
    Rule(_P, Verdict.OUTCOME_UNKNOWN, lapsed=True, effects=True, gone=True),
    Rule(_P, Verdict.EXPIRED_REUSABLE, lapsed=True, effects=False, gone=True),
    Rule(_S, Verdict.REPLAYABLE, gone=False, same=True),
    Rule(_S, Verdict.REQUEST_HASH_CONFLICT, gone=False, same=False),
    Rule(_S, Verdict.EXPIRED_REUSABLE, gone=True),
    Rule(_F, Verdict.FAILED_RETRY_REQUIRES_OPT_IN, gone=False, same=True),
    Rule(_F, Verdict.REQUEST_HASH_CONFLICT, gone=False, same=False),
    # An answer was given, so what was committed is done with; what a step did is not.
    Rule(_F, Verdict.EXPIRED_REUSABLE, open_step=False, gone=True),
    Rule(_F, Verdict.OUTCOME_UNKNOWN, open_step=True, gone=True),
    Rule(_E, Verdict.EXPIRED_REUSABLE),
)

#: Rows that let a request take the record over.
TAKEABLE = tuple(
    rule
    for rule in RULES
    if rule.verdict in {Verdict.LEASE_LAPSED, Verdict.EXPIRED_REUSABLE}
)
#: The row that ``retry_failed`` adds: never once a part of the operation stayed.
RETRYABLE = Rule(
    _F, Verdict.FAILED_RETRY_REQUIRES_OPT_IN, effects=False, gone=False, same=True
)
#: Rows of an unknown outcome.
UNKNOWN = tuple(rule for rule in RULES if rule.verdict is Verdict.OUTCOME_UNKNOWN)
#: Rows that ``expire`` marks.
EXPIRABLE = tuple(
    rule
    for rule in RULES
    if rule.verdict is Verdict.EXPIRED_REUSABLE and rule.status is not Status.EXPIRED
)


def decide(facts: Facts) -> Verdict:
    """Return what a record with these facts means for the next request."""
    return next(rule.verdict for rule in RULES if rule.matches(facts))


def is_takeable(facts: Facts, *, retry_failed: bool) -> bool:
    """Tell whether a request may take a record with these facts over."""
    rules: Iterable[Rule] = (*TAKEABLE, RETRYABLE) if retry_failed else TAKEABLE
    return any(rule.matches(facts) for rule in rules)


def comparable_hash(request_hash: str, recorded: str) -> str:
    """
    Return what to compare with the recorded hash of an operation.

    Hashes that two releases made by different rules (``v1:…``, ``v2:…``) say nothing
    about each other. The key alone then decides, as while a release is rolled out.
    """
    given, kept = _RULES_OF.match(request_hash), _RULES_OF.match(recorded)
    if given and kept and given[0] != kept[0]:
        return recorded
    return request_hash


def facts_of(record: RecordView, request_hash: str | None) -> Facts:
    """Return what decides on a request with this hash (None: on the same one)."""
    if request_hash is not None:
        request_hash = comparable_hash(request_hash, record.request_hash)
    return Facts(
        status=record.status,
        lapsed=record.lapsed,
        effects=bool(record.effects_committed_at or record.open_step),
        open_step=bool(record.open_step) and record.resolved_by is None,
        gone=record.gone,
        same=request_hash is None or request_hash == record.request_hash,
    )


def verdict_on(record: RecordView | None, request_hash: str | None) -> Verdict:
    """Return what a record, or that there is none, means for a request."""
    return decide(facts_of(record, request_hash)) if record else Verdict.MISSING
