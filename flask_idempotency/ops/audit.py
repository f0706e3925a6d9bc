"""What every mutating route of an application declares, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flask.views import MethodView

from flask_idempotency.decorator import DECLARATION, GUARDS, SAFE_METHODS

from .layers import is_guard, login_check, shaping, unwrapped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flask import Flask
    from werkzeug.routing import Rule

    from flask_idempotency.config import RouteOptions

_ANY_METHOD = frozenset({"DELETE", "GET", "PATCH", "POST", "PUT"})

MESSAGES = {
    "undeclared": "It declares nothing: add @idempotent below the route and login "
    'decorators, or @not_idempotent("why"). A decorator without functools.wraps hides '
    "a declaration.",
    "above_route": "The view was registered without its guard: put @idempotent below "
    "the route decorator.",
    "login_inside": "{name} runs inside @idempotent, so that a replay bypasses it: put "
    "@idempotent below it.",
    "shaped_outside": "{name} shapes the answer outside of @idempotent, where it can "
    "no longer do so: put @idempotent above it.",
    "declared_twice": "It is declared twice, such as by a class and by its method: "
    "keep one of the two.",
    "safe_method": "@idempotent does nothing for {name}, a safe method: remove it, or "
    "let the route have a method that changes something.",
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """
    What is wrong with a route.

    Attributes:
        code: One of the keys of ``MESSAGES``.
        message: One sentence that says what is wrong, and the fix.
    """

    code: str
    message: str


@dataclass(frozen=True, kw_only=True)
class RouteReport:
    """
    One method of one URL rule.

    Attributes:
        method: The HTTP method.
        rule: The URL rule.
        endpoint: The rule's endpoint.
        declaration: Options of ``@idempotent``, or the reason of ``@not_idempotent``.
        problems: What is wrong.
    """

    method: str
    rule: str
    endpoint: str
    declaration: RouteOptions | str | None
    problems: tuple[Problem, ...]


def audit(app: Flask) -> list[RouteReport]:
    """
    Return a report on every mutating route, and on guards of routes that are safe.

    Args:
        app: The application, with all its routes.

    Returns:
        Sorted by rule, method and endpoint.
    """
    return sorted(_Audit(app).reports(), key=lambda r: (r.rule, r.method, r.endpoint))


def _problem(code: str, name: str | None = None) -> Problem:
    return Problem(code=code, message=MESSAGES[code].format(name=name))


class _Audit:
    """The routes of an application, read once."""

    def __init__(self, app: Flask) -> None:
        self._routes = [
            (rule, app.view_functions[rule.endpoint])
            for rule in app.url_map.iter_rules()
            if rule.endpoint in app.view_functions and not rule.build_only
        ]
        registered = {
            id(part) for view in app.view_functions.values() for part in unwrapped(view)
        }
        #: What guards protect that no rule leads to.
        self._missed = [
            unwrapped(guard)[-1] for guard in GUARDS if id(guard) not in registered
        ]
        #: Views that change something by one rule may be read by another.
        self._changing = {
            id(_origin(view))
            for rule, view in self._routes
            if _methods(rule) - SAFE_METHODS
        }

    def reports(self) -> Iterator[RouteReport]:
        for rule, view in self._routes:
            for method in _methods(rule) - SAFE_METHODS:
                yield self._mutating(rule, view, method)
            yield from self._safe(rule, view)

    def _mutating(self, rule: Rule, view: Any, method: str) -> RouteReport:
        chain = _chain(view, method)
        declared = [d for part in chain if (d := _declaration(part)) is not None]
        layers = [layer for part in chain for layer in part]
        problems = list(_order_problems(layers))
        if not declared:
            innermost = chain[0][-1]
            missed = any(innermost is known for known in self._missed)
            problems.append(_problem("above_route" if missed else "undeclared"))
        if len(declared) > 1 or sum(map(is_guard, layers)) > 1:
            problems.append(_problem("declared_twice"))
        return RouteReport(
            method=method,
            rule=rule.rule,
            endpoint=rule.endpoint,
            declaration=declared[0] if declared else None,
            problems=tuple(problems),
        )

    def _safe(self, rule: Rule, view: Any) -> Iterator[RouteReport]:
        changing = id(_origin(view)) in self._changing
        for method in _methods(rule) & SAFE_METHODS:
            chain = _chain(view, method)
            # A guard of the whole view has a purpose if any rule changes something.
            parts = chain[2:] if changing or method != "GET" else chain
            guards = [layer for part in parts for layer in part if is_guard(layer)]
            if guards:
                yield RouteReport(
                    method=method,
                    rule=rule.rule,
                    endpoint=rule.endpoint,
                    declaration=getattr(guards[0], DECLARATION),
                    problems=(_problem("safe_method", method),),
                )


def _methods(rule: Rule) -> frozenset[str]:
    return _ANY_METHOD if rule.methods is None else frozenset(rule.methods)


def _origin(view: Any) -> Any:
    """Return what is the same, however often a view was registered."""
    return getattr(view, "view_class", None) or unwrapped(view)[-1]


def _chain(view: Any, method: str) -> list[list[Any]]:
    """Return the layers of a view, of its class's dispatcher and of its method."""
    chain = [unwrapped(view)]
    view_class = getattr(view, "view_class", None)
    if view_class is not None:
        chain.append(unwrapped(view_class.dispatch_request))
        if issubclass(view_class, MethodView):
            chain.append(unwrapped(_handler(view_class, method.lower())))
    return chain


def _handler(view_class: Any, name: str) -> Any:
    """Return the method of a class, decorated as Flask-RESTX and -RESTful do it."""
    handler = getattr(view_class, name, None)
    decorators = getattr(view_class, "method_decorators", ())
    if isinstance(decorators, Mapping):
        decorators = decorators.get(name, ())
    for decorator in decorators if handler is not None else ():
        handler = decorator(handler)
    return handler


def _declaration(layers: list[Any]) -> RouteOptions | str | None:
    marks = (getattr(layer, DECLARATION, None) for layer in layers)
    return next((mark for mark in marks if mark is not None), None)


def _order_problems(layers: list[Any]) -> Iterator[Problem]:
    """Tell which decorators stand on the wrong side of the guard."""
    first = next((i for i, layer in enumerate(layers) if is_guard(layer)), None)
    if first is None:
        return
    for layer in layers[:first]:
        if name := shaping(layer):
            yield _problem("shaped_outside", name)
    if not getattr(layers[first], DECLARATION).claim:
        return  # It replays nothing: the service does, behind every check.
    for layer in layers[first + 1 :]:
        if name := login_check(layer):
            yield _problem("login_inside", name)
