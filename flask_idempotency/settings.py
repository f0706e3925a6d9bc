"""How one setting is checked: each function returns the value or says what it must be."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

from .fingerprint import Fingerprint, is_field_name
from .lifecycle import SCOPE_LENGTHS, check_text

_CENTURY_SECONDS = timedelta(days=36500).total_seconds()
Duration = float | timedelta


def seconds_of(value: object, *, minimum: float = 1.0) -> float:
    """
    Return a duration in seconds.

    Args:
        value: Seconds or a ``timedelta``.
        minimum: Least number of seconds that makes sense.

    Raises:
        ValueError: If it is no finite duration of at least `minimum`.
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, (int, float))
        or not minimum <= seconds <= _CENTURY_SECONDS
    ):
        message = f"a duration of {minimum:g} s or more, in seconds or as timedelta"
        raise ValueError(message)
    return float(seconds)


def seconds_from_zero(value: object) -> float:
    """Accept a duration that may be 0."""
    return seconds_of(value, minimum=0)


def flag(value: object) -> bool:
    """Accept True or False."""
    if not isinstance(value, bool):
        message = "True or False"
        raise ValueError(message)  # noqa: TRY004 - one error type for all checks
    return value


def integer(minimum: int) -> Callable[[object], int]:
    """Return the check of a whole number."""

    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            message = f"a whole number of {minimum} or more"
            raise ValueError(message)
        return value

    return parse


def choice(*names: str) -> Callable[[object], str]:
    """Return the check of one of some words."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or value not in names:
            message = " or ".join(f"'{name}'" for name in names)
            raise ValueError(message)
        return value

    return parse


def ascii_text(value: object) -> str:
    """Accept an ASCII text that is not empty."""
    if not isinstance(value, str) or not value or not value.isascii():
        message = "a non-empty ASCII text"
        raise ValueError(message)
    return value


def header_name(value: object) -> str:
    """Accept the name of a header field."""
    if not is_field_name(value):
        message = "the name of a header field"
        raise ValueError(message)
    return str(value)


def pattern(value: object) -> re.Pattern[str]:
    """Accept a regular expression."""
    try:
        compiled = re.compile(value)  # type: ignore[call-overload]
    except (TypeError, re.error):
        compiled = None
    if compiled is None or not isinstance(compiled.pattern, str) or not value:
        message = "a regular expression (str) that the whole key must match"
        raise ValueError(message)
    return compiled  # type: ignore[no-any-return]


def error_statuses(value: object) -> frozenset[int]:
    """Accept a collection of HTTP error statuses."""
    wanted = "a collection of HTTP statuses from 400 to 599"
    if isinstance(value, (str, bytes)) or not isinstance(value, Collection):
        raise ValueError(wanted)  # noqa: TRY004 - one error type for all checks
    if not all(type(code) is int and 400 <= code <= 599 for code in value):  # noqa: PLR2004
        raise ValueError(wanted)
    return frozenset(value)


def release_on(value: object) -> frozenset[int] | Callable[..., Any]:
    """Accept error statuses, or what decides on a response."""
    try:
        return plain_function(value) if callable(value) else error_statuses(value)
    except ValueError as error:
        message = (
            "a collection of HTTP statuses from 400 to 599, or a plain function of "
            "the response"
        )
        raise ValueError(message) from error


def caller(name: str) -> Callable[[object], str | Callable[[], str | None]]:
    """Return the check of a route's own tenant or user: a text, or what returns one."""

    def parse(value: object) -> str | Callable[[], str | None]:
        try:
            if callable(value):
                return plain_function(value)
            text = check_text(name, value, SCOPE_LENGTHS[name])
        except ValueError:
            text = ""
        if not text:
            message = (
                f"a text of 1 to {SCOPE_LENGTHS[name]} characters without NUL, or a "
                "plain function that returns one"
            )
            raise ValueError(message)
        return text

    return parse


def fingerprint_option(value: object) -> Fingerprint | Callable[[], object] | None:
    """Accept what a route may say about its fingerprint."""
    if value is None or isinstance(value, Fingerprint):
        return value
    try:
        return plain_function(value)
    except ValueError as error:
        message = (
            "Fingerprint(…), a plain function without arguments, or None for the key "
            "alone"
        )
        raise ValueError(message) from error


def checked_route(value: object) -> str:
    """
    Return a name that a route or service may have.

    Raises:
        ValueError: If it is empty, too long, not storable or reserved.
    """
    try:
        name = check_text("route", value, SCOPE_LENGTHS["route"])
    except ValueError:
        name = ""
    if not name or name.startswith(("task:", "outbox:")):
        message = (
            "a text of 1 to 255 characters without NUL that does not start with "
            "'task:' or 'outbox:', which are reserved"
        )
        raise ValueError(message)
    return name


def plain_function(value: object) -> Callable[..., Any]:
    """Accept a callable that is not async."""
    if not callable(value) or inspect.iscoroutinefunction(value):
        message = "a plain (not async) function"
        raise ValueError(message)
    return value
