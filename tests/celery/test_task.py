"""A task's run, message by message, without a broker."""

from __future__ import annotations

import datetime as dt
import logging
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from sqlalchemy import text

from celery_integration import OutcomeUnknown, RetryAfterEffects
from flask_idempotency import current_idempotency
from flask_idempotency.exceptions import (
    IdempotencyConfigError,
    IdempotencyInProgress,
    IdempotencyKeyConflict,
    IdempotencyKeyInvalid,
    IdempotencyPreviousFailure,
    IdempotencyResponseUnavailable,
    ResultNotStorable,
)
from flask_idempotency.lifecycle import Failure, Resolution, StoredResponse
from tests.shop import elsewhere

from .bench import Bench, deliver, runs

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.shop import Shop


def test_duplicate_gets_the_first_result(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """The body runs once, and the log says why it does not run again."""
    caplog.set_level(logging.INFO, "celery_integration")
    task = bench.adding()
    results = [deliver(task, "first") for _ in range(2)]
    assert [r.state for r in results] == ["SUCCESS"] * 2
    assert [r.result for r in results] == [{"name": "first"}] * 2
    assert bench.shop.accounts() == ["first"]
    record = bench.record()
    assert record is not None
    (message,) = caplog.messages
    assert message.startswith("Task work[t1] was not run: it has succeeded before")
    assert str(record.id) in message


def test_first_result_is_what_duplicates_get(bench: Bench) -> None:
    """A tuple is a list at once, as what follows the task may depend on it."""
    task = bench.task(lambda _task: (1, {"at": dt.date(2030, 1, 2)}))
    first, second = (deliver(task).result for _ in range(2))
    assert first == second == [1, {"at": "Wed, 02 Jan 2030 00:00:00 GMT"}]


def test_other_task_id_is_another_run(bench: Bench) -> None:
    """Without a key of its own, each message that was sent is one run."""
    task = bench.adding()
    deliver(task, "a", key="t1")
    deliver(task, "b", key="t2")
    assert bench.shop.accounts() == ["a", "b"]


def test_plain_call_is_a_function_call(bench: Bench) -> None:
    """Also inside of a run: nothing is claimed."""
    task = bench.task(lambda task, depth: task(depth - 1) if depth else "done")
    with bench.shop.app.app_context():
        assert task(3) == "done"
    assert bench.record() is None
    assert deliver(task, 3).result == "done"
    record = bench.record()
    assert record is not None
    assert record.attempts == 1


def test_key_of_the_arguments(bench: Bench) -> None:
    """One run per key, whatever the ids; other arguments are a conflict."""
    task = bench.adding(idempotency_key=lambda name: name[0])
    assert deliver(task, "first", key="t1").result == {"name": "first"}
    assert deliver(task, "first", key="t2").result == {"name": "first"}
    conflict = deliver(task, "f", key="t3")
    assert isinstance(conflict.result, IdempotencyKeyConflict)
    assert bench.shop.accounts() == ["first"]
    assert bench.record("f") is not None


def test_key_that_is_none(bench: Bench) -> None:
    """A key must be a text that can be stored."""
    task = bench.adding(idempotency_key=staticmethod(lambda _name: ""))
    assert isinstance(deliver(task, "x").result, IdempotencyKeyInvalid)


def test_tenant_and_user_come_with_the_message(bench: Bench) -> None:
    """They keep the runs of one key apart."""
    task = bench.adding(idempotency_key=lambda _name: "k")
    headers = {"idempotency_tenant_id": "acme", "idempotency_user_id": "u1"}
    deliver(task, "hers", headers=headers)
    deliver(task, "his")
    assert bench.shop.accounts() == ["hers", "his"]
    record = bench.record("k")
    assert record is not None
    assert (record.scope.tenant_id, record.scope.user_id) == ("", "")


def test_life_of_a_record(bench: Bench) -> None:
    """A task's record lives a week, or as the task says."""
    deliver(bench.adding(), "a")
    deliver(bench.adding(name="short", idempotency_ttl=60), "b")
    lives = []
    for route in ("task:work", "task:short"):
        record = bench.record(route=route)
        assert record is not None
        lives.append(round((record.expires_at - record.created_at).total_seconds()))
    assert lives == [7 * 86400, 60]


def test_values_of_messages_are_told_apart(bench: Bench) -> None:
    """Arguments that messages carry are compared exactly."""
    task = bench.task(lambda _task, _value: None, idempotency_key=lambda _value: "k")
    now = dt.datetime(2030, 1, 2, 3, 4, 5, 6, tzinfo=dt.timezone.utc)
    assert deliver(task, [now, Decimal("1.0")]).state == "SUCCESS"
    assert deliver(task, [now, Decimal("1.0")]).state == "SUCCESS"
    later = now + dt.timedelta(microseconds=1)
    assert deliver(task, [later, Decimal("1.0")]).state == "FAILURE"


def test_arguments_without_json_form(bench: Bench) -> None:
    """What cannot be compared is refused."""
    result = deliver(bench.adding(), object()).result
    assert isinstance(result, IdempotencyConfigError)
    assert "arguments of task 'work' have no JSON form" in str(result)


def flaky(bench: Bench, **retry: Any) -> Callable[..., Any]:
    """Return a task's body that adds an account, and succeeds at the second try."""

    def body(task: Any, name: str) -> int:
        bench.shop.add(name)
        bench.shop.db.session.commit()
        if task.request.retries == 0:
            raise task.retry(countdown=0, **retry)
        return int(task.request.retries)

    return body


def test_retry_is_a_new_try_of_the_same_run(bench: Bench) -> None:
    """Nothing of the first one stays, its own commits included."""
    result = deliver(bench.task(flaky(bench)), "first")
    assert (result.state, result.result) == ("SUCCESS", 1)
    assert bench.shop.runs == ["first", "first"]
    assert bench.shop.accounts() == ["first"]
    record = bench.record()
    assert record is not None
    assert (record.status.value, record.retries) == ("succeeded", 1)


def test_autoretry(bench: Bench) -> None:
    """The retries that Celery makes by itself are retries, too."""

    def body(task: Any, name: str) -> str:
        bench.shop.add(name)
        if task.request.retries < 2:
            message = "not yet"
            raise LookupError(message)
        return name

    task = bench.task(body, autoretry_for=(LookupError,), default_retry_delay=0)
    assert deliver(task, "first").result == "first"
    assert bench.shop.accounts() == ["first"]


def test_more_retries_than_crashes_are_allowed(
    make_quick: Callable[..., Shop],
) -> None:
    """A retry is no crash, so that it is Celery which counts it."""
    bench = Bench(make_quick(IDEMPOTENCY_MAX_ATTEMPTS=2))

    def body(task: Any) -> int:
        if task.request.retries < 5:
            raise task.retry(countdown=0, max_retries=5)
        return int(task.request.retries)

    assert deliver(bench.task(body)).result == 5


def test_retry_with_other_arguments(bench: Bench) -> None:
    """The next try is expected with the arguments that it is sent with."""
    task = bench.task(flaky(bench, args=("second",)))
    assert deliver(task, "first").result == 1
    assert bench.shop.accounts() == ["second"]


def test_retries_that_are_used_up(bench: Bench) -> None:
    """The run has failed, for duplicates as well."""

    def body(task: Any) -> None:
        raise task.retry(exc=LookupError("gone"), countdown=0, max_retries=1)

    task = bench.task(runs(body))
    assert isinstance(deliver(task).result, LookupError)
    assert isinstance(deliver(task, retries=1).result, IdempotencyPreviousFailure)


def test_stale_copy_is_ignored(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """A message from before the retry does not run, nor end the task."""
    caplog.set_level(logging.INFO, "celery_integration")
    stopped: list[str] = []

    def body(task: Any) -> str:
        if task.request.retries == 0:
            raise task.retry(countdown=0)
        if not stopped:
            # The first message comes again while the second one runs.
            stopped.append(elsewhere(lambda: deliver(task)).state)
        return "done"

    task = bench.task(body)
    assert deliver(task).result == "done"
    assert (stopped, deliver(task).state) == (["IGNORED"], "IGNORED")
    assert len([m for m in caplog.messages if "a copy of an earlier one" in m]) == 2


def test_stale_copy_before_the_next_message(bench: Bench) -> None:
    """It leaves the record to that one."""
    states = []

    def body(task: Any) -> str:
        if task.request.retries == 0:
            raise Retry(sig=Later(task))
        return "done"

    class Later:
        """Stands for a message that a broker holds for a while."""

        args, kwargs = (), {}  # type: ignore[var-annotated]

        def __init__(self, task: Any) -> None:
            self.task = task

        def apply(self, retries: int) -> Any:
            states.append(deliver(self.task, retries=0).state)
            return deliver(self.task, retries=retries)

    assert deliver(bench.task(body)).result == "done"
    assert states == ["IGNORED"]


def test_retry_that_names_no_message(bench: Bench) -> None:
    """Nobody knows of a next try, so that whoever comes runs the task."""
    errors: list[Exception] = [Retry("by hand")]

    def body(_task: Any) -> str:
        if errors:
            raise errors.pop()
        return "done"

    task = bench.task(body)
    assert deliver(task).state == "RETRY"
    assert bench.record() is None
    assert deliver(task).result == "done"


@pytest.mark.parametrize(
    ("error", "state"),
    [(Ignore(), "IGNORED"), (Reject(requeue=True), "REJECTED")],
    ids=["Ignore", "Reject"],
)
def test_ignore_and_reject_free_the_key(
    bench: Bench, error: Exception, state: str
) -> None:
    """Nothing was done, and a message that comes back runs."""
    errors = [error]

    def body(_task: Any, name: str) -> str:
        bench.shop.add(name)
        if errors:
            raise errors.pop()
        return name

    task = bench.task(body)
    assert deliver(task, "first").state == state
    assert (bench.record(), bench.shop.accounts()) == (None, [])
    assert deliver(task, "first").result == "first"
    assert bench.shop.accounts() == ["first"]


@pytest.mark.parametrize("error", [LookupError("no"), SoftTimeLimitExceeded()])
def test_failure_is_kept(bench: Bench, error: Exception) -> None:
    """A duplicate fails, too, without a run."""

    def body(_task: Any, name: str) -> None:
        bench.shop.add(name)
        raise error

    task = bench.task(body)
    assert deliver(task, "first").result is error
    assert isinstance(deliver(task, "first").result, IdempotencyPreviousFailure)
    assert (bench.shop.runs, bench.shop.accounts()) == (["first"], [])


def test_failed_task_runs_again_where_it_may(bench: Bench) -> None:
    """With retry_failed a new message tries again."""
    errors = [LookupError("no")]

    def body(_task: Any) -> str:
        if errors:
            raise errors.pop()
        return "done"

    task = bench.task(body, idempotency_retry_failed=True)
    assert deliver(task).state == "FAILURE"
    assert deliver(task).result == "done"


def test_worker_that_is_told_to_end(bench: Bench) -> None:
    """The run counts as a crash: the message comes back and runs."""
    errors: list[BaseException] = [SystemExit()]

    def body(_task: Any, name: str) -> str:
        bench.shop.add(name)
        if errors:
            raise errors.pop()
        return name

    task = bench.task(body)
    with pytest.raises(SystemExit):
        deliver(task, "first")
    assert deliver(task, "first").result == "first"
    record = bench.record()
    assert record is not None
    assert (record.attempts, bench.shop.accounts()) == (2, ["first"])


def test_live_lease_in_eager_mode(bench: Bench) -> None:
    """There is no broker to wait at, and the error says so."""
    found = []

    def body(task: Any) -> None:
        found.append(elsewhere(lambda: deliver(task)).result)

    deliver(bench.task(body))
    assert isinstance(found[0], IdempotencyInProgress)
    assert "called eagerly" in str(found[0])


def test_lost_lease_gives_the_winner_s_result(bench: Bench) -> None:
    """The late owner writes nothing."""
    turns = iter(["late", "winner"])

    def body(task: Any) -> str:
        turn = next(turns)
        if turn == "late":
            elsewhere(lambda: bench.shop.lapse("t1"))
            assert elsewhere(lambda: deliver(task)).result == "winner"
        return bench.shop.add(turn)

    assert deliver(bench.task(body)).result == "winner"
    assert bench.shop.accounts() == ["winner"]


def test_unknown_outcome_fails(bench: Bench) -> None:
    """A part is durable and nobody knows the rest: no run, no loop."""
    task = bench.adding()
    claim = bench.claim(task._request_hash(("first",), {}))
    with bench.store() as store:
        store.mark_effects(claim)
    bench.shop.lapse("t1")
    result = deliver(task, "first")
    assert result.state == "FAILURE"
    assert isinstance(result.result, OutcomeUnknown)
    assert str(claim.record_id) in str(result.result)
    assert bench.shop.runs == []


@pytest.mark.parametrize(
    ("ending", "error"),
    [
        (StoredResponse(code=200, body=None), IdempotencyResponseUnavailable),
        (
            Failure(reason="no", response=StoredResponse(code=500, body=b"1")),
            IdempotencyPreviousFailure,
        ),
    ],
    ids=["succeeded", "failed"],
)
def test_settled_by_an_operator(
    bench: Bench, ending: StoredResponse | Failure, error: type[Exception]
) -> None:
    """What an operator says is the outcome; there is no result."""
    task = bench.adding()
    claim = bench.claim(task._request_hash(("first",), {}))
    with bench.store() as store:
        resolution = Resolution(ending=ending, by="me", reason="seen")
        assert store.resolve(claim.scope, resolution, force=True)
    assert isinstance(deliver(task, "first").result, error)


def test_result_that_cannot_be_stored(bench: Bench) -> None:
    """An atomic run is undone, and has failed."""

    def body(_task: Any, name: str) -> object:
        bench.shop.add(name)
        bench.shop.db.session.commit()
        return object()

    task = bench.task(body)
    assert isinstance(deliver(task, "first").result, ResultNotStorable)
    record = bench.record()
    assert record is not None
    assert (record.status.value, bench.shop.accounts()) == ("failed", [])


def test_result_of_a_run_with_commits_cannot_be_stored(bench: Bench) -> None:
    """What it committed stays, and so does the note of it."""

    def body(_task: Any, name: str) -> object:
        bench.shop.add(name)
        bench.shop.db.session.commit()
        return object()

    task = bench.task(body, idempotency_atomic=False, idempotency_retry_failed=True)
    assert isinstance(deliver(task, "first").result, ResultNotStorable)
    assert isinstance(deliver(task, "first").result, IdempotencyPreviousFailure)
    assert bench.shop.accounts() == ["first"]


def test_retry_after_a_commit(bench: Bench) -> None:
    """It is refused before it is sent, and the run has failed."""
    task = bench.task(flaky(bench), idempotency_atomic=False)
    result = deliver(task, "first")
    assert isinstance(result.result, RetryAfterEffects)
    assert isinstance(deliver(task, "first").result, IdempotencyPreviousFailure)
    assert bench.shop.accounts() == ["first"]


def test_retry_after_a_commit_where_it_may(bench: Bench) -> None:
    """The next run sees what the first one has committed."""

    def body(task: Any) -> int:
        bench.shop.add(f"try {task.request.retries}")
        bench.shop.db.session.commit()
        if task.request.retries == 0:
            raise task.retry(countdown=0)
        return len(bench.shop.accounts())

    task = bench.task(
        body, idempotency_atomic=False, idempotency_retry_after_effects=True
    )
    assert deliver(task).result == 2
    assert bench.shop.accounts() == ["try 0", "try 1"]


def test_retry_with_an_open_step(bench: Bench) -> None:
    """A step that may have taken effect is not called again by a retry."""

    def body(task: Any) -> None:
        try:
            current_idempotency.run_step("charge", lambda _key: 1 // 0)
        except ZeroDivisionError as error:
            raise task.retry(countdown=0, exc=error) from error

    task = bench.task(body, idempotency_retry_after_effects=True)
    result = deliver(task).result
    assert isinstance(result, RetryAfterEffects)
    assert "repeatable=True" in str(result)


def test_steps_and_keys_outlive_a_retry(bench: Bench) -> None:
    """The next try gets the result of the step, and the same downstream key."""
    charge = runs(lambda key: key)
    keys = []

    def body(task: Any) -> Any:
        keys.append(current_idempotency.derive_key("mail"))
        paid = current_idempotency.run_step("charge", charge)
        if task.request.retries == 0:
            raise task.retry(countdown=0)
        return paid

    result = deliver(bench.task(body)).result
    assert (len(result), charge.count) == (36, 1)
    assert len(keys) == 2
    assert len(set(keys)) == 1


def test_options_are_checked(bench: Bench) -> None:
    """A misspelt or impossible option is refused where it stands."""
    with pytest.raises(IdempotencyConfigError, match="'idempotency_kee'"):
        bench.adding(idempotency_kee=str).name  # noqa: B018 - Celery makes it now
    with pytest.raises(IdempotencyConfigError, match="idempotency_ttl is 0"):
        bench.adding(idempotency_ttl=0).name  # noqa: B018


def test_task_of_another_celery_application(bench: Bench) -> None:
    """Without a Flask application there is nothing to record in."""
    task = bench.adding()
    del bench.celery.flask_app
    result = deliver(task, "x").result
    assert isinstance(result, IdempotencyConfigError)
    assert "init_celery" in str(result)


def test_store_cannot_be_reached(bench: Bench) -> None:
    """Nothing runs unprotected."""
    task = bench.adding()
    deliver(task, "first", key="t0")
    with bench.shop.app.app_context(), bench.shop.db.engine.begin() as connection:
        connection.execute(text("ALTER TABLE idempotency_record RENAME TO gone"))
    assert isinstance(deliver(task, "second").result, IdempotencyInProgress)
    assert bench.shop.accounts() == ["first"]
