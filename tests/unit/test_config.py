"""Settings of an application and options of a route."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError
from datetime import timedelta
from typing import Any

import pytest

from flask_idempotency import Fingerprint, IdempotencyConfigError, idempotent
from flask_idempotency.config import Config, RouteOptions
from flask_idempotency.settings import seconds_of

NAN, INFINITE = float("nan"), float("inf")

DEFAULTS = {
    "ttl_seconds": 86400.0,
    "task_ttl_seconds": 604800.0,
    "lease_seconds": 30.0,
    "retention_seconds": 604800.0,
    "header": "Idempotency-Key",
    "form_field": "idempotency_key",
    "required": False,
    "anonymous": False,
    "strict_keys": False,
    "key_pattern": None,
    "wait_seconds": 0.0,
    "mode": "enforce",
    "atomic": False,
    "separate_bind": False,
    "release_on": frozenset({401, 403, 408, 425, 429}),
    "max_response_size": 1024 * 1024,
    "commit": "unit",
    "before_view_writes": "refuse",
    "max_attempts": 10,
    "pool_size": 2,
    "problem_type": "about:blank",
}

#: What no key that takes a duration may be set to.
NO_DURATION: list[Any] = [
    None,
    True,
    False,
    "30",
    "",
    NAN,
    INFINITE,
    -INFINITE,
    -1,
    -0.5,
    timedelta(seconds=-1),
    timedelta(days=40000),
    10**400,
    [30],
    1j,
]
#: What no key that takes a whole number may be set to.
NO_INTEGER: list[Any] = [None, True, "2", 1.0, 1.5, -1, NAN, [1]]
NO_FLAG: list[Any] = [None, 0, 1, "", "true", "False", []]
NO_NAME: list[Any] = [None, "", b"X", 1, True, "K\xe9y", ["Key"]]


def shortened(value: object) -> str:
    """Name a value in a test's id, by the same name in each process."""
    return repr(getattr(value, "__name__", value))[:30]


GOOD: list[tuple[str, Any, str, Any]] = [
    ("TTL", 1, "ttl_seconds", 1.0),
    ("TTL", 0x15180, "ttl_seconds", 86400.0),
    ("TTL", timedelta(days=2), "ttl_seconds", 172800.0),
    ("TASK_TTL", 3600, "task_ttl_seconds", 3600.0),
    ("LEASE", 1.5, "lease_seconds", 1.5),
    ("LEASE", timedelta(seconds=1), "lease_seconds", 1.0),
    ("LEASE", timedelta(milliseconds=1500), "lease_seconds", 1.5),
    ("RETENTION", 0, "retention_seconds", 0.0),
    ("RETENTION", timedelta(0), "retention_seconds", 0.0),
    ("RETENTION", timedelta(days=30), "retention_seconds", 2592000.0),
    ("HEADER", "X-Request-Id", "header", "X-Request-Id"),
    ("FORM_FIELD", "key", "form_field", "key"),
    ("REQUIRED", True, "required", True),
    ("ANONYMOUS", True, "anonymous", True),
    ("RELEASE_ON", [], "release_on", frozenset()),
    ("RELEASE_ON", [429, 429], "release_on", frozenset({429})),
    ("RELEASE_ON", (400, 599), "release_on", frozenset({400, 599})),
    ("STRICT_KEYS", True, "strict_keys", True),
    ("KEY_PATTERN", "[a-z]+", "key_pattern", re.compile("[a-z]+")),
    (
        "KEY_PATTERN",
        re.compile("k", re.IGNORECASE),
        "key_pattern",
        re.compile("k", re.IGNORECASE),
    ),
    ("WAIT", 0, "wait_seconds", 0.0),
    ("WAIT", timedelta(seconds=2), "wait_seconds", 2.0),
    ("MODE", "observe", "mode", "observe"),
    ("ATOMIC", True, "atomic", True),
    ("SEPARATE_BIND", True, "separate_bind", True),
    ("MAX_RESPONSE_SIZE", 0, "max_response_size", 0),
    ("MAX_RESPONSE_SIZE", 2**31, "max_response_size", 2**31),
    ("COMMIT", "view", "commit", "view"),
    ("BEFORE_VIEW_WRITES", "commit", "before_view_writes", "commit"),
    ("MAX_ATTEMPTS", 1, "max_attempts", 1),
    ("POOL_SIZE", 1, "pool_size", 1),
    ("PROBLEM_TYPE", "https://errors.test/x", "problem_type", "https://errors.test/x"),
]

#: For each key: bad values, and what the error text says is expected.
BAD: dict[str, tuple[list[Any], str]] = {
    "TTL": (
        [*NO_DURATION, 0, 0.0, 0.999, timedelta(0)],
        "a duration of 1 s or more, in seconds or as timedelta",
    ),
    "TASK_TTL": (
        [*NO_DURATION, 0],
        "a duration of 1 s or more, in seconds or as timedelta",
    ),
    "LEASE": (
        [*NO_DURATION, 0, 0.0, 0.999, timedelta(0)],
        "a duration of 1 s or more, in seconds or as timedelta",
    ),
    "RETENTION": (
        NO_DURATION,
        "a duration of 0 s or more, in seconds or as timedelta",
    ),
    "HEADER": (
        [*NO_NAME, "Idempotency Key", "Key:", "a\nb"],
        "the name of a header field",
    ),
    "FORM_FIELD": (NO_NAME, "a non-empty ASCII text"),
    "PROBLEM_TYPE": (NO_NAME, "a non-empty ASCII text"),
    "REQUIRED": (NO_FLAG, "True or False"),
    "ANONYMOUS": (NO_FLAG, "True or False"),
    "RELEASE_ON": (
        [None, 429, "429", b"429", [200], [600], [399], [True], ["429"], [429.0]],
        "a collection of HTTP statuses from 400 to 599",
    ),
    "STRICT_KEYS": (NO_FLAG, "True or False"),
    "KEY_PATTERN": (
        [None, "", 1, b"k", "(", "[", ["k"]],
        "a regular expression (str) that the whole key must match",
    ),
    "WAIT": (NO_DURATION, "a duration of 0 s or more, in seconds or as timedelta"),
    "MODE": ([None, "", "Observe", "off", True], "'enforce' or 'observe'"),
    "ATOMIC": (NO_FLAG, "True or False"),
    "SEPARATE_BIND": (NO_FLAG, "True or False"),
    "MAX_RESPONSE_SIZE": (NO_INTEGER, "a whole number of 0 or more"),
    "MAX_ATTEMPTS": ([*NO_INTEGER, 0], "a whole number of 1 or more"),
    "POOL_SIZE": ([*NO_INTEGER, 0], "a whole number of 1 or more"),
    "COMMIT": ([None, "", "Unit", "both", 1, ["unit"]], "'unit' or 'view'"),
    "BEFORE_VIEW_WRITES": ([None, "", "allow", True], "'refuse' or 'commit'"),
}


def test_defaults() -> None:
    """An application that sets nothing gets the documented defaults."""
    assert vars(Config.from_mapping({})) == DEFAULTS


def test_keys_are_the_fields_without_unit() -> None:
    """Each field has one key, in capitals and without a unit."""
    assert Config.keys() == {
        name: "IDEMPOTENCY_" + name.removesuffix("_seconds").upper()
        for name in DEFAULTS
    }


def test_every_key_has_good_and_bad_values_here() -> None:
    """No setting is left out of the tables of this file."""
    keys = {key.removeprefix("IDEMPOTENCY_") for key in Config.keys().values()}
    assert {key for key, *_ in GOOD} == set(BAD) == keys


@pytest.mark.parametrize(("key", "value", "field", "expected"), GOOD)
def test_good_value_is_read(key: str, value: Any, field: str, expected: Any) -> None:
    """A good value arrives in its field, and nothing else changes."""
    config = Config.from_mapping({f"IDEMPOTENCY_{key}": value})
    assert vars(config) == {**DEFAULTS, field: expected}
    assert type(getattr(config, field)) is type(expected)


@pytest.mark.parametrize(
    ("key", "value", "expectation"),
    [(key, value, text) for key, (values, text) in BAD.items() for value in values],
    ids=shortened,
)
def test_bad_value_is_refused(key: str, value: Any, expectation: str) -> None:
    """The error names the key, the value and what is expected."""
    with pytest.raises(IdempotencyConfigError) as caught:
        Config.from_mapping({f"IDEMPOTENCY_{key}": value})
    assert str(caught.value) == (
        f"IDEMPOTENCY_{key} is {value!r}; it must be {expectation}."
    )


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("IDEMPOTENCY_TLL", "IDEMPOTENCY_TTL"),
        ("IDEMPOTENCY_LEASES", "IDEMPOTENCY_LEASE"),
        ("IDEMPOTENCY_RELEASEON", "IDEMPOTENCY_RELEASE_ON"),
        ("IDEMPOTENCY_REQUIRE", "IDEMPOTENCY_REQUIRED"),
        ("IDEMPOTENCY_ttl", "IDEMPOTENCY_TTL"),
        ("IDEMPOTENCY_FORMFIELD", "IDEMPOTENCY_FORM_FIELD"),
        ("IDEMPOTENCY_LEASE_SECONDS", "IDEMPOTENCY_LEASE"),
    ],
)
def test_misspelt_key_is_refused_with_the_nearest(wrong: str, meant: str) -> None:
    """An unknown key with our prefix is an error that says what was meant."""
    with pytest.raises(IdempotencyConfigError) as caught:
        Config.from_mapping({wrong: 1})
    assert f"'{wrong}'" in str(caught.value)
    assert f"Did you mean '{meant}'?" in str(caught.value)


def test_key_like_no_other_is_refused_with_the_list() -> None:
    """An unknown key that resembles nothing is answered with all known keys."""
    with pytest.raises(IdempotencyConfigError) as caught:
        Config.from_mapping({"IDEMPOTENCY_" + "Z" * 80: 1})
    assert all(key in str(caught.value) for key in Config.keys().values())


@pytest.mark.parametrize("key", ["TTL", "IDEMPOTENT_TTL", "idempotency_ttl", "DEBUG"])
def test_keys_of_others_are_ignored(key: str) -> None:
    """Only keys with the prefix are ours."""
    assert Config.from_mapping({key: "x"}) == Config()


def test_config_is_frozen() -> None:
    """Settings cannot be changed after they were read."""
    with pytest.raises(FrozenInstanceError):
        Config().ttl_seconds = 1.0  # type: ignore[misc]


def test_config_does_not_follow_the_mapping() -> None:
    """A later change of the application's configuration changes nothing."""
    statuses = [429]
    mapping = {"IDEMPOTENCY_RELEASE_ON": statuses, "IDEMPOTENCY_TTL": 60}
    config = Config.from_mapping(mapping)
    statuses.append(409)
    mapping["IDEMPOTENCY_TTL"] = 5
    assert (config.release_on, config.ttl_seconds) == (frozenset({429}), 60.0)


@pytest.mark.parametrize(
    ("value", "minimum", "seconds"),
    [
        (1, 1.0, 1.0),
        (0, 0, 0.0),
        (0.25, 0.25, 0.25),
        (timedelta(minutes=1), 1.0, 60.0),
        (timedelta(days=36500), 1.0, 36500 * 86400.0),
    ],
)
def test_durations(value: Any, minimum: float, seconds: float) -> None:
    """Seconds and timedelta both become a float of seconds."""
    assert seconds_of(value, minimum=minimum) == seconds


OPTIONS: list[tuple[str, Any, str, Any]] = [
    ("required", True, "required", True),
    ("required", False, "required", False),
    ("key", len, "key", len),
    ("route", "POST /x", "route", "POST /x"),
    ("route", "r" * 255, "route", "r" * 255),
    ("route", "ä" * 255, "route", "ä" * 255),
    ("route", "tasks:x", "route", "tasks:x"),
    ("ttl", 60, "ttl_seconds", 60.0),
    ("ttl", timedelta(hours=1), "ttl_seconds", 3600.0),
    ("lease", 1, "lease_seconds", 1.0),
    ("max_runtime", timedelta(minutes=5), "max_runtime_seconds", 300.0),
    ("retry_failed", True, "retry_failed", True),
    ("anonymous", True, "anonymous", True),
    ("claim", False, "claim", False),
    ("tenant_id", "t1", "tenant_id", "t1"),
    ("tenant_id", str, "tenant_id", str),
    ("user_id", "psp", "user_id", "psp"),
    ("user_id", str, "user_id", str),
    ("fingerprint", None, "fingerprint", None),
    ("fingerprint", dict, "fingerprint", dict),
    (
        "fingerprint",
        Fingerprint(ignore=("/a",)),
        "fingerprint",
        Fingerprint(ignore=("/a",)),
    ),
    ("wait", 0, "wait_seconds", 0.0),
    ("wait", timedelta(seconds=3), "wait_seconds", 3.0),
    ("release_on", (), "release_on", frozenset()),
    ("release_on", [503], "release_on", frozenset({503})),
    ("release_on", bool, "release_on", bool),
    ("store_body", False, "store_body", False),
    ("rebuild", repr, "rebuild", repr),
    ("authorize_replay", bool, "authorize_replay", bool),
    ("recover", repr, "recover", repr),
    ("fail_open", True, "fail_open", True),
    ("mode", "observe", "mode", "observe"),
    ("atomic", True, "atomic", True),
]


async def asynchronous() -> str:
    """Be no plain function."""
    return "k"


NO_CALLER: list[Any] = ["", 1, b"u", True, "a\0", asynchronous]
BAD_OPTIONS: dict[str, tuple[list[Any], str]] = {
    "required": ([0, 1, "yes", "", []], "True or False"),
    "anonymous": ([0, 1, "yes"], "True or False"),
    "retry_failed": ([None, 0, 1, "yes"], "True or False"),
    "claim": ([None, 0, 1, "no"], "True or False"),
    "key": (["id", 1, b"k", True, asynchronous], "a plain (not async) function"),
    "rebuild": (["id", 1, True, asynchronous], "a plain (not async) function"),
    "recover": ([1, True, asynchronous], "a plain (not async) function"),
    "authorize_replay": ([1, True, asynchronous], "a plain (not async) function"),
    "store_body": ([None, 0, 1, "no"], "True or False"),
    "fail_open": ([None, 0, 1, "yes"], "True or False"),
    "mode": (["", "Observe", True], "'enforce' or 'observe'"),
    "atomic": ([0, 1, "yes"], "True or False"),
    "tenant_id": (
        [*NO_CALLER, "t" * 65],
        (
            "a text of 1 to 64 characters without NUL, or a plain function that returns "
            "one"
        ),
    ),
    "user_id": (
        [*NO_CALLER, "u" * 129],
        (
            "a text of 1 to 128 characters without NUL, or a plain function that returns "
            "one"
        ),
    ),
    "fingerprint": (
        ["v1", 1, True, ("/a",), asynchronous],
        "Fingerprint(…), a plain function without arguments, or None for the key alone",
    ),
    "release_on": (
        [429, "429", [200], [600], [True], asynchronous],
        (
            "a collection of HTTP statuses from 400 to 599, or a plain function of the "
            "response"
        ),
    ),
    "wait": (
        [v for v in NO_DURATION if v is not None],
        "a duration of 0 s or more, in seconds or as timedelta",
    ),
    "ttl": (
        [v for v in [*NO_DURATION, 0, 0.0, 0.5, timedelta(0)] if v is not None],
        "a duration of 1 s or more, in seconds or as timedelta",
    ),
    "lease": (
        [v for v in [*NO_DURATION, 0, 0.0, 0.5, timedelta(0)] if v is not None],
        "a duration of 1 s or more, in seconds or as timedelta",
    ),
    "max_runtime": (
        [v for v in [*NO_DURATION, 0, 0.0, 0.5, timedelta(0)] if v is not None],
        "a duration of 1 s or more, in seconds or as timedelta",
    ),
    "route": (
        [
            *("", "task:", "task:x", "outbox:", "outbox:x:v1:y", 7, b"POST /x"),
            *(["POST", "/x"], "r" * 256, "r" * 10_000, "r\0", "r\ud800"),
        ],
        (
            "a text of 1 to 255 characters without NUL that does not start with "
            "'task:' or 'outbox:', which are reserved"
        ),
    ),
}


def test_option_defaults() -> None:
    """A bare declaration leaves everything to the application."""
    assert vars(RouteOptions.from_keywords({})) == {
        "required": None,
        "key": None,
        "route": None,
        "ttl_seconds": None,
        "lease_seconds": None,
        "max_runtime_seconds": None,
        "retry_failed": False,
        "anonymous": None,
        "claim": True,
        "tenant_id": None,
        "user_id": None,
        "fingerprint": Fingerprint(),
        "wait_seconds": None,
        "release_on": None,
        "store_body": True,
        "rebuild": None,
        "authorize_replay": None,
        "recover": None,
        "fail_open": False,
        "mode": None,
        "atomic": None,
    }


@pytest.mark.parametrize(("option", "value", "field", "expected"), OPTIONS)
def test_good_option_is_read(
    option: str, value: Any, field: str, expected: Any
) -> None:
    """A good value arrives in its field, and nothing else changes."""
    options = RouteOptions.from_keywords({option: value})
    assert vars(options) == {**vars(RouteOptions()), field: expected}


@pytest.mark.parametrize(
    "option",
    [
        *("required", "key", "route", "ttl", "lease", "anonymous", "tenant_id"),
        "max_runtime",
        *("user_id", "wait", "release_on", "rebuild", "authorize_replay", "mode"),
        *("recover", "atomic"),
    ],
)
def test_none_is_as_if_not_given(option: str) -> None:
    """None leaves an option that has no default of its own to the application."""
    assert RouteOptions.from_keywords({option: None}) == RouteOptions()


@pytest.mark.parametrize(
    ("option", "value", "expectation"),
    [
        (name, value, text)
        for name, (all_, text) in BAD_OPTIONS.items()
        for value in all_
    ],
    ids=shortened,
)
def test_bad_option_is_refused(option: str, value: Any, expectation: str) -> None:
    """The error names the option, the value and what is expected."""
    with pytest.raises(IdempotencyConfigError) as caught:
        idempotent(**{option: value})
    assert str(caught.value) == (
        f"@idempotent({option}=…) is {value!r}; it must be {expectation}."
    )


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("require", "required"),
        ("retry_fail", "retry_failed"),
        ("ttl_seconds", "ttl"),
        ("leese", "lease"),
        ("anonymus", "anonymous"),
        ("Key", "key"),
    ],
)
def test_unknown_option_is_refused(wrong: str, meant: str | None) -> None:
    """An unknown option is an error with the nearest name, or all of them."""
    with pytest.raises(IdempotencyConfigError) as caught:
        idempotent(**{wrong: True})  # type: ignore[call-overload]
    text = str(caught.value)
    assert text.startswith(f"@idempotent: '{wrong}' is not known.")
    hint = f"Did you mean '{meant}'?" if meant else "Known: "
    assert hint in text


def test_options_are_frozen() -> None:
    """A declaration cannot be changed afterwards."""
    with pytest.raises(FrozenInstanceError):
        RouteOptions().claim = False  # type: ignore[misc]


def test_application_fills_what_a_route_leaves_open() -> None:
    """Options that were not given are the application's settings."""
    config = Config(ttl_seconds=5.0, lease_seconds=6.0, required=True, anonymous=True)
    filled = RouteOptions().under(config)
    assert (filled.ttl_seconds, filled.lease_seconds) == (5.0, 6.0)
    assert (filled.required, filled.anonymous) == (True, True)


def test_route_overrides_the_application() -> None:
    """What a route says counts, also where it says False."""
    config = Config(ttl_seconds=5.0, lease_seconds=6.0, required=True, anonymous=True)
    given = RouteOptions.from_keywords(
        {
            "ttl": 7,
            "lease": 8,
            "required": False,
            "anonymous": False,
            "wait": 1,
            "release_on": [],
            "mode": "observe",
            "atomic": True,
        }
    )
    assert given.under(config) == given


def test_filled_options_leave_the_declaration_alone() -> None:
    """One declaration serves applications with different settings."""
    declared = RouteOptions()
    assert declared.under(Config(required=True)).required is True
    assert declared.under(Config(required=False)).required is False
    assert declared == RouteOptions()


@pytest.mark.parametrize("positional", ["POST /x", 1, None.__class__.__name__, b"x"])
def test_positional_option_is_refused_with_the_spelling(positional: Any) -> None:
    """A route name without its keyword is refused with the right spelling."""
    with pytest.raises(
        IdempotencyConfigError,
        match=re.escape(f"@idempotent(route={positional!r})"),
    ):
        idempotent(positional)
