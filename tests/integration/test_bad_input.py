"""Requests that cannot be claimed: the right answer, no run, and nothing left behind."""

from __future__ import annotations

import socket
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from flask import request
from sqlalchemy import text
from werkzeug.serving import WSGIRequestHandler, make_server

from flask_idempotency import IdempotencyConfigError, fingerprint, idempotent
from flask_idempotency.config import Config
from flask_idempotency.fingerprint import Fingerprint
from flask_idempotency.request_hash import request_hash
from tests.databases import sqlite_database
from tests.shop import Shop, statements_sent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from werkzeug.test import TestResponse

#: Values of a text that no database or not every database keeps.
UNUSABLE = ["x" * 1000, "a\0b", "\ud800"]
NO_KEYS: dict[str, str] = {
    "empty": "",
    "blank": " ",
    "tab": "\t",
    "quotes only": '""',
    "one quote": '"',
    "no closing quote": '"k',
    "wrong escape": r'"a\b"',
    "blank inside": "a b",
    "256 characters": "k" * 256,
    "quoted 256 characters": '"' + "k" * 256 + '"',
    "10,000 characters": "k" * 10_000,
    "two": "a, b",
    "twice the same": "a,a",
    "two quoted": '"a", "b"',
    "latin-1": "k\xe9",
    "UTF-8": "k\xc3\xa9",
    "NUL": "a\0b",
    "newline": "a\nb",
}


class Gate(Shop):
    """An application that refuses every request of its tests."""

    def __init__(self, folder: Path) -> None:
        super().__init__(sqlite_database(folder))
        self.loaders: dict[str, Callable[[], Any]] = {}
        self.idempotency.user_id_loader(partial(self.load, "user_id"))
        self.idempotency.tenant_id_loader(partial(self.load, "tenant_id"))
        routes: dict[str, dict[str, Any]] = {
            "optional": {},
            "required": {"required": True},
            "anonymous": {"anonymous": True},
            "keyed": {"key": partial(self.load, "key")},
        }
        for name, options in routes.items():
            guarded = idempotent(**options)(self.run)
            self.app.add_url_rule(f"/{name}", name, guarded, methods=["POST"])

    def load(self, name: str) -> Any:
        """Name a caller or a key, as the test wants it."""
        return self.loaders[name]()

    def run(self) -> str:
        """Do what no request of these tests may reach."""
        self.runs.append(1)
        return "done"

    def reset(self) -> None:
        """Let the loaders name a caller again."""
        self.loaders.update(user_id=lambda: "u1", tenant_id=lambda: "t1")
        self.runs.clear()
        self.app.testing = False


@pytest.fixture(scope="module")
def shared_gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """Make one application for all requests that are refused."""
    gate = Gate(tmp_path_factory.mktemp("gate"))
    yield gate
    gate.close()


@pytest.fixture
def gate(shared_gate: Gate) -> Gate:
    """Give the application of all requests that are refused."""
    shared_gate.reset()
    return shared_gate


def running_view(shop: Shop, **options: Any) -> None:
    """Serve ``POST /accounts`` by a view that does nothing but run."""

    def view() -> str:
        shop.runs.append(1)
        return "done"

    shop.app.add_url_rule(
        "/accounts",
        endpoint="accounts",
        view_func=idempotent(**options)(view),
        methods=["POST"],
    )


def records(shop: Shop) -> int:
    """Count the records of all callers and keys."""
    with shop.app.app_context(), shop.db.engine.connect() as connection:
        query = text("SELECT count(*) FROM idempotency_record")
        return int(connection.execute(query).scalar_one())


def refused(response: TestResponse, status: int, code: str) -> None:
    """Check that an answer is a Problem with this status and code."""
    assert response.status_code == status
    assert response.mimetype == "application/problem+json"
    assert response.json is not None
    assert (response.json["status"], response.json["code"]) == (
        status,
        f"IDEMPOTENCY_{code}",
    )


def post_raw(shop: Shop, key: str, *, path: str = "/accounts") -> TestResponse:
    """Post with a header value that no client library would send."""
    environ = {"HTTP_IDEMPOTENCY_KEY": key}
    return shop.post(key=None, path=path, environ_overrides=environ)


@pytest.mark.parametrize("path", ["/optional", "/required"])
@pytest.mark.parametrize("raw", NO_KEYS.values(), ids=NO_KEYS.keys())
def test_malformed_header_is_refused_before_any_statement(
    gate: Gate, raw: str, path: str
) -> None:
    """A header that is not one key gets 400, also where a key is optional."""
    with statements_sent() as statements:
        response = post_raw(gate, raw, path=path)
    refused(response, 400, "KEY_INVALID")
    assert (gate.runs, statements) == ([], [])


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        ("k", "k"),
        ("k" * 255, "k" * 255),
        ('" k "', " k "),
        (r'"a\"b\\,"', 'a"b\\,'),
    ],
    ids=["one character", "longest", "blanks", "escapes"],
)
def test_well_formed_header_is_kept_exactly(shop: Shop, raw: str, key: str) -> None:
    """The key in the record is the key that was sent, character by character."""
    running_view(shop)
    assert post_raw(shop, raw).status_code == 200
    record = shop.record(key)
    assert record is not None
    assert record.scope.idempotency_key == key
    assert post_raw(shop, raw).headers["Idempotent-Replayed"] == "true"


def test_missing_key_is_refused_where_required(gate: Gate) -> None:
    """A route that requires a key says so with 400."""
    with statements_sent() as statements:
        response = gate.post(key=None, path="/required")
    refused(response, 400, "KEY_MISSING")
    assert "Idempotency-Key" in response.text
    assert (gate.runs, statements) == ([], [])


def test_missing_key_text_names_the_configured_header(
    make_quick: Callable[..., Shop],
) -> None:
    """The client is told the header that this application reads."""
    shop = make_quick(IDEMPOTENCY_HEADER="X-Once", IDEMPOTENCY_REQUIRED=True)
    running_view(shop)
    refused(shop.post(key="k"), 400, "KEY_MISSING")
    assert "X-Once" in shop.post(key="k").text
    assert shop.post(key=None, headers={"X-Once": "k"}).status_code == 200


def test_refusal_does_not_repeat_the_key(gate: Gate) -> None:
    """No answer quotes what may be personal data."""
    assert "secret" not in post_raw(gate, '"secret" "secret"', path="/optional").text


@pytest.mark.parametrize("values", [("a", "b"), ("a", "a"), ('"a"', '"b"'), ("", "a")])
def test_two_headers_are_refused(gate: Gate, values: tuple[str, str]) -> None:
    """A client that sends two headers gets 400."""
    response = gate.app.test_client().post(
        "/optional", headers=[("Idempotency-Key", value) for value in values]
    )
    refused(response, 400, "KEY_INVALID")
    assert gate.runs == []


class Quiet(WSGIRequestHandler):
    """A server that logs nothing of its requests."""

    def log_request(self, *_args: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize(
    "lines",
    [
        b"Idempotency-Key: a\r\nIdempotency-Key: b\r\n",
        b'Idempotency-Key: "a"\r\nidempotency-key: "a"\r\n',
        b"Idempotency-Key:\r\n",
        b"Idempotency-Key: \r\n",
        "Idempotency-Key: k\u00e9\r\n".encode(),
        b"Idempotency-Key: k\xe9\r\n",
        b"Idempotency-Key: a\0b\r\n",
        b"Idempotency-Key: a\r\n b\r\n",
    ],
    ids=["two", "same", "empty", "blank", "UTF-8", "latin-1", "NUL", "folded"],
)
def test_bad_header_of_a_real_connection_is_refused(quick: Shop, lines: bytes) -> None:
    """What a server makes of odd bytes on the wire is refused as well."""
    running_view(quick)
    server = make_server("127.0.0.1", 0, quick.app, request_handler=Quiet)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    try:
        with socket.create_connection(("127.0.0.1", server.port), 5) as client:
            client.sendall(
                b"POST /accounts HTTP/1.1\r\nHost: x\r\nX-User: u1\r\n"
                b"Content-Length: 0\r\nConnection: close\r\n" + lines + b"\r\n"
            )
            answer = b"".join(iter(lambda: client.recv(65536), b""))
    finally:
        thread.join()
        server.server_close()
    assert b" 400 " in answer.split(b"\r\n")[0]
    assert b"IDEMPOTENCY_KEY_INVALID" in answer
    assert quick.runs == []


FORMS = [
    "application/x-www-form-urlencoded",
    "multipart/form-data",
]
every_form = pytest.mark.parametrize("kind", FORMS, ids=["urlencoded", "multipart"])


@every_form
def test_form_field_is_a_key(quick: Shop, kind: str) -> None:
    """A form may carry the key in a field, quoted or bare."""
    running_view(quick, required=True)
    for key in ("k", '"k"'):
        form = {"idempotency_key": key, "name": "first"}
        assert quick.post(key=None, data=form, content_type=kind).status_code == 200
    assert (quick.runs, quick.status("k")) == ([1], "succeeded")


@every_form
def test_header_and_field_may_agree(quick: Shop, kind: str) -> None:
    """The same key in header and field is one key."""
    running_view(quick)
    form = {"idempotency_key": '"k"'}
    assert quick.post(key="k", data=form, content_type=kind).status_code == 200
    assert quick.status("k") == "succeeded"


@every_form
@pytest.mark.parametrize("field", ["other", "K", "", "k" * 256])
def test_header_and_field_may_not_differ(quick: Shop, kind: str, field: str) -> None:
    """A field that is not the header's key is refused."""
    running_view(quick)
    form = {"idempotency_key": field}
    refused(quick.post(key="k", data=form, content_type=kind), 400, "KEY_INVALID")
    assert (quick.runs, records(quick)) == ([], 0)


@every_form
@pytest.mark.parametrize("fields", [["a", "b"], ["a", "a"], [""], ["\xe9"], ["\0"]])
def test_bad_field_is_refused(quick: Shop, kind: str, fields: list[str]) -> None:
    """An empty, malformed or doubled field is refused, also where none is needed."""
    running_view(quick)
    form = {"idempotency_key": fields}
    refused(quick.post(key=None, data=form, content_type=kind), 400, "KEY_INVALID")
    assert (quick.runs, records(quick)) == ([], 0)


def test_member_of_json_is_no_key(quick: Shop) -> None:
    """The field is looked for in forms only."""
    running_view(quick, required=True)
    response = quick.post(key=None, json={"idempotency_key": "k"})
    refused(response, 400, "KEY_MISSING")


def test_key_is_no_part_of_what_is_asked_for(quick: Shop) -> None:
    """A retry may send by header what was a field before."""
    running_view(quick)
    form = {"name": "first"}
    quick.post(key=None, data={**form, "idempotency_key": "k"})
    response = quick.post(key="k", data=form)
    assert response.headers["Idempotent-Replayed"] == "true"


@pytest.mark.parametrize(
    "options",
    [{}, {"key": lambda: request.headers.get("X-Event")}],
    ids=["header", "key="],
)
@pytest.mark.parametrize("key", ["k", None], ids=["key", "no key"])
def test_view_still_reads_the_raw_form(
    quick: Shop, options: dict[str, Any], key: str | None
) -> None:
    """A view can check a signature over the bytes of a form, and read its fields."""

    def view() -> dict[str, str]:
        return {"raw": request.get_data(as_text=True), "a": request.form["a"]}

    quick.app.post("/accounts")(idempotent(**options)(view))
    headers = {"X-Event": key} if key else {}
    response = quick.post(key=key, data={"a": "1", "b": "x y"}, headers=headers)
    assert response.json == {"raw": "a=1&b=x+y", "a": "1"}


@pytest.mark.parametrize("required", [True, False], ids=["required", "optional"])
@pytest.mark.parametrize(
    "loader",
    [
        lambda: None,
        lambda: "",
        lambda: request.headers["X-Absent"],
        lambda: request.form["absent"],
        lambda: request.environ["absent"],
        lambda: request.form.getlist("absent")[0],
    ],
    ids=["None", "empty", "header", "form", "KeyError", "IndexError"],
)
def test_loader_without_a_key(
    quick: Shop, loader: Callable[[], Any], *, required: bool
) -> None:
    """A key= function that finds nothing means that there is no key."""
    running_view(quick, required=required, key=loader)
    response = quick.post(key="ignored", data={})
    if required:
        refused(response, 400, "KEY_MISSING")
    assert response.status_code == (400 if required else 200)
    assert (quick.runs, records(quick)) == ([] if required else [1], 0)


@pytest.mark.parametrize("key", [1, 0, True, b"k", ["k"], *UNUSABLE], ids=repr)
def test_loader_with_an_unusable_key(gate: Gate, key: Any) -> None:
    """A key= function whose result is no storable text ends as 400."""
    gate.loaders["key"] = lambda: key
    with statements_sent() as statements:
        response = gate.post(path="/keyed")
    refused(response, 400, "KEY_INVALID")
    assert (gate.runs, statements) == ([], [])


@pytest.mark.parametrize("key", ["ä" * 255, " k ", "\U0001f600" * 255], ids=repr)
def test_loader_gives_any_storable_text(shop: Shop, key: str) -> None:
    """A key that the application gives is not bound to the header's grammar."""
    running_view(shop, key=lambda: key)
    assert [shop.post().status_code for _ in range(2)] == [200, 200]
    record = shop.record(key)
    assert record is not None
    assert record.scope.idempotency_key == key
    assert shop.runs == [1]


def test_loader_of_a_key_that_raises(shop: Shop) -> None:
    """An error of the key= function is the application's, and leaves nothing."""

    def loader() -> str:
        message = "broken"
        raise ValueError(message)

    running_view(shop, key=loader)
    assert shop.post().status_code == 500
    assert (shop.runs, records(shop)) == ([], 0)


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"data": "{", "content_type": "application/json"}, 400),
        ({"data": "{}", "content_type": "text/plain"}, 415),
    ],
    ids=["no JSON", "other type"],
)
def test_loader_of_a_key_that_aborts(
    quick: Shop, options: dict[str, Any], status: int
) -> None:
    """What the key= function answers by an HTTP error is answered."""
    running_view(quick, key=lambda: request.get_json()["id"])
    assert quick.post(**options).status_code == status
    assert (quick.runs, records(quick)) == ([], 0)


def test_body_too_deep_for_the_key_is_refused(quick: Shop) -> None:
    """A body that exhausts the parser of the key= function is the client's mistake."""
    running_view(quick, key=lambda: request.get_json()["id"])
    deep = quick.post(data=b"[" * 100_000, content_type="application/json")
    refused(deep, 400, "KEY_INVALID")
    assert (quick.runs, records(quick)) == ([], 0)


def test_parts_of_a_form_without_a_name_are_told_apart(quick: Shop) -> None:
    """A field or file without a name is none with an empty name, and no failure."""
    running_view(quick)
    part = "--b\r\nContent-Disposition: form-data; {}\r\n\r\nx\r\n"
    statuses = []
    for about in ("nme=a", 'name=""', "filename=f", 'name=""; filename=f', "nme=b"):
        body = part.format(about) + part.format("name=a") + "--b--\r\n"
        answer = quick.post(data=body, content_type="multipart/form-data; boundary=b")
        statuses.append(answer.status_code)
    assert statuses == [200, 422, 422, 422, 200]
    assert quick.runs == [1]


def test_query_that_is_no_text_is_told_apart_by_its_bytes(quick: Shop) -> None:
    """Bytes without an escape, which no browser sends, are a query like any other."""
    running_view(quick)
    statuses = [
        quick.post(environ_overrides={"QUERY_STRING": query}).status_code
        for query in ("a=\xff", "a=\xff", "a=\xfe", "a=b")
    ]
    assert statuses == [200, 200, 422, 422]
    assert quick.runs == [1]


@pytest.mark.parametrize(
    "body", [b"{", b"", b'{"name": "x"} y', b"\xff\xfe\xfa", b"nul"]
)
def test_body_that_is_not_the_json_it_claims(quick: Shop, body: bytes) -> None:
    """The view's own refusal of a body is an answer like any other."""

    def view() -> dict[str, Any]:
        quick.runs.append(1)
        return {"name": request.get_json()["name"]}

    quick.view(view)
    options: dict[str, Any] = {"data": body, "content_type": "application/json"}
    answers = [quick.post(**options) for _ in range(2)]
    assert [a.status_code for a in answers] == [400, 400]
    assert answers[0].data == answers[1].data
    assert "Idempotent-Replayed" in answers[1].headers
    assert (quick.runs, quick.status()) == ([1], "succeeded")


def test_corrected_body_needs_a_new_key(shop: Shop) -> None:
    """A body that was refused and then corrected is another request."""
    shop.view(shop.create)
    bad: dict[str, Any] = {"data": b"{", "content_type": "application/json"}
    assert shop.post(**bad).status_code == 400
    refused(shop.post(), 422, "KEY_CONFLICT")
    assert shop.post(key="other").status_code == 201
    assert shop.accounts() == ["first"]


def test_body_that_is_too_large_is_refused_before_the_claim(quick: Shop) -> None:
    """The application's limit on bodies holds, and its 413 frees nothing up."""
    quick.app.config["MAX_CONTENT_LENGTH"] = 10
    running_view(quick)
    assert quick.post(data=b"x" * 11).status_code == 413
    assert (quick.runs, records(quick)) == ([], 0)
    assert quick.post(data=b"x" * 10).status_code == 200


LOADERS = ["user_id", "tenant_id"]
every_loader = pytest.mark.parametrize("name", LOADERS)


def register(shop: Shop, name: str, loader: Callable[[], Any]) -> None:
    """Register a function that names the caller or the tenant."""
    getattr(shop.idempotency, f"{name}_loader")(loader)


@every_loader
@pytest.mark.parametrize("value", [None, "", *UNUSABLE], ids=repr)
def test_caller_that_is_not_named_is_refused(gate: Gate, name: str, value: Any) -> None:
    """Nobody, and nobody that the database can keep, gets 403."""
    gate.loaders[name] = lambda: value
    with statements_sent() as statements:
        response = gate.post(path="/optional")
    refused(response, 403, "CALLER_UNKNOWN")
    assert (gate.runs, statements) == ([], [])


@every_loader
@pytest.mark.parametrize("value", [0, 7, True, b"u1"])
def test_caller_of_a_wrong_type_is_the_applications_error(
    gate: Gate, name: str, value: Any
) -> None:
    """A loader that returns no text is told so, by an error that names it."""
    gate.loaders[name] = lambda: value
    gate.app.testing = True
    with pytest.raises(IdempotencyConfigError, match=f"{name} loader") as caught:
        gate.post(path="/optional")
    assert type(value).__name__ in str(caught.value)
    assert (gate.runs, records(gate)) == ([], 0)


@every_loader
@pytest.mark.parametrize("path", ["/optional", "/anonymous"])
@pytest.mark.parametrize("error", [ValueError, LookupError])
def test_loader_that_raises_is_never_anonymous(
    gate: Gate, name: str, error: type[Exception], path: str
) -> None:
    """An error of a loader goes on; the request is not run for nobody."""

    def loader() -> str:
        raise error

    gate.loaders[name] = loader
    gate.app.testing = True
    with pytest.raises(error):
        gate.post(path=path)
    assert (gate.runs, records(gate)) == ([], 0)


@every_loader
@pytest.mark.parametrize("value", [None, 7], ids=repr)
def test_nothing_of_a_refused_caller_is_left(shop: Shop, name: str, value: Any) -> None:
    """A request whose caller was not known leaves the key free on every database."""
    shop.creating_view()
    good = {"user_id": lambda: "u1", "tenant_id": lambda: ""}
    register(shop, name, lambda: value)
    assert shop.post().status_code in {403, 500}
    assert records(shop) == 0
    shop.idempotency._loaders.tenant_id = None
    register(shop, "user_id", good["user_id"])
    assert shop.post().status_code == 201


def test_without_any_loader_the_error_says_what_to_paste(quick: Shop) -> None:
    """An application that names nobody is told how to, in lines to paste."""
    running_view(quick)
    quick.idempotency._loaders.user_id = None
    quick.app.testing = True
    with pytest.raises(IdempotencyConfigError) as caught:
        quick.post()
    assert "@idempotency.user_id_loader\n    def caller():\n" in str(caught.value)
    assert "anonymous=True" in str(caught.value)
    assert (quick.runs, records(quick)) == ([], 0)


def test_without_any_loader_the_client_gets_500(quick: Shop) -> None:
    """The client of an application that is set up wrongly learns nothing of it."""
    running_view(quick)
    quick.idempotency._loaders.user_id = None
    response = quick.post()
    assert response.status_code == 500
    assert "loader" not in response.text


def test_without_any_loader_and_without_a_key_the_view_runs(quick: Shop) -> None:
    """Nobody has to be named for a request without a key."""
    running_view(quick)
    quick.idempotency._loaders.user_id = None
    assert quick.post(key=None).status_code == 200


@pytest.mark.parametrize(
    "loader", [None, lambda: None, lambda: ""], ids=["no", "N", "e"]
)
@pytest.mark.parametrize("how", ["route", "application"])
def test_anonymous_callers_share_the_empty_user(
    make_quick: Callable[..., Shop], loader: Callable[[], Any] | None, how: str
) -> None:
    """Where it is asked for, callers without identity are one user."""
    shop = make_quick(IDEMPOTENCY_ANONYMOUS=how == "application")
    running_view(shop, **({"anonymous": True} if how == "route" else {}))
    shop.idempotency._loaders.user_id = loader
    assert [shop.post(user=user).status_code for user in ("u1", "u2")] == [200, 200]
    assert (shop.runs, shop.status(user="")) == ([1], "succeeded")


def test_route_may_refuse_what_the_application_allows(
    make_quick: Callable[..., Shop],
) -> None:
    """A route with anonymous=False needs a caller."""
    shop = make_quick(IDEMPOTENCY_ANONYMOUS=True)
    running_view(shop, anonymous=False)
    register(shop, "user_id", lambda: None)
    refused(shop.post(), 403, "CALLER_UNKNOWN")


def test_anonymous_route_keeps_known_callers_apart(quick: Shop) -> None:
    """A caller with an identity is never one of the anonymous."""
    running_view(quick, anonymous=True)
    assert [quick.post(user=user).status_code for user in ("u1", "u2")] == [200, 200]
    assert quick.runs == [1, 1]
    assert quick.status(user="") is None


@pytest.mark.parametrize("value", ["x" * 1000, "a\0b", 7], ids=repr)
def test_unusable_caller_is_never_anonymous(gate: Gate, value: Any) -> None:
    """A caller that cannot be kept is refused also where anonymous ones are let in."""
    gate.loaders["user_id"] = lambda: value
    assert gate.post(path="/anonymous").status_code in {403, 500}
    assert (gate.runs, records(gate)) == ([], 0)


def test_anonymous_route_still_needs_its_tenant(gate: Gate) -> None:
    """A tenant loader that names nobody is refused on every route."""
    gate.loaders["tenant_id"] = lambda: None
    refused(gate.post(path="/anonymous"), 403, "CALLER_UNKNOWN")
    assert gate.runs == []


def test_refused_caller_is_logged_without_the_key(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says that a caller was refused, and holds no key."""
    gate.loaders["user_id"] = lambda: "u" * 129
    gate.post(key="secret", path="/optional")
    assert "129 characters" in caplog.text
    assert "secret" not in caplog.text


LONG_RULE = "/" + "r" * 300


def test_rule_that_is_too_long_to_name_records(quick: Shop) -> None:
    """A rule that is longer than a route may be is an error that says what to do."""
    quick.app.post(LONG_RULE)(idempotent(quick.create))
    quick.app.testing = True
    with pytest.raises(IdempotencyConfigError, match=r"@idempotent\(route="):
        quick.post(path=LONG_RULE)
    assert (quick.runs, records(quick)) == ([], 0)


def test_long_rule_with_a_name_works(quick: Shop) -> None:
    """A short name stands for a long rule."""
    quick.app.post(LONG_RULE)(idempotent(route="long")(quick.create))
    assert quick.post(path=LONG_RULE).status_code == 201
    assert quick.status(route="long") == "succeeded"


def guarded_run(shop: Shop, **options: Any) -> Callable[[], object]:
    """Return a service call that must be refused before it runs."""

    def run() -> object:
        with shop.app.app_context():
            hash_ = options.pop("request_hash", fingerprint(1))
            return shop.idempotency.guard.run(
                shop.scope(), hash_, lambda: shop.runs.append(1), **options
            )

    return run


@pytest.mark.parametrize("value", ["h" * 129, "a\0", "\ud800", 7, None], ids=repr)
def test_unusable_request_hash_is_refused(gate: Gate, value: Any) -> None:
    """A hash that cannot be kept unchanged is refused before any statement."""
    with (
        statements_sent() as statements,
        pytest.raises(ValueError, match="request_hash"),
    ):
        guarded_run(gate, request_hash=value)()
    assert (gate.runs, statements) == ([], [])


@pytest.mark.parametrize("name", ["task_id", "outbox_event_id"])
@pytest.mark.parametrize("value", ["i" * 256, "a\0", "\ud800", 7, None], ids=repr)
def test_unusable_bound_id_is_refused(gate: Gate, name: str, value: Any) -> None:
    """An id that cannot be kept unchanged is refused before any statement."""
    with statements_sent() as statements, pytest.raises(ValueError, match=name):
        guarded_run(gate, **{f"{name}_builder": lambda _claim: value})()
    assert (gate.runs, statements) == ([], [])


@pytest.mark.parametrize("option", ["ttl", "lease"])
@pytest.mark.parametrize("value", [0, 0.0, -1, True, "1", float("nan")], ids=repr)
def test_unusable_duration_is_refused(gate: Gate, option: str, value: Any) -> None:
    """A life or lease that makes no sense is refused before any statement."""
    with (
        statements_sent() as statements,
        pytest.raises(IdempotencyConfigError, match=f"^{option} is"),
    ):
        guarded_run(gate, **{option: value})()
    assert (gate.runs, statements) == ([], [])


def test_parts_of_a_request_are_kept_apart(shop: Shop) -> None:
    """What moves from the query to the body makes another request."""
    form = "application/x-www-form-urlencoded"
    hashes = set()
    for query, data in (({}, {"x": form}), ({form: "x"}, {})):
        with shop.app.test_request_context(
            "/accounts",
            method="POST",
            query_string=query,
            data=data,
            content_type=form,
        ):
            hashes.add(request_hash("POST /accounts", Config(), Fingerprint()))
    assert len(hashes) == 2
