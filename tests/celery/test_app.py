"""``init_celery``: one Celery application for a Flask application."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from celery import _state, shared_task
from celery import current_app as default_celery
from celery.signals import worker_init, worker_process_init
from flask import Flask, current_app

import celery_integration
from celery_integration import IdempotentTask, app, findings, init_celery
from flask_idempotency.exceptions import IdempotencyConfigError
from tests.acceptance.test_cli import run

from .bench import Bench

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.shop import Shop

SAFE = {"task_acks_late": True, "task_reject_on_worker_lost": True}

WITHOUT_CELERY = """
import sys
sys.modules["celery"] = None  # as if it were not installed
import celery_integration
from celery_integration import OutcomeUnknown
assert not hasattr(celery_integration, "nothing")
from celery_integration import {name}
"""


@pytest.mark.parametrize("name", sorted(celery_integration._MODULES))
def test_without_celery(name: str) -> None:
    """The package can be imported, and says how to install what is missing."""
    code = WITHOUT_CELERY.format(name=name)
    done = subprocess.run(  # noqa: S603 - our own text
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        f"ImportError: 'celery_integration.{name}' needs Celery, which is not "
        "installed: pip install 'flask-idempotency[celery]'"
    )


def test_other_missing_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only Celery's absence is explained as such."""
    monkeypatch.setitem(celery_integration._MODULES, "nothing", ".nothing")
    with pytest.raises(ModuleNotFoundError, match=r"celery_integration\.nothing"):
        _ = celery_integration.nothing


def test_every_export_exists() -> None:
    """The names of ``__all__`` can be imported."""
    for name in celery_integration.__all__:
        assert getattr(celery_integration, name)


def test_settings_context_and_shared_tasks(
    make_quick: Callable[..., Shop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery is set up by the application's configuration, and knows the application."""
    # What is shared is shared with the applications of later tests, too.
    monkeypatch.setattr(_state, "_on_app_finalizers", set())
    shop = make_quick(CELERY={"task_always_eager": True, "task_default_queue": "mine"})
    celery = init_celery(shop.app)
    assert shop.app.extensions["celery"] is celery
    assert (celery.main, celery.conf.task_default_queue) == ("shop", "mine")
    assert default_celery._get_current_object() is celery

    @shared_task
    def plain() -> str:
        return current_app.name

    @shared_task(base=IdempotentTask)
    def once() -> str:
        return current_app.name

    assert plain.delay().get() == "shop"
    assert once.delay().get() == "shop"


def test_without_settings(bench: Bench) -> None:
    """Celery has defaults for everything."""
    assert bench.celery.conf.task_always_eager is False


def test_second_call_is_refused(bench: Bench) -> None:
    """One application has one."""
    with pytest.raises(IdempotencyConfigError, match="has a Celery application"):
        init_celery(bench.shop.app)


def test_application_without_idempotency_is_refused() -> None:
    """Tasks need a place for their records."""
    with pytest.raises(IdempotencyConfigError, match="has no 'Idempotency'"):
        init_celery(Flask("bare"))


def test_settings_that_are_no_mapping(make_quick: Callable[..., Shop]) -> None:
    """The error says what is expected."""
    with pytest.raises(IdempotencyConfigError, match="it must be a mapping"):
        init_celery(make_quick(CELERY="redis://").app)


def test_package_from_elsewhere_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Half of another package would be in use."""
    elsewhere = tmp_path / "celery_integration" / "app.py"
    monkeypatch.setattr(app, "__file__", str(elsewhere))
    with pytest.raises(IdempotencyConfigError, match="is in the way"):
        init_celery(bench.shop.app)


def found(make_quick: Callable[..., Shop], task: Any = None, **settings: Any) -> Any:
    """Return the findings on some settings."""
    bench = Bench(make_quick(CELERY={**SAFE, **settings}))
    bench.adding(**(task or {}))
    return findings(bench.shop.app)


def codes(*arguments: Any, **settings: Any) -> list[str]:
    """Return the codes of the findings on some settings."""
    return [finding.code for finding in found(*arguments, **settings)]


def test_settings_that_lose_tasks(make_quick: Callable[..., Shop]) -> None:
    """A message must come back when its worker dies, or the task's process."""
    assert codes(make_quick) == []
    assert codes(make_quick, task_acks_late=False) == ["task_acks_late"]
    assert codes(make_quick, {"acks_late": True}, task_acks_late=False) == []
    assert codes(make_quick, task_reject_on_worker_lost=False) == [
        "task_reject_on_worker_lost"
    ]
    assert codes(make_quick, task_acks_late=False, task_always_eager=True) == []


REDIS = {"broker_url": "redis://127.0.0.1:1/0"}


@pytest.mark.parametrize(
    ("seconds", "task", "finds"),
    [
        (60, {}, False),
        (29, {}, True),
        (60, {"idempotency_lease": 90}, True),
        (60, {"time_limit": 90}, True),
        (None, {"time_limit": 3000}, False),
        (None, {"time_limit": 4000}, True),
    ],
)
def test_redis_gives_messages_away(
    make_quick: Callable[..., Shop],
    seconds: int | None,
    task: dict[str, Any],
    *,
    finds: bool,
) -> None:
    """Not before a run may be over, which lasts as long as its lease or its limit."""
    options = {} if seconds is None else {"visibility_timeout": seconds}
    found = codes(make_quick, task, broker_transport_options=options, **REDIS)
    assert found == ["visibility_timeout"] * finds


class Worker:
    """Stands for a worker that starts."""

    def __init__(self, app: object) -> None:
        self.app = app


def test_worker_and_doctor_say_so(
    make_quick: Callable[..., Shop], caplog: pytest.LogCaptureFixture
) -> None:
    """What is found is logged when a worker starts, and shown by doctor."""
    bench = Bench(make_quick(CELERY={**SAFE, "task_acks_late": False}))
    bench.adding()
    worker_init.send(sender=Worker(bench.celery))
    worker_init.send(sender=Worker(object()))
    (message,) = caplog.messages
    assert message.startswith("task_acks_late: A worker that dies takes its task along")
    result = run(bench.shop.app, "doctor")
    assert f"problem: {message}" in result.stdout
    assert result.exit_code == 1


@pytest.mark.parametrize("forked", [False, True])
def test_forked_worker_leaves_connections_to_its_parent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, forked: bool
) -> None:
    """Its engine starts anew, and the one of a worker that did not fork goes on."""
    with bench.shop.app.app_context():
        pool = bench.shop.db.engine.pool
        if forked:
            monkeypatch.setitem(app._APPS, bench.shop.app, os.getpid() + 1)
        worker_process_init.send(sender="here")
        assert (bench.shop.db.engine.pool is not pool) is forked
