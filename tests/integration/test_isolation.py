"""Whole calls at each isolation level, however an application sets it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from flask import request
from sqlalchemy import event, text

from flask_idempotency import fingerprint
from tests.shop import elsewhere, is_replay

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.backends import Backends
    from tests.shop import Shop

SNAPSHOTS = "innodb_snapshot_isolation = ON"


def by_engine(level: str) -> dict[str, Any]:
    """Set the level by SQLAlchemy's option."""
    return {"isolation_level": level}


def by_driver(level: str) -> dict[str, Any]:
    """Set what is the default of each connection."""
    name = level.lower().replace(" ", "\\ ")
    return {"connect_args": {"options": f"-c default_transaction_isolation={name}"}}


def by_command(assignments: str) -> dict[str, Any]:
    """Set it by the first statement on each connection."""
    return {"connect_args": {"init_command": f"SET {assignments}"}}


SETTINGS = {
    "postgresql-read committed": by_engine("READ COMMITTED"),
    "postgresql-repeatable read": by_engine("REPEATABLE READ"),
    "postgresql-serializable": by_engine("SERIALIZABLE"),
    "postgresql-serializable by default": by_driver("SERIALIZABLE"),
    "postgresql-repeatable read by a listener": {},
    "mariadb-read committed": by_engine("READ COMMITTED"),
    "mariadb-serializable": by_engine("SERIALIZABLE"),
    "mariadb-snapshots": by_command(SNAPSHOTS),
    "mariadb-serializable by a command": by_command(
        f"tx_isolation = 'SERIALIZABLE', {SNAPSHOTS}"
    ),
}


@pytest.fixture
def level_shop(
    make_shop: Callable[..., Shop], backends: Backends, setting: str
) -> Shop:
    """Give a shop at a level, whose every request has an open snapshot."""
    # Nobody writes there: MariaDB locks what is read at the highest level.
    backends.execute("CREATE TABLE visitor (id INT PRIMARY KEY)")
    shop = make_shop(SQLALCHEMY_ENGINE_OPTIONS=SETTINGS[setting])
    if "listener" in setting:
        _listen(shop)

    @shop.app.before_request
    def load_user() -> None:
        shop.db.session.execute(text("SELECT * FROM visitor"))

    return shop


def _listen(shop: Shop) -> None:
    with shop.app.app_context():
        engine = shop.db.engine

    @event.listens_for(engine, "connect")
    def connect(raw: Any, _record: Any) -> None:
        raw.execute(
            "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ"
        )
        raw.commit()

    engine.dispose()


at_each_level = pytest.mark.parametrize(
    ("database", "setting"),
    [(setting.partition("-")[0], setting) for setting in SETTINGS],
    indirect=["database"],
    ids=SETTINGS,
)


@at_each_level
def test_calls_end_as_they_do_everywhere(level_shop: Shop) -> None:
    """Answers of all kinds, commits of the view and a lapsed lease are as ever."""
    shop = level_shop

    def view() -> Any:
        answer = shop.create()
        if request.args.get("commit"):
            shop.db.session.commit()
            shop.add(f"{answer[0]['name']} again")
        if request.args.get("raise") and len(shop.runs) % 2:
            raise ValueError
        return (
            answer if "status" not in request.args else ("no", request.args["status"])
        )

    def ask(key: str, **query: str) -> tuple[int, bool]:
        answer = shop.post(key, key=key, query_string=query)
        return answer.status_code, is_replay(answer)

    shop.view(view, retry_failed=True)
    assert [ask("a"), ask("a")] == [(201, False), (201, True)]
    assert shop.post("other", key="a").status_code == 422
    assert [ask("b", commit="1") for _ in range(2)] == [(201, False), (201, True)]
    assert [ask("c", status="404") for _ in range(2)] == [(404, False), (404, True)]
    assert [ask("d", status="429") for _ in range(2)] == [(429, False)] * 2
    shop.runs.clear()
    assert [ask("e", **{"raise": "1"})[0] for _ in range(3)] == [500, 201, 201]
    assert shop.accounts() == ["a", "b", "b again", "e"]


@pytest.mark.torture
@at_each_level
def test_running_call_has_its_key(level_shop: Shop) -> None:
    """Beside a running call a duplicate waits, and a late owner commits nothing."""
    shop = level_shop
    seen: list[int] = []

    def view() -> Any:
        if not shop.runs:
            shop.add("late")
            elsewhere(lambda: shop.lapse("lapsed"))
            seen.append(elsewhere(lambda: shop.post(key="lapsed")).status_code)
            return "late"
        answer = shop.create()
        if request.headers.get("Idempotency-Key") == "waited":
            started.set()
            assert go_on.wait(30)
        return answer

    started, go_on = threading.Event(), threading.Event()
    shop.view(view, wait=20)
    late = shop.post(key="lapsed")
    assert (late.status_code, is_replay(late), seen) == (201, True, [201])
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(shop.post, "second", key="waited")
        assert started.wait(30)
        waiter = pool.submit(shop.post, "second", key="waited")
        go_on.set()
        answers = [first.result(), waiter.result()]
    assert [(a.status_code, is_replay(a)) for a in answers] == [
        (201, False),
        (201, True),
    ]
    assert shop.accounts() == ["first", "second"]


@pytest.mark.torture
@at_each_level
def test_inner_calls_are_part_of_the_whole(level_shop: Shop) -> None:
    """An inner call is committed with the outer one, fails with it, and is replayed."""
    shop = level_shop

    def view() -> Any:
        shop.add("outer")
        value = shop.idempotency.guard.run(
            shop.scope(route="inner"), fingerprint(1), lambda: shop.add("inner")
        ).value
        if len(shop.runs) == 2:
            raise ValueError
        return {"inner": value}

    shop.view(view, retry_failed=True)
    assert (shop.post().status_code, shop.accounts()) == (500, [])
    assert [shop.post().json for _ in range(2)] == [{"inner": "inner"}] * 2
    assert shop.accounts() == ["outer", "inner"]
    assert shop.status(route="inner") == "succeeded"
