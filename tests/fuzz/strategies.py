"""How requests are generated: mostly plausible ones, sent again with one thing changed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from hypothesis import strategies as st

from example_app.auth import EXAMPLE_TOKENS
from flask_idempotency.exceptions import IdempotencyKeyInvalid
from flask_idempotency.keys import parse_key

from . import bodies
from .bodies import FORM, JSON
from .requests import Body, Key, Request, Scenario, Step

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hypothesis.strategies import DrawFn, SearchStrategy
    from werkzeug.routing import Rule

T = TypeVar("T")

LATIN_1 = st.characters(max_codepoint=255)
METHODS = ["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "POST", "TRACE", "post"]
#: Without and with the blanks, quotes and commas that only a quoted key may have.
_PLAIN = ["k-1", "k-2", "K-1", "k" * 255]
_QUOTED_ONLY = ["k-1 ", " k-1", "k 1", "k,1", 'k"1', "k\\1", "k;1", "~ !"]
_NO_KEYS = [
    "", " ", "\t", '""', '"', '"k-1', 'k-1"', r'"k\1"', "k 1", "k-1, k-2", "k-1,k-1",
    '"k-1", "k-2"', '"k-1","k-1"', "k\xe9", '"k\xc3\xa9"', "k\0", "k\n1", "\x7f", "k\\1",
    "k" * 256, '"' + "k" * 256 + '"', "k" * 100_000, '"k-1";', '"k-1";A=1', '"k-1"x',
    '"k-1";a="', "k-1;a=1", '"k-1";a=1,', "'k\t1'", "\xa0k", '"k-1"\x0b', '"k\x001"',
]  # fmt: skip
_PATHS = [
    "1", "2", "0", "-1", "007", "2147483647", "2147483648", "9223372036854775808",
    "9" * 30, "9" * 5000, "\xd9\xa3", "\xc2\xb2", "a", "", " ", "a/b", "..", "%00", "\0",
    "\xff", "\xc3\xa9", "1.0", "1e3", "+1", "1_0", "x" * 3000, "{file}/", "1;a=b", "\n",
    "\xed\xa0\x80", "\xf0\x9f\x98\x80", "'", "{", "{file}", "{account}", "{payment}",
    "../../../etc/passwd", "{task}", "{task}",
]  # fmt: skip
_QUERIES = [
    "a=1", "a=1&a=2", "a=2&a=1", "a=%zz", "%", "a=%ff", "\xff=\xfe", "=", "&&&", "a" * 9000,
    "idempotency_key=k-1", "a=%00", "a=1;b=2", "a[]=1", "a=%ed%a0%80", "?a=1", "a=+%20",
]  # fmt: skip
_HEADERS = [
    ("Accept", "text/html"), ("Accept", "text/html,*/*;q=0.1"), ("Accept", "*/*"),
    ("Accept", "application/problem+json;q=0, text/html;q=0.5"), ("Accept", ";q=x,,"),
    ("Accept", "text/*;q=2"), ("Accept", "\xff"), ("Accept", "a/b;q=" + "9" * 5000),
    ("Content-Encoding", "gzip"), ("Content-Encoding", "identity"), ("Cookie", "\xff=;"),
    ("Content-Encoding", " GZIP , br"), ("Content-Encoding", "\xe9"), ("Range", "x=1-"),
    ("Idempotent-Replayed", "true"), ("X-HTTP-Method-Override", "DELETE"), ("Date", "x"),
    ("If-None-Match", '"'), ("If-Modified-Since", "never"), ("Expect", "100-continue"),
    ("Accept-Charset", "nonsense"), ("Accept-Language", "\x00"), ("X-Signature", "\xe9"),
    ("Range", "bytes=0-0"), ("If-Match", "*"), ("Transfer-Encoding", "chunked"),
]  # fmt: skip
_LENGTHS = ["0", "1", "5", "99999", "-1", "x", "", " 3", "1e3", "9" * 30, "9" * 5000]
_TOKENS = [f"Bearer {token}" for token in EXAMPLE_TOKENS]
_NOBODY = [
    None, "", "Bearer", "Bearer ", "Bearer unknown", "Bearer \xe9", "Basic !!!", "Digest x",
    "Basic dTpw", 'Bearer a="example-token-1"', "example-token-1", "Digest =,=", "\xff",
    "Bearer example-token-1x", "Basic /w==", "Bearer " + "x" * 9000,
]  # fmt: skip
_FAILURES = ["before", "after", "before", "none"]
_TRUE, _FALSE = (st.sampled_from([value]) for value in (True, False))


def _quoted(key: str) -> str:
    return '"' + re.sub(r'(["\\])', r"\\\1", key) + '"'


def _usable_keys() -> list[Key]:
    made = [Key(_quoted(key), key) for key in _PLAIN * 4 + _QUOTED_ONLY]
    made += [Key(key, key) for key in _PLAIN]
    return [*made, Key(' "k-1"\t', "k-1"), Key('"k-1"; a=1;b="x";c', "k-1")]


def _any_key(raw: str) -> Key:
    # What arbitrary text means is the grammar's to say: tests/unit/test_keys.py.
    try:
        return Key(raw, parse_key(raw))
    except IdempotencyKeyInvalid:
        return Key(raw)


def _mostly(
    plain: SearchStrategy[T], odd: SearchStrategy[T], one_in: int = 6
) -> SearchStrategy[T]:
    def choose(number: int) -> SearchStrategy[T]:
        return odd if number == one_in - 1 else plain

    return st.integers(0, one_in - 1).flatmap(choose)


USABLE_KEYS = st.sampled_from(_usable_keys())
KEYS: SearchStrategy[Key | None] = _mostly(
    USABLE_KEYS,
    st.one_of(
        st.none(),
        st.sampled_from([Key(raw) for raw in _NO_KEYS]),
        st.text(LATIN_1, max_size=12).map(_any_key),
    ),
)
AUTHORIZATIONS: SearchStrategy[str | None] = _mostly(
    st.sampled_from(_TOKENS), st.sampled_from(_NOBODY), 12
)
QUERIES = _mostly(
    st.just(""),
    st.one_of(st.sampled_from(_QUERIES), st.text(LATIN_1, max_size=12)),
)
HEADERS = _mostly(
    st.just(()),
    st.lists(st.sampled_from(_HEADERS), max_size=3, unique_by=lambda h: h[0]).map(
        tuple
    ),
)
_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)
)
_OBJECTS = st.dictionaries(
    st.sampled_from(["name", "month", "amount", "id", "reference", "x"]), _VALUES
)


@st.composite
def _forms(draw: DrawFn) -> Body:
    """Make a form whose key stands in a field."""
    key = draw(st.one_of(USABLE_KEYS, st.sampled_from(_NO_KEYS).map(Key)))
    if draw(st.booleans()):
        # Werkzeug ends a part's head and body by line ends, so none is in the field.
        raw = key.raw.replace("\n", "")
        content = draw(st.binary(max_size=20))
        return bodies.upload("form <me>", content, key=replace(key, raw=raw))
    fields = [("idempotency_key", key.raw), ("name", draw(st.text(max_size=5)))]
    return Body(bodies.urlencoded(*_encodable(fields)), FORM, form_key=key)


def _encodable(fields: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(n, v.encode("utf-8", "replace").decode()) for n, v in fields]


@st.composite
def _corrupted(draw: DrawFn, whole: SearchStrategy[Body]) -> Body:
    """Damage a body at some place, its media type, or its length."""
    body = draw(whole)
    kind = draw(st.integers(0, 3))
    if kind == 0:
        place = draw(st.integers(0, max(0, len(body.data))))
        data = body.data[:place] + draw(st.binary(max_size=3))
        data += body.data[place + draw(st.integers(0, 3)) :]
        return Body(data, body.content_type, sound=False)
    if kind == 1:
        return Body(
            body.data, draw(st.sampled_from(bodies.TYPES)), event=None, sound=False
        )
    if kind == 2:
        length = draw(st.sampled_from(_LENGTHS))
        return Body(body.data, body.content_type, sound=False, length=length)
    return replace(
        body, content_type=f"{body.content_type};charset=latin-1", sound=False
    )


def _bodies(rule: str) -> SearchStrategy[Body]:
    plain = st.sampled_from(bodies.right(rule))
    garbage = [*bodies.GARBAGE, *bodies.BROKEN_MULTIPART, *bodies.BROKEN_FORMS]
    return _mostly(
        plain,
        st.one_of(
            st.sampled_from(bodies.odd(rule)),
            st.sampled_from([b for data in garbage for b in bodies.broken(data)]),
            _OBJECTS.map(lambda v: Body(json.dumps(v).encode(), JSON, sound=False)),
            st.binary(max_size=40).map(lambda b: Body(b, FORM, sound=False)),
            _forms(),
            _corrupted(plain),
        ),
        4,
    )


def _paths(rule: str) -> SearchStrategy[str]:
    usual = rule
    for argument in re.findall(r"<[^>]*>", rule):
        name = argument.rpartition(":")[2].strip("<>").partition("_")[0]
        usual = usual.replace(argument, f"{{{name}}}")
    if usual == rule:
        odd = st.sampled_from([f"{rule}/", f"/{rule}", rule[:-1], rule.upper()])
        return _mostly(st.just(usual), odd, 15)
    pattern = re.sub(r"<[^>]*>", "{}", rule)
    arguments = st.one_of(st.sampled_from(_PATHS), st.text(LATIN_1, max_size=6))
    return _mostly(
        st.just(usual), arguments.map(lambda text: pattern.replace("{}", text)), 3
    )


class Requests:
    """
    Requests for the routes of an application.

    Args:
        rules: The rules of its ``url_map``.
    """

    def __init__(self, rules: Iterable[Rule]) -> None:
        found: list[tuple[str, str]] = []
        for rule in rules:
            for method in sorted(rule.methods or ()):
                # What has an effect is what the fuzzing is about.
                found += [(rule.rule, method)] * (12 if method == "POST" else 1)
        self._routes = st.sampled_from(sorted(found))
        self._parts = {
            rule: self._strategies(rule) for rule in {name for name, _ in found}
        }

    @staticmethod
    def _strategies(rule: str) -> dict[str, SearchStrategy[Any]]:
        return {
            "body": _bodies(rule),
            "key": KEYS,
            "authorization": AUTHORIZATIONS,
            "query": QUERIES,
            "headers": HEADERS,
            "path": _paths(rule),
            "signed": _mostly(_TRUE, _FALSE, 12),
        }

    def request(self, draw: DrawFn) -> Request:
        """Make a request from nothing."""
        rule, method = draw(self._routes)
        parts = self._parts[rule]
        drawn = {name: draw(strategy) for name, strategy in parts.items()}
        method = draw(_mostly(st.just(method), st.sampled_from(METHODS), 15))
        if method in {"GET", "HEAD", "OPTIONS"}:
            drawn["body"] = draw(_mostly(st.just(Body()), st.just(drawn["body"])))
        return Request(rule, method, **drawn)

    def again(self, draw: DrawFn, request: Request) -> Request:
        """Send a request again, with at most one thing changed."""
        parts = self._parts[request.rule]
        names = ["", "", "", "body", "body", *parts]
        name = draw(st.sampled_from(names))
        return replace(request, **{name: draw(parts[name])}) if name else request

    def _group(self, draw: DrawFn) -> list[Step]:
        first = self.request(draw)
        group = [first]
        for _ in range(draw(st.integers(0, 5))):
            group.append(self.again(draw, group[0]))
        return [self._step(draw, request) for request in group]

    def _step(self, draw: DrawFn, request: Request) -> Step:
        if request.rule != "/payments" or draw(st.integers(0, 3)) < 3:
            return Step(request)
        during = [self.again(draw, request) for _ in range(draw(st.integers(1, 3)))]
        return Step(request, tuple(during))

    def scenarios(self) -> SearchStrategy[Scenario]:
        """Return the strategy of whole scenarios."""
        group = st.composite(self._group)()
        # Lists of lists, since Hypothesis makes no long ones that shrink well.
        chapter = st.lists(group, min_size=1, max_size=4).map(_joined)
        return st.builds(
            Scenario,
            st.lists(chapter, min_size=1, max_size=20).map(_joined),
            _mostly(_TRUE, _FALSE, 10),
            _mostly(
                st.just(()),
                st.lists(st.sampled_from(_FAILURES), max_size=6).map(tuple),
                3,
            ),
        )


def _joined(lists: list[list[T]]) -> list[T]:
    return [item for part in lists for item in part]
