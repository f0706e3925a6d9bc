"""Behind PgBouncer in transaction mode, with the options that docs/databases.md names."""

from __future__ import annotations

import random
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from tests.pooler import ABSENT, PROGRAM, Pooler
from tests.shop import is_replay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.databases import Database
    from tests.shop import Shop

pytestmark = [
    pytest.mark.parametrize("database", ["postgresql"], indirect=True),
    pytest.mark.skipif(PROGRAM is None, reason=ABSENT),
]

ENGINE_OPTIONS = {"connect_args": {"prepare_threshold": None}}
THREADS = 4


@pytest.fixture
def make_pooled(
    open_shop: Callable[..., Shop], shop: Shop, tmp_path: Path
) -> Iterator[Callable[[int], Shop]]:
    """Make an application behind a pooler with that many connections."""
    poolers: list[Pooler] = []

    def make(pool_size: int) -> Shop:
        poolers.append(Pooler(shop.database, tmp_path, pool_size=pool_size))
        pooled = open_shop(
            poolers[-1].database, SQLALCHEMY_ENGINE_OPTIONS=ENGINE_OPTIONS
        )
        pooled.view(answering(pooled), retry_failed=True)
        return pooled

    yield make
    for pooler in poolers:
        pooler.close()


def answering(shop: Shop) -> Callable[[], Any]:
    """Return a view that ends as the name of the account says."""

    def view() -> Any:
        answer = shop.create()
        name = answer[0]["name"]
        if name.startswith("commits"):
            shop.db.session.commit()
        if name.startswith("raises"):
            raise ValueError(name)
        return answer if "answers" not in name else (name, int(name[-3:]))

    return view


STATUSES = {"plain": 201, "commits": 201, "raises": 500}


def mixed(shop: Shop, number: int) -> None:
    """Do one of all that the library does, and check what comes of it."""
    kind = ("plain", "commits", "raises", "refuses", "renews", "resumes")[number % 6]
    key = f"{kind}{number}"
    if kind == "renews":
        with shop.app.app_context():
            tokens = [uuid.uuid4() for _ in range(3)]
            shop.idempotency.store.renew(dict.fromkeys(tokens, 30.0))
            shop.idempotency.store.forget_leases(tokens)
        return
    if kind == "resumes":
        with shop.app.app_context():
            shop.idempotency.store.claim(shop.scope(key), "h")
        shop.lapse(key)
        shop.outlive(key)
    if kind == "refuses":
        code = random.choice([404, 429, 503])  # noqa: S311 - no secret
        first, again = shop.post(f"{key}answers{code}", key=key), None
        assert first.status_code == code
        return
    first, again = shop.post(key, key=key), shop.post(key, key=key)
    expected = STATUSES.get(kind, 201)
    assert (first.status_code, again.status_code) == (expected, expected)
    assert is_replay(again) == (kind != "raises")


def test_everything_works_through_a_pooler(make_pooled: Callable[[int], Shop]) -> None:
    """Hundreds of calls of every kind from several threads share two connections."""
    shop = make_pooled(2)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda number: mixed(shop, number), range(300)))
    kinds = [name.rstrip("0123456789") for name in shop.accounts()]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "plain": 50,
        "commits": 50,
        "resumes": 50,
    }


SESSION = {
    "settings": "SELECT name, setting FROM pg_settings ORDER BY name",
    "prepared": "SELECT name FROM pg_prepared_statements",
    "channels": "SELECT * FROM pg_listening_channels()",
    "locks": "SELECT locktype, mode FROM pg_locks WHERE locktype = 'advisory'",
    "tables": "SELECT relname FROM pg_class WHERE relpersistence = 't'",
}


def session_state(database: Database) -> dict[str, Any]:
    """Return whatever a session of the application may be set to, and by whom."""
    engine = create_engine(database.url, poolclass=NullPool, **ENGINE_OPTIONS)
    with engine.begin() as connection:
        state: dict[str, Any] = {
            name: [tuple(row) for row in connection.execute(text(query))]
            for name, query in SESSION.items()
        }
        state["pid"] = connection.execute(text("SELECT pg_backend_pid()")).scalar()
        return state


def test_nothing_leaks_into_sessions_of_the_application(
    make_pooled: Callable[[int], Shop],
) -> None:
    """The one connection of all is as it was: no setting, lock or statement stays."""
    shop = make_pooled(1)
    before = session_state(shop.database)
    for number in range(12):
        mixed(shop, number)
        assert session_state(shop.database) == before
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda number: mixed(shop, number), range(12, 36)))
    assert [session_state(shop.database) for _ in range(10)] == [before] * 10
    settings = dict(before["settings"])
    assert settings["synchronous_commit"] == "on"
    assert settings["lock_timeout"] == "0"
