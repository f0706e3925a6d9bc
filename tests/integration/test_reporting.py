"""Errors are handled and reported as if the decorator were not there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from flask import Blueprint, abort, got_request_exception, request
from werkzeug.exceptions import BadRequest, Conflict, NotFound

from flask_idempotency import idempotent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flask import Response

    from tests.shop import Shop


class Broken(Exception):  # noqa: N818 - an exception of an application
    """What a view raises."""


@pytest.fixture
def reported(quick: Shop) -> Iterator[list[BaseException]]:
    """Collect what an error reporter would get."""
    seen: list[BaseException] = []

    def report(_sender: Any, exception: BaseException, **_extra: Any) -> None:
        seen.append(exception)

    with got_request_exception.connected_to(report, quick.app):
        yield seen


def serve(shop: Shop, function: Callable[[], Any], **options: Any) -> None:
    """Serve a view at ``/plain`` undecorated and at ``/accounts`` guarded."""

    def view() -> Any:
        shop.runs.append(1)
        return function()

    shop.app.add_url_rule("/plain", view_func=view, methods=["POST"])
    shop.view(view, **options)


def broken() -> None:
    """Raise what no handler knows."""
    message = "broken"
    raise Broken(message)


def test_exception_is_reported_once(quick: Shop, reported: list[BaseException]) -> None:
    """The reporter gets the view's own exception; a replay reports nothing."""
    serve(quick, broken)
    assert [quick.post().status_code for _ in range(3)] == [500, 500, 500]
    assert [type(error) for error in reported] == [Broken]
    assert len(quick.runs) == 1


@pytest.mark.parametrize("setting", ["TESTING", "PROPAGATE_EXCEPTIONS", "DEBUG"])
def test_exception_propagates(quick: Shop, setting: str) -> None:
    """In tests and in debug mode it reaches the caller, and the failure is kept."""
    quick.app.config[setting] = True
    serve(quick, broken)
    with pytest.raises(Broken):
        quick.post()
    assert quick.status() == "failed"
    answer = quick.post()
    assert answer.json is not None
    assert answer.json["code"] == "IDEMPOTENCY_PREVIOUS_FAILURE"


@pytest.mark.parametrize(
    ("handled", "raised"),
    [
        (Broken, broken),
        (500, broken),
        (Exception, broken),
        (404, lambda: abort(404)),
        (NotFound, lambda: abort(404)),
        (Exception, lambda: abort(404)),
        (BadRequest, lambda: request.form["absent"]),
    ],
)
@pytest.mark.parametrize("status", [200, 418, 503])
def test_handler_of_the_application_answers(
    quick: Shop, handled: Any, raised: Callable[[], Any], status: int
) -> None:
    """Whichever handler answers the undecorated view answers the guarded one."""
    quick.app.register_error_handler(handled, lambda e: (type(e).__name__, status))
    serve(quick, raised)
    plain, first, again = quick.post(path="/plain"), quick.post(), quick.post()
    assert (first.status, first.data) == (plain.status, plain.data)
    # The handler for 500 runs outside of the view: its page is no answer of it.
    if handled != 500:
        assert (again.status, again.data) == (plain.status, plain.data)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert len(quick.runs) == 2


@pytest.mark.parametrize(
    ("setting", "raised"),
    [
        ("TRAP_HTTP_EXCEPTIONS", lambda: abort(404)),
        ("TRAP_BAD_REQUEST_ERRORS", lambda: request.form["absent"]),
    ],
)
def test_trapped_error_propagates(
    quick: Shop, setting: str, raised: Callable[[], Any]
) -> None:
    """Flask's traps spring inside a guarded view, too."""
    quick.app.config[setting] = True
    quick.app.testing = True
    serve(quick, raised)
    with pytest.raises((NotFound, BadRequest)):
        quick.post()
    assert quick.status() == "failed"


def test_error_after_the_commit_keeps_the_answer(quick: Shop) -> None:
    """An ``after_request`` function that fails comes too late to undo anything."""
    fail = [True, False, False]  # Flask runs it for its own error page, too

    @quick.app.after_request
    def late(response: Response) -> Response:
        if fail.pop(0):
            broken()
        return response

    quick.view(quick.create)
    assert quick.post().status_code == 500
    assert quick.status() == "succeeded"
    assert quick.post().headers["Idempotent-Replayed"] == "true"
    assert (quick.accounts(), quick.runs) == (["first"], ["first"])


def test_error_in_teardown_keeps_the_answer(quick: Shop) -> None:
    """A teardown function that fails changes nothing either."""
    quick.app.testing = True
    fail = [True, False]

    @quick.app.teardown_request
    def late(_error: BaseException | None) -> None:
        if fail.pop(0):
            broken()

    quick.view(quick.create)
    with pytest.raises(Broken):
        quick.post()
    assert quick.post().headers["Idempotent-Replayed"] == "true"
    assert quick.accounts() == ["first"]


def test_blueprint_handler_answers(quick: Shop) -> None:
    """A blueprint's own handlers answer for its guarded views."""
    blueprint = Blueprint("api", __name__)
    blueprint.register_error_handler(Broken, lambda _e: ("blueprint", 409))

    @blueprint.post("/orders")
    @idempotent
    def order() -> None:
        broken()

    quick.app.register_blueprint(blueprint)
    answers = [quick.post(path="/orders") for _ in range(2)]
    assert [(a.status_code, a.data) for a in answers] == [(409, b"blueprint")] * 2


def test_errors_of_ours_are_no_crash_to_report(
    quick: Shop, reported: list[BaseException]
) -> None:
    """A refusal is an answer; the error reporter does not hear of it."""
    serve(quick, lambda: "")
    quick.post()
    assert quick.post("other").status_code == 422
    assert quick.post(key=None).status_code == 400
    assert reported == []


def test_http_error_raised_as_an_answer(quick: Shop) -> None:
    """An HTTPException with a response of its own is that response."""
    serve(quick, lambda: abort(Conflict("taken").get_response()))
    first, again = quick.post(), quick.post()
    assert (first.status_code, again.data) == (409, first.data)


@pytest.mark.parametrize("other", [True, False], ids=["another", "the same"])
def test_handler_that_raises_is_asked_once(
    quick: Shop, reported: list[BaseException], *, other: bool
) -> None:
    """What a handler raises goes to the handler for 500, as undecorated."""
    asked: list[str] = []

    class Second(Exception):  # noqa: N818 - an exception of an application
        """What the handler raises."""

    def handle(error: Broken) -> Any:
        asked.append("broken")
        if other:
            raise Second from error
        raise error

    quick.app.register_error_handler(Broken, handle)
    quick.app.register_error_handler(Second, lambda _e: ("second", 418))
    quick.app.register_error_handler(500, lambda _e: ("crashed", 500))
    serve(quick, broken)
    plain = quick.post(path="/plain")
    expected, asked[:] = list(asked), []
    guarded = quick.post()
    assert (guarded.status, guarded.data) == (plain.status, plain.data)
    assert asked == expected == ["broken"]
    assert [type(error) for error in reported] == [Second if other else Broken] * 2
    assert quick.status() == "failed"
