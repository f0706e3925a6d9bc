"""Grammar of the Idempotency-Key header, and new identifiers."""

from __future__ import annotations

import re
import secrets
import time
import uuid

from .exceptions import IdempotencyKeyInvalid
from .lifecycle import SCOPE_LENGTHS

# RFC 9651, section 3.3.3: a String is printable ASCII in quotes, with \" and \\ as
# the only escapes.
_STRING = r'"((?:[ !#-\[\]-~]|\\["\\])*)"'
# The best-known clients send the key without quotes. What would have a meaning in a
# structured field is left out, so that both spellings are one key, never two.
_UNQUOTED = r"[!#-+\--:<-\[\]-~]+"
# Section 3.1.2: parameters may follow an item; the draft gives them no meaning.
_PARAMETERS = rf"(?:;[ ]*[a-z*][a-z0-9_.*-]*(?:=(?:{_STRING}|{_UNQUOTED}))?)*"
_QUOTED = re.compile(_STRING + _PARAMETERS)
_BARE = re.compile(_UNQUOTED)
_HOW = 'Send it once, as 1 to 255 printable ASCII characters in quotes: "k-123".'


def parse_key(raw: str, *, strict: bool = False) -> str:
    """
    Return the key that a header value (RFC 9651 String, or bare) stands for.

    Args:
        raw: The value as it was sent.
        strict: Refuse a key without quotes.

    Raises:
        IdempotencyKeyInvalid: If the value is empty, malformed, longer than 255
            characters or sent more than once.
    """
    text = raw.strip(" \t")
    quoted = _QUOTED.fullmatch(text)
    if quoted:
        key = re.sub(r"\\(.)", r"\1", quoted[1])
        return _checked(key, "is empty" if not key else "")
    if not _BARE.fullmatch(text):
        return _checked(text, _fault(text))
    return _checked(text, "has no quotes around it" if strict else "")


def _checked(key: str, fault: str) -> str:
    if not fault and len(key) > SCOPE_LENGTHS["idempotency_key"]:
        fault = f"has {len(key)} characters"
    if fault:
        raise IdempotencyKeyInvalid(f"The idempotency key {fault}. {_HOW}")
    return key


def _fault(text: str) -> str:
    if not text:
        return "is empty"
    if any(not " " <= character <= "~" for character in text):
        return "has control or non-ASCII characters"
    if '"' not in text and "," in text:
        return "was sent more than once, or has a comma without quotes"
    if '",' in text.replace(" ", ""):
        return "was sent more than once"
    if text.startswith('"'):
        return "has an unbalanced quote or a wrong escape"
    return 'has a blank or one of the characters " ; \\ without quotes'


def new_key() -> str:
    """Return a fresh random key (UUID version 4, RFC 9562 section 5.4)."""
    return str(uuid.uuid4())


def new_id() -> uuid.UUID:
    """
    Return a time-ordered identifier (UUID version 7, RFC 9562 section 5.7).

    Neighbours in time are neighbours in the primary key's index.
    """
    milliseconds = time.time_ns() // 1_000_000
    value = (milliseconds & (2**48 - 1)) << 80 | secrets.randbits(80)
    value = value & ~(0xF << 76) | 0x7 << 76
    return uuid.UUID(int=value & ~(0x3 << 62) | 0x2 << 62)
