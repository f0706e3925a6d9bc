"""Errors as Problem Details (RFC 9457), or as a page for a browser's form."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NoReturn

from flask import Response, json, request

from .exceptions import (
    IdempotencyError,
    IdempotencyHTTPException,
    IdempotencyStoreUnavailable,
)

if TYPE_CHECKING:
    from werkzeug.wrappers import Response as WerkzeugResponse

    from .config import Config

log = logging.getLogger(__name__)

_PROBLEM = "application/problem+json"


class Unanswered(Exception):  # noqa: N818 - no error of its own
    """
    Carries an exception past the error handlers, which have been asked already.

    Inside a guarded view they are asked early, so that their answer can be stored.
    One that raises, or finds nothing to say, must not be asked again by Flask.

    Args:
        error: What goes on to the application's handler for 500.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


def raise_unanswered(carrier: Unanswered) -> NoReturn:
    """Give Flask the exception as one that no handler has answered."""
    raise carrier.error


def problem_response(error: IdempotencyError, config: Config) -> WerkzeugResponse:
    """
    Return the answer to an error: a Problem, or HTML where a browser asks for it.

    Raises:
        IdempotencyError: If it is no HTTP error, but a mistake in the application.
    """
    if not isinstance(error, IdempotencyHTTPException):
        raise error
    if isinstance(error, IdempotencyStoreUnavailable):
        extra = {"idempotency_code": error.error_code}
        log.error("%s: %s", error.error_code, error.reason, extra=extra)
    if _prefers_html():
        return error.get_response(request.environ)
    problem_type = config.problem_type
    if problem_type != "about:blank":
        problem_type = f"{problem_type}#{error.error_code}"
    response = Response(
        json.dumps({"type": problem_type, **error.data}) + "\n",
        status=error.code,
        mimetype=_PROBLEM,
    )
    for name, value in error.get_headers(request.environ):
        if name.lower() != "content-type":
            response.headers.add(name, value)
    return response


def _prefers_html() -> bool:
    accepted = request.accept_mimetypes
    best = accepted.best_match([_PROBLEM, "application/json", "text/html"])
    return best == "text/html" and accepted["text/html"] > accepted[_PROBLEM]
