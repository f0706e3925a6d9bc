"""Everything that a view may return, first and as a replay, through a whole request."""

from __future__ import annotations

import io
import logging
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from flask import (
    Response,
    abort,
    jsonify,
    make_response,
    redirect,
    render_template_string,
    request,
    send_file,
    stream_template_string,
    stream_with_context,
)
from flask.views import MethodView, View

from flask_idempotency import idempotent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from werkzeug.test import TestResponse

    from tests.shop import Shop


def _with_headers() -> Response:
    response = make_response({"made": 1}, 201)
    response.headers["Location"] = "/accounts/1"
    response.headers["ETag"] = '"v1"'
    response.headers["Content-Language"] = "de"
    response.headers["X-Resource-Version"] = "7"
    response.headers.add("Link", "</a>; rel=a")
    response.headers.add("Link", "</b>; rel=b")
    return response


def _stream() -> Response:
    def pieces() -> Iterator[str]:
        yield "path "
        yield request.path

    return Response(stream_with_context(pieces()), mimetype="text/csv")


ANSWERS: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"b": 1, "a": [1.0, None, "\xe9"]},
    "list": lambda: [1, {"a": 2}],
    "empty list": lambda: [],  # noqa: PIE807 - a class is no view
    "str": lambda: "text \xe9",
    "empty str": lambda: "",
    "bytes": lambda: b"\x00\xff",
    "tuple with status": lambda: ({"made": 1}, 201),
    "tuple with headers": lambda: ("made", {"X-A": "1"}),
    "tuple with both": lambda: ("made", 202, [("X-A", "1"), ("X-B", "2")]),
    "status text": lambda: ("made", "201 Made of Air"),
    "jsonify": lambda: jsonify(a=1),
    "redirect": lambda: redirect("/elsewhere"),
    "303": lambda: redirect("/accounts/1", 303),
    "204": lambda: ("", 204),
    "304": lambda: ("", 304),
    "make_response": _with_headers,
    "send_file": lambda: send_file(io.BytesIO(b"%PDF"), "application/pdf"),
    "download": lambda: send_file(
        io.BytesIO(b"x" * 70_000), as_attachment=True, download_name="\xe9.bin"
    ),
    "stream": _stream,
    "generator": lambda: (piece for piece in ("a", "b")),
    "template": lambda: render_template_string("{{ 1 + 1 }}"),
    "template stream": lambda: stream_template_string(
        "{% for i in [1, 2] %}{{ i }}{% endfor %}"
    ),
    "abort": lambda: abort(404, "No such thing."),
    "abort with response": lambda: abort(Response("custom", 409)),
    "404": lambda: ({"error": "none"}, 404),
    "no content type": lambda: Response(b"x", content_type=""),
}


def compared(response: TestResponse) -> tuple[Any, ...]:
    """Return what a first answer and its replay have in common."""
    own = {"Date", "Idempotent-Replayed"}
    headers = [(n, v) for n, v in response.headers if n not in own]
    return response.status_code, response.data, sorted(headers)


@pytest.mark.parametrize("answer", ANSWERS)
def test_replay_is_the_first_answer(quick: Shop, answer: str) -> None:
    """Status, body bytes and headers are the first ones; the view ran once."""

    def view() -> Any:
        quick.runs.append(1)
        return ANSWERS[answer]()

    quick.view(view)
    quick.app.add_url_rule("/plain", view_func=ANSWERS[answer], methods=["POST"])
    first, again = quick.post(), quick.post()
    assert compared(again) == compared(first)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert "Idempotent-Replayed" not in first.headers
    assert quick.runs == [1]


@pytest.mark.parametrize("answer", sorted(set(ANSWERS) - {"stream"}))
def test_first_answer_is_the_undecorated_one(quick: Shop, answer: str) -> None:
    """The decorator changes nothing of the answer, except that a stream has a length."""
    quick.view(ANSWERS[answer])
    quick.app.add_url_rule("/plain", view_func=ANSWERS[answer], methods=["POST"])
    plain, guarded = quick.post(path="/plain"), quick.post()
    assert (guarded.status, guarded.data) == (plain.status, plain.data)
    lengthless = [h for h in compared(guarded)[2] if h[0] != "Content-Length"]
    assert lengthless == [h for h in compared(plain)[2] if h[0] != "Content-Length"]


def test_cookies_and_challenges_are_the_callers_own(quick: Shop) -> None:
    """What was meant for the first caller alone is not stored and not replayed."""

    def view() -> Response:
        response = make_response("in", 200)
        response.set_cookie("session", "first")
        response.headers["WWW-Authenticate"] = "Bearer"
        response.headers["Proxy-Authenticate"] = "Basic"
        response.headers["X-Kept"] = "1"
        return response

    quick.view(view)
    first, again = quick.post(), quick.post()
    assert "session=first" in first.headers["Set-Cookie"]
    assert {"Set-Cookie", "WWW-Authenticate", "Proxy-Authenticate"} & set(
        again.headers.keys()
    ) == set()
    assert again.headers["X-Kept"] == "1"


def test_after_request_functions_run_on_replays(quick: Shop) -> None:
    """What a function adds to each answer is that of the current exchange."""
    numbers = iter(range(10))

    @quick.app.after_request
    def count(response: Response) -> Response:
        response.headers["X-Number"] = str(next(numbers))
        return response

    quick.view(lambda: "made")
    assert [quick.post().headers["X-Number"] for _ in range(3)] == ["0", "1", "2"]


def test_marker_is_on_replays_only(quick: Shop) -> None:
    """A replay leaves no trace on later answers."""
    quick.creating_view()
    quick.app.add_url_rule("/plain", view_func=lambda: "", methods=["POST"])
    hooks = len(quick.app.after_request_funcs[None])
    quick.post("a", key="a")
    assert "Idempotent-Replayed" in quick.post("a", key="a").headers
    assert "Idempotent-Replayed" not in quick.post("b", key="b").headers
    assert "Idempotent-Replayed" not in quick.post(path="/plain").headers
    assert len(quick.app.after_request_funcs[None]) == hooks


@pytest.mark.parametrize(
    ("headers", "status", "body"),
    [
        ({"Range": "bytes=1-2"}, 206, b"12"),
        ({"If-None-Match": '"v1"'}, 304, b""),
        ({}, 200, b"0123"),
    ],
    ids=["range", "conditional", "whole"],
)
def test_safe_method_of_a_guarded_view_keeps_its_handling(
    quick: Shop, headers: dict[str, str], status: int, body: bytes
) -> None:
    """GET and HEAD of a view with both methods are as if undecorated."""

    def view() -> Response:
        return send_file(io.BytesIO(b"0123"), "text/plain", conditional=True, etag="v1")

    quick.app.add_url_rule("/both", view_func=idempotent(view), methods=["GET", "POST"])
    client = quick.app.test_client()
    sent = {**headers, "Idempotency-Key": "k", "X-User": "u1"}
    answer = client.get("/both", headers=sent)
    assert (answer.status_code, answer.data) == (status, body)
    head = client.head("/both", headers=sent)
    assert (head.status_code, head.data) == (status, b"")
    assert client.options("/both", headers=sent).status_code == 200
    assert client.post("/both", headers=sent).data == b"0123"
    assert client.post("/both", headers=sent).headers["Idempotent-Replayed"] == "true"


def test_kinds_of_views(quick: Shop) -> None:
    """Functions, View, MethodView and async views answer duplicates alike."""

    class Plain(View):
        methods = ("POST",)
        decorators: ClassVar[list[Any]] = [idempotent(required=True)]

        def dispatch_request(self) -> tuple[str, int]:
            quick.runs.append("plain")
            return "plain", 201

    class Methods(MethodView):
        @idempotent(required=True)
        def post(self) -> tuple[str, int]:
            quick.runs.append("methods")
            return "methods", 201

        @idempotent(required=True)
        async def put(self) -> tuple[str, int]:
            quick.runs.append("async")
            return "async", 201

    quick.app.add_url_rule("/plain", view_func=Plain.as_view("plain"))
    quick.app.add_url_rule("/methods", view_func=Methods.as_view("methods"))
    client = quick.app.test_client()
    headers = {"Idempotency-Key": "k", "X-User": "u1"}
    for method, path in (("POST", "/plain"), ("POST", "/methods"), ("PUT", "/methods")):
        first, again = (
            client.open(path, method=method, headers=headers) for _ in range(2)
        )
        assert compared(again) == compared(first)
        assert again.headers["Idempotent-Replayed"] == "true"
    assert quick.runs == ["plain", "methods", "async"]


def test_stream_of_events_is_passed_on(quick: Shop) -> None:
    """A stream that may never end is not collected; its duplicates are told so."""
    sent: list[int] = []

    def events() -> Iterator[str]:
        for number in range(3):
            sent.append(number)
            yield f"data: {number}\n\n"

    def view() -> Response:
        quick.runs.append(1)
        return Response(events(), mimetype="text/event-stream")

    quick.view(view)
    first = quick.app.test_client().post(
        "/accounts",
        headers={"Idempotency-Key": "k", "X-User": "u1"},
        json={"name": "first"},
    )
    assert first.data == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
    again = quick.post()
    assert again.json is not None
    assert again.json["code"] == "IDEMPOTENCY_RESPONSE_UNAVAILABLE"
    assert quick.runs == [1]


def test_stream_is_part_of_the_call(shop: Shop) -> None:
    """Rows that a collected stream adds are committed with the answer."""

    def view() -> Response:
        def pieces() -> Iterator[str]:
            yield shop.add()

        return Response(stream_with_context(pieces()))

    shop.view(view)
    assert shop.post().data == b"first"
    assert shop.accounts() == ["first"]


def test_late_writes_of_a_stream_are_reported(
    make_quick: Callable[..., Shop], caplog: pytest.LogCaptureFixture
) -> None:
    """Rows that a passed-on stream adds are lost, and the log says so."""
    shop = make_quick(IDEMPOTENCY_MAX_RESPONSE_SIZE=3)

    def view() -> Response:
        def pieces() -> Iterator[str]:
            yield "long"
            shop.db.session.add(shop.Account(name="late"))
            yield "er"

        return Response(stream_with_context(pieces()))

    shop.view(view)
    with caplog.at_level(logging.ERROR):
        assert shop.post().data == b"longer"
    assert "changed the session after its call had ended" in caplog.text
    assert shop.accounts() == []


def test_file_with_direct_passthrough(quick: Shop, tmp_path: Path) -> None:
    """A file that the server would send by itself is replayed byte by byte."""
    path = tmp_path / "report.csv"
    path.write_bytes(b"a;b\n" * 1000)
    quick.view(lambda: send_file(path))
    first = quick.post()
    path.unlink()
    assert quick.post().data == first.data == b"a;b\n" * 1000


def test_problem_says_nothing_to_caches(quick: Shop) -> None:
    """Errors of this library may not be cached, as Problem and as page."""
    quick.creating_view()
    for accept in ("application/json", "text/html"):
        answer = quick.post(key=None, headers={"Accept": accept})
        assert answer.headers.getlist("Cache-Control") == ["no-store"]
