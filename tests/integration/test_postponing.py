"""A task's run that another message repeats leaves its record without an owner."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from flask_idempotency import Claim, Failure, Verdict
from flask_idempotency.lifecycle import Retried, Step

if TYPE_CHECKING:
    from tests.shop import Shop

RETRIED = Retried(
    retries=1,
    request_hash="v1:second",
    after_effects=False,
    otherwise=Failure(reason="retried"),
)


def claimed(shop: Shop, request_hash: str = "v1:first") -> Claim:
    """Claim the record."""
    claim = shop.idempotency.store.claim(shop.scope(), request_hash).claim
    assert claim is not None
    return claim


def test_next_message_takes_it_over(shop: Shop) -> None:
    """It finds the retries that it must have, and no crash is counted."""
    with shop.app.app_context():
        store = shop.idempotency.store
        first = claimed(shop)
        assert store.postpone(first, RETRIED)
        record = store.look(shop.scope())
        assert record is not None
        assert (record.lapsed, record.owner_token, record.retries) == (True, None, 1)
        stale = store.claim(shop.scope(), "v1:first")
        assert stale.outcome is Verdict.REQUEST_HASH_CONFLICT
        second = claimed(shop, "v1:second")
        assert (second.operation_id, second.attempt, second.retries) == (
            first.operation_id,
            1,
            1,
        )


def test_only_its_owner_postpones(shop: Shop) -> None:
    """A late owner changes nothing."""
    with shop.app.app_context():
        store = shop.idempotency.store
        first = claimed(shop)
        store.hand_back(first)
        claimed(shop)
        assert not store.postpone(first, RETRIED)


@pytest.mark.parametrize("after_effects", [False, True])
def test_what_stayed(shop: Shop, *, after_effects: bool) -> None:
    """After a commit there is a next run only where the task allows for it."""
    with shop.app.app_context():
        store = shop.idempotency.store
        claim = claimed(shop)
        store.mark_effects(claim)
        retried = replace(RETRIED, after_effects=after_effects)
        assert store.postpone(claim, retried) is after_effects
        again = store.claim(shop.scope(), "v1:second")
        assert (again.claim is not None) is after_effects


@pytest.mark.parametrize("after_effects", [False, True])
def test_open_step(shop: Shop, *, after_effects: bool) -> None:
    """A step that may have taken effect is never repeated."""
    with shop.app.app_context():
        store = shop.idempotency.store
        claim = claimed(shop)
        store.write_steps(claim, (Step(name="charge"),))
        assert not store.postpone(claim, replace(RETRIED, after_effects=after_effects))


def test_new_operation_starts_with_the_first_try(shop: Shop) -> None:
    """A key that is used again after its end knows nothing of earlier retries."""
    with shop.app.app_context():
        store = shop.idempotency.store
        store.postpone(claimed(shop), RETRIED)
        shop.outlive()
        assert claimed(shop, "v1:third").retries == 0
