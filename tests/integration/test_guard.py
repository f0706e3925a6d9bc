"""``guard.run()``: services without HTTP, nested calls, bound identifiers."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.exc import IntegrityError

from flask_idempotency import Scope, current_idempotency, fingerprint, idempotent
from flask_idempotency.exceptions import (
    IdempotencyConfigError,
    IdempotencyInProgress,
    IdempotencyKeyConflict,
    IdempotencyLeaseLost,
    IdempotencyPreviousFailure,
    NestedCallError,
    ResultNotStorable,
)
from tests.shop import elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flask_idempotency import MutationResult
    from tests.shop import Shop

HASH = fingerprint({"n": 1})


@pytest.fixture
def service(shop: Shop) -> Iterator[Shop]:
    """Give the shop inside an application context, as in a command or task."""
    with shop.app.app_context():
        yield shop


def scope(key: str = "k", route: str = "accounts.create") -> Scope:
    """Return a service's scope."""
    return Scope(tenant_id="t", user_id="u", route=route, idempotency_key=key)


def run(shop: Shop, handler: Callable[[], Any], **options: Any) -> MutationResult:
    """Run a handler under the key of `options`, or the usual one."""
    key = options.pop("scope", scope())
    return shop.idempotency.guard.run(
        key, options.pop("hash", HASH), handler, **options
    )


def test_first_call_runs_and_duplicate_gets_its_result(service: Shop) -> None:
    """The handler runs once; both calls return the same value."""
    results = [run(service, lambda: {"name": service.add("first")}) for _ in range(2)]
    assert [r.value for r in results] == [{"name": "first"}] * 2
    assert [r.replayed for r in results] == [False, True]
    assert results[0].record_id == results[1].record_id
    assert service.accounts() == ["first"]


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}, 1.5, [1, [2]]])
def test_any_json_value_is_an_answer(service: Shop, value: Any) -> None:
    """Also an empty value is stored and replayed exactly."""
    runs: list[int] = []

    def handler() -> Any:
        runs.append(1)
        return value

    results = [run(service, handler) for _ in range(2)]
    assert [r.value for r in results] == [value, value]
    assert type(results[0].value) is type(results[1].value)
    assert runs == [1]


def test_value_is_the_decoded_json_on_the_first_call_too(service: Shop) -> None:
    """A tuple is a list at once, not only on the retry."""
    assert run(service, lambda: {"pair": (1, 2)}).value == {"pair": [1, 2]}


def test_status_of_the_handler_is_kept(service: Shop) -> None:
    """A handler may return (value, status)."""
    results = [run(service, lambda: ({"id": 1}, 202)) for _ in range(2)]
    assert [(r.value, r.response_code) for r in results] == [({"id": 1}, 202)] * 2


def test_client_error_status_rolls_back(service: Shop) -> None:
    """A status of 400 or above keeps the answer and drops the rows."""

    def handler() -> Any:
        service.add("first")
        return {"error": "taken"}, 409

    results = [run(service, handler) for _ in range(2)]
    assert [r.response_code for r in results] == [409, 409]
    assert (service.accounts(), service.runs) == ([], ["first"])


def test_raising_handler_is_recorded_as_failed(service: Shop) -> None:
    """The exception goes on; the duplicate is told and not run."""

    def handler() -> Any:
        service.add("first")
        raise LookupError

    with pytest.raises(LookupError):
        run(service, handler)
    with pytest.raises(IdempotencyPreviousFailure):
        run(service, handler)
    assert (service.accounts(), service.runs) == ([], ["first"])


def test_retry_failed_is_an_opt_in(service: Shop) -> None:
    """With retry_failed a failed operation runs again."""
    with pytest.raises(ZeroDivisionError):
        run(service, lambda: 1 / 0)
    assert run(service, lambda: "ok", retry_failed=True).value == "ok"


def test_result_without_json_form_is_refused_before_the_commit(service: Shop) -> None:
    """A result that no duplicate could get commits nothing."""

    def handler() -> Any:
        service.add("first")
        return object()

    with pytest.raises(ResultNotStorable, match="object"):
        run(service, handler)
    assert service.accounts() == []
    assert service.idempotency.store.diagnose(scope()).diagnosis.value == (
        "failed_retry_requires_opt_in"
    )


def test_other_hash_is_a_conflict(service: Shop) -> None:
    """The same key for another request is refused."""
    run(service, lambda: 1)
    with pytest.raises(IdempotencyKeyConflict):
        run(service, lambda: 2, hash=fingerprint({"n": 2}))


def test_running_call_is_in_progress_for_others(service: Shop) -> None:
    """A duplicate from elsewhere is refused while the first call runs."""

    def duplicate() -> int | None:
        with service.app.app_context(), pytest.raises(IdempotencyInProgress) as caught:
            run(service, lambda: 2)
        return caught.value.retry_after_seconds

    assert run(service, lambda: elsewhere(duplicate)).value in range(28, 31)


def test_builders_bind_identifiers_before_the_handler(service: Shop) -> None:
    """Ids hang on the operation; handler and duplicate see the same ones."""
    seen: list[Any] = []

    def handler() -> None:
        seen.append((current_idempotency.task_id, current_idempotency.outbox_event_id))

    results = [
        run(
            service,
            handler,
            task_id_builder=lambda claim: claim.derive_id("task"),
            outbox_event_id_builder=lambda claim: claim.derive_id("event"),
        )
        for _ in range(2)
    ]
    ids = [(r.task_id, r.outbox_event_id) for r in results]
    assert ids[0] == ids[1] == seen[0]
    assert len({*ids[0]}) == 2


def test_in_progress_tells_the_bound_task(service: Shop) -> None:
    """A duplicate learns the task id also while the first call runs."""

    def duplicate() -> str | None:
        with service.app.app_context(), pytest.raises(IdempotencyInProgress) as caught:
            run(service, lambda: 2)
        return caught.value.task_id

    result = run(
        service,
        lambda: elsewhere(duplicate),
        task_id_builder=lambda claim: claim.derive_id("task"),
    )
    assert result.value == result.task_id


def test_reused_key_gets_new_identifiers(service: Shop) -> None:
    """After its expiry a key means a new operation with a new task."""

    def submit() -> MutationResult:
        return run(
            service, lambda: 1, task_id_builder=lambda claim: claim.derive_id("task")
        )

    first = submit()
    service.outlive()
    second = submit()
    assert not second.replayed
    assert second.task_id != first.task_id
    assert second.record_id == first.record_id


def test_builder_that_raises_claims_nothing(service: Shop) -> None:
    """A broken builder fails before the INSERT."""
    with pytest.raises(ZeroDivisionError):
        run(service, lambda: 1, task_id_builder=lambda _claim: str(1 / 0))
    assert service.idempotency.store.look(scope()) is None


@pytest.mark.parametrize("built", ["x" * 256, "a\0b", 7])
def test_built_id_that_is_not_storable_is_refused(service: Shop, built: Any) -> None:
    """A task id that the database would change is refused before the INSERT."""
    with pytest.raises(ValueError, match="task_id"):
        run(service, lambda: 1, task_id_builder=lambda _claim: built)
    assert service.idempotency.store.look(scope()) is None


def test_no_scope_runs_unrecorded_in_a_unit_of_work(service: Shop) -> None:
    """Without a scope the handler runs each time, its rows committed or dropped."""
    result = run(service, lambda: service.add("first"), scope=None)
    assert (result.value, result.replayed, result.record_id) == ("first", False, None)
    with pytest.raises(KeyError):
        run(service, lambda: dict[str, str]()[service.add("second")], scope=None)
    assert service.accounts() == ["first"]


@pytest.mark.parametrize("duration", [0, 0.0, -1, float("nan"), "30", True])
def test_bad_durations_are_refused(service: Shop, duration: Any) -> None:
    """A lease or ttl that is no duration of a second or more is refused by name."""
    with pytest.raises(IdempotencyConfigError, match="lease is"):
        run(service, lambda: 1, lease=duration)
    with pytest.raises(IdempotencyConfigError, match="ttl is"):
        run(service, lambda: 1, ttl=duration)
    assert service.idempotency.store.look(scope()) is None


def test_nested_calls_complete_in_the_outermost_commit(service: Shop) -> None:
    """Two records, two rows, one commit."""
    inner_status = []

    def outer() -> str:
        service.add("outer")
        run(service, lambda: service.add("inner"), scope=scope("inner"))
        inner_status.append(elsewhere(service.accounts))
        return "done"

    assert run(service, outer).value == "done"
    assert inner_status == [[]]
    assert service.accounts() == ["outer", "inner"]
    for key in ("k", "inner"):
        found = service.idempotency.store.diagnose(scope(key))
        assert found.diagnosis.value == "replayable"


def test_outer_failure_frees_the_inner_key(service: Shop) -> None:
    """When the outer call is rolled back, nothing of the inner one stays."""

    def outer() -> None:
        run(service, lambda: service.add("inner"), scope=scope("inner"))
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - no text
        run(service, outer)
    assert service.accounts() == []
    assert service.idempotency.store.look(scope("inner")) is None


def test_inner_failure_leaves_the_outer_rows(service: Shop) -> None:
    """An inner call that fails is undone alone, if the outer one goes on."""

    def inner() -> None:
        service.add("inner")
        raise LookupError

    def outer() -> str:
        service.add("outer")
        with pytest.raises(LookupError):
            run(service, inner, scope=scope("inner"))
        return "survived"

    assert run(service, outer).value == "survived"
    assert service.accounts() == ["outer"]
    with pytest.raises(IdempotencyPreviousFailure):
        run(service, inner, scope=scope("inner"))


def test_inner_conflict_of_rows_is_undone_alone(service: Shop) -> None:
    """A database error inside an inner call does not spoil the outer transaction."""

    def outer() -> str:
        service.add("twin")
        with pytest.raises(IntegrityError):
            run(service, lambda: service.add("twin"), scope=scope("inner"))
        return "survived"

    assert run(service, outer).value == "survived"
    assert service.accounts() == ["twin"]


def test_inner_client_error_is_undone_and_kept(service: Shop) -> None:
    """An inner answer of 4xx drops the inner rows and is replayed later."""

    def inner() -> Any:
        service.add("inner")
        return "no", 409

    def outer() -> int:
        service.add("outer")
        return run(service, inner, scope=scope("inner")).response_code

    assert run(service, outer).value == 409
    assert service.accounts() == ["outer"]
    assert run(service, inner, scope=scope("inner")).replayed


def test_commit_inside_an_inner_call_carries_both_records(service: Shop) -> None:
    """A commit of the inner handler marks both operations; both complete."""

    def inner() -> str:
        name = service.add("inner")
        service.db.session.commit()
        return name

    def outer() -> str:
        service.add("outer")
        run(service, inner, scope=scope("inner"))
        service.add("more")
        return "done"

    run(service, outer)
    assert service.accounts() == ["outer", "inner", "more"]
    for key in ("k", "inner"):
        record = service.idempotency.store.look(scope(key))
        assert record is not None
        assert (record.status.value, record.effects_committed_at is None) == (
            "succeeded",
            False,
        )


def test_commit_of_the_view_after_an_inner_call(service: Shop) -> None:
    """A commit in the middle completes the inner call; the last one the outer."""

    def outer() -> str:
        run(service, lambda: service.add("inner"), scope=scope("inner"))
        service.db.session.commit()
        service.add("outer")
        return "done"

    run(service, outer)
    assert service.accounts() == ["inner", "outer"]
    assert run(service, lambda: 0, scope=scope("inner")).value == "inner"


def test_same_scope_inside_itself_is_refused(service: Shop) -> None:
    """A call that would wait for itself is a programming error, said at once."""
    with pytest.raises(NestedCallError, match=r"accounts\.create"):
        run(service, lambda: run(service, lambda: 1))


def test_inner_call_in_another_context_commits_by_itself(service: Shop) -> None:
    """An inner call with a session of its own is durable when it returns."""

    def inner() -> None:
        with service.app.app_context():
            run(service, lambda: service.add("inner"), scope=scope("inner"))

    def outer() -> list[str]:
        inner()
        return service.accounts()

    assert run(service, outer).value == ["inner"]
    record = service.idempotency.store.look(scope())
    assert record is not None
    assert record.effects_committed_at is not None


def test_inner_record_taken_over_stops_the_outer_commit(service: Shop) -> None:
    """When an inner record is lost, the outer call commits nothing and can retry."""

    def take_over() -> None:
        with service.app.app_context():
            service.lapse("inner")
            service.idempotency.store.claim(scope("inner"), HASH)

    def outer() -> str:
        run(service, lambda: "quick", scope=scope("inner"))
        elsewhere(take_over)
        service.add("outer")
        return "done"

    with pytest.raises(IdempotencyLeaseLost):
        run(service, outer)
    assert service.accounts() == []
    assert service.idempotency.store.look(scope()) is None


def test_service_claims_for_a_route(shop: Shop) -> None:
    """A route with claim=False checks the key; the service claims under its name."""

    @shop.app.post("/accounts")
    @idempotent(required=True, claim=False)
    def view() -> tuple[Any, int]:
        key = shop.idempotency.scope("accounts.create")
        result = shop.idempotency.guard.run(key, HASH, lambda: (shop.create()[0], 201))
        return result.value, result.response_code

    assert shop.post(key=None).status_code == 400
    assert [shop.post().status_code for _ in range(2)] == [201, 201]
    assert shop.runs == ["first"]
    assert shop.status(route="accounts.create") == "succeeded"


def test_retryable_refusal_inside_a_view_is_not_stored(shop: Shop) -> None:
    """A 409 "in progress" of a service is not replayed as the view's answer."""
    release = threading.Event()
    entered = threading.Event()
    service_scope = scope("shared")

    def hold() -> None:
        def handler() -> None:
            entered.set()
            release.wait(10)

        with shop.app.app_context():
            shop.idempotency.guard.run(service_scope, HASH, handler)

    def view() -> Any:
        return {
            "value": shop.idempotency.guard.run(service_scope, HASH, lambda: 1).value
        }

    shop.view(view)
    holder = threading.Thread(target=hold)
    holder.start()
    entered.wait(10)
    assert shop.post().status_code == 409
    release.set()
    holder.join()
    assert shop.post().status_code == 200


def test_outside_of_a_call_there_is_nothing_current() -> None:
    """current_idempotency explains that no call is running."""
    with pytest.raises(RuntimeError, match="outside of an idempotent call"):
        _ = current_idempotency.active


def test_current_call_without_a_key(service: Shop) -> None:
    """Without a scope the same handler works: inactive, with keys of this call."""

    def handler() -> list[Any]:
        first, again = (current_idempotency.derive_key("charge") for _ in range(2))
        assert first == again != current_idempotency.derive_key("refund")
        return [current_idempotency.active, first]

    calls = [run(service, handler, scope=None).value for _ in range(2)]
    assert [active for active, _ in calls] == [False, False]
    assert calls[0] != calls[1]
    assert run(service, handler).value[0] is True


def test_current_call_says_what_it_is_about(service: Shop) -> None:
    """A handler sees scope, hash and attempt; a replay carries its marker."""
    seen: list[Any] = []

    def handler() -> None:
        now = current_idempotency
        seen.append((now.scope, now.request_hash, now.attempt))

    results = [run(service, handler) for _ in range(2)]
    assert seen == [(scope(), HASH, 1)]
    assert [r.headers for r in results] == [{}, {"Idempotent-Replayed": "true"}]


def test_reserved_route_of_a_service_is_refused(shop: Shop) -> None:
    """Routes of tasks and events belong to the library."""
    headers = {"X-User": "u", "Idempotency-Key": "k"}
    with (
        shop.app.test_request_context(headers=headers),
        pytest.raises(IdempotencyConfigError, match="reserved"),
    ):
        shop.idempotency.scope("task:x")
