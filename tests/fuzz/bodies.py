"""Bodies for the example's routes: right, odd and broken ones."""

from __future__ import annotations

import hashlib
import json
from typing import Any
from urllib.parse import quote

from .requests import ME, WEBHOOK, Body, Key

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
_BOUNDARY = "multipart/form-data; boundary="
_ODD: list[Any] = [
    None, 7, 0, -1, True, False, 1.5, 1e300, 10**30, 2**63, 2**31, "", " ", "5",
    "a\0b", "a\nb", "\ud800", "\udc00x", "\u202e", "\xad", "x" * 101, "x" * 5000, [],
    ["x"], {}, {"x": 1}, "charge-1", "\U0001f600", "e\u0301", "'; DROP TABLE account",
]  # fmt: skip
_NAMES = [
    "Savings <me>", "Current <me>", "Spar <me> \xe4\xf6\xfc", "\u65e5\u672c <me>",
    'a "quoted" <me>', "<me>" + "x" * 90,
]  # fmt: skip
#: By rule: the member that counts, values that are right, and whether they come back.
FIELDS: dict[str, tuple[str, list[Any], bool]] = {
    "/accounts": ("name", _NAMES, True),
    "/tasks": ("month", ["2030-01", "2030-02", "<me>"], False),
    "/payments": ("amount", [1, 1250, 99, 1_000_000], True),
}
EVENTS = ["event-1", "event-2", "Event-1", "\xe9v\xe9nement", " event-1", "x" * 255]
REFERENCES = ["charge-1", "charge-1", "charge-2", "charge-3"]
TYPES: list[str | None] = [
    None, "", "text/plain", "application/octet-stream", "application/vnd.api+json",
    "application/json; charset=utf-16", "application/json; charset=nonsense",
    "application/json; charset=\xff", "application/json;;;=", "APPLICATION/JSON",
    "application/json, text/plain", "\xe9/\xe9", '"', "json", FORM,
    f"{FORM}; charset=latin-1", "multipart/form-data", _BOUNDARY, f'{_BOUNDARY}"a;b',
    _BOUNDARY + "x" * 3000, f"{_BOUNDARY}\xe9", "multipart/mixed; boundary=b",
    "text/html; charset=utf-7", "application/json; charset*=utf-8''%ff",
]  # fmt: skip
#: No JSON, or none that anybody should send.
GARBAGE = [
    b"", b"{", b"nul", b"[]", b"null", b"7", b'"text"', b"NaN", b"-Infinity",
    b'{"name": NaN, "amount": NaN, "id": NaN}', b"[" * 100_000, b'{"a":' * 20_000,
    b"[" * 900 + b"]" * 900, b'{"amount":' + b"9" * 5000 + b"}", b"\xff\xfe", b"\0",
    b'{"amount": 1e999999999999, "name": "x"}', b'{"name": "x"} y', b"\xef\xbb\xbf{}",
    b'{"name": "\\ud800", "id": "\\ud800"}', b'{"name": "\xff"}', b'{"name": "a\tb"}',
    b'{"name": "x"}\0', b'{"\\u0000": 1}', b'{"name": "x", "pad": "' + b" " * 600_000
    + b'"}', b" " * (1024 * 1024 + 1), b"[1,]", b"{'name': 'x'}", b"\xed\xa0\x80",
]  # fmt: skip


def _meaning(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def spellings(value: dict[str, Any], **known: Any) -> list[Body]:
    """Return bodies that are the same JSON, written differently."""
    texts = [
        json.dumps(value).encode(),
        json.dumps(value, indent=2).encode(),
        json.dumps(dict(reversed(value.items()))).encode() + b"\r\n",
    ]
    if "\\ud" not in json.dumps(value):
        texts.append(json.dumps(value, ensure_ascii=False).encode())
    meaning = _meaning(value)
    return [Body(text, JSON, meaning=meaning, **known) for text in texts]


def _other_encodings(value: dict[str, Any], **known: Any) -> list[Body]:
    text = json.dumps(value)
    coded = [
        text.encode(name) for name in ("utf-8-sig", "utf-16", "utf-32", "utf-16le")
    ]
    return [Body(data, JSON, **known) for data in coded if ME not in data]


def right(rule: str) -> list[Body]:
    """Return bodies that a route takes."""
    if rule == WEBHOOK:
        return [b for event in EVENTS for b in _right_events(event)]
    if rule == "/files":
        return [
            upload(name, content, boundary=boundary)
            for content in (b"12 rows", b"", b"\0\xff", b"x" * 70_000)
            for name in ("report <me>.txt", "\xe9.txt", "a b")
            for boundary in ("b", "other-1")
        ]
    if rule not in FIELDS:
        return [Body(), Body(b"{}", JSON, meaning="{}")]
    made: list[Body] = []
    name, values, returned = FIELDS[rule]
    for value in values:
        asks = ((name, value),) if returned else ()
        made += spellings({name: value, "other": [1, None]}, asks=asks)
        made += spellings({name: value}, asks=asks)
    return made


def _right_events(event: str) -> list[Body]:
    made: list[Body] = []
    for reference in REFERENCES:
        value = {"id": event, "reference": reference}
        made += spellings(value, event=event)
        made += spellings({**value, "at": 1.0}, event=event)
    large = json.dumps({**value, "note": "x" * 70_000}).encode()
    made.append(Body(large, JSON, event=event))
    return made + _other_encodings(value, event=event)


def odd(rule: str) -> list[Body]:
    """Return JSON objects whose members are not what a route takes."""
    if rule == WEBHOOK:
        values = [{"id": "event-3", "reference": value} for value in _ODD]
        # Which of these ids are keys is the library's to say; it may not fail.
        values += [{"id": value, "reference": "charge-1"} for value in _ODD]
        values += [{"reference": "charge-1"}, {"id": "event-3"}]
        return [b for v in values for b in spellings(v, sound=False)]
    name = FIELDS.get(rule, ("name",))[0]
    coded = _other_encodings({name: FIELDS[rule][1][0]}) if rule in FIELDS else []
    twice = b'{"%b": 1, "%b": 1250}' % (name.encode(), name.encode())
    made = [b for v in _ODD for b in spellings({name: v})]
    return [*made, *coded, Body(twice, JSON), *spellings({})]


def upload(
    name: str, content: bytes, *, boundary: str = "b", key: Key | None = None
) -> Body:
    """Return a form with a file, and with a key where one is given."""
    parts = [("idempotency_key", None, key.raw.encode())] if key else []
    data = multipart([*parts, ("file", name, content)], boundary)
    digest = hashlib.sha256(content).hexdigest()
    return Body(
        data,
        _BOUNDARY + boundary,
        meaning=f"{name} {digest}",
        asks=(("name", name), ("size", len(content)), ("sha256", digest)),
        form_key=key,
    )


def multipart(parts: list[tuple[str, str | None, bytes]], boundary: str = "b") -> bytes:
    """Return a multipart body of fields and, where there is a file name, files."""
    made = b""
    for name, file, content in parts:
        made += (
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"'.encode()
        )
        if file is not None:
            made += f'; filename="{file}"\r\nContent-Type: text/plain'.encode()
        made += b"\r\n\r\n" + content + b"\r\n"
    return made + f"--{boundary}--\r\n".encode()


def urlencoded(*pairs: tuple[str, str]) -> bytes:
    """Return a form of fields, all of it escaped."""
    return "&".join(f"{quote(n)}={quote(v, safe='')}" for n, v in pairs).encode()


_WHOLE = multipart([("note", None, b"x"), ("file", "a.txt", b"12 rows")])
_KEYED = multipart([("idempotency_key", None, b"k-1"), ("file", "a.txt", b"12 rows")])
_PART = b"--b\r\nContent-Disposition: form-data; name=%b\r\n\r\nx\r\n"
#: Multipart bodies that no client library makes.
BROKEN_MULTIPART = [
    *(whole[:cut] for whole in (_WHOLE, _KEYED) for cut in (1, 5, 40, 70, 90, 150, -3)),
    _WHOLE.replace(b"\r\n", b"\n"), _WHOLE.replace(b"--b--", b"--c--"), b"x" + _WHOLE,
    _WHOLE + b"trailing", _KEYED * 2, b"--b--\r\n", b"--b\r\n\r\n\r\n--b--\r\n", b"--b",
    _WHOLE.replace(b"form-data;", b"attachment;"), _WHOLE.replace(b"name=", b"nme="),
    _WHOLE.replace(b'"a.txt"', b'"\xff\xfe"'), _WHOLE.replace(b'"a.txt"', b'""'),
    _WHOLE.replace(b'filename="a.txt"', b"filename*=utf-8''%ff%00"),
    _WHOLE.replace(b'filename="a.txt"', b"filename*=nonsense''x"),
    _WHOLE.replace(b"a.txt", b"../../etc/passwd"), _WHOLE.replace(b"a.txt", b"a\0b"),
    _WHOLE.replace(b"text/plain", b"text/plain; charset=nonsense"),
    _WHOLE.replace(b"text/plain", b"\xff" * 200), _WHOLE.replace(b"text/plain", b""),
    _WHOLE.replace(b"Content-Type", b"Content-Transfer-Encoding: base64\r\nX"),
    _WHOLE.replace(b"Content-Type", b"X: " + b"h" * 70_000 + b"\r\nContent-Type"),
    b"".join(_PART % b'"%d"' % number for number in range(1100)) + b"--b--\r\n",
    _PART % b'"big"' + b"y" * 600_000 + b"\r\n--b--\r\n", _PART % b'"unended',
    _PART % b'"idempotency_key"' + _PART % b'"idempotency_key"' + b"--b--\r\n",
    _PART % b'"idempotency_key"; filename="k"' + b"--b--\r\n",
]  # fmt: skip
#: Forms with escapes that stand for nothing, and more fields than anybody needs.
BROKEN_FORMS = [
    b"%", b"%zz=%", b"a=%ff&a=%fe", b"=&=&&", b"a" * 700_000, b"a=1&" * 2000, b"%00=%00",
    b"idempotency_key=%ff", b"idempotency_key=", b"idempotency_key=k-1&idempotency_key=k-2",
    b"idempotency_key=k-1&name=%e4%zz", b"\xff=\xfe", b"a;b;c", b"idempotency_key",
    b"idempotency_key=%22k-1", b"idempotency_key=k%2C1", b"idempotency_key=%00",
]  # fmt: skip


def broken(data: bytes) -> list[Body]:
    """Return a body as several media types, none of which may be true."""
    types = (JSON, FORM, f"{_BOUNDARY}b")
    return [Body(data, content_type, sound=False) for content_type in types]
