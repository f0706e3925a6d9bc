"""
Payload to request hash: same meaning, same hash; other meaning, other hash.

Every hash starts with the version of these rules.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeGuard

from .exceptions import IdempotencyConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Of the rules below. A record that was made by other rules is no conflict: see
#: ``rules.comparable_hash``.
VERSION = "v1"


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """
    What of a request does not, or does, make it another one.

    Args:
        ignore: Places in a JSON body, as JSON Pointers (RFC 6901), whose value does
            not count, such as ``"/sent_at"``. In a form ``"/sent_at"`` is a field.
        headers: Names of header fields whose values count.

    Raises:
        IdempotencyConfigError: If a pointer or name is malformed.
    """

    ignore: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what would silently match nothing."""
        for name in ("ignore", "headers"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise IdempotencyConfigError(
                    f"Fingerprint({name}={value!r}) must be a tuple: ({value!r},)."
                )
            object.__setattr__(self, name, tuple(value))
        for pointer in self.ignore:
            if not isinstance(pointer, str) or not _POINTER.fullmatch(pointer):
                raise IdempotencyConfigError(
                    f"Fingerprint(ignore=({pointer!r},)) is no JSON Pointer; "
                    'write "/name" or "/outer/inner".'
                )
        for header in self.headers:
            if not is_field_name(header):
                raise IdempotencyConfigError(
                    f"Fingerprint(headers=({header!r},)) is no name of a header field."
                )


# RFC 6901, section 3; the whole document ("") is fingerprint=None.
_POINTER = re.compile(r"(?:/(?:[^/~]|~[01])*)+")
# RFC 9110, section 5.6.2: a field name is a token.
_TOKEN = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)


def is_field_name(value: object) -> TypeGuard[str]:
    """Tell whether a value can be the name of a header field."""
    return isinstance(value, str) and _TOKEN.fullmatch(value) is not None


def fingerprint(value: object) -> str:
    """
    Return the request hash of a JSON-like value, equal in a view, command or task.

    Member order does not matter, ``1`` and ``1.0`` are equal, ``1`` and ``"1"``
    are not. Tuples count as lists.

    Args:
        value: Made of dict (with str names), list, tuple, str, int, float, bool
            and None.

    Raises:
        TypeError: If a part has no canonical form; the message names its type.
        ValueError: If a float is not finite.
    """
    return digest(("value", _dump(_canonical(value))))


def digest(parts: Iterable[str | bytes]) -> str:
    """Return the hash over parts of which each is kept apart by its length."""
    sha = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        sha.update(b"%d:" % len(data))
        sha.update(data)
    return f"{VERSION}:{sha.hexdigest()}"


def canonical_json(body: bytes, ignore: Iterable[str] = ()) -> bytes:
    """
    Return one spelling of a JSON text, or the bytes themselves where it is not safe.

    Member order, white space and the spelling of numbers are levelled. A text that
    is not JSON, has a name twice, NaN, or a number that no float holds exactly is
    left as it is: two different requests must never become equal.

    Args:
        body: The text, in one of JSON's encodings.
        ignore: JSON Pointers to what is left out.
    """
    try:
        value = json.loads(
            body,
            object_pairs_hook=_unique_members,
            parse_float=_exact_number,
            parse_constant=_refuse_constant,
        )
        for pointer in ignore:
            _leave_out(value, pointer)
        return _dump(value)
    except (ValueError, ArithmeticError, RecursionError):
        return body


def _leave_out(value: Any, pointer: str) -> None:
    """Remove what a JSON Pointer names, if it is there (RFC 6901, section 4)."""
    names = [
        name.replace("~1", "/").replace("~0", "~") for name in pointer[1:].split("/")
    ]
    for name in names[:-1]:
        value = _child(value, name)
    last = names[-1]
    if isinstance(value, dict):
        value.pop(last, None)
    elif isinstance(value, list) and _child(value, last) is not None:
        value[int(last)] = None  # the places of the others stay


def _child(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return value.get(name)
    if isinstance(value, list) and re.fullmatch("0|[1-9][0-9]{0,9}", name):
        return value[int(name)] if int(name) < len(value) else None
    return None


def _dump(value: object) -> bytes:
    text = json.dumps(
        value,
        sort_keys=True,
        separators=(",", ":"),
        allow_nan=False,
        ensure_ascii=False,  # else two halves of a pair would equal the character
    )
    return text.encode("utf-8", "surrogatepass")


def _unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        message = "a member name occurs twice"
        raise ValueError(message)
    return members


def _exact_number(spelling: str) -> float:
    exact, nearest = Decimal(spelling), float(spelling)
    if Decimal(repr(nearest)) != exact:
        message = "the number has no exact float"
        raise ValueError(message)
    return _level_float(nearest)


def _refuse_constant(name: str) -> None:
    message = f"{name} is not JSON"
    raise ValueError(message)


def _level_float(value: float) -> float:
    """Return a whole number as int: 1.0 and 1, or 1e16 and its digits, are equal."""
    # Only where the float is what is written: 1e23 is a neighbour of its digits.
    whole = value.is_integer() and Decimal(value) == Decimal(repr(value))
    return int(value) if whole else value


def _canonical(value: object) -> object:
    if isinstance(value, float):
        return _level_float(value)
    if value is None or type(value) in {str, int, bool}:
        return value
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: _canonical(item) for name, item in value.items()}
    message = (
        f"A {type(value).__name__} has no canonical form for a fingerprint. "
        "Convert it to str, int, float, bool, None, a list, or a dict with str names."
    )
    raise TypeError(message)
