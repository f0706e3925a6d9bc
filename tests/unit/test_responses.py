"""Answers of views to stored answers, and back to answers."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
from flask import Flask, Response, send_file, stream_with_context

from flask_idempotency.lifecycle import StoredResponse
from flask_idempotency.responses import replay, store_response

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CAP = 1000


@pytest.fixture(autouse=True)
def app() -> Iterator[Flask]:
    """Make answers in the request of an application."""
    app = Flask(__name__)
    with app.test_request_context("/x", method="POST"):
        yield app


def stored(answer: Any, app: Flask, *, cap: int = CAP) -> StoredResponse:
    """Return what is kept of a view's return value."""
    return store_response(app.make_response(answer), max_size=cap)


def delivered(response: Response) -> bytes:
    """Return the bytes that a server sends."""
    return b"".join(response.iter_encoded())


@pytest.mark.parametrize(
    ("answer", "code", "body"),
    [
        ({"a": [1, None]}, 200, b'{"a":[1,null]}\n'),
        ([1, 2], 200, b"[1,2]\n"),
        ({}, 200, b"{}\n"),
        ("text \xe9", 200, "text \xe9".encode()),
        (("made", 201), 201, b"made"),
        (b"\x00\xff", 200, b"\x00\xff"),
        ("", 200, b""),
        (("", 204), 204, b""),
        (("", 304), 304, b""),
        ((iter(["a", "\xe9"]), 202), 202, b"a\xc3\xa9"),
        (("no", 404), 404, b"no"),
    ],
)
def test_answer_is_kept(app: Flask, answer: Any, code: int, body: bytes) -> None:
    """Status and body bytes of any return value are kept."""
    kept = stored(answer, app)
    assert (kept.code, kept.body) == (code, body)


@pytest.mark.parametrize(
    "answer",
    [{"a": 1}, "text", b"\x00", ("", 204), ("", 304), (b"x", 418)],
    ids=repr,
)
def test_replay_is_the_first_answer(app: Flask, answer: Any) -> None:
    """Status, bytes and type of a replay are those of the first answer."""
    first = app.make_response(answer)
    again = replay(store_response(first, max_size=CAP))
    assert again.status_code == first.status_code
    assert again.get_data() == first.get_data()
    assert again.content_type == first.content_type


def test_replay_is_marked(app: Flask) -> None:
    """A replay says that it is one, and the first answer does not."""
    first = app.make_response("x")
    kept = store_response(first, max_size=CAP)
    assert replay(kept).headers.getlist("Idempotent-Replayed") == ["true"]
    assert "Idempotent-Replayed" not in first.headers
    assert "Idempotent-Replayed" not in dict(kept.headers)


def test_replay_is_of_the_applications_class(app: Flask) -> None:
    """An application with its own class of answers gets it for replays too."""

    class Own(Response):
        pass

    app.response_class = Own
    assert type(replay(StoredResponse(code=200, body=b"x"))) is Own


def test_length_is_computed_anew(app: Flask) -> None:
    """Content-Length is not kept, and fits what is sent."""
    kept = stored(("12345", 200, {"Content-Length": "5"}), app)
    assert "Content-Length" not in dict(kept.headers)
    headers = replay(kept).get_wsgi_headers({"REQUEST_METHOD": "POST"})
    assert headers["Content-Length"] == "5"


@pytest.mark.parametrize("status", [204, 304])
def test_answer_without_body_has_no_length(app: Flask, status: int) -> None:
    """A replayed 204 or 304 has neither body nor length."""
    again = replay(stored(("", status), app))
    headers = again.get_wsgi_headers({"REQUEST_METHOD": "POST"})
    assert "Content-Length" not in headers


def test_head_gets_no_bytes() -> None:
    """A replay to HEAD sends the headers alone."""
    again = replay(StoredResponse(code=200, body=b"12345"))
    iterable, _, headers = again.get_wsgi_response({"REQUEST_METHOD": "HEAD"})
    assert b"".join(iterable) == b""
    assert headers


KEPT = [
    ("Content-Type", "application/vnd.test+json"),
    ("Link", "<a>; rel=prev"),
    ("Link", "<b>; rel=next"),
    ("Location", "/accounts/7"),
    ("ETag", '"v7"'),
    ("Content-Language", "de"),
    ("Content-Encoding", "gzip"),
    ("Cache-Control", "no-store"),
    ("Vary", "Accept"),
    ("Retry-After", "3"),
    ("X-Resource-Version", "7"),
    ("X-Empty", ""),
]
DROPPED = [
    "Set-Cookie",
    "set-cookie",
    "Date",
    "Server",
    "WWW-Authenticate",
    "Proxy-Authenticate",
    "Authentication-Info",
    "Proxy-Authentication-Info",
    "Content-Length",
    "Connection",
    "Keep-Alive",
    "Proxy-Connection",
    "TE",
    "Trailer",
    "Transfer-Encoding",
    "Upgrade",
]


def test_headers_are_kept_in_order(app: Flask) -> None:
    """What the view set is kept, several values of one name in their order."""
    response = Response(b"x")
    response.headers.clear()
    for name, value in KEPT:
        response.headers.add(name, value)
    kept = stored(response, app)
    assert kept.headers == tuple(KEPT)
    assert list(replay(kept).headers)[:-1] == KEPT


@pytest.mark.parametrize("name", DROPPED)
def test_header_of_one_exchange_is_not_kept(app: Flask, name: str) -> None:
    """Cookies, challenges and what belongs to one connection are not kept."""
    kept = stored(("x", 200, {name: "secret", "X-Kept": "1"}), app)
    assert "secret" not in repr(kept.headers)
    assert ("X-Kept", "1") in kept.headers


def test_first_answer_keeps_all_headers(app: Flask) -> None:
    """Only the stored answer loses headers."""
    response = app.make_response(("x", 200, {"Date": "now"}))
    response.set_cookie("session", "s")
    store_response(response, max_size=CAP)
    assert "Set-Cookie" in response.headers
    assert response.headers["Date"] == "now"


def whole(size: int) -> Response:
    """Answer with bytes."""
    return Response(b"x" * size)


def streamed(size: int) -> Response:
    """Answer with a generator of small pieces."""
    return Response(b"x" for _ in range(size))


def in_context(size: int) -> Response:
    """Answer with a generator that uses the request."""
    return Response(stream_with_context("x" for _ in range(size)))


def one_piece(size: int) -> Response:
    """Answer with a generator of a single piece."""
    return Response(iter([b"x" * size]))


def listed(size: int) -> Response:
    """Answer with a list of pieces."""
    return Response([b"x"] * size)


def buffered_file(size: int) -> Response:
    """Answer with a file in memory."""
    return send_file(io.BytesIO(b"x" * size), mimetype="text/plain")


SHAPES = [whole, streamed, in_context, one_piece, listed, buffered_file]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda f: f.__name__)


@every_shape
@pytest.mark.parametrize("size", [0, 1, CAP - 1, CAP])
def test_body_up_to_the_cap_is_kept(app: Flask, shape: Any, size: int) -> None:
    """A body of the largest size is kept whole, and delivered whole."""
    response = app.make_response(shape(size))
    assert store_response(response, max_size=CAP).body == b"x" * size
    assert delivered(response) == b"x" * size


@every_shape
@pytest.mark.parametrize("size", [CAP + 1, 10 * CAP])
def test_body_above_the_cap_is_delivered_and_not_kept(
    app: Flask, shape: Any, size: int
) -> None:
    """A body that is too large reaches the first caller whole, and is never cut."""
    response = app.make_response(shape(size))
    kept = store_response(response, max_size=CAP)
    assert kept.body is None
    assert kept.code == 200
    assert delivered(response) == b"x" * size


def test_cap_of_zero_keeps_empty_bodies_only(app: Flask) -> None:
    """Where nothing may be kept, an empty body still is an answer."""
    assert stored("", app, cap=0).body == b""
    assert stored("x", app, cap=0).body is None


def test_stream_above_the_cap_is_not_read_to_its_end(app: Flask) -> None:
    """No more of an endless stream is held than the cap and one piece."""
    read = []

    def endless() -> Iterator[bytes]:
        while True:
            read.append(1)
            yield b"x" * 100

    response = app.make_response(endless())
    assert store_response(response, max_size=CAP).body is None
    assert len(read) == CAP // 100 + 1


def test_stream_of_templates_stays_text(app: Flask) -> None:
    """An iterator of text is answered as text, the first time and again."""
    response = app.make_response(iter(["<p>", "\xe9", "</p>"]))
    again = replay(store_response(response, max_size=CAP))
    assert response.get_data(as_text=True) == again.get_data(as_text=True)
    assert again.mimetype == "text/html"


def test_stream_that_fails_fails_in_the_call(app: Flask) -> None:
    """An error while the body is made is an error of the view."""

    def broken() -> Iterator[bytes]:
        yield b"x"
        message = "cursor lost"
        raise ValueError(message)

    with pytest.raises(ValueError, match="cursor lost"):
        stored(broken(), app)


class Closing:
    """A body that knows whether it was closed."""

    def __init__(self, pieces: int) -> None:
        self.pieces = iter([b"x"] * pieces)
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        """Give the pieces."""
        return self.pieces

    def close(self) -> None:
        """Be closed, as PEP 3333 asks of servers."""
        self.closed = True


@pytest.mark.parametrize("pieces", [3, CAP + 1], ids=["kept", "not kept"])
def test_body_is_closed_in_the_end(app: Flask, pieces: int) -> None:
    """A body with a file or a cursor behind it is closed with the answer."""
    body = Closing(pieces)
    response = app.make_response(Response(body))
    store_response(response, max_size=CAP)
    delivered(response)
    response.close()
    assert body.closed


@pytest.mark.parametrize("size", [CAP, CAP + 1], ids=["kept", "not kept"])
def test_file_is_sent_whole_and_closed(app: Flask, tmp_path: Path, size: int) -> None:
    """A file is delivered as it is, kept up to the cap, and closed."""
    path = tmp_path / "file.bin"
    path.write_bytes(b"x" * size)
    response = app.make_response(send_file(path))
    kept = store_response(response, max_size=CAP)
    assert delivered(response) == b"x" * size
    assert (kept.body is not None) == (size <= CAP)
    response.close()
    del response


def test_file_keeps_its_headers(app: Flask, tmp_path: Path) -> None:
    """A replayed file has name, type and version of the first answer."""
    path = tmp_path / "report.csv"
    path.write_bytes(b"a,b\n")
    response = send_file(io.BytesIO(b"a,b\n"), download_name="report.csv", etag="v1")
    again = replay(store_response(app.make_response(response), max_size=CAP))
    assert again.headers["Content-Disposition"] == "inline; filename=report.csv"
    assert again.headers["ETag"] == '"v1"'
    assert again.mimetype == "text/csv"
    assert again.get_data() == b"a,b\n"


def test_on_close_functions_still_run(app: Flask) -> None:
    """What the view wants done at the end of the answer is done once."""
    done = []
    response = app.make_response(Response(iter([b"x"])))
    response.call_on_close(lambda: done.append(1))
    store_response(response, max_size=CAP)
    response.close()
    assert done == [1]


def test_body_that_was_not_kept_is_not_an_empty_one() -> None:
    """Nothing kept and an empty body are different answers."""
    assert StoredResponse(code=200, body=None) != StoredResponse(code=200, body=b"")
