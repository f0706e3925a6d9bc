"""The example on a database, with its provider, as a scenario finds it."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import traceback
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from flask import got_request_exception
from sqlalchemy import delete, func, select
from werkzeug.serving import WSGIRequestHandler, make_server

from example_app import create_app
from example_app.auth import Caller
from example_app.extensions import db, idempotency
from example_app.httpclient import send
from example_app.models import Account, Job, Payment, ProviderEvent, StoredFile
from example_app.provider import create_provider

from .model import COMPLETE, FindingError, Model, expect
from .requests import WEBHOOK

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _typeshed.wsgi import StartResponse, WSGIEnvironment

    from tests.databases import Database

    from .requests import Request, Scenario, Wire

_MODELS: dict[str, type[Any]] = {
    "/accounts": Account,
    "/files": StoredFile,
    "/tasks": Job,
    "/payments": Payment,
    WEBHOOK: ProviderEvent,
}
_SHOWN = 12


class _Quiet(WSGIRequestHandler):
    """Serves without a line for each request."""

    def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""


class Provider:
    """
    The simulated provider over HTTP, with a new ledger for each scenario.

    Attributes:
        down: An address where nothing listens.
        during: What happens while the provider works for a charge.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._app = create_provider()
        self.during: Any = None
        server = make_server(
            "127.0.0.1", 0, self._serve, threaded=True, request_handler=_Quiet
        )
        stack.callback(server.server_close)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        self.url = f"http://127.0.0.1:{server.server_port}"
        # Bound, so that nobody else gets the port, but not listening.
        bound = stack.enter_context(socket.socket())
        bound.bind(("127.0.0.1", 0))
        self.down = f"http://127.0.0.1:{bound.getsockname()[1]}"

    def restart(self, failures: Iterable[str]) -> None:
        """Forget everything, and plan the next failures."""
        self._app = create_provider()
        client = self._app.test_client()
        for when in failures:
            client.post("/failures", json={"when": when})

    def charges(self) -> int:
        """Return how many charges were made."""
        log = send("GET", f"{self.url}/log").json()
        return len(log["charges"])

    def _serve(self, environ: WSGIEnvironment, start: StartResponse) -> Any:
        during, self.during = self.during, None
        if during is not None:
            during()
        return self._app(environ, start)


class Target:
    """
    The example on an empty database, ready to play scenarios.

    Attributes:
        statistics: Counts of requests, statuses, codes and replays.
        found: Whether a scenario failed, so that those to come are shorter ones.
    """

    def __init__(self, database: Database) -> None:
        self._stack = ExitStack()
        self._provider = Provider(self._stack)
        self.statistics: Counter[str] = Counter()
        self.found = False
        self._app = create_app(
            {
                "SQLALCHEMY_DATABASE_URI": database.url,
                "PROVIDER_URL": self._provider.url,
            }
        )
        self.rules = list(self._app.url_map.iter_rules())
        self._raised: list[str] = []
        self._played: list[Wire] = []
        # Flask keeps only weak references to what it calls.
        got_request_exception.connect(self._note_exception, self._app)
        with self._app.app_context():
            db.create_all()
        for name in ("example_app", "flask_idempotency"):
            # Each odd request would be reported there, traceback and all.
            logger = logging.getLogger(name)
            self._stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL + 1)

    def close(self) -> None:
        """Close every connection and stop the provider."""
        got_request_exception.disconnect(self._note_exception, self._app)
        self._stack.close()
        with self._app.app_context():
            db.session.remove()
            db.engine.dispose()
            idempotency.store.close()

    def _note_exception(self, _app: Any, exception: BaseException, **_: Any) -> None:
        self._raised.append("".join(traceback.format_exception(exception)[-6:]))

    def play(self, scenario: Scenario) -> None:
        """
        Play a scenario on empty tables.

        Raises:
            FindingError: With the requests up to the one that got a wrong answer.
        """
        self._empty()
        self._played, self._raised = [], []
        self._provider.restart(scenario.failures)
        provider = self._provider
        url = provider.url if scenario.provider else provider.down
        self._app.config["PROVIDER_URL"] = url
        model, ids = Model(self.statistics), {"file": "1"}
        try:
            for step in scenario.steps:
                self._step(model, ids, step.request, step.during)
            self._check_end(model)
        except FindingError as finding:
            if not self.found:
                say(f"Found: {finding}. Looking for the shortest scenario.")
            self.found = True
            raise FindingError(self._report(finding)) from None

    def _report(self, finding: FindingError) -> str:
        played = [str(wire) for wire in self._played]
        lines = [f"... {len(played) - _SHOWN} before"] if len(played) > _SHOWN else []
        lines += played[-_SHOWN:]
        return "\n".join([str(finding), *lines, *self._raised[-1:]])

    def _step(
        self,
        model: Model,
        ids: dict[str, str],
        request: Request,
        during: Iterable[Request] = (),
    ) -> None:
        trouble: list[Exception] = []

        def meanwhile() -> None:
            try:
                for other in during:
                    self._step(model, ids, other)
            except Exception as error:  # noqa: BLE001 - raised where the step ends
                trouble.append(error)

        self._provider.during = meanwhile if during else None
        wire = request.wire(ids)
        self._played.append(wire)
        client = self._app.test_client(use_cookies=False)
        response = client.open("/", buffered=True, **wire.arguments())
        self._provider.during = None
        if trouble:
            raise trouble[0]
        model.judge(request, wire, response)
        if response.status_code in {201, 202} and isinstance(response.json, dict):
            name = request.rule.strip("/").rstrip("s")
            made = response.json.get("id") or response.json.get("task_id")
            ids.setdefault(name, str(made))

    def _empty(self) -> None:
        with self._app.app_context(), db.engine.begin() as connection:
            for model in (*_MODELS.values(), idempotency.Record):
                connection.execute(delete(model))

    def _check_end(self, model: Model) -> None:
        """Check the tables, now that nothing runs."""
        with self._app.app_context():
            record = idempotency.Record
            processing = _count(select(record.id).where(record.status == "processing"))
            complete = _count(
                select(StoredFile.id).where(StoredFile.status != "uploaded")
            )
            rows = {rule: _count(select(m.id)) for rule, m in _MODELS.items()}
            scopes = select(record.tenant_id, record.user_id, record.idempotency_key)
            records = [_texts(row) for row in db.session.execute(scopes)]
            db.session.rollback()
        for tenant_id, user_id, key in records:
            model.check_record(Caller(tenant_id, user_id), key)
        expect(processing == 0, f"{processing} records are still processing")
        rows[COMPLETE] = complete
        for rule, count in rows.items():
            effects = model.effects[rule]
            expect(count == effects, f"{rule}: {count} rows after {effects} effects")
        charges = self._provider.charges()
        expect(charges >= rows["/payments"], "a payment without a charge")
        most = len(model.operations)
        expect(charges <= most, f"{charges} charges for {most} operations")


def _texts(row: Iterable[Any]) -> list[str]:
    # Which the family of MySQL reads as bytes.
    return [v.decode() if isinstance(v, bytes) else str(v) for v in row]


def say(line: str) -> None:
    """Tell how far it is."""
    print(line, file=sys.stderr, flush=True)


def _count(rows: Any) -> int:
    query = select(func.count()).select_from(rows.subquery())
    return int(db.session.execute(query).scalar_one())
