"""Flask responses to stored answers and back."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from flask import current_app
from markupsafe import Markup
from werkzeug.datastructures import Headers
from werkzeug.wsgi import ClosingIterator

from .exceptions import REPLAYED
from .keys import new_key
from .lifecycle import StoredResponse

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flask import Response

    from .config import Config

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


#: What was true of the first bytes, and may not be of others.
_OF_THE_BYTES = frozenset(
    {
        "accept-ranges",
        "content-digest",
        "content-encoding",
        "content-md5",
        "content-range",
        "digest",
        "etag",
        "repr-digest",
    }
)
_ERROR = 400  # RFC 9110, section 15.5: from here on a status says that it failed


def store_response(
    response: Response,
    *,
    max_size: int,
    store_body: bool = True,
) -> StoredResponse:
    """
    Return what is kept of an answer, whose body is made into bytes here.

    A body above `max_size`, and a stream of events, is passed on to the client piece
    by piece and not kept.

    Args:
        response: The answer.
        max_size: Bytes of a body that are kept.
        store_body: False: no body of a success is kept, except an empty one.
    """
    keeps = store_body or response.status_code >= _ERROR
    body = _body(response, max_size)
    return StoredResponse(
        code=response.status_code,
        headers=tuple(
            (name, value)
            for name, value in response.headers
            if name.lower() not in _NOT_STORED
        ),
        body=body if keeps or not body else None,
    )


def _body(response: Response, max_size: int) -> bytes | None:
    if not response.is_streamed and not response.direct_passthrough:
        body = response.get_data()
        return body if len(body) <= max_size else None
    # What was set for the stream as a whole stays true for its collected bytes.
    response.direct_passthrough = False
    source, encoded = response.response, response.iter_encoded()
    close = getattr(source, "close", lambda: None)
    # A stream of events lives as long as the client listens.
    endless = response.mimetype == "text/event-stream"
    try:
        pieces = [] if endless else _collected(encoded, max_size)
    except BaseException:
        close()
        raise
    if endless or sum(map(len, pieces)) > max_size:
        response.response = ClosingIterator(chain(pieces, encoded), close)
        return None
    close()
    response.response = pieces
    return b"".join(pieces)


def _collected(pieces: Iterable[bytes], max_size: int) -> list[bytes]:
    """Return the pieces of a stream, or its start if it is too long."""
    collected: list[bytes] = []
    size = 0
    for piece in pieces:
        collected.append(piece)
        size += len(piece)
        if size > max_size:
            break
    return collected


def rebuilt(stored: StoredResponse, response: Response, *, has_type: bool) -> Response:
    """
    Complete an answer whose body was made anew for a replay.

    It gets the stored status and headers, unless it says itself that it is an error.

    Args:
        stored: The first answer, without its body.
        response: The answer that was made anew.
        has_type: Whether its media type says what it is, such as that of a dict, and
            is not just the default of a text.
    """
    if response.status_code < _ERROR:
        response.status_code = stored.code
        own = _OF_THE_BYTES | ({"content-type"} if has_type else set())
        kept = [(n, v) for n, v in stored.headers if n.lower() not in own]
        for name, _ in kept:
            response.headers.remove(name)
        response.headers.extend(kept)
    response.headers[REPLAYED] = "true"
    return response


def key_field(config: Config) -> Markup:
    """Return a hidden form field with a fresh key: ``{{ idempotency_field() }}``."""
    return Markup('<input type="hidden" name="{}" value="{}">').format(
        config.form_field, new_key()
    )


def replay(stored: StoredResponse) -> Response:
    """Return a stored answer with the marker of a replay."""
    response = current_app.response_class(stored.body or b"", status=stored.code)
    response.headers = Headers(stored.headers)
    response.headers[REPLAYED] = "true"
    return response
