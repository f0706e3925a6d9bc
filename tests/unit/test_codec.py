"""The stored answer at rest."""

from __future__ import annotations

import json
import os
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flask_idempotency.codec import (
    COMPRESS_ABOVE,
    decode_body,
    decode_headers,
    encode_body,
    encode_headers,
)

headers = st.lists(st.tuples(st.text(), st.text()), max_size=5).map(tuple)


@settings(deadline=None)
@given(st.none() | st.binary(max_size=2000))
def test_body_comes_back_unchanged(body: bytes | None) -> None:
    """Whatever was answered is what is read again, nothing and empty apart."""
    assert decode_body(*encode_body(body)) == body


@pytest.mark.parametrize("size", [0, 1, 255, 256])
def test_short_body_is_stored_as_it_is(size: int) -> None:
    """A short body is not compressed."""
    assert encode_body(b"x" * size) == (b"x" * size, None)


@pytest.mark.parametrize("size", [257, 100_000])
def test_long_body_is_compressed(size: int) -> None:
    """A body above the limit is stored in fewer bytes, and says how."""
    stored, encoding = encode_body(b"x" * size)
    assert encoding == "zlib"
    assert stored is not None
    assert len(stored) < size
    assert zlib.decompress(stored) == b"x" * size


@pytest.mark.parametrize("size", [COMPRESS_ABOVE + 1, 5000])
def test_body_that_does_not_shrink_is_stored_as_it_is(size: int) -> None:
    """Random bytes are not stored in more bytes than they have."""
    body = os.urandom(size)
    stored, encoding = encode_body(body)
    assert (stored, encoding) == (body, None)


@pytest.mark.parametrize("body", [b"x" * 300, b"\x78\x9c", b"\0" * 10])
def test_no_encoding_means_the_bytes_themselves(body: bytes) -> None:
    """Bytes without an encoding are never decompressed, whatever they look like."""
    assert decode_body(body, None) == body


def test_unknown_encoding_is_an_error() -> None:
    """Bytes of a newer release are not given out as an answer."""
    with pytest.raises(ValueError, match="unknown encoding 'brotli'"):
        decode_body(b"x", "brotli")


@settings(deadline=None)
@given(headers)
def test_headers_come_back_unchanged(pairs: tuple[tuple[str, str], ...]) -> None:
    """Names, values, order and repetition of headers are kept."""
    assert decode_headers(encode_headers(pairs)) == pairs


def test_headers_are_stored_as_ascii_json() -> None:
    """The stored form can be read without this library."""
    pairs = (("Link", "<a>"), ("Link", "<b>"), ("X-Name", "\xe9"))
    stored = encode_headers(pairs)
    assert stored.isascii()
    assert json.loads(stored) == [["Link", "<a>"], ["Link", "<b>"], ["X-Name", "\xe9"]]


@pytest.mark.parametrize("stored", [None, b"", b"[]"])
def test_no_headers(stored: bytes | None) -> None:
    """An answer without headers has none."""
    assert decode_headers(stored) == ()
