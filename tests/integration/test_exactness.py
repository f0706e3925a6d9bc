"""Bytes and instants: what the database must neither fold nor shift."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from flask_idempotency import Scope

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.shop import Shop

LOOK_ALIKES = ["abc", "ABC", "abc ", "äbc", "a\u0308bc", "abc\u3000", "\uff41bc"]


@pytest.mark.parametrize("part", ["tenant_id", "user_id", "route", "idempotency_key"])
def test_scopes_compare_bytes(shop: Shop, part: str) -> None:
    """Texts that only look or sort alike are different scopes."""
    base = {"tenant_id": "t", "user_id": "u", "route": "r", "idempotency_key": "k"}
    with shop.app.app_context():
        for value in LOOK_ALIKES:
            scope = Scope(**{**base, part: value})
            assert shop.idempotency.store.claim(scope, "hash").claim is not None
        for value in LOOK_ALIKES:
            record = shop.idempotency.store.look(Scope(**{**base, part: value}))
            assert record is not None
            assert getattr(record.scope, part) == value


def test_longest_scope_is_kept_whole(shop: Shop) -> None:
    """Each part may have its full length in four-byte characters."""
    scope = Scope(
        tenant_id="\U0001f600" * 64,
        user_id="\U0001f600" * 128,
        route="\U0001f600" * 255,
        idempotency_key="\U0001f600" * 255,
    )
    with shop.app.app_context():
        assert shop.idempotency.store.claim(scope, "hash").claim is not None
        record = shop.idempotency.store.look(scope)
    assert record is not None
    assert record.scope == scope


def test_request_hash_compares_bytes(shop: Shop) -> None:
    """Hashes that differ in case are different requests."""
    with shop.app.app_context():
        shop.idempotency.store.claim(shop.scope(), "abc")
        decision = shop.idempotency.store.claim(shop.scope(), "ABC")
    assert decision.outcome.value == "request_hash_conflict"


def test_null_in_a_scope_is_refused_by_the_schema(shop: Shop) -> None:
    """No row without a tenant can exist, since NULLs never collide."""
    with shop.app.app_context():
        shop.idempotency.store.claim(shop.scope(), "hash")
        with pytest.raises(IntegrityError), shop.db.engine.begin() as connection:
            connection.execute(text("UPDATE idempotency_record SET tenant_id = NULL"))


@pytest.mark.parametrize("size", [0, 1, 256, 257, 100_000])
def test_bodies_come_back_as_they_were(shop: Shop, size: int) -> None:
    """Any bytes are kept exactly, compressed or not."""
    body = bytes(range(256)) * (size // 256 + 1)
    shop.view(lambda: (body[:size], 200))
    assert [shop.post().data for _ in range(2)] == [body[:size]] * 2


def _zone_hook(name: str) -> dict[str, Any]:
    if name == "mariadb":
        return {"connect_args": {"init_command": "SET time_zone = '+05:00'"}}
    if name == "postgresql":
        return {"connect_args": {"options": "-c timezone=Asia/Tokyo"}}
    return {}


def test_time_zone_of_a_connection_changes_nothing(
    make_shop: Callable[..., Shop],
) -> None:
    """Leases are seen alike from sessions in different time zones."""
    here = make_shop()
    there = make_shop(SQLALCHEMY_ENGINE_OPTIONS=_zone_hook(here.database.name))
    with here.app.app_context():
        here.idempotency.store.claim(here.scope(), "hash")
    record = there.record()
    assert record is not None
    assert not record.lapsed
    assert 25 < record.lease_seconds_left <= 30
    age = datetime.now(timezone.utc) - record.created_at
    assert abs(age) < timedelta(seconds=10)
    assert record.created_at.utcoffset() == timedelta(0)


def test_application_clock_is_not_asked(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An application whose clock is hours wrong sees the same times."""
    shop.creating_view()
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + 6 * 3600 * 10**9)
    monkeypatch.setattr(time, "time", lambda: real() / 1e9 + 6 * 3600)
    assert shop.post().status_code == 201
    record = shop.record()
    assert record is not None
    lifetime = record.expires_at - record.created_at
    assert abs(lifetime - timedelta(hours=24)) < timedelta(seconds=1)
    assert abs(datetime.now(timezone.utc) - record.created_at) < timedelta(minutes=1)
