"""The current request as the guard needs it: key, caller and scope."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flask import current_app, request
from werkzeug.exceptions import HTTPException

from . import signals
from .exceptions import (
    IdempotencyCallerUnknown,
    IdempotencyConfigError,
    IdempotencyHTTPException,
    IdempotencyKeyInvalid,
    IdempotencyKeyMissing,
)
from .keys import parse_key
from .lifecycle import SCOPE_LENGTHS, Scope, check_text
from .observation import note_refusal
from .request_hash import is_form, parse_form

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flask import Response

    from .config import Config, RouteOptions
    from .state import IdempotencyState

log = logging.getLogger(__name__)

#: Where a declared route leaves its options for ``Idempotency.scope``.
OPTIONS = "flask_idempotency.options"
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
    if is_form():
        where += f" or the form field '{config.form_field}'"
    return f"This operation needs an idempotency key: send {where}."


def _given_key(loader: Callable[[], str | None]) -> str | None:
    try:
        key = loader()
    except LookupError:
        return None
    except (TypeError, AttributeError, RecursionError) as error:
        # Such as request.json["id"] where the client sent a list, or too many of them
        # in one another: its mistake, or one in the function. Never "no key", which
        # would run the view unprotected.
        log.warning("The function for the key of this route failed.", exc_info=True)
        raise IdempotencyKeyInvalid(
            "The idempotency key could not be read from the request."
        ) from error
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
    key = None if raw is None else parse_key(raw, strict=config.strict_keys)
    if is_form():
        key = _form_key(config, key)
    pattern = config.key_pattern
    if key is not None and pattern is not None and not pattern.fullmatch(key):
        raise IdempotencyKeyInvalid(
            "The idempotency key has not the form that this service asks for: "
            f"{pattern.pattern}"
        )
    return key


def _form_key(config: Config, header_key: str | None) -> str | None:
    fields = request.form.getlist(config.form_field) if parse_form() else []
    if not fields:
        return header_key
    form_key = parse_key(fields[0])  # no structured field, so never with quotes only
    if len(fields) > 1 or header_key not in {None, form_key}:
        raise IdempotencyKeyInvalid(
            f"The header {config.header} and the form field '{config.form_field}' "
            "must hold one and the same key."
        )
    return form_key


@contextmanager
def refusing(state: IdempotencyState, options: RouteOptions) -> Iterator[None]:
    """Count what refuses a request; in observe mode, let it pass all the same."""
    observing = options.mode == "observe"
    try:
        yield
    except IdempotencyHTTPException as error:
        route = options.route or route_name()
        if not observing:
            code = error.error_code
            signals.count_refusal(state.app, route, code, enforced=True)
            raise
        note_refusal(state.app, route, error)
    except HTTPException as error:  # such as 413: the view may meet it, too
        if not observing:
            raise
        log.info("A request could not be observed: %s", error)
    except Exception:
        if not observing:
            raise
        # An observer may not fail what it observes.
        log.exception("A request of '%s' could not be observed.", request.endpoint)


def scope_of_request(
    state: IdempotencyState, route: str, key: str, options: RouteOptions
) -> Scope:
    """
    Return the scope of a key of the current request.

    Raises:
        IdempotencyCallerUnknown: If a loader names nobody, or somebody unusable.
        IdempotencyConfigError: If nothing is set up to name callers.
    """
    return Scope(
        tenant_id=_tenant_id(state, options),
        user_id=_user_id(state, options),
        route=route,
        idempotency_key=key,
    )


def note_ignored_key(state: IdempotencyState, response: Response) -> Response:
    """
    Log, once per endpoint, that a client's key does nothing there.

    Any client may send one to any route, but it may also take the route for a
    protected one. Errors are passed over: a login may have refused before our guard.
    """
    ignored = (
        state.config.header in request.headers
        and OPTIONS not in request.environ
        and response.status_code < 400  # noqa: PLR2004 - RFC 9110, section 15.5
    )
    endpoint = request.endpoint
    if ignored and endpoint is not None and endpoint not in state.noted:
        state.noted.add(endpoint)
        log.warning(
            "The endpoint '%s' got a %s request with %s, which does nothing there: the "
            "view is not declared @idempotent, or the method is safe.",
            endpoint,
            request.method,
            state.config.header,
        )
    return response


def route_name() -> str:
    """Return the stable name of the matched rule, such as ``"POST /accounts"``."""
    rule = request.url_rule
    where = f"{rule.host or rule.subdomain or ''}{rule.rule}" if rule else request.path
    name = f"{request.method} {where}"
    if len(name) > SCOPE_LENGTHS["route"]:
        raise IdempotencyConfigError(
            f"The rule of endpoint '{request.endpoint}' is too long to name its "
            "records. Declare it with @idempotent(route='a short name')."
        )
    return name


def _tenant_id(state: IdempotencyState, options: RouteOptions) -> str:
    given = options.tenant_id
    if isinstance(given, str):
        return given
    loader = given or state.loaders.tenant_id
    return "" if loader is None else _identity("tenant_id", loader)


def _user_id(state: IdempotencyState, options: RouteOptions) -> str:
    given = options.user_id
    if isinstance(given, str):
        return given
    loader = given or state.loaders.user_id or _flask_login_loader()
    if loader is None:
        if options.anonymous:
            return ""
        raise IdempotencyConfigError(_NO_LOADER)
    return _identity("user_id", loader, empty_is="" if options.anonymous else None)


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
