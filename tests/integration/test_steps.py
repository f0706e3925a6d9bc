"""Steps: a foreign system is called once, and an open step is never forgotten."""

from __future__ import annotations

import contextvars
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import text

from flask_idempotency import (
    Failure,
    Idempotency,
    IdempotencyConfigError,
    Resolution,
    Scope,
    StoredResponse,
    current_idempotency,
    failpoints,
    fingerprint,
)
from flask_idempotency.exceptions import (
    IdempotencyInProgress,
    LeaseLost,
    NestedCallError,
    ResultNotStorable,
)
from tests.shop import cut_off, elsewhere, is_replay, unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from flask_idempotency import RecordView
    from tests.databases import Database
    from tests.shop import Shop


class CardDeclinedError(Exception):
    """The provider says that it did not charge."""


class Provider:
    """
    Another company's program, which charges.

    Attributes:
        keys: The key of each request for a charge.
        failures: What the next requests raise, after they have charged.
    """

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.failures: list[Exception] = []

    def charge(self, key: str) -> dict[str, Any]:
        """Charge once more."""
        self.keys.append(key)
        if self.failures:
            raise self.failures.pop(0)
        return {"id": len(self.keys)}


@pytest.fixture
def provider() -> Provider:
    """Give a provider that has charged nothing yet."""
    return Provider()


def paying(shop: Shop, provider: Provider, **step: Any) -> Callable[[], Any]:
    """Return a view that charges in a step, then adds an account."""

    def view() -> Any:
        charge = current_idempotency.run_step("charge", provider.charge, **step)
        shop.add()
        return {"charge": charge["id"]}, 201

    return view


def failing(view: Callable[[], Any], times: int = 1) -> Callable[[], Any]:
    """Return a view that raises after its work, the first times it runs."""
    left = [times]

    def failing_view() -> Any:
        answer = view()
        if left[0]:
            left[0] -= 1
            message = "after its work"
            raise RuntimeError(message)
        return answer

    return failing_view


def found(shop: Shop, key: str = "k") -> RecordView:
    """Return the record of a key, as another process sees it."""
    record = elsewhere(lambda: shop.record(key))
    assert record is not None
    return record


def settle(shop: Shop, ending: StoredResponse | Failure | None) -> RecordView | None:
    """Let an operator settle the outcome."""
    with shop.app.app_context():
        resolution = Resolution(ending=ending, by="operator", reason="in their books")
        return shop.idempotency.store.resolve(shop.scope(), resolution)


def test_later_attempt_gets_the_stored_result(shop: Shop, provider: Provider) -> None:
    """What a step has finished is not done again, though the call was rolled back."""
    shop.view(failing(paying(shop, provider), times=2), retry_failed=True)
    answers = [shop.post() for _ in range(4)]
    assert [answer.status_code for answer in answers] == [500, 500, 201, 201]
    assert answers[2].json == {"charge": 1}
    assert (len(provider.keys), shop.accounts()) == (1, ["first"])
    assert found(shop).steps == {"charge": {"id": 1}}


def test_step_is_stored_before_and_after_it_is_called(
    shop: Shop, provider: Provider
) -> None:
    """Another process sees its start and its result while the call still runs."""
    seen: list[RecordView] = []

    def fn(key: str) -> Any:
        seen.append(found(shop))
        return provider.charge(key)

    def view() -> str:
        current_idempotency.run_step("charge", fn)
        seen.append(found(shop))
        return "paid"

    shop.view(view)
    assert shop.post().data == b"paid"
    assert [(r.open_step, dict(r.steps)) for r in seen] == [
        ("charge", {}),
        (None, {"charge": {"id": 1}}),
    ]
    assert all(record.effects_committed_at is None for record in seen)


@pytest.mark.parametrize("key", ["k", None])
def test_value_is_the_stored_json_in_every_attempt(
    quick: Shop, key: str | None
) -> None:
    """What JSON changes is changed on the first call, too, with a key and without."""
    seen: list[Any] = []

    def view() -> str:
        fn: Callable[[str], Any] = lambda _key: {1: (1, 2)}  # noqa: E731
        seen.append(current_idempotency.run_step("s", fn))
        return "done"

    quick.view(failing(view), required=False, retry_failed=True)
    assert [quick.post(key=key).status_code for _ in range(2)] == [500, 200]
    assert seen == [{"1": [1, 2]}] * 2


def test_step_is_known_by_its_name(quick: Shop, provider: Provider) -> None:
    """Another name is another step, with a key of its own."""

    def view() -> str:
        names = ["charge", "refund"]
        steps = [current_idempotency.run_step(n, provider.charge) for n in names]
        return ",".join(str(step["id"]) for step in steps)

    quick.view(view)
    assert quick.post().data == b"1,2"
    assert len(set(provider.keys)) == 2
    assert found(quick).steps == {"charge": {"id": 1}, "refund": {"id": 2}}


def test_new_operation_starts_without_steps(shop: Shop, provider: Provider) -> None:
    """A key that is used again after its life charges again, under another key."""
    shop.view(lambda: current_idempotency.run_step("charge", provider.charge))
    answers = [shop.post().json]
    shop.outlive()
    answers.append(shop.post().json)
    assert answers == [{"id": 1}, {"id": 2}]
    assert len(set(provider.keys)) == 2


def test_open_step_is_never_called_again(shop: Shop, provider: Provider) -> None:
    """Its failure is replayed, also with ``retry_failed``, while the key lives."""
    provider.failures = [TimeoutError()]
    shop.view(paying(shop, provider), retry_failed=True)
    answers = [shop.post() for _ in range(3)]
    assert [answer.status_code for answer in answers] == [500] * 3
    assert is_replay(answers[1])
    assert answers[1].json is not None
    assert "safe_new_key" not in answers[1].json
    assert (len(provider.keys), found(shop).open_step) == (1, "charge")


def test_open_step_outlives_its_key(shop: Shop, provider: Provider) -> None:
    """After the key's life the outcome is unknown; nothing expires it."""
    provider.failures = [TimeoutError()]
    shop.view(paying(shop, provider), retry_failed=True)
    shop.post()
    shop.outlive()
    answer = shop.post()
    assert (answer.status_code, len(provider.keys)) == (409, 1)
    assert answer.json is not None
    assert answer.json["code"] == "IDEMPOTENCY_OUTCOME_UNKNOWN"
    assert shop.post("other").status_code == 409
    with shop.app.app_context():
        store = shop.idempotency.store
        assert (store.expire(limit=10), store.count_unknown_outcomes()) == (0, 1)


@pytest.mark.parametrize(
    ("ending", "status", "charges"),
    [
        (StoredResponse(code=202, body=b"settled"), 202, 1),
        (Failure(reason="not charged"), 500, 1),
        (None, 201, 2),
    ],
    ids=["succeeded", "failed", "released"],
)
def test_operator_settles_an_open_step(
    shop: Shop,
    provider: Provider,
    ending: StoredResponse | Failure | None,
    status: int,
    charges: int,
) -> None:
    """From then on the record is as any other, and its life ends."""
    provider.failures = [TimeoutError()]
    shop.view(paying(shop, provider), retry_failed=True)
    shop.post()
    shop.outlive()
    assert settle(shop, ending) is not None
    assert [shop.post().status_code for _ in range(2)] == [status, status]
    assert len(provider.keys) == charges
    shop.outlive()
    with shop.app.app_context():
        assert shop.idempotency.store.expire(limit=10) == 1


@pytest.mark.parametrize("expired", [False, True])
def test_recovery_sees_the_steps(
    shop: Shop, provider: Provider, *, expired: bool
) -> None:
    """``recover=`` gets what has finished, and the name of what has not."""
    seen: list[tuple[dict[str, Any], str | None]] = []

    def recover(record: RecordView) -> Any:
        seen.append((dict(record.steps), record.open_step))
        return {"charge": record.steps["charge"]["id"]}, 201

    def view() -> None:
        current_idempotency.run_step("charge", provider.charge)
        provider.failures = [TimeoutError()]
        current_idempotency.run_step("mail", provider.charge)

    shop.view(view, recover=recover)
    assert shop.post().status_code == 500
    assert is_replay(shop.post())
    if expired:
        shop.outlive()
        assert [shop.post().json for _ in range(2)] == [{"charge": 1}] * 2
    assert seen == [({"charge": {"id": 1}}, "mail")] * expired
    assert len(provider.keys) == 2


def test_repeatable_step_is_called_again_with_its_key(
    shop: Shop, provider: Provider
) -> None:
    """A provider that honours the key charges once, however often it is asked."""
    provider.failures = [TimeoutError(), TimeoutError()]
    shop.view(paying(shop, provider, repeatable=True), retry_failed=True)
    assert [shop.post().status_code for _ in range(3)] == [500, 500, 201]
    assert (len(provider.keys), len(set(provider.keys))) == (3, 1)


def test_definite_failure_leaves_nothing_open(shop: Shop, provider: Provider) -> None:
    """It reaches the view; the next try is another one for the provider."""
    provider.failures = [CardDeclinedError(), CardDeclinedError()]
    shop.view(paying(shop, provider, definite=(CardDeclinedError,)), retry_failed=True)
    assert [shop.post().status_code for _ in range(3)] == [500, 500, 201]
    assert len(set(provider.keys)) == 3
    assert found(shop).steps == {"charge": {"id": 3}}


def test_key_is_freed_after_a_definite_failure(shop: Shop, provider: Provider) -> None:
    """Nothing was done, so ``release_on`` lets the client try again with the key."""
    provider.failures = [CardDeclinedError()]
    view = paying(shop, provider, definite=(CardDeclinedError,))

    def answering() -> Any:
        try:
            return view()
        except CardDeclinedError:
            return "declined", 402

    shop.view(answering, release_on={402})
    assert shop.post().status_code == 402
    assert shop.record() is None
    assert shop.post().status_code == 201


def test_step_keeps_its_key_from_being_freed(shop: Shop, provider: Provider) -> None:
    """An answer that nothing was done does not make a charge forgotten."""

    def view() -> Any:
        repeatable = request.get_json()["name"] == "repeatable"
        with suppress(TimeoutError):
            current_idempotency.run_step(
                "charge", provider.charge, repeatable=repeatable
            )
        return "slow down", 429

    shop.view(view)
    for name in ("repeatable", "once"):
        for finished in (True, False):
            key = f"{name}-{finished}"
            provider.failures = [] if finished else [TimeoutError()]
            codes = [shop.post(name, key=key).status_code for _ in range(2)]
            assert (codes, shop.status(key)) == ([429, 429], "succeeded")
    assert len(provider.keys) == 4


def test_retryable_error_keeps_the_steps(shop: Shop, provider: Provider) -> None:
    """Who comes back later, as such an error says, gets the results of the steps."""
    view = paying(shop, provider)

    def busy() -> Any:
        answer = view()
        if len(shop.runs) == 1:
            raise IdempotencyInProgress
        return answer

    shop.view(busy)
    assert [shop.post().status_code for _ in range(2)] == [409, 201]
    assert len(provider.keys) == 1


def test_coming_back_often_is_no_crash(
    make_shop: Callable[..., Shop], provider: Provider
) -> None:
    """However often a call asks the client to come back, it does not count as failed."""
    shop = make_shop(IDEMPOTENCY_MAX_ATTEMPTS=2)

    def busy() -> Any:
        charge = current_idempotency.run_step("charge", provider.charge)
        shop.runs.append(current_idempotency.attempt)
        if len(shop.runs) < 4:
            raise IdempotencyInProgress(retry_after_seconds=1)
        return charge, 201

    shop.view(busy)
    assert [shop.post().status_code for _ in range(4)] == [409, 409, 409, 201]
    assert (len(provider.keys), shop.runs) == (1, [1, 1, 1, 1])


def test_late_owner_calls_nothing(shop: Shop, provider: Provider) -> None:
    """A call that lost its record before a step does not start it, nor any other."""

    def view() -> str:
        if shop.runs:
            return "winner"
        shop.runs.append(1)
        elsewhere(shop.lapse)
        assert elsewhere(shop.post).data == b"winner"
        for _ in range(2):
            with pytest.raises(LeaseLost):
                current_idempotency.run_step("charge", provider.charge)
        return "late"

    shop.view(view)
    assert shop.post().data == b"winner"
    assert provider.keys == []


def test_result_of_a_late_owner_is_not_used(shop: Shop, provider: Provider) -> None:
    """Who loses its record in a repeatable step leaves the rest to the new owner."""

    def fn(key: str) -> Any:
        if not provider.keys:
            provider.charge(key)
            elsewhere(shop.lapse)
            assert elsewhere(shop.post).status_code == 201
        return provider.charge(key)

    def view() -> Any:
        charge = current_idempotency.run_step("charge", fn, repeatable=True)
        shop.add()
        return {"charge": charge["id"]}, 201

    shop.view(view)
    answer = shop.post()
    assert (answer.json, is_replay(answer)) == ({"charge": 2}, True)
    assert (len(set(provider.keys)), shop.runs) == (1, ["first"])


def test_step_that_cannot_be_started(shop: Shop, provider: Provider) -> None:
    """While the store is down nothing is called; later the request runs."""
    down = ExitStack()

    def view() -> Any:
        if not shop.runs:
            shop.runs.append(1)
            down.enter_context(cut_off(shop))
        return current_idempotency.run_step("charge", provider.charge)

    shop.view(view)
    with down:
        unavailable(shop.post())
    assert provider.keys == []
    shop.lapse()
    assert shop.post().json == {"id": 1}


def test_step_whose_result_cannot_be_stored(shop: Shop, provider: Provider) -> None:
    """It was called, so it stays open, and what became of it is unknown."""
    down = ExitStack()

    def fn(key: str) -> Any:
        down.enter_context(cut_off(shop))
        return provider.charge(key)

    shop.view(lambda: current_idempotency.run_step("charge", fn), retry_failed=True)
    with down:
        unavailable(shop.post())
    assert found(shop).open_step == "charge"
    shop.lapse()
    assert [shop.post().status_code for _ in range(2)] == [409, 409]
    assert len(provider.keys) == 1


def test_record_that_vanished_under_a_step(shop: Shop, provider: Provider) -> None:
    """The client is not told that nothing happened."""

    def view() -> str:
        current_idempotency.run_step("charge", provider.charge)
        elsewhere(lambda: delete_records(shop))
        shop.add()
        return "done"

    shop.view(view)
    answer = shop.post()
    assert answer.json is not None
    assert answer.json["code"] == "IDEMPOTENCY_OUTCOME_UNKNOWN"
    assert shop.accounts() == []


def delete_records(shop: Shop) -> None:
    """Remove every record, as an operator should not."""
    with shop.app.app_context(), shop.db.engine.begin() as connection:
        connection.execute(shop.idempotency.Record.__table__.delete())


def add_pending(shop: Shop) -> None:
    """Add an object and do not flush it."""
    shop.db.session.add(shop.Account(name="first"))


def add_flushed(shop: Shop) -> None:
    """Add an object and flush it."""
    shop.add("first")


def insert_row(shop: Shop) -> None:
    """Write without an object."""
    shop.db.session.execute(text("INSERT INTO account (name) VALUES ('first')"))


WRITES = [add_pending, add_flushed, insert_row]
WRITES_AND_MODES: list[tuple[Callable[[Shop], None], str | None, str]] = [
    *((write, "k", "enforce") for write in WRITES),
    (insert_row, None, "enforce"),
    (insert_row, "k", "observe"),
]


@pytest.mark.parametrize(("write", "key", "mode"), WRITES_AND_MODES)
def test_step_comes_before_the_first_write(
    shop: Shop,
    provider: Provider,
    write: Callable[[Shop], None],
    key: str | None,
    mode: str,
) -> None:
    """A later one is refused on every database, with and without a key."""

    def view() -> str:
        write(shop)
        with pytest.raises(IdempotencyConfigError, match="before the first write"):
            current_idempotency.run_step("charge", provider.charge)
        return "done"

    shop.view(view, required=False, mode=mode)
    assert shop.post(key=key).data == b"done"
    assert (provider.keys, shop.accounts()) == ([], ["first"])


@pytest.mark.parametrize("write", WRITES)
def test_step_writes_nothing_in_the_session(
    shop: Shop, provider: Provider, write: Callable[[Shop], None]
) -> None:
    """What it did is not stored then, so it stays open, and its rows are gone."""

    def fn(key: str) -> Any:
        write(shop)
        return provider.charge(key)

    def view() -> str:
        with pytest.raises(IdempotencyConfigError, match="write afterwards"):
            current_idempotency.run_step("charge", fn)
        message = "stop"
        raise RuntimeError(message)

    shop.view(view)
    assert shop.post().status_code == 500
    assert (found(shop).open_step, shop.accounts()) == ("charge", [])


def strictest(database: Database) -> dict[str, Any]:
    """Return engine options by which a transaction keeps one snapshot."""
    if database.name == "sqlite":  # which has only one level
        return {}
    options: dict[str, Any] = {"isolation_level": "SERIALIZABLE"}
    if database.name == "mariadb":  # the default from MariaDB 11.8 on
        snapshots = "SET innodb_snapshot_isolation = ON"
        options["connect_args"] = {"init_command": snapshots}
    return options


def test_reading_around_a_step(
    make_shop: Callable[..., Shop],
    provider: Provider,
    database: Database,
) -> None:
    """Snapshots from before and from inside a step do not hide it from the commit."""
    shop = make_shop(SQLALCHEMY_ENGINE_OPTIONS=strictest(database))

    def read() -> None:
        shop.db.session.query(shop.Account).all()

    def fn(key: str) -> Any:
        read()
        return provider.charge(key)

    def view() -> Any:
        read()
        charge = current_idempotency.run_step("charge", fn)
        read()
        shop.add()
        return charge, 201

    shop.view(view)
    assert [shop.post().status_code for _ in range(2)] == [201, 201]
    assert (shop.accounts(), len(provider.keys)) == (["first"], 1)


def test_step_in_an_atomic_view(
    make_shop: Callable[..., Shop], provider: Provider, database: Database
) -> None:
    """Its result is durable beside the one transaction, which may begin anew."""
    shop = make_shop(SQLALCHEMY_ENGINE_OPTIONS=strictest(database))

    def read() -> None:
        shop.db.session.query(shop.Account).all()

    def fn(key: str) -> Any:
        read()
        return provider.charge(key)

    def view() -> Any:
        read()
        shop.db.session.commit()
        read()
        charge = current_idempotency.run_step("charge", fn)
        read()
        shop.add()
        shop.db.session.commit()
        with pytest.raises(IdempotencyConfigError, match="before the first write"):
            current_idempotency.run_step("late", provider.charge)
        return charge, 201

    shop.view(failing(view), atomic=True, retry_failed=True)
    codes = [shop.post().status_code for _ in range(3)]
    assert codes == [500, 201, 201]
    assert (shop.accounts(), len(provider.keys)) == (["first"], 1)


def test_begun_transaction_of_sqlite(quick: Shop, provider: Provider) -> None:
    """A read transaction that began in so many words is ended for the step."""

    def view() -> Any:
        quick.db.session.execute(text("BEGIN"))
        quick.db.session.query(quick.Account).all()
        charge = current_idempotency.run_step("charge", provider.charge)
        quick.add()
        return charge, 201

    quick.view(view)
    assert quick.post().status_code == 201
    assert quick.accounts() == ["first"]


def test_session_that_was_removed(shop: Shop, provider: Provider) -> None:
    """The session that counts is the one that the view has now."""

    def view() -> str:
        shop.db.session.remove()
        shop.add("first")
        with pytest.raises(IdempotencyConfigError, match="before the first write"):
            current_idempotency.run_step("charge", provider.charge)
        return "done"

    shop.view(view)
    assert shop.post().status_code == 200


INNER = Scope(tenant_id="", user_id="u1", route="inner", idempotency_key="i")


def test_step_of_an_inner_call(shop: Shop, provider: Provider) -> None:
    """It belongs to the inner operation, and outlives a failure of the outer one."""

    def view() -> Any:
        result = shop.idempotency.guard.run(
            INNER, fingerprint(1), paying(shop, provider), retry_failed=True
        )
        return result.value, 201

    shop.view(failing(view), retry_failed=True)
    assert [shop.post().status_code for _ in range(2)] == [500, 201]
    assert (len(provider.keys), shop.accounts()) == (1, ["first"])


def test_step_of_a_joined_inner_call(
    make_shop: Callable[..., Shop], provider: Provider, database: Database
) -> None:
    """Where an inner claim may be rolled back, its step cannot be kept."""
    shop = make_shop(SQLALCHEMY_ENGINE_OPTIONS=strictest(database))

    def view() -> str:
        shop.add()
        with pytest.raises(NestedCallError, match="inner call"):
            shop.idempotency.guard.run(INNER, fingerprint(1), paying(shop, provider))
        return "done"

    shop.view(view)
    assert shop.post().data == b"done"
    assert provider.keys == []


def test_step_inside_a_step(quick: Shop, provider: Provider) -> None:
    """Neither could be told from the other, so the inner one is refused."""

    def fn(key: str) -> Any:
        with pytest.raises(
            NestedCallError, match=r"'mail' was started inside .*'charge'"
        ):
            current_idempotency.run_step("mail", provider.charge)
        return key

    quick.view(lambda: current_idempotency.run_step("charge", fn))
    assert quick.post().status_code == 200
    assert provider.keys == []


@pytest.mark.parametrize("name", ["charge", "mail"])
def test_step_beside_a_step(
    shop: Shop, provider: Provider, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Threads that share the call cannot lose each other's steps, nor double one."""
    refused: list[BaseException | None] = []

    def beside(place: str) -> None:
        if place != "before_step" or refused:
            return
        refused.append(None)
        context = contextvars.copy_context()
        step = partial(current_idempotency.run_step, name, provider.charge)
        with ThreadPoolExecutor(1) as pool:
            refused.append(pool.submit(context.run, step).exception())

    monkeypatch.setattr(failpoints, "reach", beside)
    shop.view(lambda: current_idempotency.run_step("charge", provider.charge))
    assert shop.post().status_code == 200
    assert isinstance(refused[-1], NestedCallError)
    assert len(provider.keys) == 1
    assert [step.name for step in found(shop).all_steps] == ["charge"]


@pytest.mark.parametrize("key", ["k", None])
def test_open_step_is_not_called_again_in_the_same_call(
    quick: Shop, provider: Provider, key: str | None
) -> None:
    """A view that goes on after an exception cannot try it once more."""
    provider.failures = [TimeoutError()]

    def view() -> str:
        with pytest.raises(TimeoutError):
            current_idempotency.run_step("charge", provider.charge)
        with pytest.raises(IdempotencyConfigError, match="nobody knows"):
            current_idempotency.run_step("charge", provider.charge, repeatable=True)
        current_idempotency.run_step("undo", provider.charge)
        return "done"

    quick.view(view, required=False)
    assert quick.post(key=key).status_code == 200
    assert len(provider.keys) == 2
    if key:
        assert found(quick).open_step == "charge"


def test_without_a_key_the_downstream_key_is_random(
    quick: Shop, provider: Provider
) -> None:
    """It is stable within the call, and another one in the next."""

    def view() -> str:
        for error in (TimeoutError(), None):
            provider.failures = [error] if error else []
            with suppress(TimeoutError):
                current_idempotency.run_step("s", provider.charge, repeatable=True)
        return "done"

    quick.view(view, required=False)
    for _ in range(2):
        quick.post(key=None)
    first, again, *others = provider.keys
    assert first == again
    assert len({first, *others}) == 2


@pytest.mark.parametrize(
    ("name", "fault"),
    [("", "empty"), ("x" * 101, "101 characters"), (1, "must be a str"), ("\0", "NUL")],
)
def test_name_of_a_step(quick: Shop, name: Any, fault: str) -> None:
    """A name that no record can keep is refused before anything is called."""

    def view() -> str:
        with pytest.raises(ValueError, match=fault):
            current_idempotency.run_step(name, str)
        return "done"

    quick.view(view)
    assert quick.post().status_code == 200


def test_longest_name_of_a_step(shop: Shop) -> None:
    """A name of 100 characters fits, whatever their bytes."""
    name = "\U0001f600" * 100
    shop.view(lambda: current_idempotency.run_step(name, str))
    assert shop.post().status_code == 200
    assert list(found(shop).steps) == [name]


@pytest.mark.parametrize("definite", [CardDeclinedError, [CardDeclinedError], (1,)])
def test_definite_is_a_tuple_of_exceptions(quick: Shop, definite: Any) -> None:
    """A mistake in it shows at once, and not when the card is declined."""

    def view() -> str:
        with pytest.raises(TypeError, match="tuple of exception classes"):
            current_idempotency.run_step("charge", str, definite=definite)
        return "done"

    quick.view(view)
    assert quick.post().status_code == 200


@pytest.mark.parametrize("key", ["k", None])
@pytest.mark.parametrize(
    ("result", "fault"), [(object(), "no JSON"), ("x" * 99, "101")]
)
def test_result_that_cannot_be_stored(
    make_quick: Callable[..., Shop], key: str | None, result: object, fault: str
) -> None:
    """The step was called all the same, so it stays open; the message says that."""
    shop = make_quick(IDEMPOTENCY_MAX_RESPONSE_SIZE=100)

    def view() -> str:
        with pytest.raises(ResultNotStorable, match=f"{fault}.*stays started"):
            current_idempotency.run_step("charge", lambda _key: result)
        return "done"

    shop.view(view, required=False)
    assert shop.post(key=key).status_code == 200
    if key:
        assert found(shop).open_step == "charge"


def test_step_outside_of_a_call() -> None:
    """A step belongs to a guarded call."""
    with pytest.raises(RuntimeError, match="outside of an idempotent call"):
        current_idempotency.run_step("charge", str)


@pytest.mark.parametrize("atomic", [False, True])
def test_steps_on_sqlite_in_memory(provider: Provider, *, atomic: bool) -> None:
    """With the session's only connection a step is kept as a claim is."""
    app = Flask("memory")
    app.config.update(SQLALCHEMY_DATABASE_URI="sqlite://", IDEMPOTENCY_ATOMIC=atomic)
    db = SQLAlchemy(app)
    idempotency = Idempotency(app, db)
    scope = Scope(tenant_id="", user_id="", route="r", idempotency_key="k")

    def handler() -> Any:
        db.session.execute(text("SELECT 1"))
        charge = current_idempotency.run_step("charge", provider.charge)
        db.session.execute(text("INSERT INTO paid (id) VALUES (1)"))
        return charge

    with app.app_context():
        db.create_all()
        db.session.execute(text("CREATE TABLE paid (id INTEGER)"))
        db.session.commit()
        guard = idempotency.guard
        with pytest.raises(RuntimeError):
            guard.run(scope, "h", failing(handler))
        result = guard.run(scope, "h", handler, retry_failed=True)
        assert db.session.execute(text("SELECT count(*) FROM paid")).scalar() == 1
    assert (result.value, len(provider.keys)) == ({"id": 1}, 1)


def test_same_name_twice_in_one_call_is_refused(
    quick: Shop, provider: Provider
) -> None:
    """The second charge would get the result of the first, and never be made."""

    def view() -> Any:
        current_idempotency.run_step("charge", provider.charge)
        with pytest.raises(IdempotencyConfigError, match="called twice in this call"):
            current_idempotency.run_step("charge", provider.charge)
        return "done"

    quick.view(view, required=False)
    assert [quick.post(key=key).status_code for key in ("k", None)] == [200, 200]
    assert len(provider.keys) == 2


def test_key_of_an_open_step_is_on_the_record(quick: Shop, provider: Provider) -> None:
    """The provider can be asked by it, and an operator settles it before its end."""

    def fail(key: str) -> None:
        provider.charge(key)
        raise TimeoutError

    quick.view(lambda: current_idempotency.run_step("charge", fail))
    assert quick.post().status_code == 500
    record = found(quick)
    assert record.step_key("charge") == provider.keys[0]
    assert record.step_key("other") is None
    answer = quick.post()
    assert answer.json is not None
    assert "or may have" in answer.json["detail"]
