"""``init_celery``: one Celery application for one Flask application."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from celery import Celery, Task
from celery.signals import worker_init, worker_process_init

import flask_idempotency
from flask_idempotency.exceptions import IdempotencyConfigError
from flask_idempotency.settings import seconds_of
from flask_idempotency.state import EXTENSION_KEY, Finding

from .task import IdempotentTask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flask import Flask

    from flask_idempotency.state import IdempotencyState

log = logging.getLogger(__name__)

CELERY_KEY = "celery"
#: The transports that give a message to another worker after a time.
_REDIS = {"redis", "rediss", "sentinel"}
#: Of these transports, where the settings name none.
_VISIBILITY_SECONDS = 3600.0

#: Each application, and the process that set it up.
_APPS: WeakKeyDictionary[Flask, int] = WeakKeyDictionary()


class FlaskTask(Task):
    """A task that runs in the context of the Flask application."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task."""
        with self.app.flask_app.app_context():
            return self.run(*args, **kwargs)


def init_celery(app: Flask) -> Celery:
    """
    Make the Celery application of a Flask application, after ``Idempotency``.

    Its settings are ``app.config["CELERY"]``. It is the default one from then on, so
    that ``@shared_task`` finds it, and is kept as ``app.extensions["celery"]``.

    Args:
        app: The application. Every task runs in its context.

    Raises:
        IdempotencyConfigError: If the application has one already, has no
            ``Idempotency``, or if another package is in the way.
    """
    _refuse_foreign_package()
    if CELERY_KEY in app.extensions:
        raise IdempotencyConfigError(
            "This Flask app has a Celery application already. Use "
            f"app.extensions['{CELERY_KEY}'], and call 'init_celery' once."
        )
    state: IdempotencyState | None = app.extensions.get(EXTENSION_KEY)
    if state is None:
        raise IdempotencyConfigError(
            "This Flask app has no 'Idempotency', which tasks need for their records. "
            "Call 'Idempotency(app, db)' or 'idempotency.init_app(app)' before "
            "'init_celery(app)'."
        )
    settings = app.config.get("CELERY", {})
    if not isinstance(settings, Mapping):
        raise IdempotencyConfigError(
            f"app.config['CELERY'] is {type(settings).__name__}; it must be a mapping "
            "of Celery's settings, such as {'broker_url': '…'}."
        )
    celery = Celery(app.name, task_cls=FlaskTask)
    celery.config_from_object(settings)
    celery.flask_app = app
    celery.set_default()
    app.extensions[CELERY_KEY] = celery
    state.checks.append(partial(findings, app))
    _APPS[app] = os.getpid()
    return celery


def findings(app: Flask) -> list[Finding]:
    """
    Return which Celery settings break the promise that a task takes effect once.

    Args:
        app: An application with Celery.
    """
    celery: Celery = app.extensions[CELERY_KEY]
    if celery.conf.task_always_eager:
        return []
    tasks = [t for t in celery.tasks.values() if isinstance(t, IdempotentTask)]
    return [*_acknowledged_early(tasks), *_redelivered_early(app, celery, tasks)]


def _acknowledged_early(tasks: list[IdempotentTask]) -> Iterator[Finding]:
    early = sorted(task.name for task in tasks if not task.acks_late)
    if early:
        yield Finding(
            code="task_acks_late",
            is_problem=True,
            message=(
                "A worker that dies takes its task along, since it is acknowledged "
                f"before it runs: {', '.join(early)}. Set task_acks_late = True."
            ),
        )
    lost = sorted(task.name for task in tasks if not task.reject_on_worker_lost)
    if lost:
        yield Finding(
            code="task_reject_on_worker_lost",
            is_problem=True,
            message=(
                "A task whose process is killed counts as failed, and is not run "
                f"again: {', '.join(lost)}. Set task_reject_on_worker_lost = True."
            ),
        )


def _redelivered_early(
    app: Flask, celery: Celery, tasks: list[IdempotentTask]
) -> Iterator[Finding]:
    if celery.connection_for_read().transport_cls not in _REDIS:
        return
    options = celery.conf.broker_transport_options or {}
    timeout = float(options.get("visibility_timeout", _VISIBILITY_SECONDS))
    default_lease = app.extensions[EXTENSION_KEY].config.lease_seconds
    for task in sorted(tasks, key=lambda task: str(task.name)):
        lease = task.idempotency_lease
        needed = max(
            default_lease if lease is None else seconds_of(lease), task.time_limit or 0
        )
        if timeout < needed:
            yield Finding(
                code="visibility_timeout",
                is_problem=True,
                message=(
                    f"Redis gives task '{task.name}' to another worker after "
                    f"{timeout:g} s, while it may run for {needed:g} s (its lease or "
                    "time limit). Raise visibility_timeout in "
                    "broker_transport_options above that."
                ),
            )


def _refuse_foreign_package() -> None:
    """Refuse to work as half of two packages: the name of this one is a common one."""
    here = Path(__file__).resolve().parents[1]
    there = Path(flask_idempotency.__file__).resolve().parents[1]
    if here != there:
        raise IdempotencyConfigError(
            f"The 'celery_integration' that was imported is in '{here}', and "
            f"flask-idempotency in '{there}'. Another package or module of that name "
            "is in the way: rename yours, or install flask-idempotency again."
        )


@worker_init.connect
def _warn(sender: Any, **_: object) -> None:
    """Say, when a worker starts, what of its settings breaks the promise."""
    app: Flask | None = getattr(sender.app, "flask_app", None)
    for finding in findings(app) if app else ():
        log.warning("%s: %s", finding.code, finding.message)


@worker_process_init.connect
def _leave_connections(**_: object) -> None:
    """Leave the connections that a forked worker inherited to its parent."""
    for app, made_in in list(_APPS.items()):
        if made_in == os.getpid() or "sqlalchemy" not in app.extensions:
            continue  # the solo pool's worker is its own parent
        with app.app_context():
            for engine in app.extensions[EXTENSION_KEY].db.engines.values():
                engine.dispose(close=False)
