"""Fixtures: shops with tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .bench import Bench

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.shop import Shop


@pytest.fixture
def bench(make_quick: Callable[..., Shop]) -> Bench:
    """Give a shop on SQLite with tasks."""
    return Bench(make_quick())
