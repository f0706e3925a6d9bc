"""The example application, route by route, on every database."""

from __future__ import annotations

import io
import threading
from typing import TYPE_CHECKING, Any

import click
import pytest
from flask import json
from sqlalchemy import event, func, select
from werkzeug.serving import make_server

from example_app import create_app
from example_app.auth import EXAMPLE_SIGNING_KEY, signature
from example_app.extensions import db, idempotency
from example_app.httpclient import send
from example_app.models import Account, Job, Payment, ProviderEvent, StoredFile
from example_app.provider import create_provider

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from werkzeug.test import Client, TestResponse

    from tests.databases import Database

USER, COLLEAGUE, STRANGER = (f"example-token-{number}" for number in (1, 2, 3))


class Example:
    """The application on a test's database, and a client of it."""

    def __init__(self, database: Database, provider: str) -> None:
        self.provider = provider
        self.app = create_app(
            {"SQLALCHEMY_DATABASE_URI": database.url, "PROVIDER_URL": provider}
        )
        with self.app.app_context():
            db.create_all()

    def close(self) -> None:
        """Close every connection."""
        with self.app.app_context():
            db.engine.dispose()
            idempotency.store.close()

    def client(self) -> Client:
        """Return a client of its own; it may also lead to a real server."""
        return self.app.test_client()

    def post(
        self, path: str, *, key: str | None = "k", caller: str = USER, **options: Any
    ) -> TestResponse:
        """Send a POST request as one of the users."""
        headers = {"Authorization": f"Bearer {caller}"}
        if key is not None:
            headers["Idempotency-Key"] = f'"{key}"'
        return self.client().post(path, headers=headers, **options)

    def get(self, path: str, caller: str = USER) -> TestResponse:
        """Send a GET request as one of the users."""
        headers = {"Authorization": f"Bearer {caller}"}
        return self.client().get(path, headers=headers)

    def account(self, name: str = "Savings", **options: Any) -> TestResponse:
        """Ask for an account."""
        return self.post("/accounts", json={"name": name}, **options)

    def upload(self, content: bytes = b"12 rows", **options: Any) -> TestResponse:
        """Upload a file; the test client makes a new boundary each time."""
        file = (io.BytesIO(content), "report.txt", "text/plain")
        return self.post("/files", data={"file": file}, **options)

    def complete(self, file_id: int = 1, **options: Any) -> TestResponse:
        """Declare a file complete."""
        return self.post(f"/files/{file_id}/complete", **options)

    def task(self, month: str = "2030-01", **options: Any) -> TestResponse:
        """Ask for a report."""
        return self.post("/tasks", json={"month": month}, **options)

    def payment(self, amount: int = 1250, **options: Any) -> TestResponse:
        """Ask for a payment."""
        return self.post("/payments", json={"amount": amount}, **options)

    def event(
        self, signed: str | None = None, encoding: str = "utf-8", **members: object
    ) -> TestResponse:
        """Deliver an event, signed by the provider unless another one is given."""
        event = {"id": "event-1", "reference": "charge-1", **members}
        text = json.dumps({n: v for n, v in event.items() if v is not None})
        body = text.encode(encoding)
        signed = signed or signature(EXAMPLE_SIGNING_KEY, body)
        return self.client().post(
            "/webhooks/provider",
            data=body,
            content_type="application/json",
            headers={"X-Signature": signed},
        )

    def count(self, model: type[Any]) -> int:
        """Return the number of committed rows."""
        with self.app.app_context():
            query = select(func.count()).select_from(model)
            return db.session.execute(query).scalar_one()

    def records(self) -> int:
        """Return the number of idempotency records."""
        return self.count(idempotency.Record)

    def plan_failure(self, when: str) -> None:
        """Let the provider's next charge fail."""
        send(
            "POST",
            f"{self.provider}/failures",
            json.dumps({"when": when}).encode(),
            {"Content-Type": "application/json"},
        )

    def provider_log(self) -> dict[str, list[Any]]:
        """Return what the provider remembers."""
        log: dict[str, list[Any]] = send("GET", f"{self.provider}/log").json()
        return log


@pytest.fixture
def provider() -> Iterator[str]:
    """Serve a provider over HTTP and give its address."""
    server = make_server("127.0.0.1", 0, create_provider(), threaded=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def example(database: Database, provider: str) -> Iterator[Example]:
    """Give the application on an empty database."""
    example = Example(database, provider)
    yield example
    example.close()


def is_replay(response: TestResponse) -> bool:
    """Tell whether an answer is marked as a stored one."""
    return response.headers.get("Idempotent-Replayed") == "true"


def code_of(response: TestResponse) -> str:
    """Return the code of a Problem."""
    assert response.mimetype == "application/problem+json"
    return str(response.get_json()["code"])


def test_account_is_created(example: Example) -> None:
    """The first request opens the account."""
    response = example.account()

    assert (response.status_code, response.get_json()) == (
        201,
        {"id": 1, "name": "Savings"},
    )
    assert not is_replay(response)
    assert example.count(Account) == 1


def test_account_retry_gets_the_first_answer(example: Example) -> None:
    """A retry opens no second account and is marked."""
    first, again = example.account(), example.account()

    assert (again.status_code, again.data) == (201, first.data)
    assert is_replay(again)
    assert example.count(Account) == 1


def test_account_key_with_another_name_is_refused(example: Example) -> None:
    """One key stands for one request."""
    example.account()
    other = example.account("Current")

    assert (other.status_code, code_of(other)) == (422, "IDEMPOTENCY_KEY_CONFLICT")
    assert example.count(Account) == 1


@pytest.mark.parametrize("caller", [COLLEAGUE, STRANGER])
def test_callers_do_not_share_keys(example: Example, caller: str) -> None:
    """The key of another user or tenant is another key."""
    example.account()
    other = example.account("Current", caller=caller)

    assert (other.status_code, is_replay(other)) == (201, False)
    assert example.count(Account) == 2


def test_services_do_not_share_keys(example: Example) -> None:
    """One key may be used for an account and a task."""
    assert example.account().status_code == 201
    assert example.task().status_code == 202


def test_accounts_are_listed_for_their_tenant_alone(example: Example) -> None:
    """A tenant sees what its users created, and nothing else."""
    example.account()
    example.account("Current", caller=STRANGER)

    expected = {"accounts": [{"id": 1, "name": "Savings"}]}
    assert example.get("/accounts", COLLEAGUE).get_json() == expected


def test_account_is_shown_to_its_tenant(example: Example) -> None:
    """An account can be looked up by whoever belongs to the tenant."""
    example.account()

    assert example.get("/accounts/1", COLLEAGUE).get_json()["name"] == "Savings"


def test_account_is_hidden_from_other_tenants(example: Example) -> None:
    """For another tenant the account does not exist."""
    example.account()

    assert example.get("/accounts/1", STRANGER).status_code == 404


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800", "a" * 101, 7, None])
def test_unusable_name_claims_nothing(example: Example, name: object) -> None:
    """A name that not every database keeps is refused before the claim."""
    response = example.post("/accounts", json={"name": name})

    assert response.status_code == 400
    assert example.records() == 0


def test_missing_key_is_refused(example: Example) -> None:
    """Every mutating route asks for a key."""
    response = example.account(key=None)

    assert (response.status_code, code_of(response)) == (400, "IDEMPOTENCY_KEY_MISSING")


@pytest.mark.parametrize("path", ["/accounts", "/payments"])
def test_unknown_token_claims_nothing(example: Example, path: str) -> None:
    """Who is not known gets neither an effect nor a record."""
    response = example.post(path, json={}, caller="unknown")

    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"].lower().startswith("bearer")
    assert example.records() == 0


def test_replay_needs_a_known_token(example: Example) -> None:
    """A stored answer is no way around the login."""
    example.account()

    assert example.account(caller="unknown").status_code == 401


def test_file_is_stored(example: Example) -> None:
    """The first upload keeps the file and says what it is."""
    response = example.upload()

    assert response.status_code == 201
    assert response.get_json()["size"] == 7
    with example.app.app_context():
        assert db.session.scalars(select(StoredFile.content)).all() == [b"12 rows"]


def test_upload_retry_may_have_another_boundary(example: Example) -> None:
    """The content decides, not how it was wrapped."""
    first, again = example.upload(), example.upload()

    assert first.request.mimetype_params != again.request.mimetype_params
    assert (again.status_code, again.data) == (201, first.data)
    assert is_replay(again)
    assert example.count(StoredFile) == 1


def test_upload_key_with_other_content_is_refused(example: Example) -> None:
    """One key stands for one content."""
    example.upload()

    assert code_of(example.upload(b"13 rows")) == "IDEMPOTENCY_KEY_CONFLICT"


def test_upload_needs_a_file(example: Example) -> None:
    """A form without the file is refused before the claim."""
    response = example.post("/files", data={"file": "no file"})

    assert response.status_code == 400
    assert example.records() == 0


def test_file_is_completed(example: Example) -> None:
    """The first completion changes the file's status."""
    example.upload()
    response = example.complete()

    assert (response.status_code, response.get_json()["status"]) == (200, "complete")


def test_completion_retry_gets_the_first_answer(example: Example) -> None:
    """A retry is no second completion, which would be refused."""
    example.upload()
    first, again = example.complete(), example.complete()

    assert (again.status_code, again.data) == (200, first.data)
    assert is_replay(again)


def test_completion_under_another_key_is_refused(example: Example) -> None:
    """A file is completed once, whoever asks."""
    example.upload()
    example.complete()

    assert example.complete(key="other").status_code == 409


def test_completion_key_for_another_file_is_refused(example: Example) -> None:
    """The file belongs to what the key stands for."""
    example.upload()
    example.complete()

    assert code_of(example.complete(2)) == "IDEMPOTENCY_KEY_CONFLICT"


def test_other_tenants_cannot_complete_a_file(example: Example) -> None:
    """For another tenant the file does not exist, and it stays as it is."""
    example.upload()

    assert example.complete(caller=STRANGER).status_code == 404
    assert example.complete().status_code == 200


def test_task_is_submitted(example: Example) -> None:
    """The answer names a task that can be looked up."""
    response = example.task()
    task_id = response.get_json()["task_id"]

    assert response.status_code == 202
    assert example.get(f"/tasks/{task_id}").get_json() == {
        "task_id": task_id,
        "month": "2030-01",
        "status": "queued",
    }


def test_task_retry_names_the_same_task(example: Example) -> None:
    """A retry submits nothing and gets the same task's id."""
    first, again = example.task(), example.task()

    assert again.get_json() == first.get_json()
    assert is_replay(again)
    assert example.count(Job) == 1


def test_task_key_with_another_month_is_refused(example: Example) -> None:
    """One key stands for one report."""
    example.task()

    assert code_of(example.task("2030-02")) == "IDEMPOTENCY_KEY_CONFLICT"


def test_task_of_another_tenant_has_another_id(example: Example) -> None:
    """Equal keys of two tenants stand for two tasks, each seen by its own tenant."""
    mine, theirs = example.task(), example.task(caller=STRANGER)
    task_id = theirs.get_json()["task_id"]

    assert mine.get_json()["task_id"] != task_id
    assert example.get(f"/tasks/{task_id}").status_code == 404


def test_payment_is_charged(example: Example) -> None:
    """The payment's row names the provider's charge."""
    response = example.payment()

    assert response.status_code == 201
    assert response.get_json()["reference"] == "charge-1"
    assert example.provider_log()["charges"] == [{"amount": 1250, "id": "charge-1"}]


def test_payment_retry_does_not_reach_the_provider(example: Example) -> None:
    """A stored answer needs no provider."""
    first, again = example.payment(), example.payment()

    assert (again.status_code, again.data) == (201, first.data)
    assert is_replay(again)
    assert len(example.provider_log()["requests"]) == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_payment_retried_after_a_failure_charges_once(
    example: Example, when: str
) -> None:
    """Whether or not the failed call charged, the retry ends with one charge."""
    example.plan_failure(when)
    failed, retried = example.payment(), example.payment()

    assert (failed.status_code, retried.status_code) == (502, 201)
    assert len(example.provider_log()["charges"]) == 1
    assert example.count(Payment) == 1


def test_payment_attempts_share_the_provider_key(example: Example) -> None:
    """Each attempt sends the key that belongs to the operation."""
    example.plan_failure("before")
    example.payment()
    example.payment()

    first, second = example.provider_log()["requests"]
    assert first == second


def test_payment_that_could_not_be_stored_is_not_charged_again(
    example: Example,
) -> None:
    """What the provider has answered is kept, though the payment's row was not."""

    def fail(_mapper: Any, _connection: Any, _payment: Payment) -> None:
        message = "disk full"
        raise RuntimeError(message)

    event.listen(Payment, "before_insert", fail)
    try:
        assert example.payment().status_code == 500
    finally:
        event.remove(Payment, "before_insert", fail)

    assert example.payment().get_json()["reference"] == "charge-1"
    assert len(example.provider_log()["requests"]) == 1


def test_payments_under_two_keys_are_two_charges(example: Example) -> None:
    """Another key is another payment, also for the provider."""
    example.payment()
    example.payment(key="other")

    assert len(example.provider_log()["charges"]) == 2


def test_unreachable_provider_is_a_bad_gateway(example: Example) -> None:
    """Without a provider there is no payment, and the client may retry."""
    address = example.app.config["PROVIDER_URL"]
    example.app.config["PROVIDER_URL"] = "http://127.0.0.1:1"
    assert example.payment().status_code == 502

    example.app.config["PROVIDER_URL"] = address
    assert example.payment().status_code == 201


def test_payment_key_with_another_amount_is_refused(example: Example) -> None:
    """One key stands for one amount, also after a failure."""
    example.plan_failure("before")
    example.payment()

    assert code_of(example.payment(1)) == "IDEMPOTENCY_KEY_CONFLICT"


@pytest.mark.parametrize("amount", [0, -1, True, "1", 1.5, None])
def test_unusable_amount_is_refused(example: Example, amount: Any) -> None:
    """The provider hears nothing of an amount that makes no sense."""
    assert example.payment(amount).status_code == 400
    assert example.provider_log()["requests"] == []


def test_event_settles_its_payment(example: Example) -> None:
    """A signed event changes the payment's status."""
    example.payment()

    assert example.event().status_code == 204
    assert example.get("/payments/1").get_json()["status"] == "settled"


def test_event_delivered_twice_is_handled_once(example: Example) -> None:
    """The second delivery gets the first answer."""
    example.payment()
    first, again = example.event(), example.event()

    assert (first.status_code, again.status_code) == (204, 204)
    assert is_replay(again)
    assert example.count(ProviderEvent) == 1


def test_forged_event_claims_nothing(example: Example) -> None:
    """A bad signature leaves the event's id to the provider."""
    example.payment()
    records = example.records()

    assert example.event("forged").status_code == 401
    assert example.records() == records
    assert example.event().status_code == 204


def test_event_without_id_is_refused(example: Example) -> None:
    """Without an id there is no key."""
    response = example.event(id=None)

    assert (response.status_code, code_of(response)) == (400, "IDEMPOTENCY_KEY_MISSING")


@pytest.mark.parametrize("reference", [None, 7, [], {}, "a\0b", "\ud800", "x" * 101])
def test_unusable_reference_is_refused(example: Example, reference: object) -> None:
    """A reference that no payment can have is the provider's mistake, not a failure."""
    assert example.event(reference=reference).status_code == 400


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_event_in_another_encoding_is_kept(example: Example, encoding: str) -> None:
    """The view keeps the event's meaning; its bytes could hold what no text may."""
    example.payment()

    assert example.event(encoding=encoding).status_code == 204
    with example.app.app_context():
        kept = json.loads(db.session.scalars(select(ProviderEvent.payload)).one())
    assert kept == {"id": "event-1", "reference": "charge-1"}


def test_large_event_is_kept(example: Example) -> None:
    """What is below the limit of a body fits into the event's row."""
    example.payment()

    assert example.event(note="\u00e9" * 150_000).status_code == 204


def test_early_event_is_handled_when_it_comes_again(example: Example) -> None:
    """An event that overtakes its payment is not lost."""
    early = example.event()
    example.payment()
    again = example.event()

    assert (early.status_code, again.status_code) == (503, 204)
    assert example.get("/payments/1").get_json()["status"] == "settled"


@pytest.mark.parametrize("row_id", ["2147483648", "9" * 30, "9" * 5000], ids=len)
def test_id_that_no_row_can_have_is_not_found(example: Example, row_id: str) -> None:
    """An id that is too large for the database, or for Python, is like any other."""
    assert example.get(f"/accounts/{row_id}").status_code == 404
    assert example.get(f"/payments/{row_id}").status_code == 404
    assert example.post(f"/files/{row_id}/complete").status_code == 404


@pytest.mark.parametrize("task_id", ["a%00b", "x", "%ED%A0%80"])
def test_id_that_no_task_can_have_is_not_found(example: Example, task_id: str) -> None:
    """Not every text in a path can be asked of every database."""
    assert example.get(f"/tasks/{task_id}").status_code == 404


@pytest.mark.parametrize("path", ["/accounts", "/tasks", "/payments"])
def test_deeply_nested_body_is_refused(example: Example, path: str) -> None:
    """A body that exhausts the parser is the client's mistake."""
    response = example.post(path, data=b"[" * 100_000, content_type="application/json")

    assert response.status_code == 400


def test_own_errors_are_json(example: Example) -> None:
    """Errors of the application have its own form, with their headers."""
    response = example.client().delete("/accounts")

    assert response.get_json()["error"] == "Method Not Allowed"
    assert "POST" in response.headers["Allow"]


def test_missing_tables_are_explained(example: Example) -> None:
    """Before the first migration every route says what to do."""
    with example.app.app_context():
        db.drop_all()
    response = example.account()

    assert response.status_code == 503
    assert "db upgrade" in response.get_json()["detail"]


def test_unreachable_database_is_explained(tmp_path: Path) -> None:
    """Without a database every route says so."""
    uri = f"sqlite:///{tmp_path / 'no folder' / 'no.sqlite3'}"
    response = create_app({"SQLALCHEMY_DATABASE_URI": uri}).test_client().get("/")

    assert response.status_code == 503
    assert response.get_json()["detail"] == "The database cannot be reached."


@pytest.mark.parametrize(("command", "hints"), [("run", 1), ("shell", 0)])
def test_server_hints_at_missing_tables(
    database: Database, capsys: pytest.CaptureFixture[str], command: str, hints: int
) -> None:
    """Who starts the server before the first migration is told so, nobody else."""
    with click.Context(click.Command(command), info_name=command):
        app = create_app({"SQLALCHEMY_DATABASE_URI": database.url})
    with app.app_context():
        db.engine.dispose()

    assert capsys.readouterr().err.count("db upgrade") == hints


def test_every_mutating_route_is_declared(example: Example) -> None:
    """Each route that changes something says how it treats repeated requests."""
    app = example.app
    mutating = [
        rule.endpoint
        for rule in app.url_map.iter_rules()
        if (rule.methods or set()) & {"POST", "PUT", "PATCH", "DELETE"}
    ]

    assert mutating
    for endpoint in mutating:
        assert hasattr(app.view_functions[endpoint], "__idempotency__")
