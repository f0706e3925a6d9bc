"""What of an application's set-up weakens the guarantees, or is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flask_idempotency.exceptions import IdempotencyStoreUnavailable
from flask_idempotency.explain import short_lease
from flask_idempotency.state import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flask_idempotency.state import IdempotencyState

#: What no set-up changes: it goes past everything that the library can see.
NOT_FENCED = (
    "commits through a raw driver connection (dbapi_connection.commit())",
    "threads that a view starts without its context",
    "engines that Flask-SQLAlchemy does not know",
)


def examine(state: IdempotencyState) -> list[Finding]:
    """
    Look at the set-up of an application, and at its database.

    Args:
        state: Of the application, whose context is needed.

    Returns:
        Problems first.
    """
    others = (finding for check in state.checks for finding in check())
    findings = [*_engines(state), *_database(state), *others]
    return sorted(findings, key=lambda finding: not finding.is_problem)


def _engines(state: IdempotencyState) -> Iterator[Finding]:
    if state.bind_key is not None:
        yield Finding(
            code="separate_bind",
            message=(
                f"Records are on the bind '{state.bind_key}', so no transaction holds "
                "them together with business rows: a crash between the two leaves an "
                "unknown outcome."
            ),
        )
    for key, level in state.other_engines().items():
        name = "the default bind" if key is None else f"the bind '{key}'"
        yield Finding(
            code="other_bind",
            message=(
                f"Commits on {name} are noted on the record before, in a transaction of "
                "its own: a crash between the two leaves an unknown outcome."
            ),
        )
        if level == "AUTOCOMMIT":
            yield Finding(
                code="autocommit_bind",
                message=(
                    f"Each statement on {name} is durable at once, and nothing rolls it "
                    "back when a call fails."
                ),
            )
    if not state.store.can_renew:
        yield Finding(
            code="in_memory",
            message="SQLite in memory is for tests: it has no recovery of leases.",
        )


def _database(state: IdempotencyState) -> Iterator[Finding]:
    store = state.store
    try:
        limit = store.statement_timeout()
        unknown = store.count_unknown_outcomes()
    except IdempotencyStoreUnavailable as error:
        yield Finding(code="store_unavailable", is_problem=True, message=error.reason)
        return
    lease = state.config.lease_seconds
    if limit is not None and lease < limit:
        yield Finding(
            code="lease_below_timeout",
            is_problem=True,
            message=short_lease(lease, limit),
        )
    if unknown:
        yield Finding(
            code="outcome_unknown",
            is_problem=True,
            message=(
                f"Calls of unknown outcome: {unknown}. "
                "They stay until each is settled: 'flask idempotency resolve'."
            ),
        )
