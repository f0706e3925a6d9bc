"""The story: one method for each chapter, in the order in which it is told."""

from __future__ import annotations

import json
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from example_app.auth import EXAMPLE_SIGNING_KEY, signature
from example_app.httpclient import send

from .client import Client, Request, json_request, member, upload_request
from .effects import Effects
from .inspection import Inspection

if TYPE_CHECKING:
    from example_app.httpclient import Reply

    from .processes import Children
    from .report import Report


class Story:
    """
    Plays every chapter against the running servers.

    Args:
        report: Takes what is seen and what is wrong.
        children: Runs ``flask`` commands on the servers' database.
        address: The application's address.
        provider: The provider's address.
    """

    def __init__(
        self, report: Report, children: Children, *, address: str, provider: str
    ) -> None:
        self._report = report
        self._address = address
        self._provider = provider
        self._client = Client(address, report)
        self._inspection = Inspection(children)
        self._effects = Effects(children.database_uri, provider)
        # A database that is used again must not know this run's keys.
        self._run = secrets.token_hex(2)
        self._reference = ""

    def play(self) -> None:
        """Tell the whole story."""
        self.accounts()
        self.in_progress()
        self.failure()
        self.files()
        self.tasks()
        self.payments()
        self.webhook()
        self.wrong_keys()
        self.diagnoses()
        self._effects.compare(self._report)

    def accounts(self) -> None:
        """Create, retry, and change the request under the same key."""
        self._report.chapter("One effect per key")
        key = self._key("account")
        request = json_request("/accounts", key, {"name": "Savings"})
        first = self._client.play("An account is created.", request, 201)
        self._replay(
            "The client sends it again: same answer, no new row.", first, request
        )
        self._client.play(
            "The key with another body is a mistake of the client.",
            json_request("/accounts", key, {"name": "Current"}),
            422,
            code="IDEMPOTENCY_KEY_CONFLICT",
        )
        self._inspection.ask("accounts.create", key)

    def in_progress(self) -> None:
        """Retry while the first request is held at a gate in its handler."""
        self._report.chapter("A retry while the first request still runs")
        request = json_request("/demo/slow", self._key("slow"), {})
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(self._client.post, request)
            try:
                arrival = send("GET", f"{self._address}/demo/gate")
                self._report.expect("the gate's answer", arrival.status, 204)
                reply = self._client.play(
                    "A handler is at work, and the client asks again.",
                    request,
                    409,
                    code="IDEMPOTENCY_IN_PROGRESS",
                )
                self._check_retry_after(reply)
            finally:
                # Whatever happened: nobody is left waiting.
                with suppress(OSError):
                    send("POST", f"{self._address}/demo/gate")
            first = running.result()
        self._report.step("The first request ends.")
        self._client.check(request, first, 201)
        self._replay("Now the retry gets its answer.", first, request)
        self._inspection.ask("POST /demo/slow", request.key)

    def failure(self) -> None:
        """Fail in the handler and retry."""
        self._report.chapter("A failure is an outcome, too")
        request = json_request("/demo/broken", self._key("broken"), {})
        self._client.play("A handler writes a row, then raises.", request, 500)
        self._client.play(
            "The retry gets the stored failure; the handler does not run again.",
            request,
            500,
            replayed=True,
            code="IDEMPOTENCY_PREVIOUS_FAILURE",
        )
        diagnosis = "failed_retry_requires_opt_in"
        self._inspection.ask("POST /demo/broken", request.key, diagnosis)

    def files(self) -> None:
        """Upload with two boundaries, then complete."""
        self._report.chapter("Files: the content counts, not how it is wrapped")
        key = self._key("upload")
        upload = upload_request("/files", key, b"12 rows", "boundary-one")
        first = self._client.play("A file is uploaded.", upload, 201)
        again = upload_request("/files", key, b"12 rows", "boundary-two")
        self._replay("It is sent again, with another boundary.", first, again)
        self._inspection.ask("files.store", key)
        path = f"/files/{member(first, 'id')}/complete"
        request = json_request(path, self._key("complete"), {})
        first = self._client.play("The upload is declared complete.", request, 200)
        self._replay("And once more.", first, request)
        self._inspection.ask("files.complete", request.key)

    def tasks(self) -> None:
        """Submit a task twice."""
        self._report.chapter("Tasks: a retry names the same task")
        request = json_request("/tasks", self._key("report"), {"month": "2030-01"})
        first = self._client.play("A report is asked for.", request, 202)
        again = self._replay("It is asked for again.", first, request)
        task_id = member(first, "task_id")
        self._report.expect("the task's id", member(again, "task_id"), task_id)
        self._report.line(f"     task_id {task_id}")
        self._inspection.ask("tasks.submit", request.key)

    def payments(self) -> None:
        """Lose the provider's first answer; the retry must not charge again."""
        self._report.chapter("Payments: a provider outside of the transaction")
        plan = json.dumps({"when": "after"}).encode()
        headers = {"Content-Type": "application/json"}
        send("POST", f"{self._provider}/failures", plan, headers)
        request = json_request("/payments", self._key("payment"), {"amount": 1250})
        self._client.play("The provider charges, and its answer is lost.", request, 502)
        paid = self._client.play(
            "The retry runs; the provider gets the same key and does not charge.",
            request,
            201,
        )
        self._replay("Another retry gets the answer.", paid, request)
        self._reference = str(member(paid, "reference"))
        self._inspection.ask("POST /payments", request.key)

    def webhook(self) -> None:
        """Deliver the provider's event twice, and once with a false signature."""
        self._report.chapter("Webhooks: the event's id is the key")
        key = self._key("event")
        event = {"id": key, "type": "charge.settled", "reference": self._reference}
        body = json.dumps(event).encode()
        request = self._event(key, body, "forged")
        self._client.play("A forged event is refused and claims nothing.", request, 401)
        request = self._event(key, body, signature(EXAMPLE_SIGNING_KEY, body))
        first = self._client.play("The provider reports a settlement.", request, 204)
        self._replay("It delivers the event again: settled once.", first, request)
        self._inspection.ask_for_event("POST /webhooks/provider", key)

    def wrong_keys(self) -> None:
        """Send a malformed key and none."""
        self._report.chapter("Keys that are no keys")
        for text, key, code in (
            ("A malformed key.", "two words", "IDEMPOTENCY_KEY_INVALID"),
            ("No key at all.", None, "IDEMPOTENCY_KEY_MISSING"),
        ):
            request = json_request("/accounts", key, {"name": "Savings"})
            self._client.play(text, request, 400, code=code)

    def diagnoses(self) -> None:
        """Tell what the command line says of each key."""
        self._report.chapter("What 'flask idempotency diagnose' says of each key")
        self._inspection.tell(self._report)

    def _replay(self, text: str, first: Reply, request: Request) -> Reply:
        """Send a retry that has to get the first answer, byte for byte."""
        again = self._client.play(text, request, first.status, replayed=True)
        self._report.expect("the body", again.body, first.body)
        content_types = [reply.headers.get("Content-Type") for reply in (again, first)]
        self._report.expect("the content type", *content_types)
        return again

    def _check_retry_after(self, reply: Reply) -> None:
        seconds = reply.headers.get("Retry-After", "")
        self._report.expect("Retry-After is a number", seconds.isdecimal(), wanted=True)
        self._report.line(f"     Retry-After: {seconds}")

    def _event(self, key: str, body: bytes, signed: str) -> Request:
        headers = {"Content-Type": "application/json", "X-Signature": signed}
        return Request(path="/webhooks/provider", key=key, body=body, headers=headers)

    def _key(self, name: str) -> str:
        return f"{name}-{self._run}"
