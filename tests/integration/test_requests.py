"""A guarded route on every database: first request, duplicate, failure, effects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from flask import abort, request
from sqlalchemy.exc import IntegrityError

from flask_idempotency import idempotent
from flask_idempotency.config import Config
from flask_idempotency.exceptions import LeaseLost
from flask_idempotency.fingerprint import Fingerprint
from flask_idempotency.request_hash import request_hash
from tests.shop import elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.shop import Shop


def test_first_request_runs_and_commits_rows_with_the_answer(shop: Shop) -> None:
    """A view without a commit leaves its row and a succeeded record."""
    shop.creating_view()
    response = shop.post()
    assert (response.status_code, response.json) == (201, {"name": "first", "run": 1})
    assert "Idempotent-Replayed" not in response.headers
    assert shop.accounts() == ["first"]
    assert shop.status() == "succeeded"


def test_duplicate_gets_the_first_answer(shop: Shop) -> None:
    """The same key and request is answered by the same bytes, marked as replayed."""
    shop.creating_view()
    first, second = shop.post(), shop.post()
    assert second.status_code == first.status_code
    assert second.data == first.data
    assert second.headers["Idempotent-Replayed"] == "true"
    assert shop.runs == ["first"]


def test_other_body_is_a_conflict(shop: Shop) -> None:
    """The same key with another body is refused with 422 and changes nothing."""
    shop.creating_view()
    shop.post()
    response = shop.post("second")
    assert response.status_code == 422
    assert response.json is not None
    assert response.json["code"] == "IDEMPOTENCY_KEY_CONFLICT"
    assert shop.accounts() == ["first"]


def test_conflict_is_answered_before_in_progress(shop: Shop) -> None:
    """While the first call runs, another body is a conflict, the same one waits."""
    seen: list[int] = []

    def view() -> tuple[dict[str, Any], int]:
        if not seen:
            seen.append(0)
            seen.append(elsewhere(lambda: shop.post("second")).status_code)
            seen.append(elsewhere(lambda: shop.post("first")).status_code)
        return shop.create()

    shop.view(view)
    assert shop.post().status_code == 201
    assert seen[1:] == [422, 409]


def test_in_progress_says_when_to_come_back(shop: Shop) -> None:
    """A duplicate of a running call gets 409 with the rest of the lease."""
    answers: list[Any] = []

    def view() -> tuple[dict[str, Any], int]:
        answers.append(elsewhere(shop.post))
        return shop.create()

    shop.view(view, lease=20)
    shop.post()
    response = answers[0]
    assert response.status_code == 409
    assert response.json["code"] == "IDEMPOTENCY_IN_PROGRESS"
    assert response.json["retryable"] is True
    assert 18 <= int(response.headers["Retry-After"]) <= 20


def test_raising_view_is_rolled_back_and_its_failure_replayed(shop: Shop) -> None:
    """An exception reaches the application; the duplicate is not run again."""

    def view() -> None:
        shop.add()
        message = "secret detail"
        raise ValueError(message)

    shop.view(view)
    assert shop.post().status_code == 500
    response = shop.post()
    assert response.status_code == 500
    assert response.json is not None
    assert response.json["code"] == "IDEMPOTENCY_PREVIOUS_FAILURE"
    assert "secret detail" not in response.text
    assert response.headers["Idempotent-Replayed"] == "true"
    assert (shop.accounts(), shop.runs) == ([], ["first"])
    record = shop.record()
    assert record is not None
    assert (record.status.value, record.failure) == ("failed", "builtins.ValueError")


def test_retry_failed_runs_again_as_the_same_operation(shop: Shop) -> None:
    """With retry_failed a failure of which nothing stayed is run again."""
    operations = []

    def view() -> tuple[dict[str, Any], int]:
        record = shop.record()
        assert record is not None
        operations.append((record.operation_id, record.attempts))
        answer = shop.create()
        if len(shop.runs) == 1:
            raise ValueError
        return answer

    shop.view(view, retry_failed=True)
    assert [shop.post().status_code for _ in range(3)] == [500, 201, 201]
    assert shop.accounts() == ["first"]
    assert operations[0][0] == operations[1][0]
    assert [attempts for _, attempts in operations] == [1, 2]


def test_retry_failed_does_not_run_what_partly_stayed(shop: Shop) -> None:
    """A view that committed and then raised is never run again."""

    def view() -> None:
        shop.add()
        shop.db.session.commit()
        raise ValueError

    shop.view(view, retry_failed=True)
    assert [shop.post().status_code for _ in range(2)] == [500, 500]
    assert (shop.accounts(), shop.runs) == (["first"], ["first"])


@pytest.mark.parametrize("status", [400, 404, 409, 422])
def test_client_error_is_stored_and_its_rows_rolled_back(
    shop: Shop, status: int
) -> None:
    """An answer of 4xx is an answer: replayed, without what the view had added."""

    def view() -> tuple[str, int]:
        shop.add()
        return "no", status

    shop.view(view)
    answers = [shop.post(), shop.post()]
    assert [a.status_code for a in answers] == [status, status]
    assert answers[1].headers["Idempotent-Replayed"] == "true"
    assert (shop.accounts(), shop.runs) == ([], ["first"])


def test_abort_is_an_answer(shop: Shop) -> None:
    """An answer given by abort() is stored like any other."""

    def view() -> None:
        shop.runs.append(1)
        abort(404, "no such thing")

    shop.view(view)
    first, second = shop.post(), shop.post()
    assert first.status_code == second.status_code == 404
    assert first.data == second.data
    assert shop.runs == [1]


def test_error_handler_of_the_application_answers(shop: Shop) -> None:
    """An exception that the application turns into 409 is stored as that answer."""

    @shop.app.errorhandler(KeyError)
    def handle(_error: KeyError) -> tuple[dict[str, str], int]:
        return {"error": "known"}, 409

    def view() -> None:
        shop.runs.append(1)
        raise KeyError

    shop.view(view)
    first, second = shop.post(), shop.post()
    assert first.status_code == second.status_code == 409
    assert first.json == second.json == {"error": "known"}
    assert shop.runs == [1]


@pytest.mark.parametrize("status", [401, 403, 408, 425, 429])
def test_nothing_done_frees_the_key(shop: Shop, status: int) -> None:
    """A status of IDEMPOTENCY_RELEASE_ON leaves no record, so a retry runs."""

    def view() -> tuple[str, int]:
        shop.add()
        return ("no", status) if len(shop.runs) == 1 else ("yes", 201)

    shop.view(view)
    assert shop.post().status_code == status
    assert shop.status() is None
    assert shop.post().status_code == 201
    assert shop.accounts() == ["first"]


def test_release_status_after_a_commit_keeps_the_answer(shop: Shop) -> None:
    """Once a part is durable, no status frees the key."""

    def view() -> tuple[str, int]:
        shop.add()
        shop.db.session.commit()
        return "slow down", 429

    shop.view(view)
    assert [shop.post().status_code for _ in range(2)] == [429, 429]
    assert (shop.runs, shop.status()) == (["first"], "succeeded")


def test_server_error_answer_is_replayed_as_failure(shop: Shop) -> None:
    """An answer of 500 or above is rolled back, stored as failed, and replayed."""

    def view() -> tuple[str, int]:
        shop.add()
        return "provider down", 503

    shop.view(view)
    first, second = shop.post(), shop.post()
    assert first.data == second.data == b"provider down"
    assert second.headers["Idempotent-Replayed"] == "true"
    assert (shop.accounts(), shop.status()) == ([], "failed")


def test_view_with_its_own_commit_works_too(shop: Shop) -> None:
    """A view that commits by itself keeps its rows and gets a succeeded record."""

    def view() -> tuple[dict[str, Any], int]:
        answer = shop.create()
        shop.db.session.commit()
        return answer

    shop.view(view)
    assert [shop.post().status_code for _ in range(2)] == [201, 201]
    assert (shop.accounts(), shop.runs) == (["first"], ["first"])


def test_without_a_key_the_view_is_still_a_unit_of_work(shop: Shop) -> None:
    """An optional key that is not sent leaves no record, but commits the rows."""
    shop.app.post("/accounts")(idempotent(shop.create))
    assert shop.post(key=None).status_code == 201
    assert shop.accounts() == ["first"]


def test_without_a_key_an_error_is_rolled_back(shop: Shop) -> None:
    """A decorated view rolls back at 400 or above, also without a key."""

    @shop.app.post("/accounts")
    @idempotent
    def view() -> tuple[str, int]:
        shop.add()
        return "no", 400

    assert shop.post(key=None).status_code == 400
    assert shop.accounts() == []


def test_session_whose_flush_failed_and_was_caught(shop: Shop) -> None:
    """A caught flush error is rolled back, and the view's answer stored."""

    def view() -> tuple[str, int]:
        shop.runs.append(1)
        shop.db.session.add_all([shop.Account(name="twin"), shop.Account(name="twin")])
        try:
            shop.db.session.flush()
        except IntegrityError:
            return "twins", 200
        return "created", 201

    shop.view(view)
    assert [shop.post().data for _ in range(2)] == [b"twins", b"twins"]
    assert (shop.accounts(), shop.status(), shop.runs) == ([], "succeeded", [1])
    shop.app.view_functions["accounts"] = shop.create
    assert shop.post("next").status_code == 201


def test_commit_that_fails_is_an_exception_of_the_view(shop: Shop) -> None:
    """What only the guard's own flush finds out ends as the view's failure."""

    def view() -> tuple[str, int]:
        shop.runs.append(1)
        shop.db.session.add_all([shop.Account(name="twin"), shop.Account(name="twin")])
        return "created", 201

    shop.view(view)
    assert [shop.post().status_code for _ in range(2)] == [500, 500]
    assert (shop.accounts(), shop.status(), shop.runs) == ([], "failed", [1])


def test_commit_that_fails_reaches_the_error_handler(shop: Shop) -> None:
    """The application may turn a failed commit into an ordinary answer."""

    @shop.app.errorhandler(IntegrityError)
    def handle(_error: IntegrityError) -> tuple[str, int]:
        return "taken", 409

    def view() -> tuple[str, int]:
        shop.db.session.add_all([shop.Account(name="twin"), shop.Account(name="twin")])
        return "created", 201

    shop.view(view)
    answers = [shop.post() for _ in range(2)]
    assert [(a.status_code, a.data) for a in answers] == [(409, b"taken")] * 2
    assert shop.status() == "succeeded"


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_errors_outside_exception_leave_processing_at_once(
    shop: Shop, error: type[BaseException]
) -> None:
    """A BaseException goes on unchanged, and the record does not wait for its lease."""

    def view() -> None:
        shop.add()
        raise error

    shop.view(view)
    with pytest.raises(error):
        shop.post()
    assert (shop.status(), shop.accounts()) == ("failed", [])


def test_lapsed_lease_is_claimed_again(shop: Shop) -> None:
    """A call that vanished without an effect is run by the next request."""
    claim_and_vanish(shop)
    assert shop.post().status_code == 409
    shop.lapse()
    assert shop.post().status_code == 201
    record = shop.record()
    assert record is not None
    assert record.attempts == 2


def test_lapsed_lease_after_an_effect_is_never_run_again(shop: Shop) -> None:
    """A call that vanished after a commit has an unknown outcome."""
    claim_and_vanish(shop, view_committed=True)
    response = shop.post()
    assert response.status_code == 409
    assert response.json is not None
    assert response.json["code"] == "IDEMPOTENCY_OUTCOME_UNKNOWN"
    shop.outlive()
    assert shop.post().status_code == 409
    assert shop.runs == []


def test_expired_key_starts_a_new_operation(shop: Shop) -> None:
    """Past its life a key is free for any request, marked as expired or not."""
    shop.creating_view()
    shop.post()
    before = shop.record()
    shop.outlive()
    assert shop.post("second").status_code == 201
    after = shop.record()
    assert before is not None
    assert after is not None
    assert before.operation_id != after.operation_id
    assert after.attempts == 1
    assert shop.accounts() == ["first", "second"]


def test_late_owner_commits_nothing_and_gives_the_winners_answer(shop: Shop) -> None:
    """A call that lost its lease to another one is rolled back by the fence."""
    answers = []

    def view() -> tuple[dict[str, Any], int]:
        first = not shop.runs
        answer = shop.create()
        if first:
            shop.db.session.rollback()  # SQLite has one writer at a time
            elsewhere(shop.lapse)
            answers.append(elsewhere(shop.post))
            shop.db.session.add(shop.Account(name="zombie"))
            answer[0]["zombie"] = True
        return answer

    shop.view(view)
    late = shop.post()
    assert answers[0].status_code == late.status_code == 201
    assert late.data == answers[0].data
    assert late.headers["Idempotent-Replayed"] == "true"
    assert shop.accounts() == ["first"]


def test_lost_lease_sticks_when_the_view_swallows_it(shop: Shop) -> None:
    """A view cannot answer for itself once its commit was fenced off."""

    def view() -> tuple[str, int]:
        first = not shop.runs
        shop.runs.append(1)
        if first:
            elsewhere(shop.lapse)
            assert elsewhere(shop.post).data == b"winner"
            shop.db.session.add(shop.Account(name="zombie"))
            try:
                shop.db.session.commit()
            except LeaseLost:
                shop.db.session.rollback()
            return "zombie", 201
        return "winner", 201

    shop.view(view)
    assert shop.post().data == b"winner"
    assert shop.accounts() == []


def test_lost_record_without_a_new_owner_is_503(shop: Shop) -> None:
    """When the record itself is gone, nothing is committed and a retry is safe."""

    def remove_records() -> None:
        with shop.app.app_context():
            shop.db.session.query(shop.idempotency.Record).delete()
            shop.db.session.commit()

    def view() -> tuple[dict[str, Any], int]:
        elsewhere(remove_records)
        return shop.create()

    shop.view(view)
    response = shop.post()
    assert response.status_code == 503
    assert response.json is not None
    assert response.json["code"] == "IDEMPOTENCY_LEASE_LOST"
    assert response.json["retryable"] is True
    assert (shop.accounts(), shop.status()) == ([], None)


def test_endless_crashes_end_as_failed(make_shop: Callable[..., Shop]) -> None:
    """A request that kills its process each time is given up after max attempts."""
    shop = make_shop(IDEMPOTENCY_MAX_ATTEMPTS=2)
    claim_and_vanish(shop)
    shop.lapse()
    with shop.app.app_context():
        shop.idempotency.store.claim(shop.scope(), shop.record().request_hash)  # type: ignore[union-attr]
    shop.lapse()
    response = shop.post()
    assert response.status_code == 500
    assert response.json is not None
    assert response.json["code"] == "IDEMPOTENCY_PREVIOUS_FAILURE"
    assert shop.runs == []


def claim_and_vanish(shop: Shop, *, view_committed: bool = False) -> None:
    """Leave the record of a call whose process died, and a view for its retry."""
    if "accounts" not in shop.app.view_functions:
        shop.creating_view()
    with shop.app.test_request_context(
        "/accounts", method="POST", json={"name": "first"}
    ):
        decision = shop.idempotency.store.claim(
            shop.scope(), request_hash("POST /accounts", Config(), Fingerprint())
        )
    assert decision.claim is not None
    if view_committed:
        with shop.app.app_context(), shop.db.engine.begin() as connection:
            shop.idempotency.store.mark_effects(decision.claim, connection)
        shop.lapse()


def test_exception_that_becomes_a_page_is_rolled_back(shop: Shop) -> None:
    """Half-done work is not committed because a handler answers below 400."""

    @shop.app.errorhandler(LookupError)
    def handle(_error: LookupError) -> tuple[str, int, dict[str, str]]:
        return "", 302, {"Location": "/"}

    def view() -> None:
        shop.add()
        raise LookupError

    shop.view(view)
    assert [shop.post().status_code for _ in range(2)] == [302, 302]
    assert (shop.accounts(), shop.status(), shop.runs) == ([], "succeeded", ["first"])


def test_answer_above_the_cap_is_not_run_again(make_shop: Callable[..., Shop]) -> None:
    """A duplicate of an answer that was too large to keep is told so."""
    shop = make_shop(IDEMPOTENCY_MAX_RESPONSE_SIZE=3)
    shop.view(lambda: "long")
    first, second = shop.post(), shop.post()
    assert (first.status_code, first.data) == (200, b"long")
    assert second.status_code == 409
    assert second.json is not None
    assert second.json["code"] == "IDEMPOTENCY_RESPONSE_UNAVAILABLE"


def test_upload_is_the_same_under_another_boundary(shop: Shop) -> None:
    """Uploads are compared by their content; another file is a conflict."""

    def upload(content: bytes, boundary: str) -> int:
        body = (
            f"--{boundary}\r\nContent-Disposition: form-data; name=file; "
            f"filename=a.bin\r\n\r\n"
        ).encode() + content
        body += f"\r\n--{boundary}--\r\n".encode()
        kind = f"multipart/form-data; boundary={boundary}"
        return shop.post(data=body, content_type=kind).status_code

    shop.view(lambda: (request.files["file"].read(), 201))
    answers = [upload(b"one", "x"), upload(b"one", "y"), upload(b"two", "x")]
    assert answers == [201, 201, 422]


def test_raw_body_stays_readable_as_a_stream(shop: Shop) -> None:
    """The view reads the body in whatever way it likes."""

    def view() -> bytes:
        return request.stream.read()

    shop.view(view)
    response = shop.post(data=b"raw", content_type="application/octet-stream")
    assert response.data == b"raw"


def test_vanished_record_after_a_commit_is_an_unknown_outcome(shop: Shop) -> None:
    """Where a part is durable, the client is not told to send the request again."""

    def remove_records() -> None:
        with shop.app.app_context():
            shop.db.session.query(shop.idempotency.Record).delete()
            shop.db.session.commit()

    def view() -> str:
        shop.add()
        shop.db.session.commit()
        elsewhere(remove_records)
        shop.add("second")
        return "done"

    shop.view(view)
    response = shop.post()
    assert response.json is not None
    assert response.json["code"] == "IDEMPOTENCY_OUTCOME_UNKNOWN"
    assert shop.accounts() == ["first"]


def test_service_in_a_claiming_route_sees_its_key(shop: Shop) -> None:
    """scope() reads the key as the route declares it."""
    scopes = []

    def view() -> str:
        scopes.append(shop.idempotency.scope("service"))
        return "done"

    shop.view(view, key=lambda: "from the route")
    assert shop.post(key=None).status_code == 200
    assert scopes[0] is not None
    assert scopes[0].idempotency_key == "from the route"


def test_service_in_an_undeclared_route_leaves_nothing(quick: Shop) -> None:
    """scope() keeps nothing of a request, however many there are."""

    def view() -> str:
        assert quick.idempotency.scope("service") is not None
        return "done"

    quick.app.add_url_rule("/plain", view_func=view, methods=["POST"])
    for key in ("k1", "k2", "k3"):
        assert quick.post(key=key, path="/plain").status_code == 200
    assert len(quick.app.extensions["idempotency"]._routes) == 1
