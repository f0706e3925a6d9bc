"""The grammar of keys, and new identifiers."""

from __future__ import annotations

import re
import time
import uuid

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from flask_idempotency.exceptions import IdempotencyKeyInvalid
from flask_idempotency.keys import new_id, new_key, parse_key

PRINTABLE = "".join(map(chr, range(0x20, 0x7F)))
#: What has a meaning of its own in a structured field.
NOT_BARE = ' ";\\,'
keys = st.text(PRINTABLE, min_size=1, max_size=255)
bare_keys = st.text(sorted(set(PRINTABLE) - set(NOT_BARE)), min_size=1, max_size=255)


def quoted(key: str) -> str:
    """Write a key as RFC 9651 writes a String."""
    return '"' + key.replace("\\", r"\\").replace('"', r"\"") + '"'


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        ('"k-123"', "k-123"),
        ("k-123", "k-123"),
        (" \tk-123\t ", "k-123"),
        ('  "k-123"  ', "k-123"),
        ('" k "', " k "),
        ('"two words"', "two words"),
        (r'"a\"b"', 'a"b'),
        (r'"a\\b"', r"a\b"),
        (r'"\\\""', '\\"'),
        (r'"\\n"', r"\n"),
        ('"a,b"', "a,b"),
        ('"a, \\"b\\""', 'a, "b"'),
        ('"a;b=c"', "a;b=c"),
        ('"~"', "~"),
        ("~!#$%&'()*+-./:<=>?@[]^_`{|}", "~!#$%&'()*+-./:<=>?@[]^_`{|}"),
        (
            "8e03978e-40d5-43dd-bc93-6894a57f9324",
            "8e03978e-40d5-43dd-bc93-6894a57f9324",
        ),
    ],
)
def test_key_is_read(raw: str, key: str) -> None:
    """A quoted and a bare value stand for the characters of the key."""
    assert parse_key(raw) == key


@pytest.mark.parametrize(
    "parameters",
    [
        ";a",
        ";a=1",
        ";a=1.5",
        ";a=-1",
        "; a=1",
        ";a=?1",
        ";a=token/x",
        ";a=:YWJj:",
        ';a="quoted; \\"x\\", y"',
        ";a;b=2;*c_d-e.f=3",
    ],
)
def test_parameters_are_ignored(parameters: str) -> None:
    """Parameters after a quoted key change nothing."""
    assert parse_key(f'"k"{parameters}') == "k"


MALFORMED = {
    "empty": "",
    "blank": " ",
    "tab": "\t",
    "quotes only": '""',
    "quotes and parameter": '"";a=1',
    "one quote": '"',
    "opening quote only": '"k',
    "closing quote only": 'k"',
    "escaped closing quote": '"k\\"',
    "quote inside": '"a"b"',
    "bare quote inside": 'a"b',
    "unknown escape": r'"a\nb"',
    "escape at the end": '"k\\',
    "bare backslash": r"a\b",
    "bare blank": "a b",
    "bare semicolon": "k;a=1",
    "bare comma": "a,b",
    "joined bare": "a, a",
    "joined quoted": '"a", "a"',
    "joined tightly": '"a","b"',
    "joined with bare": '"a", b',
    "joined with parameters": '"a";x=1, "b"',
    "text after quotes": '"k" x',
    "blank before parameter": '"k" ;a=1',
    "parameter without name": '"k";',
    "parameter in capitals": '"k";A=1',
    "parameter without value": '"k";a=',
    "single quotes with blank": "'a b'",
    "NUL": "a\0b",
    "quoted NUL": '"a\0b"',
    "newline": '"a\nb"',
    "trailing newline": "k\n",
    "quoted tab": '"a\tb"',
    "DEL": "a\x7fb",
    "latin-1": "k\xe9",
    "quoted latin-1": '"k\xe9"',
    "UTF-8 read as latin-1": "k\xc3\xa9",
    "full-width": "\uff4b",
    "emoji": '"\U0001f600"',
    "no-break space": "\xa0k",
    "lone surrogate": "k\ud800",
    "display string": '%"k"',
}


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_key_is_refused(raw: str) -> None:
    """What is not exactly one key is refused, and never repaired into one."""
    with pytest.raises(IdempotencyKeyInvalid):
        parse_key(raw)


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        ("", "is empty"),
        ('""', "is empty"),
        ("k\xe9", "has control or non-ASCII characters"),
        ('"a", "b"', "was sent more than once"),
        ("a, b", "was sent more than once"),
        ('"k', "has an unbalanced quote or a wrong escape"),
        ("a b", "without quotes"),
        ("k" * 256, "has 256 characters"),
    ],
)
def test_refusal_says_what_is_wrong_and_how_to_send_it(raw: str, fault: str) -> None:
    """The text for the client names the fault and shows a good key."""
    with pytest.raises(IdempotencyKeyInvalid, match=re.escape(fault)) as caught:
        parse_key(raw)
    assert '"k-123"' in str(caught.value)


def test_refusal_does_not_repeat_the_key() -> None:
    """A key can hold personal data, so no error text quotes it."""
    with pytest.raises(IdempotencyKeyInvalid) as caught:
        parse_key('"secret" "secret"')
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("spell", [str, quoted], ids=["bare", "quoted"])
def test_longest_key(spell: type[str]) -> None:
    """A key of 255 characters is kept whole."""
    assert parse_key(spell("k" * 255)) == "k" * 255


def test_escapes_do_not_count_as_characters() -> None:
    """The limit is on the key, not on its spelling."""
    assert parse_key(quoted('"' * 255)) == '"' * 255


@pytest.mark.parametrize("length", [256, 2048, 10_000])
@pytest.mark.parametrize("spell", [str, quoted], ids=["bare", "quoted"])
def test_too_long_key_is_refused(spell: type[str], length: int) -> None:
    """A longer key is refused, never shortened."""
    with pytest.raises(IdempotencyKeyInvalid, match=f"has {length} characters"):
        parse_key(spell("k" * length))


@pytest.mark.parametrize(
    "raw",
    ['"' + "\\" * 9999, '"k"' + ";a" * 5000 + "!", '"k"' + ';a="' * 3001, "," * 10_000],
    ids=["escapes", "parameters", "quotes", "commas"],
)
def test_hostile_value_is_refused_quickly(raw: str) -> None:
    """No value makes the grammar try for long."""
    began = time.perf_counter()
    with pytest.raises(IdempotencyKeyInvalid):
        parse_key(raw)
    assert time.perf_counter() - began < 1


@settings(deadline=None)
@given(keys)
@example('"')
@example("\\")
@example('\\"')
@example(" ")
def test_quoted_key_comes_back_unchanged(key: str) -> None:
    """Every printable ASCII string of up to 255 characters is a key."""
    assert parse_key(quoted(key)) == key


@settings(deadline=None)
@given(bare_keys)
def test_bare_and_quoted_spelling_are_one_key(key: str) -> None:
    """The same characters with and without quotes are the same key."""
    assert parse_key(key) == parse_key(quoted(key)) == key


@settings(deadline=None)
@given(keys, keys)
@example("k", "K")
@example("k", "k ")
@example("k", " k")
@example("1", "01")
def test_different_keys_stay_different(first: str, second: str) -> None:
    """No two keys are folded into one."""
    assume(first != second)
    assert parse_key(quoted(first)) != parse_key(quoted(second))


@settings(deadline=None)
@given(st.text(max_size=300))
def test_any_value_is_one_key_or_refused(raw: str) -> None:
    """Whatever is sent ends as a storable key or as the documented error."""
    try:
        key = parse_key(raw)
    except IdempotencyKeyInvalid:
        return
    assert 1 <= len(key) <= 255
    assert key.isascii()
    assert key.isprintable()


@settings(deadline=None)
@given(
    st.one_of(
        st.text(alphabet='"\\\\;,= ab1.*:?@%()-_/\x7f\x1f\xe9', max_size=12),
        st.builds(
            "{}{}{}".format,
            st.sampled_from(['"', "", '"a']),
            st.text(alphabet='ab\\\\" ', max_size=6),
            st.sampled_from(
                ['"', '";a', '";a=1;b="x;y"', '"; a=?0', '",', '" ', '";A']
            ),
        ),
    )
)
@example('"k";a=:aGk=:')
@example('"k";a=1.5;b=tok*en;c="q\\""')
@example("k")
@example("?1")
@example(":aGk=:")
def test_strict_keys_are_strings_of_structured_fields(raw: str) -> None:
    """Under strict keys an independent parser of RFC 9651 agrees on every value."""
    http_sf = pytest.importorskip("http_sf")
    try:
        value, _ = http_sf.parse(raw.encode("latin-1"), tltype="item")
    except ValueError:
        value = None
    if type(value) is str and value:  # a Token is a str, too
        assert parse_key(raw, strict=True) == value
    elif '";' not in raw:  # parameters are ignored, so they may be malformed
        with pytest.raises(IdempotencyKeyInvalid):
            parse_key(raw, strict=True)


def test_new_key_is_random_and_usable() -> None:
    """A fresh key is a UUID of version 4 that reads as itself."""
    key, other = new_key(), new_key()
    assert key != other
    assert uuid.UUID(key).version == 4
    assert parse_key(key) == key


def test_new_id_has_version_and_variant() -> None:
    """A new identifier says that it is a UUID of version 7 (RFC 9562)."""
    ids = [new_id() for _ in range(100)]
    assert {i.version for i in ids} == {7}
    assert {i.variant for i in ids} == {uuid.RFC_4122}
    assert len(set(ids)) == 100


def test_new_id_starts_with_the_time() -> None:
    """The first 48 bits are the milliseconds since 1970."""
    before = time.time_ns() // 1_000_000
    milliseconds = new_id().int >> 80
    assert before <= milliseconds <= time.time_ns() // 1_000_000


def test_new_ids_are_ordered_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An identifier of a later millisecond sorts after all earlier ones."""
    ids = []
    for milliseconds in range(1_900_000_000_000, 1_900_000_000_200):
        monkeypatch.setattr(time, "time_ns", lambda m=milliseconds: m * 1_000_000)
        ids.append(new_id())
    assert ids == sorted(ids)
    assert [str(i) for i in ids] == sorted(map(str, ids))
