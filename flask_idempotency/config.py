"""
Configuration: one table of ``IDEMPOTENCY_*`` keys and one of route options.

Durations are seconds or ``timedelta`` outside and ``*_seconds`` floats inside.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from . import settings
from .exceptions import IdempotencyConfigError
from .fingerprint import Fingerprint

PREFIX = "IDEMPOTENCY_"
#: Answer duplicates, or only note what would be answered.
MODES = ("enforce", "observe")


def _setting(default: Any, parse: Callable[[object], Any], key: str = "") -> Any:
    return field(default=default, metadata={"parse": parse, "key": key})


@dataclass(frozen=True, kw_only=True)
class Config:
    """
    The settings of one application, read once by ``init_app``.

    A field ``x`` is read from ``IDEMPOTENCY_X``; ``ttl_seconds`` and its like from
    the key without the unit.
    """

    ttl_seconds: float = _setting(86400.0, settings.seconds_of, "TTL")
    task_ttl_seconds: float = _setting(604800.0, settings.seconds_of, "TASK_TTL")
    lease_seconds: float = _setting(30.0, settings.seconds_of, "LEASE")
    retention_seconds: float = _setting(
        604800.0, settings.seconds_from_zero, "RETENTION"
    )
    header: str = _setting("Idempotency-Key", settings.header_name)
    form_field: str = _setting("idempotency_key", settings.ascii_text)
    required: bool = _setting(default=False, parse=settings.flag)
    anonymous: bool = _setting(default=False, parse=settings.flag)
    strict_keys: bool = _setting(default=False, parse=settings.flag)
    key_pattern: re.Pattern[str] | None = _setting(None, settings.pattern)
    wait_seconds: float = _setting(0.0, settings.seconds_from_zero, "WAIT")
    mode: str = _setting("enforce", settings.choice(*MODES))
    atomic: bool = _setting(default=False, parse=settings.flag)
    release_on: frozenset[int] = _setting(
        frozenset({401, 403, 408, 425, 429}), settings.error_statuses
    )
    max_response_size: int = _setting(1024 * 1024, settings.integer(0))
    separate_bind: bool = _setting(default=False, parse=settings.flag)
    commit: str = _setting("unit", settings.choice("unit", "view"))
    before_view_writes: str = _setting("refuse", settings.choice("refuse", "commit"))
    max_attempts: int = _setting(10, settings.integer(1))
    pool_size: int = _setting(2, settings.integer(1))
    problem_type: str = _setting("about:blank", settings.ascii_text)

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
        lease_seconds: How long a crash can block a key; renewed while a call runs.
        max_runtime_seconds: After this time a call that hangs is not renewed any
            more; ten leases by default.
        retry_failed: Run a failed request again if no part of it stayed.
        anonymous: Callers without identity share the empty user.
        claim: False: only check the key; a service claims through the guard.
        tenant_id: The tenant, or what names it, instead of the loader.
        user_id: The caller, or what names it, instead of the loader.
        fingerprint: What makes a request the same: ``Fingerprint(...)``, a function
            that returns a JSON-like value, or ``None``: the key alone.
        wait_seconds: How long a duplicate waits for a first call in progress.
        release_on: Statuses of 400 and above, or a function of the response, that
            free the key while nothing is committed.
        store_body: False: only status and headers of a success are kept.
        rebuild: Makes the answer of a replay whose body is not stored, from the
            ``RecordView``. Status and headers are the stored ones.
        authorize_replay: Called with the ``RecordView`` before a stored answer is
            given out; False refuses it (403).
        recover: Called with the ``RecordView``, instead of the view, when an earlier
            request committed a part and left no answer: returns the answer, or
            ``None`` where it cannot tell either.
        fail_open: Run unprotected while the store cannot be reached.
        mode: ``"observe"``: record and compare, answer as if undecorated.
        atomic: The view's own commits become savepoints; one commit makes durable what
            it did, with the record and the answer, and any failure undoes it all.
    """

    required: bool | None = _setting(None, settings.flag)
    key: Callable[[], str | None] | None = _setting(None, settings.plain_function)
    route: str | None = _setting(None, settings.checked_route)
    ttl_seconds: float | None = _setting(None, settings.seconds_of, "ttl")
    lease_seconds: float | None = _setting(None, settings.seconds_of, "lease")
    max_runtime_seconds: float | None = _setting(
        None, settings.seconds_of, "max_runtime"
    )
    retry_failed: bool = _setting(default=False, parse=settings.flag)
    anonymous: bool | None = _setting(None, settings.flag)
    claim: bool = _setting(default=True, parse=settings.flag)
    tenant_id: str | Callable[[], str | None] | None = _setting(
        None, settings.caller("tenant_id")
    )
    user_id: str | Callable[[], str | None] | None = _setting(
        None, settings.caller("user_id")
    )
    fingerprint: Fingerprint | Callable[[], object] | None = _setting(
        Fingerprint(), settings.fingerprint_option
    )
    wait_seconds: float | None = _setting(None, settings.seconds_from_zero, "wait")
    release_on: frozenset[int] | Callable[[Any], bool] | None = _setting(
        None, settings.release_on
    )
    store_body: bool = _setting(default=True, parse=settings.flag)
    rebuild: Callable[[Any], Any] | None = _setting(None, settings.plain_function)
    authorize_replay: Callable[[Any], bool] | None = _setting(
        None, settings.plain_function
    )
    recover: Callable[[Any], Any] | None = _setting(None, settings.plain_function)
    fail_open: bool = _setting(default=False, parse=settings.flag)
    mode: str | None = _setting(None, settings.choice(*MODES))
    atomic: bool | None = _setting(None, settings.flag)

    #: Options that fall back to the application's setting of the same name.
    DEFAULTED: ClassVar[tuple[str, ...]] = (
        "required",
        "ttl_seconds",
        "lease_seconds",
        "anonymous",
        "wait_seconds",
        "release_on",
        "mode",
        "atomic",
    )
    #: Options that only say who calls and where the key is.
    WITHOUT_CLAIM: ClassVar[frozenset[str]] = frozenset(
        {"required", "key", "anonymous", "claim", "tenant_id", "user_id", "mode"}
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
            idle = sorted(options.keys() - cls.WITHOUT_CLAIM)
            if idle:
                raise IdempotencyConfigError(
                    f"@idempotent(claim=False) leaves the claim to a service, so "
                    f"'{idle[0]}' would do nothing here. What guard.run() takes, give "
                    "it there."
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


#: What a route says that says nothing. One object for all of them, since an application
#: keeps what it has made of each declaration.
UNSAID = RouteOptions()


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
