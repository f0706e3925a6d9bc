"""The errors: their tree, codes, statuses, headers and members."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import Any

import pytest
from werkzeug.exceptions import HTTPException

from flask_idempotency import exceptions
from flask_idempotency.exceptions import (
    IdempotencyError,
    IdempotencyHTTPException,
    IdempotencyInProgress,
    IdempotencyKeyConflict,
    IdempotencyKeyMissing,
    IdempotencyPreviousFailure,
    IdempotencyStoreUnavailable,
)

#: Error, its status, its code, and whether the same request may be sent again.
HTTP_ERRORS = [
    ("IdempotencyKeyMissing", 400, "IDEMPOTENCY_KEY_MISSING", False),
    ("IdempotencyKeyInvalid", 400, "IDEMPOTENCY_KEY_INVALID", False),
    ("IdempotencyCallerUnknown", 403, "IDEMPOTENCY_CALLER_UNKNOWN", False),
    ("IdempotencyReplayForbidden", 403, "IDEMPOTENCY_REPLAY_FORBIDDEN", False),
    ("IdempotencyInProgress", 409, "IDEMPOTENCY_IN_PROGRESS", True),
    ("IdempotencyOutcomeUnknown", 409, "IDEMPOTENCY_OUTCOME_UNKNOWN", False),
    ("IdempotencyResponseUnavailable", 409, "IDEMPOTENCY_RESPONSE_UNAVAILABLE", False),
    ("IdempotencyKeyConflict", 422, "IDEMPOTENCY_KEY_CONFLICT", False),
    ("IdempotencyPreviousFailure", 500, "IDEMPOTENCY_PREVIOUS_FAILURE", False),
    ("IdempotencyStoreUnavailable", 503, "IDEMPOTENCY_STORE_UNAVAILABLE", True),
    ("IdempotencyLeaseLost", 503, "IDEMPOTENCY_LEASE_LOST", True),
]
OTHER_ERRORS = {
    "IdempotencyConfigError",
    "LeaseLost",
    "NestedCallError",
    "ResultNotStorable",
}
#: A line of the tree: branches of four characters a level, then the class.
BRANCH = re.compile(r"^((?:│   |    )*(?:[├└]── )?)(\w+)(?:\s{2,}(.+))?$")


def error_classes() -> dict[str, type[IdempotencyError]]:
    """Return the error classes that the module defines."""
    return {
        name: value
        for name, value in vars(exceptions).items()
        if isinstance(value, type) and issubclass(value, IdempotencyError)
    }


def make(name: str, **facts: Any) -> IdempotencyHTTPException:
    """Return an error as the library raises it."""
    cls: Any = error_classes()[name]
    error: IdempotencyHTTPException
    error = cls("why") if cls is IdempotencyStoreUnavailable else cls(**facts)
    return error


def drawn_tree() -> dict[str, tuple[str | None, str]]:
    """Read class, parent and note from the tree in the module's docstring."""
    tree: dict[str, tuple[str | None, str]] = {}
    above: list[str] = []
    assert exceptions.__doc__ is not None
    drawing = exceptions.__doc__.split("::\n")[1]
    for line in drawing.strip("\n").split("\n\n")[0].splitlines():
        match = BRANCH.match(line[4:])
        assert match, line
        depth = len(match[1]) // 4
        above[depth:] = [match[2]]
        tree[match[2]] = (above[depth - 1] if depth else None, match[3] or "")
    return tree


def test_tree_in_the_docstring_is_the_tree_of_classes() -> None:
    """A reader of the docstring sees every class below its true parent."""
    drawn = {name: parent for name, (parent, _) in drawn_tree().items()}
    real = {
        name: cls.__base__.__name__ if cls is not IdempotencyError else None  # type: ignore[union-attr]
        for name, cls in error_classes().items()
    }
    assert drawn == real


def test_notes_of_the_tree_are_true() -> None:
    """Status and retryable are drawn as they are."""
    notes = {n: note for n, (_, note) in drawn_tree().items() if note[:1].isdigit()}
    assert notes == {
        name: f"{status}, retryable" if retryable else str(status)
        for name, status, _, retryable in HTTP_ERRORS
    }


def test_table_is_complete() -> None:
    """Every error is in the tables of this file."""
    http = {name for name, *_ in HTTP_ERRORS}
    bases = {"IdempotencyError", "IdempotencyHTTPException"}
    assert set(error_classes()) == http | OTHER_ERRORS | bases


@pytest.mark.parametrize(("name", "status", "code", "retryable"), HTTP_ERRORS)
def test_http_error(name: str, status: int, code: str, *, retryable: bool) -> None:
    """Each HTTP error has its status, its code and whether a retry helps."""
    error = make(name)
    assert (error.code, error.error_code, error.retryable) == (status, code, retryable)
    assert isinstance(error, HTTPException)


@pytest.mark.parametrize("name", [name for name, *_ in HTTP_ERRORS])
def test_code_is_the_name_of_the_class(name: str) -> None:
    """Who knows the class knows the code."""
    words = re.findall("[A-Z][a-z]+", name)
    assert make(name).error_code == "_".join(words).upper()


@pytest.mark.parametrize("name", sorted(OTHER_ERRORS))
def test_other_errors_are_not_answered_by_themselves(name: str) -> None:
    """What is no answer to a client is no HTTP error."""
    assert not issubclass(error_classes()[name], HTTPException)


@pytest.mark.parametrize("name", [name for name, *_ in HTTP_ERRORS])
def test_default_text_is_one_line(name: str) -> None:
    """The text for the client is a sentence without line breaks."""
    text = make(name).description
    assert text
    assert text == " ".join(text.split())
    assert text.endswith(".")


@pytest.mark.parametrize("name", sorted(error_classes()))
def test_error_has_a_docstring_of_its_own(name: str) -> None:
    """No error inherits its explanation."""
    assert "__doc__" in vars(error_classes()[name])
    assert error_classes()[name].__doc__


def test_members_without_facts() -> None:
    """An error has the members of a Problem, and none that is not known."""
    error = IdempotencyKeyConflict()
    assert error.data == {
        "title": "Unprocessable Entity",
        "status": 422,
        "detail": error.description,
        "code": "IDEMPOTENCY_KEY_CONFLICT",
        "retryable": False,
    }


def test_members_with_facts() -> None:
    """What is known of the record is told to the client."""
    error = IdempotencyInProgress(
        "Wait.",
        task_id="t-1",
        outbox_event_id="e-1",
        expires_at=datetime(2030, 1, 2, 3, 4, 5, tzinfo=timezone.utc),
        retry_after_seconds=7,
        safe_new_key=True,
    )
    assert error.data == {
        "title": "Conflict",
        "status": 409,
        "detail": "Wait.",
        "code": "IDEMPOTENCY_IN_PROGRESS",
        "retryable": True,
        "task_id": "t-1",
        "outbox_event_id": "e-1",
        "expires_at": "2030-01-02T03:04:05+00:00",
        "safe_new_key": True,
    }


def test_text_can_be_given() -> None:
    """The place that raises an error may know better."""
    assert IdempotencyKeyMissing("Send it.").description == "Send it."


def headers_of(error: HTTPException) -> dict[str, str]:
    """Return the headers with which an error is answered, besides the common ones."""
    headers = dict(error.get_headers())
    assert headers.pop("Cache-Control") == "no-store"
    del headers["Content-Type"]
    return headers


@pytest.mark.parametrize("name", [name for name, *_ in HTTP_ERRORS])
def test_error_adds_few_headers_by_itself(name: str) -> None:
    """No error may be cached; without a time and a replay that is all."""
    expected = {"Retry-After": "1"} if name == "IdempotencyStoreUnavailable" else {}
    assert headers_of(make(name)) == expected


@pytest.mark.parametrize("seconds", [0, 1, 30])
def test_retry_after(seconds: int) -> None:
    """The time to wait is a header of whole seconds, also 0."""
    error = IdempotencyInProgress(retry_after_seconds=seconds)
    assert headers_of(error) == {"Retry-After": str(seconds)}


def test_replayed_error_is_marked() -> None:
    """A stored failure that is given out again says so."""
    error = IdempotencyPreviousFailure(replayed=True)
    assert headers_of(error) == {"Idempotent-Replayed": "true"}


def test_headers_are_in_the_answer_of_werkzeug_too() -> None:
    """Whoever renders the error keeps its headers."""
    response = IdempotencyInProgress(retry_after_seconds=3).get_response()
    assert response.status_code == 409
    assert response.headers["Retry-After"] == "3"


def test_reason_of_an_outage_is_not_for_the_client() -> None:
    """What the database said stays with the operator."""
    error = IdempotencyStoreUnavailable("no route to host db.internal")
    assert error.reason == "no route to host db.internal"
    assert "db.internal" not in repr(error.data)
    assert "db.internal" not in str(error)


def test_every_error_is_caught_by_the_base() -> None:
    """One except clause is enough for everything of this library."""
    assert all(issubclass(c, IdempotencyError) for c in error_classes().values())
    assert not issubclass(IdempotencyError, HTTPException)
