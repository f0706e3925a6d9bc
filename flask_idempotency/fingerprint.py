"""
Payload to request hash: same meaning, same hash; other meaning, other hash.

Every hash starts with the version of these rules.
"""

from __future__ import annotations

import hashlib
import json
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

VERSION = "v1"
#: Whole floats below this are written as integers: 1.0 and 1 are one number.
_EXACT_INTEGERS = 2**53


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


def canonical_json(body: bytes) -> bytes:
    """
    Return one spelling of a JSON text, or the bytes themselves where it is not safe.

    Member order, white space and the spelling of numbers are levelled. A text that
    is not JSON, has a name twice, NaN, or a number that no float holds exactly is
    left as it is: two different requests must never become equal.
    """
    try:
        value = json.loads(
            body,
            object_pairs_hook=_unique_members,
            parse_float=_exact_number,
            parse_constant=_refuse_constant,
        )
        return _dump(value)
    except (ValueError, ArithmeticError, RecursionError):
        return body


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
    whole = value.is_integer() and abs(value) < _EXACT_INTEGERS
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
