"""The same answers and effects behind gunicorn, with each kind of worker."""

from __future__ import annotations

import inspect
import json
import os
import signal
import socket
import threading
from contextlib import closing
from functools import partial
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text
from werkzeug.serving import make_server

from example_app.extensions import db
from example_app.models import Account
from example_app.provider import create_provider
from tests.acceptance import test_example
from tests.acceptance.test_example import Example
from tests.databases import Database, sqlite_database
from tests.databases import Server as DatabaseServer
from tests.integration.test_races import together
from tests.servers import TIMEOUT_SECONDS, WORKERS, Hook, Server
from tests.shop import Shop, is_replay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from http.client import HTTPResponse
    from pathlib import Path

    from werkzeug.test import Client, TestResponse

pytest.importorskip("gunicorn")
pytest.importorskip("gevent")

pytestmark = pytest.mark.slow

#: Every kind of worker on a server's database, and SQLite behind one of them.
SERVED = [*(("postgresql", worker) for worker in WORKERS), ("sqlite", "gthread")]
RIVALS = 20
#: These change or inspect the application's object, which is in another process here,
#: or send what a server refuses by itself.
_IN_PROCESS = {
    "test_id_that_no_row_can_have_is_not_found",
    "test_every_mutating_route_is_declared",
    "test_missing_tables_are_explained",
    "test_payment_that_could_not_be_stored_is_not_charged_again",
    "test_unreachable_provider_is_a_bad_gateway",
}


class Provider:
    """The simulated provider, with an empty memory for each test."""

    def __init__(self) -> None:
        self.forget()
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def forget(self) -> None:
        """Start with an empty memory."""
        self._app = create_provider()

    def _serve(self, environ: Any, start_response: Any) -> Any:
        return self._app(environ, start_response)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class LiveExample(Example):
    """The example behind a server; the application here only looks at the database."""

    def __init__(
        self, database: Database, worker: str, log: Path, *options: str
    ) -> None:
        self._provider = Provider()
        super().__init__(database, self._provider.url)
        self._server = Server(
            "example_app:create_app()",
            worker,
            log,
            *options,
            EXAMPLE_DATABASE_URI=database.url,
            EXAMPLE_PROVIDER_URL=self._provider.url,
        )
        self._server.wait()

    def client(self) -> Client:
        """Return a client of the server."""
        return self._server.client()

    def empty(self) -> None:
        """Let everything be as at the start, but the server."""
        self._provider.forget()
        tables = db.metadata.sorted_tables
        with self.app.app_context(), db.engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                names = ", ".join(table.name for table in tables)
                connection.execute(text(f"TRUNCATE {names} RESTART IDENTITY CASCADE"))
            else:
                for table in reversed(tables):
                    connection.execute(table.delete())

    def close(self) -> None:
        """Stop the server and close every connection."""
        self._server.stop()
        self._provider.close()
        super().close()


class LiveShop(Shop):
    """The shop behind a server; the application here only looks at the database."""

    def __init__(self, database: Database, worker: str, log: Path) -> None:
        super().__init__(database)  # makes the tables, too
        self.server = Server(
            "tests.slow_shop:create_app()",
            worker,
            log,
            SHOP_DATABASE=database.name,
            SHOP_DATABASE_URL=database.url,
        )
        self.server.wait()

    def client(self) -> Client:
        """Return a client of the server."""
        return self.server.client()

    def close(self) -> None:
        """Stop the server and close every connection."""
        self.server.stop()
        super().close()


@pytest.fixture(scope="module", params=SERVED, ids="-".join)
def served(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Give each database with its workers."""
    pair: tuple[str, str] = request.param
    return pair


@pytest.fixture(scope="module")
def make_database(
    served: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Database]]:
    """Make databases of one kind that stay for all tests on one server."""
    name, _ = served
    if name == "sqlite":
        yield lambda: sqlite_database(tmp_path_factory.mktemp("database"))
        return
    server = DatabaseServer(name)
    if absence := server.absence():
        pytest.skip(absence)
    made: list[str] = []

    def make() -> Database:
        made.append(server.create())
        return Database(name, made[-1])

    yield make
    for url in made:
        server.drop(url)


@pytest.fixture(scope="module")
def worker(served: tuple[str, str]) -> str:
    """Give the kind of worker."""
    return served[1]


@pytest.fixture(scope="module")
def served_example(
    make_database: Callable[[], Database],
    worker: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LiveExample]:
    """Serve the example for many tests."""
    log = tmp_path_factory.mktemp("log") / "gunicorn.txt"
    example = LiveExample(make_database(), worker, log)
    yield example
    example.close()


@pytest.fixture
def live(served_example: LiveExample) -> LiveExample:
    """Give the served example with an empty database."""
    served_example.empty()
    return served_example


def scenarios() -> Iterator[Any]:
    """Yield the tests of the example that need nothing but the example."""
    for name, function in vars(test_example).items():
        if not name.startswith("test_") or name in _IN_PROCESS:
            continue
        first, *others = inspect.signature(function).parameters
        if first != "example":
            continue
        if not others:
            yield pytest.param(function, id=name[5:])
            continue
        (mark,) = function.pytestmark
        argument, values = mark.args
        for number, value in enumerate(values):
            scenario = partial(function, **{argument: value})
            yield pytest.param(scenario, id=f"{name[5:]}-{number}")


#: One server is enough to see what differs from the tests' own process.
EVERYWHERE = [
    pytest.param(pair, marks=[] if pair == SERVED[1] else pytest.mark.torture)
    for pair in SERVED
]


@pytest.mark.parametrize("served", EVERYWHERE, ids="-".join, indirect=True)
@pytest.mark.parametrize("scenario", list(scenarios()))
def test_example_behind_a_server(
    live: LiveExample, scenario: Callable[[Example], None]
) -> None:
    """What holds for the example in the tests' own process holds behind gunicorn."""
    scenario(live)


def test_rivals_over_the_network_open_one_account(live: LiveExample) -> None:
    """Twenty clients with one request at once are one effect."""
    assert_rivals_open_one_account(live)


def assert_rivals_open_one_account(live: LiveExample) -> None:
    """Let clients race, then look at their answers, the rows and one more answer."""
    answers = together(lambda: live.account().status_code, RIVALS)
    assert 201 in answers
    assert set(answers) <= {201, 409}
    assert live.count(Account) == 1
    again = live.account()
    assert (again.status_code, is_replay(again)) == (201, True)


@pytest.mark.parametrize("make_database", ["postgresql"], indirect=True)
def test_preloaded_application_serves_rivals(
    make_database: Callable[[], Database], worker: str, tmp_path: Path
) -> None:
    """Workers that share what was loaded before they were forked share no connection."""
    live = LiveExample(make_database(), worker, tmp_path / "log", "--preload")
    try:
        assert_rivals_open_one_account(live)
    finally:
        live.close()


@pytest.fixture(scope="module")
def shop(
    make_database: Callable[[], Database],
    worker: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LiveShop]:
    """Serve a shop; its tests share it, each with an account and key of its own."""
    log = tmp_path_factory.mktemp("log") / "gunicorn.txt"
    shop = LiveShop(make_database(), worker, log)
    yield shop
    shop.close()


@pytest.fixture
def hook() -> Iterator[Hook]:
    """Give what holds a view."""
    hook = Hook()
    yield hook
    hook.close()


def started(shop: LiveShop, hook: Hook, name: str, path: str) -> socket.socket:
    """Send a request whose view is held, and return the client's connection."""
    body = json.dumps({"name": name}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nX-User: u1\r\n"
        f"Idempotency-Key: {name}\r\nX-Hook: {hook.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", shop.server.port))
    connection.sendall(head.encode() + body)
    return connection


def test_client_that_hangs_up_gets_its_answer_later(shop: LiveShop, hook: Hook) -> None:
    """Who closes the connection while the view runs and retries gets the one answer."""
    with started(shop, hook, "hangup", "/accounts"):
        hook.process()
    hook.let_go()  # before the retry: SQLite's wait for a lock stops all greenlets
    again = shop.post("hangup", key="hangup")
    assert (again.status_code, is_replay(again)) == (201, True)
    assert shop.accounts().count("hangup") == 1


def test_killed_worker_leaves_one_effect(shop: LiveShop, hook: Hook) -> None:
    """After a worker's death in the view the retry runs, once the lease is over."""
    with started(shop, hook, "killed", "/brief"):
        os.kill(hook.process(), signal.SIGKILL)
    answer = insisting(lambda: shop.post("killed", key="killed", path="/brief"))
    assert (answer.status_code, is_replay(answer)) == (201, False)
    assert is_replay(shop.post("killed", key="killed", path="/brief"))
    assert shop.accounts().count("killed") == 1


def insisting(send: Callable[[], TestResponse]) -> TestResponse:
    """Send a request until its answer is none that says to come again."""
    for _ in range(int(TIMEOUT_SECONDS / 0.1)):
        answer = send()
        if answer.status_code not in {409, 503}:
            return answer
        threading.Event().wait(0.1)
    raise AssertionError("The key stays blocked.")


def chunked(shop: LiveShop, key: str, *pieces: bytes) -> HTTPResponse:
    """Send a body in chunks, whose length nobody says."""
    connection = HTTPConnection("127.0.0.1", shop.server.port, timeout=TIMEOUT_SECONDS)
    headers = {
        "X-User": "u1",
        "Idempotency-Key": key,
        "Content-Type": "application/json",
        "Transfer-Encoding": "chunked",
    }
    with closing(connection):
        connection.request(
            "POST", "/accounts", iter(pieces), headers, encode_chunked=True
        )
        reply = connection.getresponse()
        reply.read()
        return reply


def test_chunks_do_not_matter(shop: LiveShop) -> None:
    """One body in other chunks is the same request."""
    first = chunked(shop, "chunks", b'{"name": "chunks"}')
    again = chunked(shop, "chunks", b'{"name"', b': "chu', b'nks"}')
    assert (first.status, again.status) == (201, 201)
    assert again.getheader("Idempotent-Replayed") == "true"
    assert shop.accounts().count("chunks") == 1


def test_chunked_body_is_compared(shop: LiveShop) -> None:
    """Another body under the key is a conflict, also where nobody says its length."""
    first = chunked(shop, "compared", b'{"name":', b'"compared"}')
    other = chunked(shop, "compared", b'{"name":', b'"different"}')
    assert (first.status, other.status) == (201, 422)
    assert "different" not in shop.accounts()


def test_chunked_and_whole_body_are_one_request(shop: LiveShop) -> None:
    """How the body was sent is no part of the request."""
    assert chunked(shop, "whole", b'{"name":', b'"whole"}').status == 201
    assert is_replay(shop.post("whole", key="whole"))
