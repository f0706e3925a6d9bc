"""``@idempotent`` and ``@not_idempotent``: what a route declares, and its adapter."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from flask import current_app, request

from . import failpoints
from .answers import refuse_without_body
from .config import UNSAID, RouteOptions
from .exceptions import (
    IdempotencyConfigError,
    IdempotencyReplayForbidden,
)
from .fingerprint import Fingerprint
from .late_work import call_ended
from .problems import Unanswered
from .request import OPTIONS, read_key, refusing, route_name, scope_of_request
from .request_hash import request_hash
from .responses import rebuilt, replay, store_response
from .state import get_state
from .work import CallOptions, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Literal, ParamSpec

    from flask import Response
    from flask.typing import ResponseReturnValue

    from .answers import Answer
    from .lifecycle import RecordView, Scope
    from .settings import Duration
    from .state import IdempotencyState

    P = ParamSpec("P")

log = logging.getLogger(__name__)

F = TypeVar("F", bound="Callable[..., Any]")

#: Attribute by which a declared view is known, also behind ``functools.wraps``.
DECLARATION = "__idempotency__"
#: The guards that are alive: a wrapper around one has its mark, but is none itself.
GUARDS: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
#: Methods of which a guard does nothing.
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})  # RFC 9110, 9.2.1


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
    max_runtime: Duration | None = None,
    retry_failed: bool = False,
    anonymous: bool | None = None,
    claim: bool = True,
    tenant_id: str | Callable[[], str | None] | None = None,
    user_id: str | Callable[[], str | None] | None = None,
    fingerprint: Fingerprint | Callable[[], object] | None = Fingerprint(),  # noqa: B008 - frozen
    wait: Duration | None = None,
    release_on: Collection[int] | Callable[[Response], bool] | None = None,
    store_body: bool = True,
    rebuild: Callable[[RecordView], ResponseReturnValue] | None = None,
    authorize_replay: Callable[[RecordView], bool] | None = None,
    recover: Callable[[RecordView], ResponseReturnValue | None] | None = None,
    fail_open: bool = False,
    mode: Literal["enforce", "observe"] | None = None,
    atomic: bool | None = None,
) -> Callable[[Callable[P, Any]], Callable[P, Response]]: ...


def idempotent(view: Any = None, /, **options: Any) -> Any:
    """
    Make a view take effect once per idempotency key.

    Put it below the route and the login decorator and above whatever shapes the
    answer. With or without a key the call is one unit of work: committed below 400,
    rolled back otherwise. Safe methods pass through.

    Args:
        view: The view function, where the decorator is used bare.
        options: See ``RouteOptions``; ``ttl``, ``lease`` and ``wait`` are seconds or
            timedelta.

    Raises:
        IdempotencyConfigError: If the declaration is wrong.
    """
    if view is not None and not callable(view):
        raise IdempotencyConfigError(
            f"@idempotent({view!r}) has no positional option; "
            f"the name of the route is @idempotent(route={view!r})."
        )
    # One object for all bare uses: some libraries decorate anew for each request.
    declared = RouteOptions.from_keywords(options) if options else UNSAID
    if view is None:
        return functools.partial(_guarded, declared=declared)
    return _guarded(view, declared=declared)


def not_idempotent(reason: str) -> Callable[[F], F]:
    """
    Declare that a view needs no guard, and why.

    Args:
        reason: One sentence for the reader of ``flask idempotency routes``.

    Returns:
        A decorator that marks the view and returns it; of a bound method, a function
        to register in its place.
    """
    if not isinstance(reason, str) or not reason.strip():
        raise IdempotencyConfigError(
            '@not_idempotent needs the reason: @not_idempotent("why").'
        )

    def mark(view: F) -> F:
        _refuse_second_declaration(view)
        marked = _function_of(view) if inspect.ismethod(view) else view
        setattr(marked, DECLARATION, reason)
        return marked

    return mark


def _function_of(method: F) -> F:
    """Return a bound method as a function, which can have attributes."""

    @functools.wraps(method)
    def function(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return cast("F", function)


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
        if request.method in SAFE_METHODS:
            return current_app.make_response(call())
        options = state.options(declared)
        request.environ[OPTIONS] = options  # not on g: a context may outlive us
        if options.claim:
            return _respond(state, options, call)
        with refusing(state, options):
            read_key(options, state.config)
        return current_app.make_response(call())

    setattr(guard, DECLARATION, declared)
    GUARDS.add(guard)
    return guard


def _respond(
    state: IdempotencyState,
    options: RouteOptions,
    view: Callable[[], ResponseReturnValue],
) -> Response:
    scope, fingerprint = None, ""
    with refusing(state, options):
        scope, fingerprint = _identified(state, options)
    unanswered: list[Exception] = []
    try:
        answer = state.guard.call(
            scope,
            fingerprint,
            _work(state, options, view, unanswered),
            CallOptions(
                ttl_seconds=options.ttl_seconds,
                lease_seconds=options.lease_seconds,
                max_runtime_seconds=options.max_runtime_seconds,
                wait_seconds=options.wait_seconds,
                mode=options.mode,
                retry_failed=options.retry_failed,
                fail_open=options.fail_open,
                atomic=options.atomic,
            ),
        )
    except Exception as error:
        if any(error is known for known in unanswered):
            raise Unanswered(error) from None
        raise
    finally:
        call_ended()
    failpoints.reach("before_response")
    return _replay(answer, options) if answer.result is None else answer.result


def _work(
    state: IdempotencyState,
    options: RouteOptions,
    view: Callable[[], ResponseReturnValue],
    unanswered: list[Exception],
) -> Work[Response]:
    """Return a view's work; what its error handlers raise is added to `unanswered`."""

    def rescue(error: Exception) -> Response:
        # Called where the exception is being handled, as Flask itself does it.
        try:
            answer = current_app.handle_user_exception(error)
        except Exception as raised:
            unanswered.append(raised)
            raise
        return current_app.make_response(answer)

    return Work(
        handler=lambda: current_app.make_response(view()),
        encode=lambda response: store_response(
            response,
            max_size=state.config.max_response_size,
            store_body=options.store_body,
        ),
        rescue=rescue,
        releases=lambda response: _says_nothing_was_done(response, options),
        admit=lambda answer: _admit(answer, options),
        recover=_recovering(options.recover) if options.recover else None,
    )


def _recovering(
    find: Callable[[RecordView], ResponseReturnValue | None],
) -> Callable[[RecordView], Response | None]:
    def recover(record: RecordView) -> Response | None:
        answer = find(record)
        return None if answer is None else current_app.make_response(answer)

    return recover


def _identified(
    state: IdempotencyState, options: RouteOptions
) -> tuple[Scope | None, str]:
    key = read_key(options, state.config)
    if key is None:
        return None, ""
    route = options.route or route_name()
    scope = scope_of_request(state, route, key, options)
    return scope, request_hash(route, state.config, options.fingerprint)


def _admit(answer: Answer[Response], options: RouteOptions) -> None:
    """Check whether a duplicate may, and can, have the stored answer."""
    record = cast("RecordView", answer.record)
    if options.authorize_replay is not None and not options.authorize_replay(record):
        raise IdempotencyReplayForbidden
    if options.rebuild is None:
        refuse_without_body(answer)


def _replay(answer: Answer[Response], options: RouteOptions) -> Response:
    """Give a stored answer out, or make it anew where its body was not kept."""
    if answer.stored.body is None and options.rebuild is not None:
        made = options.rebuild(cast("RecordView", answer.record))
        body = made[0] if isinstance(made, tuple) else made
        has_type = not isinstance(body, (str, bytes))
        response = current_app.make_response(made)
        return rebuilt(answer.stored, response, has_type=has_type)
    return replay(answer.stored)


def _says_nothing_was_done(response: Response, options: RouteOptions) -> bool:
    release_on = options.release_on
    if callable(release_on):
        return bool(release_on(response))
    return release_on is not None and response.status_code in release_on
