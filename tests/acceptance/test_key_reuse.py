"""What a key stands for before and after the end of its life, and what never ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from flask_idempotency import current_idempotency, fingerprint
from tests.shop import elsewhere

from .test_cli import diagnose, outcome_unknown, report_of, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.shop import Shop

HASH = fingerprint({"n": 1})


def identity(shop: Shop, seen: list[set[str]]) -> Callable[[], str]:
    """Return a handler that notes everything by which its operation is known."""

    def handler() -> str:
        current = current_idempotency
        names = {
            str(current.task_id),
            str(current.outbox_event_id),
            current.derive_key("charge"),
        }
        record = shop.record()
        assert record is not None
        seen.append({*names, str(record.operation_id)})
        return "done"

    return handler


def call(shop: Shop, handler: Callable[[], Any]) -> bool:
    """Run a handler under the key; tell whether it was a replay."""
    with shop.app.app_context():
        result = shop.idempotency.guard.run(
            shop.scope(),
            HASH,
            handler,
            retry_failed=True,
            task_id_builder=lambda claim: claim.derive_id("task"),
            outbox_event_id_builder=lambda claim: claim.derive_id("event"),
        )
    return result.replayed


def clean_up(shop: Shop, *commands: str) -> None:
    """Run the commands as a nightly job does, with no time to wait for."""
    for command in commands:
        options = ("--older-than", "0") if command == "purge" else ()
        assert run(shop.app, command, "--yes", *options).exit_code == 0


@pytest.mark.parametrize(
    "commands", [(), ("expire",), ("expire", "purge")], ids=["over", "marked", "purged"]
)
def test_reused_key_is_another_operation(shop: Shop, commands: tuple[str, ...]) -> None:
    """Nothing that went downstream for the first operation comes up again."""
    seen: list[set[str]] = []
    handler = identity(shop, seen)
    assert not call(shop, handler)
    assert call(shop, handler)
    shop.outlive()
    clean_up(shop, *commands)
    assert not call(shop, handler)
    first, second = seen
    assert len(first) == len(second) == 4
    assert first.isdisjoint(second)


def test_operation_keeps_its_names_in_every_attempt(shop: Shop) -> None:
    """A failure that is retried, and a call taken over, are the same operation."""
    seen: list[set[str]] = []
    handler = identity(shop, seen)

    def fail() -> None:
        handler()
        raise LookupError

    def lose() -> None:
        handler()
        elsewhere(shop.lapse)
        assert not elsewhere(lambda: call(shop, handler))

    with pytest.raises(LookupError):
        call(shop, fail)
    call(shop, lose)
    assert len(seen) == 3
    assert seen[0] == seen[1] == seen[2]


def test_unknown_outcome_outlives_its_key(shop: Shop) -> None:
    """No end of its life, no expiry and no purge lets it run again."""
    outcome_unknown(shop)
    shop.creating_view()
    shop.outlive()
    for _ in range(2):
        clean_up(shop, "expire", "purge")
        assert report_of(diagnose(shop, "--json"))["diagnosis"] == "outcome_unknown"
        assert [shop.post(name).status_code for name in ("a", "b")] == [409, 409]
    assert shop.runs == []
