"""A shop whose accounts are added by tasks."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from celery_integration import IdempotentTask, init_celery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flask_idempotency import RecordView
    from tests.shop import Shop


class Bench:
    """
    A shop with Celery, whose tasks each test brings itself.

    Args:
        shop: The shop.
    """

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.celery = init_celery(shop.app)

    def task(self, function: Callable[..., Any], **options: Any) -> Any:
        """Make a task of a function that takes the task itself first."""
        function.__name__ = "work"  # Celery can do nothing with "<lambda>"
        named = {"name": "work", "bind": True, "base": IdempotentTask, **options}
        named["shared"] = False  # with the Celery applications of other tests
        return self.celery.task(**named)(function)

    def adding(self, **options: Any) -> Any:
        """Make a task that adds an account."""

        def add(_task: Any, name: str) -> dict[str, str]:
            return {"name": self.shop.add(name)}

        return self.task(add, **options)

    def record(self, key: str = "t1", **scope: str) -> RecordView | None:
        """Return the record of a run."""
        return self.shop.record(key, **{"user": "", "route": "task:work", **scope})

    def claim(self, request_hash: str, key: str = "t1") -> Any:
        """Claim a run, as a worker does that dies."""
        scope = self.shop.scope(key, user="", route="task:work")
        with self.shop.app.app_context():
            claim = self.shop.idempotency.store.claim(scope, request_hash).claim
            assert claim is not None
            return claim

    @contextlib.contextmanager
    def store(self) -> Iterator[Any]:
        """Lend the store."""
        with self.shop.app.app_context():
            yield self.shop.idempotency.store


def deliver(task: Any, *args: Any, key: str = "t1", **options: Any) -> Any:
    """Run a task for a message here and now, and return what a worker would report."""
    return task.apply(args, task_id=key, **options)


def runs(function: Callable[..., Any]) -> Any:
    """Count the runs of a function, in its attribute ``count``."""

    @functools.wraps(function)
    def counting(*args: Any, **kwargs: Any) -> Any:
        counting.count += 1  # type: ignore[attr-defined]
        return function(*args, **kwargs)

    counting.count = 0  # type: ignore[attr-defined]
    return counting
