"""What makes a retry the same request, and what of a body the view still reads."""

from __future__ import annotations

import io
import subprocess
import sys
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest
from flask import Flask, Request, g, request
from flask_sqlalchemy import SQLAlchemy
from werkzeug.routing import BaseConverter

from flask_idempotency import Fingerprint, Idempotency, fingerprint, idempotent
from tests.databases import sqlite_database

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.shop import Shop

#: The module, which the package hides behind its function of the same name.
RULES = sys.modules["flask_idempotency.fingerprint"]
JSON = "application/json"
FORM = "application/x-www-form-urlencoded"


def twice(shop: Shop, first: dict[str, Any], second: dict[str, Any]) -> int:
    """Send two requests with one key; return the second one's status."""
    shop.view(lambda: ("made", 201))
    assert shop.post(**first).status_code == 201
    return shop.post(**second).status_code


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (
            {"json": {"amount": 1, "to": {"b": 2, "a": 1}}},
            {"data": b' {"to":{"a":1,"b":2},\n"amount": 1.0}', "content_type": JSON},
        ),
        ({"data": b"a=1&b=2&a=3"}, {"data": b"b=2&a=1&a=3"}),
        (
            {"query_string": "a=1&b=2", "data": b"x"},
            {"query_string": "b=2&a=1", "data": b"x"},
        ),
        (
            {"data": b"x", "content_type": "text/plain"},
            {"data": b"x", "content_type": "text/plain; charset=UTF-8"},
        ),
        (
            {"data": b"x", "headers": {"Content-Encoding": "identity"}},
            {"data": b"x"},
        ),
    ],
    ids=["JSON", "form", "query", "charset", "coding"],
)
def test_same_meaning_is_the_same_request(
    quick: Shop, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """Accidents of transport are no other request."""
    for sent in (first, second):
        if sent.get("data", b"").startswith((b"a=", b"b=")):
            sent.setdefault("content_type", FORM)
    assert twice(quick, first, second) == 201


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"json": [1, 2]}, {"json": [2, 1]}),
        ({"json": {"a": 2**53}}, {"json": {"a": 2**53 + 1}}),
        (
            {"data": b'{"a":1,"a":2}', "content_type": JSON},
            {"data": b'{"a":2}', "content_type": JSON},
        ),
        (
            {"data": b"a=1&a=2", "content_type": FORM},
            {"data": b"a=2&a=1", "content_type": FORM},
        ),
        (
            {"data": b"a=%ff", "content_type": FORM},
            {"data": b"a=%fe", "content_type": FORM},
        ),
        (
            {"query_string": "a=%ff", "data": b""},
            {"query_string": "a=%fe", "data": b""},
        ),
        (
            {"data": b"\xe4", "content_type": "text/plain; charset=latin-1"},
            {"data": b"\xe4", "content_type": "text/plain; charset=cp1251"},
        ),
        (
            {"data": b"x", "headers": {"Content-Encoding": "gzip"}},
            {"data": b"x"},
        ),
        (
            {"json": {"a": 1}, "headers": {"Content-Encoding": "br"}},
            {"json": {"a": 1}},
        ),
        (
            {"data": b"{}", "content_type": JSON},
            {"data": b"{}", "content_type": "text/plain"},
        ),
    ],
    ids=[
        *("order of an array", "big numbers", "a name twice", "order of a field"),
        *("bytes of a form", "bytes of a query", "charset", "coding", "coded JSON"),
        "media type",
    ],
)
def test_other_meaning_is_a_conflict(
    quick: Shop, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """What the view could tell apart is another request."""
    assert twice(quick, first, second) == 422


def upload(boundary: str, *parts: tuple[str, str, bytes]) -> dict[str, Any]:
    """Return an upload of parts (name, file name, content)."""
    body = b""
    for name, file_name, content in parts:
        file = f'; filename="{file_name}"' if file_name else ""
        body += f"--{boundary}\r\nContent-Disposition: form-data; ".encode()
        body += f'name="{name}"{file}\r\n\r\n'.encode() + content + b"\r\n"
    body += f"--{boundary}--\r\n".encode()
    kind = f"multipart/form-data; boundary={boundary}"
    return {"data": body, "content_type": kind}


FILE, FIELD = ("file", "a.bin", b"one"), ("note", "", b"n")


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([FIELD, FILE], 201),
        ([FILE, ("note", "", b"m")], 422),
        ([("file", "a.bin", b"two"), FIELD], 422),
        ([("file", "b.bin", b"one"), FIELD], 422),
        ([FILE, FILE, FIELD], 422),
    ],
    ids=["other order", "other field", "other bytes", "other name", "two files"],
)
def test_upload_is_its_fields_and_files(
    quick: Shop, parts: list[tuple[str, str, bytes]], status: int
) -> None:
    """Boundary and order of an upload's parts do not count; everything else does."""
    assert twice(quick, upload("x", FILE, FIELD), upload("y", *parts)) == status


WAYS: dict[str, Callable[[], Any]] = {
    "get_data": lambda: request.get_data(as_text=True),
    "stream": lambda: request.stream.read().decode(),
    "json": lambda: request.get_json(silent=True, force=True),
    "form": lambda: dict(request.form.items()),
    "files": lambda: {n: f.read().decode() for n, f in request.files.items()},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "sent",
    [
        {"json": {"a": 1}},
        {"data": "a=1&b=2", "content_type": FORM},
        upload("x", FILE, FIELD),
        {"data": "text", "content_type": "text/plain"},
        {"data": "x" * 600_000, "content_type": "text/plain"},
    ],
    ids=["JSON", "form", "multipart", "text", "large"],
)
@pytest.mark.parametrize("key", ["k", None], ids=["key", "no key"])
def test_view_reads_the_body_in_every_way(
    quick: Shop, way: str, sent: dict[str, Any], key: str | None
) -> None:
    """A guarded view finds the body as an undecorated one does."""

    def view() -> dict[str, Any]:
        return {"read": WAYS[way]()}

    quick.app.add_url_rule("/plain", view_func=view, methods=["POST"])
    quick.view(view, required=False)
    expected = quick.post(path="/plain", key=None, **sent).json
    assert quick.post(key=key, **sent).json == expected


def test_body_that_was_read_before_still_counts(quick: Shop) -> None:
    """What ``before_request`` has read and kept is part of the fingerprint."""
    quick.app.before_request(lambda: request.get_data() and None)
    quick.view(lambda: bytes(request.get_data()))
    assert quick.post(data=b"one").data == b"one"
    assert quick.post(data=b"two").status_code == 422


def test_form_that_was_parsed_before_still_counts(quick: Shop) -> None:
    """A form that ``before_request`` has parsed is part of the fingerprint."""
    quick.app.before_request(lambda: request.form.get("a") and None)
    quick.view(lambda: request.form["a"])
    assert quick.post(data={"a": "one"}).data == b"one"
    assert quick.post(data={"a": "two"}).status_code == 422


def test_body_that_was_consumed_before_is_an_error(quick: Shop) -> None:
    """Requests that cannot be told apart are not guarded as if they were one."""
    quick.app.before_request(lambda: request.stream.read() and None)
    quick.app.testing = True
    quick.view(lambda: "")
    with pytest.raises(Exception, match="consumed before @idempotent"):
        quick.post(data=b"one")


@pytest.mark.parametrize("seen", [4, -1], ids=["part", "whole"])
def test_body_that_was_partly_consumed_is_an_error(quick: Shop, seen: int) -> None:
    """What is left of a body does not tell requests apart."""
    quick.app.before_request(lambda: request.stream.read(seen) and None)
    quick.app.testing = True
    quick.view(lambda: "")
    with pytest.raises(Exception, match="consumed before @idempotent"):
        quick.post(data=b"AAAArest")


def test_argument_that_was_taken_away_still_counts(quick: Shop) -> None:
    """``url_value_preprocessor`` functions do not make two resources one."""

    @quick.app.url_value_preprocessor
    def pull(_endpoint: str | None, values: dict[str, Any] | None) -> None:
        g.shop = (values or {}).pop("shop", None)

    view = idempotent(lambda: str(g.shop))
    quick.app.add_url_rule("/shops/<int:shop>/orders", "o", view, methods=["POST"])
    assert quick.post(path="/shops/1/orders").data == b"1"
    assert quick.post(path="/shops/2/orders").status_code == 422
    assert quick.post(path="/shops/1/orders").data == b"1"


def test_argument_without_a_text_counts_by_the_path(quick: Shop) -> None:
    """A converter may give any object; its address says nothing."""

    class Thing:
        """An object that has no text of its own."""

    class Converter(BaseConverter):
        """Makes such objects."""

        def to_python(self, _value: str) -> Thing:
            """Make one."""
            return Thing()

    quick.app.url_map.converters["thing"] = Converter
    view = idempotent(lambda name: type(name).__name__)
    quick.app.add_url_rule("/things/<thing:name>", "t", view, methods=["POST"])
    statuses = [quick.post(path=f"/things/{n}").status_code for n in "aab"]
    assert statuses == [200, 200, 422]


def test_hosts_are_routes_of_their_own(tmp_path: Path) -> None:
    """The same rule on another host is another operation."""
    app = Flask("hosts", host_matching=True, static_folder=None)
    app.config["SQLALCHEMY_DATABASE_URI"] = sqlite_database(tmp_path).url
    db = SQLAlchemy(app)
    Idempotency(app, db)
    for host in ("a.test", "b.test"):
        view = idempotent(anonymous=True)(lambda host=host: host)
        app.add_url_rule("/x", host, view, methods=["POST"], host=host)
    with app.app_context():
        db.create_all()
    answers = [
        app.test_client().post(
            "/x", base_url=f"http://{host}", headers={"Idempotency-Key": "k"}
        )
        for host in ("a.test", "b.test", "a.test")
    ]
    assert [answer.data for answer in answers] == [b"a.test", b"b.test", b"a.test"]
    with app.app_context():
        db.engine.dispose()


def test_upload_that_was_looked_at_still_counts(quick: Shop) -> None:
    """A size check or scan before the guard leaves the file where it stands."""

    @quick.app.before_request
    def look() -> None:
        request.files["file"].stream.seek(0, 2)

    quick.view(lambda: str(request.files["file"].stream.tell()))
    assert quick.post(**upload("x", FILE)).data == b"3"
    other = ("file", "a.bin", b"twofold")
    assert quick.post(**upload("x", other)).status_code == 422


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (b"--x\r\ngarbage one", b"--x\r\ngarbage two"),
        (
            b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n\xff\r\n--x--',
            b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n\xfe\r\n--x--',
        ),
    ],
    ids=["garbage", "bytes"],
)
def test_form_that_cannot_be_read_is_its_bytes(
    quick: Shop, first: bytes, second: bytes
) -> None:
    """What the parser gives up on is no empty form."""
    kind = "multipart/form-data; boundary=x"
    sent = [{"data": data, "content_type": kind} for data in (first, second)]
    assert twice(quick, *sent) == 422


def limit_forms(shop: Shop) -> None:
    """Set a limit on a form's fields, in the way of every release of Flask."""

    class Limited(Request):
        max_form_memory_size = 10

    shop.app.request_class = Limited


@pytest.mark.parametrize("way", ["get_data", "stream"])
@pytest.mark.parametrize("mode", ["enforce", "observe"])
def test_form_above_a_limit_is_left_to_the_view(
    quick: Shop, way: str, mode: str
) -> None:
    """A view that does not parse the form is not held to the limits of parsing."""
    limit_forms(quick)
    quick.view(lambda: str(len(WAYS[way]())), mode=mode)
    sent = upload("x", ("field", "", b"y" * 100))
    assert quick.post(**sent).data == str(len(sent["data"])).encode()


def test_form_above_a_limit_is_refused_as_undecorated(quick: Shop) -> None:
    """A view that parses it answers 413, also where it is only observed."""
    limit_forms(quick)
    quick.view(lambda: str(len(request.form)), mode="observe")
    assert quick.post(**upload("x", ("f", "", b"y" * 100))).status_code == 413


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        ({"a": 1, "sent_at": 1}, {"a": 1, "sent_at": 2}, 201),
        ({"a": 1, "sent_at": 1}, {"a": 1}, 201),
        ({"a": 1, "in": {"id": 1, "x": 1}}, {"a": 1, "in": {"id": 2, "x": 1}}, 201),
        ({"l": [{"t": 1}, 2]}, {"l": [{"t": 3}, 2]}, 201),
        ({"a/b": 1, "c~d": 1}, {"a/b": 2, "c~d": 2}, 201),
        ({"a": 1}, {"a": 2}, 422),
        ({"in": {"x": 1}}, {"in": {"x": 2}}, 422),
        ({"in": {"sent_at": 1}}, {"in": {"sent_at": 2}}, 422),
        ({"l": [1, 2]}, {"l": [1, 3]}, 422),
    ],
)
def test_ignored_members_do_not_count(
    quick: Shop, first: Any, second: Any, status: int
) -> None:
    """Values at the JSON Pointers of ``ignore`` may differ, and nothing else."""
    ignore = ("/sent_at", "/in/id", "/l/0/t", "/a~1b", "/c~0d")
    quick.view(lambda: ("made", 201), fingerprint=Fingerprint(ignore=ignore))
    assert quick.post(json=first).status_code == 201
    assert quick.post(json=second).status_code == status


def test_ignored_field_of_a_form_does_not_count(quick: Shop) -> None:
    """A pointer names a form's field as it names an object's member."""
    quick.view(lambda: "", fingerprint=Fingerprint(ignore=("/sent_at",)))
    quick.post(data={"a": "1", "sent_at": "1"})
    assert quick.post(data={"a": "1", "sent_at": "2"}).status_code == 200
    assert quick.post(data={"a": "2", "sent_at": "1"}).status_code == 422


def test_chosen_headers_count(quick: Shop) -> None:
    """A header counts where the route says so, whatever the case of its name."""
    quick.view(lambda: "", fingerprint=Fingerprint(headers=("X-Version",)))
    quick.post(headers={"x-version": "1", "X-Other": "1"})
    same = quick.post(headers={"X-VERSION": "1", "X-Other": "2"})
    other = quick.post(headers={"X-Version": "2"})
    none = quick.post()
    assert (same.status_code, other.status_code, none.status_code) == (200, 422, 422)


def test_key_alone(quick: Shop) -> None:
    """With ``fingerprint=None`` any body is the same request."""
    quick.view(lambda: bytes(request.get_data()), fingerprint=None)
    assert quick.post(data=b"one").data == b"one"
    assert quick.post(data=b"two").data == b"one"


def test_function_of_the_request(quick: Shop) -> None:
    """A function says what counts; its value has the same hash in a service."""
    quick.view(lambda: "", fingerprint=lambda: {"name": request.get_json()["name"]})
    quick.post(json={"name": "a", "noise": 1})
    assert quick.post(json={"name": "a", "noise": 2}).status_code == 200
    assert quick.post(json={"name": "b", "noise": 1}).status_code == 422
    record = quick.record()
    assert record is not None
    assert record.request_hash == fingerprint({"name": "a"})


@pytest.mark.parametrize(
    "options",
    [
        {"ignore": "/a"},
        {"ignore": ("a",)},
        {"ignore": ("",)},
        {"ignore": ("/a~2",)},
        {"headers": "X-A"},
        {"headers": ("X A",)},
        {"headers": ("",)},
    ],
    ids=str,
)
def test_malformed_fingerprint_is_refused(options: dict[str, Any]) -> None:
    """What would silently match nothing is an error at import."""
    with pytest.raises(Exception, match=r"Fingerprint\("):
        Fingerprint(**options)


def test_rules_of_another_release_are_no_conflict(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live keys survive a release that computes fingerprints in another way."""
    shop.creating_view()
    first = shop.post()
    monkeypatch.setattr(RULES, "VERSION", "v2")
    again = shop.post()
    assert again.headers["Idempotent-Replayed"] == "true"
    assert again.data == first.data
    assert shop.post("anything").data == first.data  # the key alone counts
    assert shop.post("other", key="k2").status_code == 201
    assert shop.post("another", key="k2").status_code == 422


def test_rules_of_another_release_take_over(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed operation of an older release can be tried again by a newer one."""
    shop.view(shop.create, retry_failed=True)
    shop.runs.append("first")  # so that its name is taken and the flush fails
    with shop.app.app_context():
        shop.db.session.add(shop.Account(name="first"))
        shop.db.session.commit()
    assert shop.post().status_code == 500
    with shop.app.app_context():
        shop.db.session.query(shop.Account).delete()
        shop.db.session.commit()
    monkeypatch.setattr(RULES, "VERSION", "v2")
    assert shop.post().status_code == 201
    assert shop.post().headers["Idempotent-Replayed"] == "true"


UPLOADING = """
    import resource, sys
    from flask import Flask, request
    from flask_sqlalchemy import SQLAlchemy
    from werkzeug.test import create_environ, run_wsgi_app
    from flask_idempotency import Idempotency, idempotent

    app = Flask("uploads")
    app.config["SQLALCHEMY_DATABASE_URI"] = "sqlite:///" + sys.argv[1]
    db = SQLAlchemy(app)
    idempotency = Idempotency(app, db)

    @app.post("/files")
    @idempotent(required=True, anonymous=True)
    def upload():
        file = request.files["file"] if request.files else request.stream
        return str(sum(len(c) for c in iter(lambda: file.read(1 << 16), b"")))

    class Body:
        def __init__(self, head, size, tail):
            self.rest = [head, size, tail]
        def read(self, n=-1):
            n, data = 1 << 20 if n < 0 else n, b""
            while self.rest and len(data) < n:
                part, left = self.rest[0], n - len(data)
                if isinstance(part, int):
                    data += b"x" * min(part, left)
                    self.rest[0] = part - min(part, left)
                else:
                    data += part[:left]
                    self.rest[0] = part[left:]
                if not self.rest[0]:
                    del self.rest[0]
            return data

    def post(size, kind, head=b"", tail=b""):
        environ = create_environ("/files", method="POST",
                                 headers={"Idempotency-Key": f"{kind[:4]}{size}"})
        environ["CONTENT_TYPE"] = kind
        environ["CONTENT_LENGTH"] = str(len(head) + size + len(tail))
        environ["wsgi.input"] = Body(head, size, tail)
        body, status, headers = run_wsgi_app(app, environ)
        return int(status[:3]), b''.join(body), headers

    with app.app_context():
        db.create_all()
    head = (b'--b\\r\\nContent-Disposition: form-data; name="file"; '
            b'filename="f"\\r\\n\\r\\n')
    whole = [("multipart/form-data; boundary=b", head, b"\\r\\n--b--\\r\\n"),
             ("application/octet-stream", b"", b"")]
    for kind, head, tail in whole:
        post(1 << 20, kind, head, tail)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for kind, head, tail in whole:
        for _ in range(2):
            *answer, headers = post(200 << 20, kind, head, tail)
            assert answer == [200, b"209715200"], answer
        assert headers["Idempotent-Replayed"] == "true"
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="measured by getrusage")
def test_upload_is_never_whole_in_memory(tmp_path: Any) -> None:
    """200 MB, as a form's file and as a raw body, cost less than 16 MB of memory."""
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", dedent(UPLOADING), str(tmp_path / "x.db")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    assert int(done.stdout) * unit < 16 * 2**20


def test_temporary_file_is_closed_with_the_request(quick: Shop) -> None:
    """A body that was kept in a file leaves nothing open."""
    kept: list[Any] = []

    def view() -> str:
        kept.append(request.stream)
        return ""

    quick.view(view)
    quick.post(data=io.BytesIO(b"x" * 600_000), content_type="text/plain")
    assert kept[0].closed
