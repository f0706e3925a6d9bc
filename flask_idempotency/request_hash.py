"""
The current request as a hash: what makes a retry the same request.

The body is read here, once, and left to the view in every form that Flask offers.
"""

from __future__ import annotations

import hashlib
import tempfile
import weakref
from io import BytesIO
from shutil import copyfileobj
from typing import IO, TYPE_CHECKING, Any, cast

from flask import current_app, request
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from .exceptions import IdempotencyConfigError
from .fingerprint import Fingerprint, canonical_json, digest
from .fingerprint import fingerprint as hash_of_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from .config import Config

FORM, MULTIPART = "application/x-www-form-urlencoded", "multipart/form-data"
_BODY = "flask_idempotency.body"
_CHUNK = 64 * 1024
#: Bodies above this many bytes, and those of unknown length, are kept in a file.
_IN_MEMORY = 512 * 1024
#: What Werkzeug puts in the place of bytes that are no UTF-8.
_REPLACED = "\ufffd"
#: Stands for the name of a part that has none; no text is encoded like this.
_NAMELESS = b"\xff"


def is_form() -> bool:
    """Tell whether the current request is a form post."""
    return request.mimetype in {FORM, MULTIPART}


def request_hash(
    route: str,
    config: Config,
    option: Fingerprint | Callable[[], object] | None,
) -> str:
    """
    Return the fingerprint of the current request.

    Method, route, path arguments, query (order of names does not matter) and body by
    media type: JSON by meaning, forms by fields, uploads by the digests of their
    files, anything else by bytes.

    Args:
        route: Name of the route.
        config: Names the form field of the key, which is left out.
        option: What the route declares.

    Raises:
        TypeError: If the route's own function returns what has no canonical form.
        ValueError: If that has a float that is not finite.
        IdempotencyConfigError: If something has consumed the body before.
    """
    if option is None:
        return digest(["key"])
    if not isinstance(option, Fingerprint):
        return hash_of_value(option())
    return digest(
        [
            request.method,
            route,
            digest(_arguments()),
            digest(_query()),
            digest(_headers(option)),
            request.mimetype,
            *_body(config.form_field, option),
        ]
    )


def _arguments() -> Iterator[str]:
    """Give the path arguments as the URL has them, whatever was made of them since."""
    # Not request.view_args: url_value_preprocessor functions take arguments away.
    adapter = current_app.create_url_adapter(request)
    try:
        arguments: Mapping[str, Any] = adapter.match()[1] if adapter else {}
    except HTTPException:  # the application has matched the URL in its own way
        arguments = request.view_args or {}
    for name, value in sorted(arguments.items()):
        yield name
        # An object of a converter that has no text would be another one each time.
        kind: Any = type(value)
        has_text = kind.__str__ is not object.__str__
        yield str(value) if has_text else request.path


def keep_body() -> IO[bytes]:
    """
    Read the body to where the view can read it again, and return it as a file.

    Small bodies are kept in memory, others in a temporary file.

    Raises:
        IdempotencyConfigError: If something has consumed the body before, so that
            different requests could not be told apart.
    """
    kept: IO[bytes] | None = request.environ.get(_BODY)
    if kept is None:
        kept = request.environ[_BODY] = _copy_of_body()
    kept.seek(0)
    request.stream = kept
    return kept


def _copy_of_body() -> IO[bytes]:
    length = request.content_length
    if length is None:  # in chunks, or none at all
        small = "Transfer-Encoding" not in request.headers
    else:
        small = length <= _IN_MEMORY
    copy = BytesIO() if small else _temporary_file()
    parsed = is_form() and "form" in vars(request)
    touched = "stream" in vars(request) and not parsed and _was_read(request.stream)
    copyfileobj(request.stream, copy, _CHUNK)
    if not copy.tell():
        copy.write(request.get_data())  # read, and cached, by something before us
        touched = touched and not copy.tell()
    if touched or (length and not copy.tell() and not parsed):
        raise IdempotencyConfigError(
            "The body was consumed before @idempotent could read it, by a "
            "'before_request' function or a decorator outside it? Let that use "
            "'request.get_data()', which keeps the body."
        )
    return copy


def _was_read(stream: IO[bytes]) -> bool:
    """Tell whether a stream was read from, or may have been."""
    try:
        return stream.tell() > 0
    except (AttributeError, OSError):  # a server's own stream
        return True


def _temporary_file() -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the request
    weakref.finalize(request._get_current_object(), file.close)  # type: ignore[attr-defined] # noqa: SLF001 - Werkzeug's documented way to the object
    return cast("IO[bytes]", file)


def _query() -> Iterator[str | bytes]:
    try:
        lists = list(request.args.lists())
    except UnicodeDecodeError:  # Werkzeug gives up on bytes without an escape
        yield request.query_string
        return
    yield from _pairs(lists)
    if any(
        _REPLACED in text for pair in request.args.items(multi=True) for text in pair
    ):
        yield request.query_string


def _headers(option: Fingerprint) -> Iterator[str]:
    for name in sorted({header.lower() for header in option.headers}):
        yield name
        yield str(request.headers.getlist(name))
    # The same bytes mean something else under another coding (RFC 9110, 8.4).
    coding = request.headers.get("Content-Encoding", "").strip().lower()
    yield "" if coding == "identity" else coding


def _body(key_field: str, option: Fingerprint) -> Iterator[str | bytes]:
    ignored = {pointer[1:] for pointer in option.ignore}
    if is_form() and parse_form():
        fields = list(request.form.lists())
        yield digest(
            _pairs((n, v) for n, v in fields if n != key_field and n not in ignored)
        )
        yield digest(_files(ignored))
        # What the parser could not read, the view can still tell apart.
        if _REPLACED in str(fields) or not (fields or request.files):
            yield _digest(keep_body())
    elif request.is_json:
        yield canonical_json(keep_body().read(), option.ignore)
    else:
        # RFC 9110, section 8.3.2: compared without regard to case.
        yield request.mimetype_params.get("charset", "utf-8").lower()
        yield _digest(keep_body())
    keep_body()


def parse_form() -> bool:
    """
    Parse the form, and leave the raw body to the view as well.

    Returns:
        False if it breaks a limit of the application. The view decides what to make
        of that: it may read the body in another way, or raise the limit.
    """
    if "form" in vars(request):
        return True
    keep_body()
    try:
        _ = request.form
    except RequestEntityTooLarge:
        return False
    finally:
        keep_body()
    return True


def _files(ignored: set[str]) -> Iterator[str | bytes]:
    for name, files in sorted(request.files.lists(), key=_by_name):
        if name not in ignored:
            for file in files:
                yield from (_named(name), file.filename or "", file.content_type or "")
                yield _digest(file.stream)


def _pairs(lists: Iterable[tuple[str, list[str]]]) -> Iterator[str | bytes]:
    for name, values in sorted(lists, key=_by_name):
        for value in values:
            yield _named(name)
            yield value


def _by_name(pair: tuple[str | None, object]) -> tuple[bool, str]:
    # Werkzeug's types hide that the name of a part may be missing.
    return pair[0] is not None, pair[0] or ""


def _named(name: str | None) -> str | bytes:
    return _NAMELESS if name is None else name


def _digest(file: IO[bytes]) -> bytes:
    position = file.tell()  # not 0 if something has looked at an upload before
    file.seek(0)
    sha = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        sha.update(chunk)
    file.seek(position)
    return sha.digest()
