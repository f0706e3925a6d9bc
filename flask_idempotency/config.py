"""
Configuration: one table of ``IDEMPOTENCY_*`` keys and one of route options.

Durations are seconds or ``timedelta`` outside and ``*_seconds`` floats inside.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any, ClassVar

from .exceptions import IdempotencyConfigError
from .lifecycle import SCOPE_LENGTHS, check_text

PREFIX = "IDEMPOTENCY_"
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


def _retention(value: object) -> float:
    return seconds_of(value, minimum=0)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        message = "True or False"
        raise ValueError(message)  # noqa: TRY004 - one error type for all checks
    return value


def _integer(minimum: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            message = f"a whole number of {minimum} or more"
            raise ValueError(message)
        return value

    return parse


def _choice(*names: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if not isinstance(value, str) or value not in names:
            message = " or ".join(f"'{name}'" for name in names)
            raise ValueError(message)
        return value

    return parse


def _name(value: object) -> str:
    if not isinstance(value, str) or not value or not value.isascii():
        message = "a non-empty ASCII text"
        raise ValueError(message)
    return value


def _header(value: object) -> str:
    # RFC 9110, section 5.6.2: a field name is a token.
    if not isinstance(value, str) or not re.fullmatch(
        r"[\w!#$%&'*+.^`|~-]+", value, re.ASCII
    ):
        message = "the name of a header field"
        raise ValueError(message)
    return value


def _statuses(value: object) -> frozenset[int]:
    wanted = "a collection of HTTP statuses from 400 to 499"
    if isinstance(value, (str, bytes)) or not isinstance(value, Collection):
        raise ValueError(wanted)  # noqa: TRY004 - one error type for all checks
    if not all(type(code) is int and 400 <= code <= 499 for code in value):  # noqa: PLR2004
        raise ValueError(wanted)
    return frozenset(value)


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


def _callable(value: object) -> Callable[..., Any]:
    if not callable(value) or inspect.iscoroutinefunction(value):
        message = "a plain callable without arguments"
        raise ValueError(message)
    return value


def _setting(default: Any, parse: Callable[[object], Any], key: str = "") -> Any:
    return field(default=default, metadata={"parse": parse, "key": key})


@dataclass(frozen=True, kw_only=True)
class Config:
    """
    The settings of one application, read once by ``init_app``.

    A field ``x`` is read from ``IDEMPOTENCY_X``; ``ttl_seconds`` and its like from
    the key without the unit.
    """

    ttl_seconds: float = _setting(86400.0, seconds_of, "TTL")
    lease_seconds: float = _setting(30.0, seconds_of, "LEASE")
    retention_seconds: float = _setting(604800.0, _retention, "RETENTION")
    header: str = _setting("Idempotency-Key", _header)
    form_field: str = _setting("idempotency_key", _name)
    required: bool = _setting(default=False, parse=_flag)
    anonymous: bool = _setting(default=False, parse=_flag)
    release_on: frozenset[int] = _setting(
        frozenset({401, 403, 408, 425, 429}), _statuses
    )
    max_response_size: int = _setting(1024 * 1024, _integer(0))
    commit: str = _setting("unit", _choice("unit", "view"))
    before_view_writes: str = _setting("refuse", _choice("refuse", "commit"))
    max_attempts: int = _setting(10, _integer(1))
    pool_size: int = _setting(2, _integer(1))
    problem_type: str = _setting("about:blank", _name)

    @classmethod
    def keys(cls) -> dict[str, str]:
        """Return the configuration key of each field."""
        return {
            f.name: PREFIX + (f.metadata["key"] or f.name.upper()) for f in fields(cls)
        }

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> Config:
        """
        Read the ``IDEMPOTENCY_*`` keys of an application's configuration.

        Raises:
            IdempotencyConfigError: On an unknown key or a bad value; the text names
                the key, the value and what is expected.
        """
        keys = cls.keys()
        for key in config:
            if key.startswith(PREFIX) and key not in keys.values():
                raise IdempotencyConfigError(_unknown(key, keys.values()))
        values = {}
        for f in fields(cls):
            key = keys[f.name]
            if key in config:
                values[f.name] = _parsed(key, config[key], f.metadata["parse"])
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class RouteOptions:
    """
    What ``@idempotent(...)`` was given; ``None`` is "as the application says".

    Args:
        required: Refuse requests without a key.
        key: Where the key comes from, instead of header and form field. ``None``,
            ``""`` or ``LookupError`` mean that there is no key.
        route: Name of the operation in the record; the method and rule by default.
        ttl_seconds: Life of a key from its first claim.
        lease_seconds: How long a crash can block a key.
        retry_failed: Run a failed request again if no part of it stayed.
        anonymous: Callers without identity share the empty user.
        claim: False: only check the key; a service claims through the guard.
    """

    required: bool | None = _setting(None, _flag)
    key: Callable[[], str | None] | None = _setting(None, _callable)  # noqa: RUF009
    route: str | None = _setting(None, checked_route)
    ttl_seconds: float | None = _setting(None, seconds_of, "ttl")
    lease_seconds: float | None = _setting(None, seconds_of, "lease")
    retry_failed: bool = _setting(default=False, parse=_flag)
    anonymous: bool | None = _setting(None, _flag)
    claim: bool = _setting(default=True, parse=_flag)

    #: Options that fall back to the application's setting of the same name.
    DEFAULTED: ClassVar[tuple[str, ...]] = (
        "required",
        "ttl_seconds",
        "lease_seconds",
        "anonymous",
    )

    @classmethod
    def from_keywords(cls, options: Mapping[str, Any]) -> RouteOptions:
        """
        Check the options of a declaration.

        Raises:
            IdempotencyConfigError: On an unknown option or a bad value.
        """
        names = {f.metadata["key"] or f.name: f for f in fields(cls)}
        for name in options:
            if name not in names:
                raise IdempotencyConfigError(_unknown(name, names, "@idempotent: "))
        if options.get("claim") is False:
            idle = sorted({"route", "ttl", "lease", "retry_failed"} & options.keys())
            if idle:
                raise IdempotencyConfigError(
                    f"@idempotent(claim=False) leaves the claim to a service, so "
                    f"'{idle[0]}' would do nothing. Pass it to guard.run()."
                )
        return cls(
            **{
                names[name].name: _parsed(
                    f"@idempotent({name}=…)", value, names[name].metadata["parse"]
                )
                for name, value in options.items()
                if value is not None or names[name].default is not None
            }
        )

    def under(self, config: Config) -> RouteOptions:
        """Return the options with the application's settings filled in."""
        unset = [name for name in self.DEFAULTED if getattr(self, name) is None]
        return replace(self, **{name: getattr(config, name) for name in unset})


def _unknown(name: str, known: Collection[str], where: str = "") -> str:
    longer = [key for key in known if name.startswith(f"{key}_")]
    near = longer or difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean '{near[0]}'?" if near else f"Known: {', '.join(known)}."
    return f"{where}'{name}' is not known. {hint}"


def _parsed(name: str, value: object, parse: Callable[[object], Any]) -> Any:
    try:
        return parse(value)
    except ValueError as error:
        raise IdempotencyConfigError(
            f"{name} is {value!r}; it must be {error}."
        ) from error
