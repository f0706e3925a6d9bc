"""Flask responses to stored answers and back."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from flask import current_app
from werkzeug.datastructures import Headers
from werkzeug.wsgi import ClosingIterator

from .exceptions import REPLAYED, ResultNotStorable
from .lifecycle import StoredResponse

if TYPE_CHECKING:
    from flask import Response

#: Made anew for each exchange, or meant for the first caller alone.
_NOT_STORED = frozenset(
    {
        "set-cookie",
        "date",
        "server",
        "www-authenticate",
        "proxy-authenticate",
        "authentication-info",
        "proxy-authentication-info",
        "content-length",
        # RFC 9110, section 7.6.1: fields of one connection.
        "connection",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


def store_response(response: Response, *, max_size: int) -> StoredResponse:
    """
    Return what is kept of an answer, whose body is made into bytes here.

    A body above `max_size` is passed on to the client piece by piece and not kept.

    Raises:
        ResultNotStorable: If the status is none of HTTP's (RFC 9110, section 15).
    """
    if not 100 <= response.status_code <= 599:  # noqa: PLR2004
        raise ResultNotStorable(
            f"The answer has the status {response.status_code}; HTTP has 100 to 599."
        )
    return StoredResponse(
        code=response.status_code,
        headers=tuple(
            (name, value)
            for name, value in response.headers
            if name.lower() not in _NOT_STORED
        ),
        body=_body(response, max_size),
    )


def _body(response: Response, max_size: int) -> bytes | None:
    if not response.is_streamed and not response.direct_passthrough:
        body = response.get_data()
        return body if len(body) <= max_size else None
    # What was set for the stream as a whole stays true for its collected bytes.
    response.direct_passthrough = False
    source, encoded = response.response, response.iter_encoded()
    close = getattr(source, "close", lambda: None)
    pieces: list[bytes] = []
    size = 0
    try:
        for piece in encoded:
            pieces.append(piece)
            size += len(piece)
            if size > max_size:
                response.response = ClosingIterator(chain(pieces, encoded), close)
                return None
    except BaseException:
        close()
        raise
    close()
    response.response = pieces
    return b"".join(pieces)


def replay(stored: StoredResponse) -> Response:
    """Return a stored answer with the marker of a replay."""
    response = current_app.response_class(stored.body or b"", status=stored.code)
    response.headers = Headers(stored.headers)
    response.headers[REPLAYED] = "true"
    return response
