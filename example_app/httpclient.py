"""One HTTP request with the standard library; use httpx or requests in earnest."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping
    from email.message import Message

#: Longest silence of the other side.
TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An HTTP answer, whatever its status."""

    status: int
    headers: Message
    body: bytes

    def json(self) -> Any:
        """Return the decoded body."""
        return json.loads(self.body)


def send(
    method: str, url: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> Reply:
    """
    Send a request over plain HTTP and return the answer.

    Raises:
        OSError: If the other side cannot be reached or is silent.
        http.client.HTTPException: If its answer is no HTTP.
    """
    parts = urlsplit(url)
    connection = HTTPConnection(
        parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS
    )
    with closing(connection):
        connection.request(method, parts.path or "/", body, dict(headers or {}))
        response = connection.getresponse()
        return Reply(
            status=response.status, headers=response.headers, body=response.read()
        )
