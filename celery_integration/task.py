"""
``IdempotentTask``: a task takes effect once, however often its message arrives.

Whether a message repeats another one is read from the record alone: what a broker says
of redelivery is lost by some, and no copy that was published twice has it.
"""

from __future__ import annotations

import json
import logging
import math
import random
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from celery import Task
from celery.exceptions import Ignore, Reject, Retry
from kombu.utils import json as message_json

from flask_idempotency import Failure, Scope, Status, fingerprint
from flask_idempotency.answers import refuse_without_body
from flask_idempotency.codec import ResultCodec
from flask_idempotency.exceptions import (
    IdempotencyConfigError,
    IdempotencyHTTPException,
    IdempotencyInProgress,
    IdempotencyOutcomeUnknown,
    IdempotencyPreviousFailure,
    IdempotencyStoreUnavailable,
)
from flask_idempotency.lifecycle import Retried, StoredResponse, first_open
from flask_idempotency.settings import seconds_of
from flask_idempotency.state import get_state
from flask_idempotency.unit_of_work import HandedBack, Release, current_call
from flask_idempotency.work import CallOptions, Work, failure_of

from .errors import OutcomeUnknown, RetryAfterEffects

if TYPE_CHECKING:
    from collections.abc import Callable

    from flask import Flask

    from flask_idempotency.answers import Answer
    from flask_idempotency.lifecycle import RecordView
    from flask_idempotency.settings import Duration
    from flask_idempotency.unit_of_work import Ending

log = logging.getLogger(__name__)

_message_text: Callable[[object], str] = message_json.dumps

TENANT_HEADER = "idempotency_tenant_id"
USER_HEADER = "idempotency_user_id"
#: A message that was put back is held in the memory of a worker, so not for long.
LONGEST_WAIT_SECONDS = 30.0
SHORTEST_WAIT_SECONDS = 1.0

_OK = 200
_PREFIX = "idempotency_"
#: Where a task's request keeps the guarded call that runs it.
_CALL = "idempotency_call"


class StaleCopy(Ignore):
    """The message is a copy of one whose task has been retried since."""


class IdempotentTask(Task):
    """
    Base class of tasks of which each run takes effect once: ``base=IdempotentTask``.

    A plain call of the task is an ordinary function call, without any of this.

    Attributes:
        idempotency_key: Makes the key of a run from the task's arguments; by default
            the task id is the key.
        idempotency_ttl: Life of a record, in seconds or as timedelta;
            ``IDEMPOTENCY_TASK_TTL`` by default.
        idempotency_lease: How long the death of a worker can block the task.
        idempotency_retry_failed: A message runs a failed task again, if nothing of it
            stayed.
        idempotency_atomic: Commits of the task become savepoints, and one commit makes
            durable all that it did, with its result.
        idempotency_retry_after_effects: A retry may follow a commit of the run before,
            where a run is not atomic.

    Raises:
        IdempotencyConfigError: By a subclass with an unknown or wrong option.
    """

    idempotency_key: ClassVar[Callable[..., str] | None] = None
    idempotency_ttl: ClassVar[Duration | None] = None
    idempotency_lease: ClassVar[Duration | None] = None
    idempotency_retry_failed: ClassVar[bool] = False
    idempotency_atomic: ClassVar[bool] = True
    idempotency_retry_after_effects: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Check the options, which Celery makes attributes of a class of each task."""
        super().__init_subclass__(**options)
        for name, value in list(vars(cls).items()):
            if not name.startswith(_PREFIX):
                continue
            if not hasattr(IdempotentTask, name):
                raise IdempotencyConfigError(f"'{name}' of a task is not known.")
            if name in {"idempotency_ttl", "idempotency_lease"} and value is not None:
                _seconds(name, value)
            if isinstance(value, FunctionType):
                setattr(cls, name, staticmethod(value))  # it is no method of the task

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task for a message, or return what the first run returned."""
        request = self.request
        # A call inside the task's own run finds the request of that run.
        if request.id is None or request.get(_CALL) is not None:
            return super().__call__(*args, **kwargs)
        with self._flask_app().app_context():
            return self._run_once(args, kwargs)

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        """
        Retry the task, as Celery does.

        Raises:
            RetryAfterEffects: If a part of this run is durable, or may be. Nothing is
                sent then, and the run has failed.
        """
        call = self.request.get(_CALL)
        if call is not None and call.claim is not None:
            step = first_open(call.claim.steps)
            if step is not None:
                raise RetryAfterEffects(
                    f"Task '{self.name}' cannot be retried: step '{step}' has started "
                    "and not finished, so nobody knows whether it took effect. Declare "
                    "the step repeatable=True if the other side honours its key."
                )
            if call.partly_committed and not self.idempotency_retry_after_effects:
                raise RetryAfterEffects(
                    f"Task '{self.name}' cannot be retried: it has committed a part, "
                    "which the next run would do again. Let the task be atomic, or set "
                    "idempotency_retry_after_effects=True if it can tell."
                )
        return super().retry(*args, **kwargs)

    def _flask_app(self) -> Flask:
        app: Flask | None = getattr(self.app, "flask_app", None)
        if app is None:
            raise IdempotencyConfigError(
                f"The Celery application of task '{self.name}' belongs to no Flask "
                "application. Make it with 'celery_integration.init_celery(app)'."
            )
        return app

    def _run_once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = get_state()
        scope = self._scope(args, kwargs)
        results = ResultCodec(
            dumps=state.app.json.dumps,
            loads=state.app.json.loads,
            max_size=state.config.max_response_size,
        )

        def encode(result: Any) -> StoredResponse:
            text = results.encode(f"task '{self.name}'", result)
            return StoredResponse(code=_OK, body=text.encode())

        work = Work(
            handler=lambda: self._run(args, kwargs),
            encode=encode,
            rescue=_reraise,
            releases=lambda _result: False,
            admit=_refuse_failed,
            leaves=self._leaves,
        )
        request_hash = self._request_hash(args, kwargs)
        try:
            answer = state.guard.call(scope, request_hash, work, self._options())
        except IdempotencyHTTPException as error:
            self._refused(scope, error)
        if answer.record is not None:
            self._replayed(answer.record)
        return results.decode((answer.stored.body or b"null").decode())

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = current_call.get()
        setattr(self.request, _CALL, call)
        if call is not None and call.claim is not None:
            self._refuse_stale(call.claim.record_id, call.claim.retries)
        return self.run(*args, **kwargs)

    def _scope(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scope:
        make_key = self.idempotency_key
        headers = self.request.headers or {}
        return Scope(
            tenant_id=headers.get(TENANT_HEADER, ""),
            user_id=headers.get(USER_HEADER, ""),
            route=f"task:{self.name}",
            idempotency_key=make_key(*args, **kwargs) if make_key else self.request.id,
        )

    def _request_hash(self, args: Any, kwargs: Any) -> str:
        # As in a message: datetime, Decimal and their like are told apart there.
        try:
            return fingerprint(json.loads(_message_text([args, kwargs])))
        except (TypeError, ValueError) as error:
            raise IdempotencyConfigError(
                f"The arguments of task '{self.name}' have no JSON form, so a message "
                f"cannot be told from another one: {error}."
            ) from error

    def _options(self) -> CallOptions:
        ttl, lease = self.idempotency_ttl, self.idempotency_lease
        if ttl is None:
            ttl = get_state().config.task_ttl_seconds
        hard_limit, _soft = self.request.timelimit or (None, None)
        return CallOptions(
            ttl_seconds=_seconds("idempotency_ttl", ttl),
            lease_seconds=(
                None if lease is None else _seconds("idempotency_lease", lease)
            ),
            # What hangs is ended by Celery's limits; without one it may take for ever.
            max_runtime_seconds=hard_limit or self.time_limit or math.inf,
            wait_seconds=0,
            retry_failed=self.idempotency_retry_failed,
            atomic=self.idempotency_atomic,
        )

    def _leaves(self, error: BaseException) -> Ending | None:
        """Return what a run leaves that ended without result, if that is no failure."""
        if isinstance(error, StaleCopy) or not isinstance(error, Exception):
            return HandedBack()  # a worker that is told to end gives its message back
        if isinstance(error, Retry) and error.sig is not None:
            return Retried(
                retries=self.request.retries + 1,
                request_hash=self._request_hash(error.sig.args, error.sig.kwargs),
                after_effects=self.idempotency_retry_after_effects,
                otherwise=failure_of(error),
            )
        if isinstance(error, (Retry, Ignore, Reject)):
            return Release(Failure(reason=f"celery: {type(error).__name__}"))
        return None

    def _replayed(self, record: RecordView) -> None:
        self._refuse_stale(record.id, record.retries)
        log.info(
            "Task %s[%s] was not run: it has succeeded before, and its result is that "
            "of record %s.",
            self.name,
            self.request.id,
            record.id,
        )

    def _refuse_stale(self, record_id: object, retries: int | None) -> None:
        if (retries or 0) <= self.request.retries:
            return
        log.info(
            "Task %s[%s] was not run: record %s waits for retry %s, and this message "
            "is a copy of an earlier one.",
            self.name,
            self.request.id,
            record_id,
            retries,
        )
        raise StaleCopy

    def _refused(self, scope: Scope, error: IdempotencyHTTPException) -> NoReturn:
        """End a run that may not take place now, or not at all."""
        if isinstance(error, IdempotencyStoreUnavailable):
            self._put_back(error, SHORTEST_WAIT_SECONDS)
        record = get_state().store.look(scope)
        if record is not None:
            self._refuse_stale(record.id, record.retries)
        if isinstance(error, IdempotencyOutcomeUnknown):
            raise OutcomeUnknown(
                f"Task '{self.name}' is not run again: an earlier run was interrupted "
                "after a part of it had taken effect, or may have (record "
                f"{record and record.id}). Settle it: 'flask idempotency resolve'."
            ) from error
        if not error.retryable:
            raise error
        self._put_back(error, self._wait_seconds(record))

    def _wait_seconds(self, record: RecordView | None) -> float:
        if record is None or self.request.retries > (record.retries or 0):
            return SHORTEST_WAIT_SECONDS  # the run that asked for this one is ending
        return record.lease_seconds_left

    def _put_back(self, error: IdempotencyHTTPException, seconds: float) -> NoReturn:
        """
        Send the message again for later, with its id and all that hangs on it.

        Not by Celery's own retry, which counts, and drops the message if the broker
        does not take it; not by a requeue, which would come back at once.
        """
        if self.request.is_eager:
            raise IdempotencyInProgress(
                f"Task '{self.name}' cannot run now, and as it is called eagerly there "
                "is no broker to keep it for later."
            ) from error
        seconds = min(max(seconds, SHORTEST_WAIT_SECONDS), LONGEST_WAIT_SECONDS)
        seconds += random.uniform(0, 1)  # noqa: S311 - so that copies do not meet again
        message = self.signature_from_request(
            self.request, countdown=seconds, retries=self.request.retries
        )
        try:
            message.apply_async()
        except Exception as failure:
            # Whatever the broker's library raises: the message must not be lost.
            raise Reject(failure, requeue=True) from failure
        log.info(
            "Task %s[%s] was put back for %.1f s: %s",
            self.name,
            self.request.id,
            seconds,
            error.error_code,
        )
        raise Retry(error.error_code, when=seconds, sig=message) from error


def _refuse_failed(answer: Answer[Any]) -> None:
    """Refuse to take an operator's answer of a failure for a result."""
    refuse_without_body(answer)
    if answer.record is not None and answer.record.status is Status.FAILED:
        raise IdempotencyPreviousFailure(replayed=True)


def _reraise(error: Exception) -> Any:
    raise error


def _seconds(name: str, value: Duration) -> float:
    try:
        return seconds_of(value)
    except ValueError as error:
        raise IdempotencyConfigError(
            f"{name} is {value!r}; it must be {error}."
        ) from error
