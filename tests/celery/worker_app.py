"""The shop whose tasks are run by workers in processes of their own."""

from __future__ import annotations

import json
import os
from typing import Any

from celery_integration import IdempotentTask, init_celery
from tests.databases import Database
from tests.servers import ask_hook
from tests.shop import Shop

LEASE_SECONDS = 2

shop = Shop(
    Database("postgresql", os.environ["TASK_SHOP_DATABASE"]),
    IDEMPOTENCY_LEASE=LEASE_SECONDS,
    CELERY=json.loads(os.environ["TASK_SHOP_CELERY"]),
)
celery = init_celery(shop.app)


@celery.task(base=IdempotentTask, bind=True, name="add", max_retries=0)
def add(task: Any, name: str, port: int | None = None) -> list[Any]:
    """Add an account, and wait for a hook with the row not committed."""
    shop.add(name)
    if port is not None:
        ask_hook(port)
    return [name, task.request.retries]


@celery.task(base=IdempotentTask, bind=True, name="retry")
def retry(task: Any, name: str) -> list[Any]:
    """Add an account, and start again once."""
    shop.add(name)
    if task.request.retries == 0:
        raise task.retry(countdown=0)
    return [name, task.request.retries]


@celery.task(base=IdempotentTask, name="follow")
def follow(results: list[Any]) -> list[Any]:
    """Add an account for what was done before."""
    shop.add(f"after {results[0]}")
    return results
