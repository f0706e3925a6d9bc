"""Options of a route: callers, outcomes, answers that are not kept, failure policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from flask import Response, abort, request
from sqlalchemy import text
from werkzeug.datastructures import Headers

from flask_idempotency import signals
from tests.shop import ROUTE, cut_off, statements_sent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from werkzeug.test import TestResponse

    from flask_idempotency import RecordView
    from tests.shop import Shop

PRIVATE = "example-1"


@pytest.fixture
def counted() -> Iterator[list[dict[str, Any]]]:
    """Collect what the signals say."""
    seen: list[dict[str, Any]] = []

    def count(name: str) -> Callable[..., None]:
        return lambda _sender, **payload: seen.append({"signal": name, **payload})

    receivers = {name: count(name) for name in ("claimed", "replayed", "refused")}
    for name, receiver in receivers.items():
        getattr(signals, name).connect(receiver, weak=False)
    yield seen
    for name, receiver in receivers.items():
        getattr(signals, name).disconnect(receiver)


def code_of(response: TestResponse) -> str | None:
    """Return the code of a Problem."""
    return response.json["code"] if response.is_json and response.json else None


@pytest.mark.parametrize("option", ["tenant_id", "user_id"])
def test_route_names_its_caller(shop: Shop, option: str) -> None:
    """A value or a function of the route comes before the application's loader."""
    shop.view(shop.create, **{option: "psp"})
    assert shop.post(user="u1").status_code == 201
    record = shop.record(user="psp") if option == "user_id" else None
    with shop.app.app_context():
        row = shop.db.session.execute(
            text("SELECT tenant_id, user_id FROM idempotency_record")
        ).one()
    found = [v.decode() if isinstance(v, bytes) else v for v in row]
    assert found == (["", "psp"] if option == "user_id" else ["psp", "u1"])
    assert (record is not None) == (option == "user_id")


def test_function_of_the_route_names_its_caller(quick: Shop) -> None:
    """A function is asked in each request."""
    quick.view(quick.create, user_id=lambda: request.headers.get("X-Partner"))
    quick.post("a", headers={"X-Partner": "p1"})
    quick.post("b", headers={"X-Partner": "p2"})
    assert (quick.status(user="p1"), quick.status(user="p2")) == ("succeeded",) * 2


def test_caller_of_the_route_that_is_not_named_is_refused(quick: Shop) -> None:
    """A function that returns nothing fails closed, as a loader does."""
    quick.view(quick.create, user_id=lambda: None)
    assert code_of(quick.post()) == "IDEMPOTENCY_CALLER_UNKNOWN"
    assert quick.runs == []


def test_rights_are_checked_again_before_a_replay(quick: Shop) -> None:
    """``authorize_replay`` sees the record; False is 403, and nothing runs."""
    seen: list[RecordView] = []
    allowed = [True, False]

    def authorize(record: RecordView) -> bool:
        seen.append(record)
        return allowed.pop(0)

    quick.view(quick.create, authorize_replay=authorize)
    assert (quick.post().status_code, seen) == (201, [])
    assert quick.post().headers["Idempotent-Replayed"] == "true"
    refused = quick.post()
    assert (refused.status_code, code_of(refused)) == (
        403,
        "IDEMPOTENCY_REPLAY_FORBIDDEN",
    )
    assert {record.scope.user_id for record in seen} == {"u1"}
    assert quick.runs == ["first"]


@pytest.mark.parametrize(
    ("release_on", "status", "runs"),
    [
        ([404], 404, 2),
        ([], 429, 1),
        ([503], 503, 2),
        (lambda response: response.headers.get("X-Retry") == "1", 422, 2),
        (lambda _response: False, 429, 1),
    ],
    ids=["404", "nothing", "503", "function", "function says no"],
)
def test_route_says_what_frees_its_key(
    shop: Shop, release_on: Any, status: int, runs: int
) -> None:
    """``release_on`` takes statuses or a function of the response."""

    def view() -> Any:
        shop.runs.append(1)
        return "no", status, {"X-Retry": "1"}

    shop.view(view, release_on=release_on)
    answers = [shop.post() for _ in range(2)]
    assert [answer.status_code for answer in answers] == [status, status]
    assert len(shop.runs) == runs


def test_function_that_frees_the_key_is_not_asked_after_success(quick: Shop) -> None:
    """What is committed stays: an answer below 400 is never un-stored."""

    def release_on(_response: Response) -> bool:
        quick.runs.append("asked")
        return True

    quick.view(quick.create, release_on=release_on)
    quick.post()
    assert quick.post().headers["Idempotent-Replayed"] == "true"
    assert quick.runs == ["first"]


def test_key_is_not_freed_once_a_part_is_committed(shop: Shop) -> None:
    """After a commit of the view a released status is stored all the same."""

    def view() -> Any:
        shop.add()
        shop.db.session.commit()
        abort(503)

    shop.view(view, release_on=[503])
    assert [shop.post().status_code for _ in range(2)] == [503, 503]
    assert (shop.runs, shop.status()) == (["first"], "failed")


def test_body_that_is_not_kept(shop: Shop) -> None:
    """With ``store_body=False`` the secret is nowhere, and nothing runs again."""

    def view() -> Any:
        shop.runs.append(1)
        return {"token": PRIVATE}, 201, {"Location": "/tokens/1"}

    shop.view(view, store_body=False)
    first, again = shop.post(), shop.post()
    assert first.json == {"token": PRIVATE}
    assert (again.status_code, code_of(again)) == (
        409,
        "IDEMPOTENCY_RESPONSE_UNAVAILABLE",
    )
    record = shop.record()
    assert record is not None
    assert PRIVATE not in repr(record)
    assert shop.runs == [1]


def test_answer_is_rebuilt(shop: Shop) -> None:
    """``rebuild`` makes the body anew; status and headers are the first ones."""

    def rebuild(record: RecordView) -> Any:
        assert record.response is not None
        return {"again": dict(record.response.headers)["Location"]}

    def view() -> Any:
        links = Headers([("Link", "a"), ("Link", "b"), ("Location", "/t/1")])
        return Response(PRIVATE, 201, links)

    shop.view(view, store_body=False, rebuild=rebuild)
    shop.post()
    answer = shop.post()
    assert (answer.status_code, answer.json) == (201, {"again": "/t/1"})
    assert answer.headers.getlist("Link") == ["a", "b"]
    assert answer.headers["Location"] == "/t/1"
    assert answer.headers["Idempotent-Replayed"] == "true"
    assert answer.content_length == len(answer.data)


def test_answer_above_the_cap_is_rebuilt(make_quick: Callable[..., Shop]) -> None:
    """``rebuild`` serves what was too large to be kept as well."""
    shop = make_quick(IDEMPOTENCY_MAX_RESPONSE_SIZE=10)
    shop.view(lambda: "x" * 100, rebuild=lambda _record: "y" * 100)
    assert shop.post().data == b"x" * 100
    assert shop.post().data == b"y" * 100


def test_rebuilt_error_keeps_its_status(quick: Shop) -> None:
    """What is gone by now may be said to be gone, without what it had then."""
    quick.view(
        lambda: ("made", 201, {"Location": "/accounts/1"}),
        store_body=False,
        rebuild=lambda _record: ("gone", 410),
    )
    quick.post()
    answer = quick.post()
    assert (answer.status_code, "Location" in answer.headers) == (410, False)


def test_empty_body_needs_no_keeping(quick: Shop) -> None:
    """A 204 is replayed also where bodies are not kept."""
    quick.view(lambda: ("", 204), store_body=False)
    assert [quick.post().status_code for _ in range(2)] == [204, 204]


def test_failure_above_the_cap_is_still_a_failure(
    make_quick: Callable[..., Shop],
) -> None:
    """A stored 5xx whose body was not kept is answered as the failure it was."""
    shop = make_quick(IDEMPOTENCY_MAX_RESPONSE_SIZE=3)
    shop.view(lambda: ("broken", 500))
    shop.post()
    assert code_of(shop.post()) == "IDEMPOTENCY_PREVIOUS_FAILURE"


def test_errors_keep_their_body(quick: Shop) -> None:
    """``store_body=False`` is about successes: an error is replayed as it was."""
    quick.view(
        lambda: ({"error": "no"}, 422), store_body=False, rebuild=lambda _r: "unused"
    )
    first, again = quick.post(), quick.post()
    assert (again.status_code, again.data) == (422, first.data)


def test_rebuilt_text_has_the_stored_type(quick: Shop) -> None:
    """A text says nothing of its media type, so the first one counts."""
    quick.view(
        lambda: Response("a;b", mimetype="text/csv"),
        store_body=False,
        rebuild=lambda _record: "a;b",
    )
    assert quick.post().content_type == quick.post().content_type


def test_new_key_is_safe_where_nothing_stayed(shop: Shop) -> None:
    """A failure that left nothing says so; one that committed a part does not."""

    def view() -> Any:
        if request.get_json()["name"] == "part":
            shop.add()
            shop.db.session.commit()
        message = "broken"
        raise RuntimeError(message)

    shop.view(view)
    for name in ("nothing", "part"):
        shop.post(name, key=name)
    nothing, part = (shop.post(name, key=name).json for name in ("nothing", "part"))
    assert nothing is not None
    assert part is not None
    assert (nothing["safe_new_key"], "safe_new_key" in part) == (True, False)


def test_fail_open_runs_unprotected(
    shop: Shop, counted: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """Where the route says so, an outage of the store lets requests pass."""

    def view() -> str:
        shop.runs.append(1)
        return "done"

    shop.view(view, fail_open=True)
    with cut_off(shop):
        answers = [shop.post() for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert shop.runs == [1, 1]
    refused = {
        "signal": "refused",
        "route": ROUTE,
        "error_code": "IDEMPOTENCY_STORE_UNAVAILABLE",
        "enforced": False,
    }
    assert counted == [refused, refused]
    assert "runs unprotected" in caplog.text


def test_fail_open_does_not_hide_a_missing_table(shop: Shop) -> None:
    """A migration that was forgotten is a mistake, and stays one."""
    shop.creating_view(fail_open=True)
    with shop.app.app_context(), shop.db.engine.begin() as connection:
        connection.execute(text("DROP TABLE idempotency_record"))
    response = shop.post()
    assert (response.status_code, shop.runs) == (503, [])


def test_fail_open_protects_while_the_store_answers(shop: Shop) -> None:
    """The option changes nothing else, and its rows are still one unit of work."""
    shop.view(shop.create, fail_open=True)
    shop.post()
    assert shop.post().headers["Idempotent-Replayed"] == "true"
    assert shop.accounts() == ["first"]


def test_signals_count_what_becomes_of_keys(
    shop: Shop, counted: list[dict[str, Any]]
) -> None:
    """Claims, replays and refusals are counted, without any key."""
    shop.creating_view()
    shop.post(key="raw-key-1")
    shop.post(key="raw-key-1")
    shop.post("other", key="raw-key-1")
    shop.post(key=None)
    assert [(s["signal"], s.get("error_code")) for s in counted] == [
        ("claimed", None),
        ("replayed", None),
        ("refused", "IDEMPOTENCY_KEY_CONFLICT"),
        ("refused", "IDEMPOTENCY_KEY_MISSING"),
    ]
    assert {s["route"] for s in counted} == {ROUTE}
    assert "raw-key-1" not in repr(counted)


def test_refusal_is_not_counted_as_a_replay(
    quick: Shop, counted: list[dict[str, Any]]
) -> None:
    """What a duplicate did not get was refused."""
    quick.view(lambda: "x", store_body=False)
    quick.post()
    quick.post()
    assert [(s["signal"], s.get("error_code")) for s in counted] == [
        ("claimed", None),
        ("refused", "IDEMPOTENCY_RESPONSE_UNAVAILABLE"),
    ]


def test_outage_is_counted(shop: Shop, counted: list[dict[str, Any]]) -> None:
    """A request that gets 503 was refused."""
    shop.creating_view()
    with cut_off(shop):
        shop.post()
    assert [(s["error_code"], s["enforced"]) for s in counted] == [
        ("IDEMPOTENCY_STORE_UNAVAILABLE", True)
    ]


def test_ignored_key_is_logged_once(
    quick: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """A key that does nothing is said to do nothing, once per endpoint."""
    quick.creating_view()
    quick.app.add_url_rule("/plain", view_func=lambda: "", methods=["GET", "POST"])
    with statements_sent() as statements:
        for _ in range(3):
            quick.post(path="/plain")
    quick.post()
    messages = [r.getMessage() for r in caplog.records if "which does" in r.message]
    assert len(messages) == 1
    assert "does nothing there" in messages[0]
    assert statements == []


def test_refused_login_is_no_ignored_key(
    quick: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """A login that refuses before the guard is no sign of a missing declaration."""
    quick.app.before_request(lambda: abort(401))
    quick.creating_view()
    quick.post()
    assert caplog.records == []


def test_template_has_a_field_with_a_fresh_key(quick: Shop) -> None:
    """``{{ idempotency_field() }}`` is a hidden input, with a new key each time."""
    with quick.app.test_request_context():
        render = quick.app.jinja_env.from_string("{{ idempotency_field() }}").render
        first, second = render(), render()
    assert first.startswith('<input type="hidden" name="idempotency_key" value="')
    assert first != second
    quick.view(lambda: "done")
    key = first.split('value="')[1].removesuffix('">')
    form = {"idempotency_key": key}
    assert quick.post(key=None, data=form).status_code == 200
    assert quick.post(key=None, data=form).headers["Idempotent-Replayed"] == "true"


@pytest.mark.parametrize(
    ("sent", "status"), [('"k-1"', 200), ("k-1", 400), ("k-1;a=1", 400)]
)
def test_strict_keys(make_quick: Callable[..., Shop], sent: str, status: int) -> None:
    """Strict keys have quotes, as the draft asks for."""
    shop = make_quick(IDEMPOTENCY_STRICT_KEYS=True)
    shop.view(lambda: "")
    response = shop.post(key=sent)
    assert response.status_code == status
    if status == 400:
        assert response.json is not None
        assert '"k-123"' in response.json["detail"]


def test_form_field_needs_no_quotes_under_strict_keys(
    make_quick: Callable[..., Shop],
) -> None:
    """A form's field is no header field, so the rule of that does not apply."""
    shop = make_quick(IDEMPOTENCY_STRICT_KEYS=True)
    shop.view(lambda: "")
    assert shop.post(key=None, data={"idempotency_key": "k-1"}).status_code == 200


def test_key_pattern(make_quick: Callable[..., Shop]) -> None:
    """One pattern for the whole key; the refusal tells the client what to send."""
    shop = make_quick(IDEMPOTENCY_KEY_PATTERN="[0-9]{4}")
    shop.view(lambda: "")
    assert shop.post(key="1234").status_code == 200
    for key in ("12345", "x1234", "abcd"):
        response = shop.post(key=key)
        assert code_of(response) == "IDEMPOTENCY_KEY_INVALID"
        assert "[0-9]{4}" in response.get_data(as_text=True)
        assert key not in response.get_data(as_text=True)


@pytest.mark.parametrize("body", ["[1]", '"text"', "7", "null"])
def test_event_without_an_id_is_the_senders_mistake(quick: Shop, body: str) -> None:
    """``key=lambda: request.json["id"]`` on a body that is no object is 400."""
    quick.view(quick.create, key=lambda: request.get_json()["id"], required=False)
    response = quick.post(data=body, content_type="application/json")
    assert response.status_code == 400
    assert quick.runs == []
