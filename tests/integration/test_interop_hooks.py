"""Beside libraries that work in hooks: each exchange gets its own coding and limits."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Any

import pytest
from flask import Flask, Response

from flask_idempotency import idempotent
from tests.shop import is_replay

if TYPE_CHECKING:
    from collections.abc import Callable

    from werkzeug.test import TestResponse

    from tests.shop import Shop

BODY = b'{"text": "' + b"the same again " * 200 + b'"}'
LIMITS = ("X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset")


@pytest.fixture(params=["before", "after"])
def make_with(
    request: pytest.FixtureRequest, make_quick: Callable[..., Shop]
) -> Callable[..., Shop]:
    """Make an application whose other extension is set up before ours, or after."""

    def make_with(set_up: Callable[[Flask], object], **config: Any) -> Shop:
        if request.param == "after":
            shop = make_quick(**config)
            set_up(shop.app)
            return shop

        def app_class(name: str) -> Flask:
            app = Flask(name)
            app.config.update(config)
            set_up(app)
            return app

        return make_quick(app_class, **config)

    return make_with


def accepting(shop: Shop, coding: str) -> TestResponse:
    """Post, and take the answer in one coding."""
    return shop.post(headers={"Accept-Encoding": coding})


def decoded(answer: TestResponse) -> bytes:
    """Return the body behind the coding that the answer names."""
    brotli: Any = pytest.importorskip("brotli")
    decoders: dict[str | None, Callable[[bytes], bytes]] = {
        "br": brotli.decompress,
        "gzip": gzip.decompress,
        None: bytes,
    }
    return decoders[answer.headers.get("Content-Encoding")](answer.data)


def compressing(make_with: Callable[..., Shop], view: Callable[[], Any]) -> Shop:
    """Serve a view in an application with Flask-Compress."""
    library: Any = pytest.importorskip("flask_compress")
    shop = make_with(library.Compress)
    shop.view(view)
    return shop


def plain() -> Response:
    """Answer in one piece."""
    response = Response(BODY, 201, mimetype="application/json")
    response.set_etag("v1")
    return response


def streamed() -> Response:
    """Answer in pieces."""
    pieces = (BODY[at : at + 100] for at in range(0, len(BODY), 100))
    return Response(pieces, 201, mimetype="application/json")


@pytest.mark.parametrize("view", [plain, streamed])
@pytest.mark.parametrize("first", ["br", "gzip", "identity"])
def test_each_exchange_has_the_coding_that_it_asks_for(
    make_with: Callable[..., Shop], view: Callable[[], Response], first: str
) -> None:
    """Coding and length are those of the bytes sent, on first answer and replays."""
    shop = compressing(make_with, view)
    for number, coding in enumerate([first, "gzip", "br", "identity"]):
        answer = accepting(shop, coding)
        assert (answer.status_code, is_replay(answer)) == (201, number > 0)
        assert answer.headers.get("Content-Encoding", "identity") == coding
        assert answer.headers.getlist("Content-Length") == [str(len(answer.data))]
        assert "accept-encoding" in answer.headers["Vary"].lower()
        assert decoded(answer) == BODY


@pytest.mark.parametrize("view", [plain, streamed])
def test_stored_are_the_bytes_of_the_view(
    make_with: Callable[..., Shop], view: Callable[[], Response]
) -> None:
    """What is stored knows nothing of the first client's coding."""
    shop = compressing(make_with, view)
    accepting(shop, "br")
    record = shop.record()
    assert record is not None
    assert record.response is not None
    assert record.response.body == BODY
    names = {name.lower() for name, _ in record.response.headers}
    assert not names & {"content-encoding", "content-length", "vary"}


def test_validator_belongs_to_the_coding(make_with: Callable[..., Shop]) -> None:
    """Flask-Compress marks the view's ETag for each exchange anew."""
    shop = compressing(make_with, plain)
    tags = [accepting(shop, c).get_etag()[0] for c in ("br", "gzip", "identity")]
    assert tags == ["v1:br", "v1:gzip", "v1"]


@pytest.mark.parametrize("place", ["above", "below"])
def test_compressing_one_view(make_quick: Callable[..., Shop], place: str) -> None:
    """The decorator ``compressed`` may stand on either side of the guard."""
    library: Any = pytest.importorskip("flask_compress")
    shop = make_quick(COMPRESS_REGISTER=False)
    compressed, guard = library.Compress(shop.app).compressed(), idempotent
    view = compressed(guard(plain)) if place == "above" else guard(compressed(plain))
    shop.app.add_url_rule("/accounts", view_func=view, methods=["POST"])
    answers = [accepting(shop, "gzip") for _ in range(2)]
    assert [decoded(answer) for answer in answers] == [BODY, BODY]
    assert answers[0].headers["Content-Encoding"] == "gzip"
    assert is_replay(answers[1])


def limiting(make_with: Callable[..., Shop], place: str, limit: str) -> Shop:
    """Serve accounts with a limit above the guard, below it, or for the application."""
    library: Any = pytest.importorskip("flask_limiter")
    limiter = library.Limiter(
        key_func=lambda: "everybody",
        storage_uri="memory://",
        headers_enabled=True,
        default_limits=[limit] if place == "everywhere" else None,
    )
    shop = make_with(limiter.init_app)
    guard = idempotent(required=True)
    view: Callable[..., Any] = shop.create
    if place == "below":
        view = limiter.limit(limit)(view)
    view = guard(view)
    if place == "above":
        view = limiter.limit(limit)(view)
    shop.app.add_url_rule("/accounts", view_func=view, methods=["POST"])
    return shop


@pytest.mark.parametrize("place", ["above", "everywhere"])
def test_replay_tells_the_limits_of_now(
    make_with: Callable[..., Shop], place: str
) -> None:
    """The headers of a limit on a replay are those of its own exchange."""
    shop = limiting(make_with, place, "5 per hour")
    answers = [shop.post() for _ in range(3)]
    assert [is_replay(answer) for answer in answers] == [False, True, True]
    left = [answer.headers.getlist("X-RateLimit-Remaining") for answer in answers]
    assert left == [["4"], ["3"], ["2"]]


@pytest.mark.parametrize("place", ["above", "everywhere", "below"])
def test_limits_are_not_stored(make_with: Callable[..., Shop], place: str) -> None:
    """No limit of the first exchange is kept with its answer."""
    shop = limiting(make_with, place, "5 per hour")
    assert shop.post().headers["X-RateLimit-Remaining"] == "4"
    record = shop.record()
    assert record is not None
    assert record.response is not None
    assert not {name for name, _ in record.response.headers} & {*LIMITS, "Retry-After"}


@pytest.mark.parametrize("place", ["above", "everywhere", "below"])
def test_too_many_requests_leave_the_key_free(
    make_with: Callable[..., Shop], place: str
) -> None:
    """A 429 of the limiter runs nothing, and leaves no record behind."""
    shop = limiting(make_with, place, "1 per hour")
    assert shop.post("first", key="k").status_code == 201
    for _ in range(2):
        refused = shop.post("second", key="other")
        assert (refused.status_code, is_replay(refused)) == (429, False)
        assert int(refused.headers["Retry-After"]) > 0
        assert shop.status("other") is None
    assert shop.accounts() == ["first"]


def test_limit_above_the_guard_counts_replays(make_with: Callable[..., Shop]) -> None:
    """Above the guard a retry may be too much, and the stored answer stays."""
    shop = limiting(make_with, "above", "1 per hour")
    assert [shop.post().status_code for _ in range(2)] == [201, 429]
    assert shop.status() == "succeeded"


def test_limit_below_the_guard_counts_runs(make_with: Callable[..., Shop]) -> None:
    """Below the guard a limit counts runs of the view, and a replay is none."""
    shop = limiting(make_with, "below", "1 per hour")
    answers = [shop.post() for _ in range(3)]
    assert [answer.status_code for answer in answers] == [201] * 3
    assert is_replay(answers[2])
    assert not set(answers[2].headers.keys()) & set(LIMITS)


def test_login_above_the_guard_stands_before_replays(
    make_quick: Callable[..., Shop],
) -> None:
    """A user of Flask-Login who has left gets no stored answer, only who is there."""
    library: Any = pytest.importorskip("flask_login")
    shop = make_quick(SECRET_KEY="test")  # noqa: S106 - of a test
    manager = library.LoginManager(shop.app)
    user = library.UserMixin()
    user.id = "u1"
    manager.user_loader(lambda _id: user)
    shop.idempotency._loaders.user_id = None
    view = library.login_required(idempotent(required=True)(shop.create))
    shop.app.add_url_rule("/accounts", view_func=view, methods=["POST"])
    shop.app.add_url_rule("/in", "in", lambda: str(library.login_user(user)))
    shop.app.add_url_rule("/out", "out", lambda: str(library.logout_user()))
    client, answers = shop.app.test_client(), []
    for step in ("/in", "/accounts", "/accounts", "/out", "/accounts"):
        if step != "/accounts":
            client.get(step)
            continue
        sent = {"json": {"name": "first"}, "headers": {"Idempotency-Key": "k"}}
        answers.append(client.post(step, **sent))
    assert [answer.status_code for answer in answers] == [201, 201, 401]
    assert [is_replay(answer) for answer in answers] == [False, True, False]
