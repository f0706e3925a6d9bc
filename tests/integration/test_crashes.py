"""A process that is killed in the middle of a call, and the next request."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event

from tests.shop import Shop

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.databases import Database


def _die(*_arguments: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def in_view(shop: Shop) -> None:
    """Die after the claim, with an uncommitted row."""

    def view() -> None:
        shop.add()
        _die()

    shop.view(view)


def before_commit(shop: Shop) -> None:
    """Die when the record is written, just before COMMIT."""

    def before_execute(_c: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if statement.startswith("UPDATE idempotency_record"):
            event.listen(engine, "after_cursor_execute", _die)

    with shop.app.app_context():
        engine = shop.db.engine
    event.listen(engine, "before_cursor_execute", before_execute)
    shop.creating_view()


def after_own_commit(shop: Shop) -> None:
    """Die after the view has committed by itself."""

    def view() -> None:
        shop.add()
        shop.db.session.commit()
        _die()

    shop.view(view)


def before_the_answer_leaves(shop: Shop) -> None:
    """Die after the one commit, before the client gets the answer."""
    shop.creating_view()
    shop.app.after_request(_die)


def _crash(database: Database, set_up: Callable[[Shop], None]) -> None:
    shop = Shop(database)
    set_up(shop)
    shop.post()


#: Where it dies: accounts then, and status and accounts of the next request.
CRASHES: dict[Callable[[Shop], None], tuple[list[str], int, list[str]]] = {
    in_view: ([], 201, ["first"]),
    before_commit: ([], 201, ["first"]),
    after_own_commit: (["first"], 409, ["first"]),
    before_the_answer_leaves: (["first"], 201, ["first"]),
}


@pytest.mark.parametrize("set_up", CRASHES)
def test_next_request_after_a_kill(
    database: Database, shop: Shop, set_up: Callable[[Shop], None]
) -> None:
    """After the lease the effect exists once, or the outcome is said to be unknown."""
    then, status, finally_there = CRASHES[set_up]
    process = multiprocessing.get_context("spawn").Process(
        target=_crash, args=(database, set_up)
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert shop.accounts() == then
    shop.creating_view()
    record = shop.record()
    assert record is not None
    if record.status.value == "processing":
        assert shop.post().status_code == 409
        shop.lapse()
    assert shop.post().status_code == status
    assert shop.accounts() == finally_there
