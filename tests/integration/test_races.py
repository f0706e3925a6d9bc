"""Rivals for one key, released by a barrier: one effect, a right answer for all."""

from __future__ import annotations

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from flask_idempotency.config import Config
from flask_idempotency.fingerprint import Fingerprint
from flask_idempotency.request_hash import request_hash
from tests.shop import Shop

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.databases import Database

#: Keys of one round.
RIVALS, KEYS = 20, 5


def together(function: Callable[[], int], rivals: int) -> list[int]:
    """Call `function` in threads that start at the same moment."""
    barrier = threading.Barrier(rivals, timeout=30)

    def run(_number: int) -> int:
        barrier.wait()
        return function()

    with ThreadPoolExecutor(rivals) as pool:
        return list(pool.map(run, range(rivals)))


def assert_one_effect(shop: Shop, answers: list[int], effects: int) -> None:
    """Check one more row, at least one 201, and no answer but 201 and 409."""
    assert len(shop.accounts()) == effects
    assert 201 in answers
    assert set(answers) <= {201, 409}


@pytest.mark.slow
def test_twenty_threads_one_effect_for_each_key(shop: Shop, rounds: int) -> None:
    """However close the requests are, each key takes effect once."""
    shop.creating_view()
    for number in range(rounds * KEYS):
        name = f"n{number}"
        answers = together(
            lambda name=name: shop.post(name, key=name).status_code,  # type: ignore[misc]
            RIVALS,
        )
        assert_one_effect(shop, answers, number + 1)


def test_rivals_with_other_bodies_are_conflicts(shop: Shop) -> None:
    """Of two bodies under one key, one takes effect and the other is refused."""
    shop.creating_view()
    names = iter("ab" * (RIVALS // 2))
    answers = together(lambda: shop.post(next(names)).status_code, RIVALS)
    assert len(shop.accounts()) == 1
    assert set(answers) <= {201, 409, 422}
    assert answers.count(422) == RIVALS // 2


def test_an_expired_key_is_taken_over_once(shop: Shop) -> None:
    """Many requests after the end of a key's life start one new operation."""
    shop.creating_view()
    for number in range(10):
        name = f"n{number}"
        if number:
            shop.outlive()
        answers = together(
            lambda name=name: shop.post(name).status_code,  # type: ignore[misc]
            10,
        )
        assert_one_effect(shop, answers, number + 1)


def test_a_lapsed_lease_is_taken_over_once(shop: Shop) -> None:
    """Many requests after a crash run the operation once."""
    shop.creating_view()
    for number in range(10):
        key = f"k{number}"
        leave_claimed(shop, key)
        answers = together(
            lambda key=key: shop.post(key, key=key).status_code,  # type: ignore[misc]
            10,
        )
        assert_one_effect(shop, answers, number + 1)


def test_processes_share_a_key(
    database: Database, make_shop: Callable[..., Shop]
) -> None:
    """Requests in processes of their own are one effect, too."""
    shop = make_shop()
    context = multiprocessing.get_context("spawn")
    with context.Pool(
        4, _serve_in_process, (database, context.Barrier(4, timeout=30))
    ) as pool:
        for number in range(5):
            answers = pool.map(_post_in_process, [f"n{number}"] * 4, chunksize=1)
            assert_one_effect(shop, answers, number + 1)


_process: dict[str, Any] = {}


def _serve_in_process(database: Database, barrier: Any) -> None:
    shop = Shop(database)
    shop.creating_view()
    _process.update(shop=shop, barrier=barrier)


def _post_in_process(name: str) -> int:
    _process["barrier"].wait()
    return int(_process["shop"].post(name, key=name).status_code)


def leave_claimed(shop: Shop, key: str) -> None:
    """Leave a record whose owner vanished and whose lease lapsed."""
    with shop.app.test_request_context("/accounts", method="POST", json={"name": key}):
        shop.idempotency.store.claim(
            shop.scope(key), request_hash("POST /accounts", Config(), Fingerprint())
        )
    shop.lapse(key)
