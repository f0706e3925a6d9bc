"""Payloads to request hashes: same meaning, same hash; other meaning, other hash."""

from __future__ import annotations

import json
import re
import time
from datetime import date
from decimal import Decimal
from enum import Enum
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from flask_idempotency import fingerprint
from flask_idempotency.fingerprint import canonical_json, digest

SAME_JSON = {
    "large whole numbers": (b"1e16", b"10000000000000000"),
    "the largest exact power": (b"1e22", b"10000000000000000000000"),
    "whole with a fraction": (b"9007199254740992.0", b"9007199254740992"),
    "member order": (b'{"a":1,"b":{"c":2,"d":3}}', b'{"b":{"d":3,"c":2},"a":1}'),
    "white space": (b'{"a":[1,2]}', b' {\n\t"a" : [ 1 ,\r\n 2 ] } '),
    "whole float": (b'{"a":1}', b'{"a":1.0}'),
    "exponent": (b"[100]", b"[1e2]"),
    "capital exponent": (b"[1e-2]", b"[0.01E0]"),
    "trailing zeros": (b"[0.5]", b"[0.500]"),
    "negative zero": (b"[0]", b"[-0.0]"),
    "escaped letter": (b'"\xc3\xa9"', b'"\\u00e9"'),
    "escaped pair": (b'"\xf0\x9f\x98\x80"', b'"\\ud83d\\ude00"'),
    "escaped slash": (b'"/"', b'"\\/"'),
    "escaped name": (b'{"a":1}', b'{"\\u0061":1}'),
    "case of hex": (b'"\\u00E9"', b'"\\u00e9"'),
    "BOM": (b'{"a":1}', b'\xef\xbb\xbf{"a":1}'),
    "UTF-16": (b'{"a":1}', '{"a":1}'.encode("utf-16")),
    "UTF-16 without BOM": (b'{"a":1}', '{"a":1}'.encode("utf-16-le")),
    "UTF-32": (b'{"a":1}', '{"a":1}'.encode("utf-32")),
}

OTHER_JSON = {
    "a float and its neighbour": (b"1e23", b"99999999999999991611392"),
    "a float and its digits": (b"1e23", b"100000000000000000000000"),
    "elements": (b"[1,2]", b"[2,1]"),
    "string": (b'{"a":1}', b'{"a":"1"}'),
    "true": (b'{"a":1}', b'{"a":true}'),
    "false and zero": (b"0", b"false"),
    "null and missing": (b'{"a":1,"b":null}', b'{"a":1}'),
    "null and empty": (b'{"a":null}', b'{"a":""}'),
    "list and object": (b"[]", b"{}"),
    "nesting": (b"[[1],2]", b"[1,[2]]"),
    "case of a name": (b'{"a":1}', b'{"A":1}'),
    "composed and decomposed": (b'"\xc3\xa9"', b'"e\xcc\x81"'),
    "trailing blank": (b'"a"', b'"a "'),
    "big integers": (
        b'{"a":10000000000000000000001}',
        b'{"a":10000000000000000000002}',
    ),
    "integers beyond a float": (b"[9007199254740993]", b"[9007199254740992]"),
    "float beyond its digits": (b"[0.1]", b"[0.1000000000000000055]"),
    "near floats": (b"[0.30000000000000004]", b"[0.3]"),
    "infinite floats": (b"[1e400]", b"[1e401]"),
    "tiny floats": (b"[1e-400]", b"[0]"),
    "huge exponents": (b"[1e999999999]", b"[1e999999998]"),
    "exponents beyond Decimal": (
        b"[1e9999999999999999999999]",
        b"[1e9999999999999999999998]",
    ),
    "last of two": (b'{"a":1,"a":2}', b'{"a":2}'),
    "first of two": (b'{"a":1,"a":2}', b'{"a":1}'),
    "NaN": (b"[NaN]", b"[null]"),
    "Infinity": (b"[Infinity]", b"[1e400]"),
    "lone surrogates": (b'"\\ud800"', b'"\\udc00"'),
    "surrogate and question mark": (b'"\\ud800"', b'"?"'),
    "pair and halves in bytes": (b'"\xf0\x9f\x98\x80"', b'"\xed\xa0\xbd\xed\xb8\x80"'),
    "empty and blank": (b"", b" "),
    "empty and null": (b"", b"null"),
}

NOT_SAFE = {
    "no JSON": b"{a: 1}",
    "cut off": b'{"a": ',
    "text after it": b'{"a": 1} x',
    "nothing": b"",
    "blank": b" ",
    "no text": b"\xff\xfe\x00",
    "a name twice": b'{"a": 1, "a": 2}',
    "a name twice inside": b'[{"x": {"a": 1, "a": 1}}]',
    "NaN": b"[NaN]",
    "Infinity": b"[-Infinity]",
    "float too large": b"[1e400]",
    "float too small": b"[1e-400]",
    "float too exact": b"[0.1000000000000000055]",
    "exponent too large": b"[1e99999999999999999999]",
    "leading zero": b"[01]",
    "comma at the end": b"[1,]",
}


@pytest.mark.parametrize(("first", "second"), SAME_JSON.values(), ids=SAME_JSON.keys())
def test_spelling_does_not_matter(first: bytes, second: bytes) -> None:
    """Two spellings of one JSON value are levelled to one."""
    assert canonical_json(first) == canonical_json(second)


@pytest.mark.parametrize(("first", "second"), OTHER_JSON.values(), ids=OTHER_JSON)
def test_meaning_does_matter(first: bytes, second: bytes) -> None:
    """Texts that a view reads as different values stay different."""
    assert canonical_json(first) != canonical_json(second)


@pytest.mark.parametrize("body", NOT_SAFE.values(), ids=NOT_SAFE.keys())
def test_unsafe_text_is_left_alone(body: bytes) -> None:
    """What is not JSON, or not safely comparable, is taken byte by byte."""
    assert canonical_json(body) == body


@pytest.mark.parametrize("bracket", [b"[]", b'{"a":}'], ids=["lists", "objects"])
def test_deep_nesting_is_left_alone(bracket: bytes) -> None:
    """A text that is too deep for the parser is no error."""
    deep = bracket[:-1] * 100_000 + b"1" + bracket[-1:] * 100_000
    assert canonical_json(deep) == deep


def test_endless_digits_are_left_alone() -> None:
    """An integer longer than Python converts is no error."""
    digits = b"9" * 10_000
    assert canonical_json(digits) == digits


@pytest.mark.parametrize("body", [b"[1e999999999]", b"[0e-999999999]", b"[1e-9999999]"])
def test_huge_exponent_costs_nothing(body: bytes) -> None:
    """A short text cannot make the comparison of numbers expensive."""
    began = time.perf_counter()
    canonical_json(body)
    assert time.perf_counter() - began < 1


@pytest.mark.parametrize("body", [b'{"b":1,"a":[1,null]}', b"[1e400]", b"no"])
def test_canonical_form_is_stable(body: bytes) -> None:
    """The canonical form of a canonical form is itself."""
    once = canonical_json(body)
    assert canonical_json(once) == once


SAME_VALUES: list[tuple[Any, Any]] = [
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({"a": 1}, {"a": 1.0}),
    (0, -0.0),
    ((1, 2), [1, 2]),
    ({"a": (1, {"c": 2.0})}, {"a": [1, {"c": 2}]}),
    ([], ()),
]
OTHER_VALUES: list[tuple[Any, Any]] = [
    (1, "1"),
    (1, True),
    (0, False),
    (None, ""),
    (None, False),
    ([], {}),
    ([], None),
    ({"a": 1}, {"a": 1, "b": None}),
    ([1, 2], [2, 1]),
    ([1, [2]], [[1], 2]),
    ("é", "e\u0301"),
    ("\ud800", "\udc00"),
    ("\ud83d\ude00", "\U0001f600"),
    (10**22 + 1, 10**22 + 2),
    (2**53 + 1, 2**53),
    (1.5, "1.5"),
    ("null", None),
    ("[1]", [1]),
    ("", "\0"),
]


@pytest.mark.parametrize(("first", "second"), SAME_VALUES)
def test_equal_values_have_one_hash(first: object, second: object) -> None:
    """Values that mean the same have the same fingerprint."""
    assert fingerprint(first) == fingerprint(second)


@pytest.mark.parametrize(("first", "second"), OTHER_VALUES)
def test_different_values_have_different_hashes(first: object, second: object) -> None:
    """Values that mean something else have another fingerprint."""
    assert fingerprint(first) != fingerprint(second)


def test_fingerprint_is_versioned() -> None:
    """A hash says by which rules it was made."""
    assert re.fullmatch(r"v1:[0-9a-f]{64}", fingerprint({"a": 1}))


def test_fingerprint_is_the_same_in_every_release() -> None:
    """A hash that is stored today is found again tomorrow."""
    assert fingerprint({"month": "2030-01", "ids": [1, 2.5]}) == (
        "v1:e4c485e61f282cd6708d625be0c11bdbf458b0922174521bd760458588613674"
    )


class Colour(Enum):
    """A value without a canonical form."""

    RED = "red"


class Text(str):
    """A text that could hide more than its characters."""

    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({1, 2}, "set"),
        (b"x", "bytes"),
        (date(2030, 1, 1), "date"),
        (Decimal(1), "Decimal"),
        (Colour.RED, "Colour"),
        (object(), "object"),
        (len, "builtin_function_or_method"),
        (Text("x"), "Text"),
    ],
)
@pytest.mark.parametrize("place", [lambda v: v, lambda v: {"a": [v]}], ids=["", "deep"])
def test_value_without_canonical_form_is_refused(
    place: Any, value: object, name: str
) -> None:
    """What has no JSON form is refused with the name of its type, never by repr()."""
    with pytest.raises(TypeError, match=rf"\b{name}\b has no canonical form"):
        fingerprint(place(value))


@pytest.mark.parametrize("name", [1, None, True, (1, 2), b"a"])
def test_member_name_that_is_no_text_is_refused(name: Any) -> None:
    """A name that JSON would turn into another one is refused."""
    with pytest.raises(TypeError, match="dict with str names"):
        fingerprint({name: 1})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_float_that_is_not_finite_is_refused(value: float) -> None:
    """A float without JSON form is refused as documented."""
    with pytest.raises(ValueError, match="JSON compliant"):
        fingerprint({"a": value})


def test_fingerprint_does_not_change_its_argument() -> None:
    """The value that is hashed stays as it was."""
    value = {"b": [1.0, (2,)], "a": None}
    fingerprint(value)
    assert value == {"b": [1.0, (2,)], "a": None}
    assert list(value) == ["b", "a"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["ab", "c"], ["a", "bc"]),
        (["ab"], ["a", "b"]),
        (["a", ""], ["a"]),
        (["", "a"], ["a", ""]),
        (["1:a"], ["a"]),
        (["a1:b"], ["a", "b"]),
        ([], [""]),
    ],
)
def test_parts_are_kept_apart(first: list[str], second: list[str]) -> None:
    """No part of a digest can run into the next one."""
    assert digest(first) != digest(second)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


def shuffled(value: Any) -> Any:
    """Return an equal value with every object's members turned around."""
    if isinstance(value, dict):
        return {name: shuffled(value[name]) for name in reversed(value)}
    if isinstance(value, list):
        return [shuffled(item) for item in value]
    return value


def typed(value: Any) -> Any:
    """Return a form whose equality is JSON's: True is not 1, but 1.0 is."""
    if isinstance(value, dict):
        return ("object", frozenset((n, typed(v)) for n, v in value.items()))
    if isinstance(value, list):
        return ("array", tuple(typed(item) for item in value))
    kind = "number" if type(value) in {int, float} else type(value).__name__
    return (kind, value)


@settings(deadline=None)
@given(values)
def test_order_of_members_never_matters(value: Any) -> None:
    """Any value and the same with its members in another order are equal."""
    assert fingerprint(shuffled(value)) == fingerprint(value)


@settings(deadline=None)
@given(values, st.sampled_from([None, 1, "\t"]), st.booleans())
def test_spelling_never_matters(value: Any, indent: Any, ascii_only: bool) -> None:  # noqa: FBT001
    """Any value is levelled to one text, however it was written."""
    plain = json.dumps(value).encode()
    other = json.dumps(shuffled(value), indent=indent, ensure_ascii=ascii_only)
    assert canonical_json(other.encode()) == canonical_json(plain)


@settings(deadline=None)
@given(values, values)
@example([0], [False])
@example([1], [True])
def test_different_values_never_meet(first: Any, second: Any) -> None:
    """Any two values that differ have different hashes."""
    assume(typed(first) != typed(second))
    assert fingerprint(first) != fingerprint(second)
    one, other = json.dumps(first).encode(), json.dumps(second).encode()
    assert canonical_json(one) != canonical_json(other)


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_have_a_canonical_form(body: bytes) -> None:
    """No body makes the levelling fail."""
    assert isinstance(canonical_json(body), bytes)


@settings(deadline=None)
@given(values)
def test_helper_and_body_level_alike(value: Any) -> None:
    """A value has one canonical form as a Python value and as a JSON text."""
    text = canonical_json(json.dumps(value).encode())
    assert fingerprint(json.loads(text)) == fingerprint(value)
