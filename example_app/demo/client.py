"""The demo's HTTP client: sends a request, prints it, checks the answer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from example_app.auth import EXAMPLE_TOKENS
from example_app.httpclient import Reply, send

if TYPE_CHECKING:
    from .report import Report

TOKEN = next(iter(EXAMPLE_TOKENS))


@dataclass(frozen=True, kw_only=True)
class Request:
    """
    A POST request of the story.

    Attributes:
        path: Where it goes.
        key: The idempotency key as it is printed.
        body: The bytes.
        headers: What is sent with it.
    """

    path: str
    key: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def json_request(path: str, key: str | None, value: object) -> Request:
    """Return a client's request with a JSON body."""
    return Request(
        path=path,
        key=key or "(no key)",
        body=json.dumps(value).encode(),
        headers={"Content-Type": "application/json", **_client_headers(key)},
    )


def upload_request(path: str, key: str, content: bytes, boundary: str) -> Request:
    """Return a client's upload; each client library makes boundaries of its own."""
    head = (
        f"--{boundary}\r\n"
        'Content-Disposition: form-data; name="file"; filename="report.txt"\r\n'
        "Content-Type: text/plain\r\n\r\n"
    )
    return Request(
        path=path,
        key=key,
        body=head.encode() + content + f"\r\n--{boundary}--\r\n".encode(),
        headers={
            "Content-Type": f"multipart/form-data; boundary={boundary}",
            **_client_headers(key),
        },
    )


def _client_headers(key: str | None) -> dict[str, str]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    if key is not None:
        # The draft of the header asks for quotes; a bare key is the same key. One with
        # a blank needs them, so the demo's malformed key goes without.
        headers["Idempotency-Key"] = key if " " in key else f'"{key}"'
    return headers


class Client:
    """
    Plays requests of the story against a server.

    Args:
        address: The server's address.
        report: Takes what is seen and what is wrong.
    """

    def __init__(self, address: str, report: Report) -> None:
        self._address = address
        self._report = report

    def post(self, request: Request) -> Reply:
        """Send a request and return the answer, unseen."""
        return send("POST", self._address + request.path, request.body, request.headers)

    def play(
        self,
        text: str,
        request: Request,
        status: int,
        *,
        replayed: bool = False,
        code: str | None = None,
    ) -> Reply:
        """
        Send a request as the next step of the story and check the answer.

        Args:
            text: What happens, in words.
            request: What is sent.
            status: The status that it has to be answered with.
            replayed: Whether the answer has to be a stored one.
            code: The code that a Problem has to carry.
        """
        self._report.step(text)
        reply = self.post(request)
        self.check(request, reply, status, replayed=replayed, code=code)
        return reply

    def check(
        self,
        request: Request,
        reply: Reply,
        status: int,
        *,
        replayed: bool = False,
        code: str | None = None,
    ) -> None:
        """Print an answer and compare it with what it has to be."""
        seen_code = member(reply, "code")
        marked = reply.headers.get("Idempotent-Replayed") == "true"
        outcome = f"{reply.status} replayed" if marked else f"{reply.status}"
        self._report.line(f"     POST {request.path:<19} {request.key:<13} {outcome}")
        if seen_code:
            self._report.line(f"     {seen_code}")
        self._report.expect("the status", reply.status, status)
        self._report.expect("the replay marker", marked, replayed)
        self._report.expect("the code", seen_code, code)


def member(reply: Reply, name: str) -> Any:
    """Return a member of a JSON answer, ``None`` where there is none."""
    try:
        value = reply.json()
    except ValueError:
        return None
    return value.get(name) if isinstance(value, dict) else None
