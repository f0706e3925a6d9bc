"""Stored answers and steps at rest: JSON of headers, compression of bodies."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .exceptions import ResultNotStorable
from .lifecycle import Step, StepState

if TYPE_CHECKING:
    from collections.abc import Callable

#: Bodies above this many bytes are compressed, so that a completed row usually
#: stays on its page (a HOT update on PostgreSQL).
COMPRESS_ABOVE = 256


def encode_body(body: bytes | None) -> tuple[bytes | None, str | None]:
    """Return the bytes to store and the name of their encoding."""
    if body is None or len(body) <= COMPRESS_ABOVE:
        return body, None
    compressed = zlib.compress(body, 1)
    return (compressed, "zlib") if len(compressed) < len(body) else (body, None)


def decode_body(stored: bytes | None, encoding: str | None) -> bytes | None:
    """
    Return the body as it was answered.

    Raises:
        ValueError: If the encoding is not one that this release writes.
    """
    if stored is None or encoding is None:
        return stored
    if encoding != "zlib":
        message = (
            f"The stored answer has the unknown encoding '{encoding}'; a newer release "
            "of flask-idempotency has probably written it. Upgrade this one."
        )
        raise ValueError(message)
    return zlib.decompress(stored)


def encode_headers(headers: tuple[tuple[str, str], ...]) -> bytes:
    """Return header pairs as JSON, order and repetition kept."""
    return json.dumps(headers, separators=(",", ":")).encode("ascii")


def decode_headers(stored: bytes | None) -> tuple[tuple[str, str], ...]:
    """Return the header pairs of a stored answer."""
    return tuple((name, value) for name, value in json.loads(stored or b"[]"))


def encode_steps(steps: tuple[Step, ...]) -> bytes:
    """Return steps as JSON; each result is a text in it, exactly as it was encoded."""
    return json.dumps([asdict(step) for step in steps], separators=(",", ":")).encode()


def decode_steps(stored: bytes | None) -> tuple[Step, ...]:
    """Return the steps of a record."""
    steps = json.loads(stored or b"[]")
    return tuple(Step(**{**s, "state": StepState(s["state"])}) for s in steps)


@dataclass(frozen=True, kw_only=True)
class ResultCodec:
    """
    The results of steps as JSON.

    Attributes:
        dumps: Result to JSON text, the application's own.
        loads: JSON text to value.
        max_size: Most bytes of a result.
    """

    dumps: Callable[[Any], str]
    loads: Callable[[str | bytes], Any]
    max_size: int

    def encode(self, what: str, value: object) -> str:
        """
        Return a result as it is stored.

        Raises:
            ResultNotStorable: If it has no JSON form, or one that is too long.
        """
        try:
            text = self.dumps(value)
            size = len(text.encode())
        except (TypeError, ValueError) as error:
            raise ResultNotStorable(
                f"The result of {what} has no JSON form: {error}. Return dicts, lists, "
                f"str, int, float, bool or None. {_AFTERWARDS}"
            ) from error
        if size > self.max_size:
            raise ResultNotStorable(
                f"The result of {what} has {size} bytes; IDEMPOTENCY_MAX_RESPONSE_SIZE "
                f"allows {self.max_size}. Return only what the call needs afterwards. "
                f"{_AFTERWARDS}"
            )
        return text

    def decode(self, text: str) -> Any:
        """Return the value of a stored result."""
        return self.loads(text)


_AFTERWARDS = "It has been called all the same, so it stays started and not finished."
