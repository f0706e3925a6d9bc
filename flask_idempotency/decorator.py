"""``@idempotent`` and ``@not_idempotent``: what a route declares, and its adapter."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar, overload

from flask import current_app, request

from .completion import CallOptions, Work
from .config import RouteOptions
from .exceptions import IdempotencyConfigError
from .request import OPTIONS, read_key, request_hash, route_name, scope_of_request
from .responses import replay, store_response
from .state import get_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ParamSpec

    from flask import Response
    from flask.typing import ResponseReturnValue

    from .config import Duration
    from .state import IdempotencyState

    P = ParamSpec("P")

F = TypeVar("F", bound="Callable[..., Any]")

#: Attribute by which a declared view is known, also behind ``functools.wraps``.
DECLARATION = "__idempotency__"
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})  # RFC 9110, 9.2.1


@overload
def idempotent(view: Callable[P, Any], /) -> Callable[P, Response]: ...


@overload
def idempotent(
    *,
    required: bool | None = None,
    key: Callable[[], str | None] | None = None,
    route: str | None = None,
    ttl: Duration | None = None,
    lease: Duration | None = None,
    retry_failed: bool = False,
    anonymous: bool | None = None,
    claim: bool = True,
) -> Callable[[Callable[P, Any]], Callable[P, Response]]: ...


def idempotent(view: Any = None, /, **options: Any) -> Any:
    """
    Make a view take effect once per idempotency key.

    Put it below the route and the login decorator and above whatever shapes the
    answer. With or without a key the call is one unit of work: committed below 400,
    rolled back otherwise. Safe methods pass through.

    Args:
        view: The view function, where the decorator is used bare.
        options: See ``RouteOptions``; ``ttl`` and ``lease`` are seconds or timedelta.

    Raises:
        IdempotencyConfigError: If the declaration is wrong.
    """
    if view is not None and not callable(view):
        raise IdempotencyConfigError(
            f"@idempotent({view!r}) has no positional option; "
            f"the name of the route is @idempotent(route={view!r})."
        )
    declared = RouteOptions.from_keywords(options)
    if view is None:
        return functools.partial(_guarded, declared=declared)
    return _guarded(view, declared=declared)


def not_idempotent(reason: str) -> Callable[[F], F]:
    """
    Declare that a view needs no guard, and why.

    Args:
        reason: One sentence for the reader of ``flask idempotency routes``.
    """
    if not isinstance(reason, str) or not reason.strip():
        raise IdempotencyConfigError(
            '@not_idempotent needs the reason: @not_idempotent("why").'
        )

    def mark(view: F) -> F:
        _refuse_second_declaration(view)
        setattr(view, DECLARATION, reason)
        return view

    return mark


def _refuse_second_declaration(view: Any) -> None:
    if hasattr(view, DECLARATION):
        raise IdempotencyConfigError(
            f"The view '{view.__name__}' is declared twice. Keep one of "
            "@idempotent and @not_idempotent."
        )


def _guarded(view: Any, *, declared: RouteOptions) -> Any:
    if isinstance(view, type):
        raise IdempotencyConfigError(
            f"@idempotent cannot guard the class '{view.__name__}'. "
            "Put it on the methods, or in the class attribute 'decorators'."
        )
    if not callable(view):
        raise IdempotencyConfigError(f"@idempotent guards a view, not {view!r}.")
    _refuse_second_declaration(view)

    @functools.wraps(view)
    def guard(*args: Any, **kwargs: Any) -> Response:
        state = get_state()
        call = functools.partial(current_app.ensure_sync(view), *args, **kwargs)
        if request.method in _SAFE_METHODS:
            return current_app.make_response(call())
        options = state.options(declared)
        key = read_key(options, state.config)
        request.environ[OPTIONS] = options  # not on g: a context may outlive us
        if not options.claim:
            return current_app.make_response(call())
        return _respond(state, options, key, call)

    setattr(guard, DECLARATION, declared)
    return guard


def _respond(
    state: IdempotencyState,
    options: RouteOptions,
    key: str | None,
    view: Callable[[], ResponseReturnValue],
) -> Response:
    scope, fingerprint = None, ""
    if key is not None:
        route = options.route or route_name()
        scope = scope_of_request(state, route, key, anonymous=bool(options.anonymous))
        fingerprint = request_hash(route, state.config)
    limit = state.config.max_response_size
    answer = state.guard.call(
        scope,
        fingerprint,
        Work(
            handler=lambda: current_app.make_response(view()),
            encode=lambda response: store_response(response, max_size=limit),
            rescue=_application_answer,
        ),
        CallOptions(
            ttl_seconds=options.ttl_seconds,
            lease_seconds=options.lease_seconds,
            retry_failed=options.retry_failed,
        ),
    )
    return replay(answer.stored) if answer.result is None else answer.result


def _application_answer(error: Exception) -> Response:
    """
    Return what the application's error handlers answer to an exception.

    Called where the exception is being handled: one without a handler is raised
    again, as by Flask itself.
    """
    answer = current_app.handle_user_exception(error)
    return current_app.make_response(answer)
