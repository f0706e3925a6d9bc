"""The current request as the guard needs it: key, caller, scope and request hash."""

from __future__ import annotations

import hashlib
import logging
import sys
from io import BytesIO
from typing import TYPE_CHECKING

from flask import current_app, request

from .exceptions import (
    IdempotencyCallerUnknown,
    IdempotencyConfigError,
    IdempotencyKeyInvalid,
    IdempotencyKeyMissing,
)
from .fingerprint import canonical_json, digest
from .keys import parse_key
from .lifecycle import SCOPE_LENGTHS, Scope, check_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from werkzeug.datastructures import FileStorage

    from .config import Config, RouteOptions
    from .state import IdempotencyState

log = logging.getLogger(__name__)

#: Where a declared route leaves its options for ``Idempotency.scope``.
OPTIONS = "flask_idempotency.options"
_FORM_TYPES = ("application/x-www-form-urlencoded", "multipart/form-data")
_CHUNK = 64 * 1024
_NO_LOADER = """\
Nothing tells who the caller is, and keys of different callers must not meet. Add

    @idempotency.user_id_loader
    def caller():
        return ...  # the id of the authenticated user, as str

or declare the route with @idempotent(anonymous=True)."""


def read_key(options: RouteOptions, config: Config) -> str | None:
    """
    Return the key of the current request.

    Raises:
        IdempotencyKeyMissing: If there is none and the route requires one.
        IdempotencyKeyInvalid: If it is malformed, or header and form differ.
    """
    key = _given_key(options.key) if options.key else _client_key(config)
    if key is None and options.required:
        raise IdempotencyKeyMissing(None if options.key else _how_to_send(config))
    return key


def _how_to_send(config: Config) -> str:
    where = f"the header {config.header}"
    if request.mimetype in _FORM_TYPES:
        where += f" or the form field '{config.form_field}'"
    return f"This operation needs an idempotency key: send {where}."


def _keep_raw_form() -> None:
    """Read the body before the form is parsed, so that the view has both."""
    if request.mimetype == _FORM_TYPES[0]:
        _read_body()


def _read_body() -> bytes:
    """Return the body, and leave it to the view in every form that Flask offers."""
    body = request.get_data()
    request.stream = BytesIO(body)
    return body


def _given_key(loader: Callable[[], str | None]) -> str | None:
    try:
        key = loader()
    except LookupError:
        return None
    if key is None or key == "":
        return None
    try:
        return check_text("key", key, SCOPE_LENGTHS["idempotency_key"])
    except ValueError as error:
        raise IdempotencyKeyInvalid(
            f"The idempotency key is unusable: {error}."
        ) from error


def _client_key(config: Config) -> str | None:
    raw = request.headers.get(config.header)
    key = None if raw is None else parse_key(raw)
    if request.mimetype not in _FORM_TYPES:
        return key
    _keep_raw_form()
    fields = request.form.getlist(config.form_field)
    if not fields:
        return key
    form_key = parse_key(fields[0])
    if len(fields) > 1 or key not in {None, form_key}:
        raise IdempotencyKeyInvalid(
            f"The header {config.header} and the form field '{config.form_field}' "
            "must hold one and the same key."
        )
    return form_key


def scope_of_request(
    state: IdempotencyState, route: str, key: str, *, anonymous: bool
) -> Scope:
    """
    Return the scope of a key of the current request.

    Raises:
        IdempotencyCallerUnknown: If a loader names nobody, or somebody unusable.
        IdempotencyConfigError: If nothing is set up to name callers.
    """
    return Scope(
        tenant_id=_tenant_id(state),
        user_id=_user_id(state, anonymous=anonymous),
        route=route,
        idempotency_key=key,
    )


def route_name() -> str:
    """Return the stable name of the matched rule, such as ``"POST /accounts"``."""
    rule = request.url_rule.rule if request.url_rule else request.path
    name = f"{request.method} {rule}"
    if len(name) > SCOPE_LENGTHS["route"]:
        raise IdempotencyConfigError(
            f"The rule of endpoint '{request.endpoint}' is too long to name its "
            "records. Declare it with @idempotent(route='a short name')."
        )
    return name


def _tenant_id(state: IdempotencyState) -> str:
    if state.loaders.tenant_id is None:
        return ""
    return _identity("tenant_id", state.loaders.tenant_id)


def _user_id(state: IdempotencyState, *, anonymous: bool) -> str:
    loader = state.loaders.user_id or _flask_login_loader()
    if loader is None:
        if anonymous:
            return ""
        raise IdempotencyConfigError(_NO_LOADER)
    if anonymous:
        return _identity("user_id", loader, empty_is="")
    return _identity("user_id", loader)


def _identity(
    name: str, loader: Callable[[], str | None], empty_is: str | None = None
) -> str:
    value = loader()
    if value is None or value == "":
        if empty_is is None:
            raise IdempotencyCallerUnknown
        return empty_is
    if not isinstance(value, str):
        raise IdempotencyConfigError(
            f"The {name} loader returned {type(value).__name__}; return str, "
            "such as str(user.id), or None."
        )
    try:
        return check_text(name, value, SCOPE_LENGTHS[name])
    except ValueError as error:
        log.warning("A caller is refused: %s.", error)
        raise IdempotencyCallerUnknown from error


def _flask_login_loader() -> Callable[[], str | None] | None:
    if not hasattr(current_app, "login_manager"):
        return None
    # The module is loaded where it is in use; it is no dependency of ours.
    flask_login = sys.modules.get("flask_login")
    if flask_login is None:
        return None
    user = flask_login.current_user
    return lambda: user.get_id() if user.is_authenticated else None


def request_hash(route: str, config: Config) -> str:
    """
    Return the fingerprint of the current request.

    Method, route, path arguments, query (order of names does not matter) and body by
    media type: JSON by meaning, forms by fields, uploads by the digests of their
    files, anything else by bytes.
    """
    arguments = sorted((request.view_args or {}).items())
    return digest(
        [
            request.method,
            route,
            digest(f"{name}={value}" for name, value in arguments),
            digest(_pairs(request.args.lists())),
            request.mimetype,
            *_body(config.form_field),
        ]
    )


def _body(key_field: str) -> Iterator[str | bytes]:
    if request.mimetype in _FORM_TYPES:
        _keep_raw_form()
        fields = ((n, v) for n, v in request.form.lists() if n != key_field)
        yield digest(_pairs(fields))
        yield digest(_files())
    elif request.is_json:
        yield canonical_json(_read_body())
    else:
        yield _read_body()


def _files() -> Iterator[str | bytes]:
    for name, files in sorted(request.files.lists()):
        for file in files:
            yield from (name, file.filename or "", file.mimetype, _digest(file))


def _pairs(lists: Iterable[tuple[str, list[str]]]) -> Iterator[str]:
    for name, values in sorted(lists):
        for value in values:
            yield name
            yield value


def _digest(file: FileStorage) -> bytes:
    sha = hashlib.sha256()
    while chunk := file.stream.read(_CHUNK):
        sha.update(chunk)
    file.stream.seek(0)
    return sha.digest()
