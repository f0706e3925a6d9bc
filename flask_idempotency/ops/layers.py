"""
The decorators of a view: which there are, and who made them.

``functools.wraps`` copies names and modules, so that a decorator's wrapper looks like
the view. Its code and its globals are still the decorator's.
"""

from __future__ import annotations

import functools
import inspect
import re
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from flask_idempotency.decorator import GUARDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: Packages whose decorators all check who is calling.
_LOGIN_LIBRARIES = frozenset(
    {
        "authlib",
        "flask_allows",
        "flask_allows2",
        "flask_awscognito",
        "flask_basicauth",
        "flask_cognito",
        "flask_cognito_lib",
        "flask_httpauth",
        "flask_jwt",
        "flask_jwt_extended",
        "flask_jwt_oidc",
        "flask_login",
        "flask_oidc",
        "flask_praetorian",
        "flask_principal",
        "flask_pyjwt",
        "flask_security",
        "flask_simplelogin",
        "flask_user",
    }
)
_WHO = (
    "access|admin|api_?key|auth|authentication|authori[sz]ation|jwt|logged_in|login"
    "|permissions?|roles?|scopes?|signature|staff|superuser|token|user"
)
#: Names of an application's own login decorators: a subject and a demand, no less,
#: because a false alarm would keep a correct application from passing.
_LOGIN_NAME = re.compile(
    rf"(?!.*csrf)(?:(?:\w+_)?(?:{_WHO})_(?:required|accepted|only)"
    rf"|(?:requires?|check)_(?:oauth_)?(?:{_WHO})|verify_(?:\w+_)?signature"
    r"|authenticated?|authori[sz]ed?)"
)
#: Decorators that turn what a view returns into the answer.
_SHAPING = {
    "apiflask": {"output"},
    "flask_restful": {"marshal_with", "marshal_with_field"},
    "flask_restx": {"marshal_with", "marshal_with_field"},
    "flask_smorest": {"response"},
}


def unwrapped(view: Any) -> list[Any]:
    """Return a view and what it wraps, from the outside in."""
    found: list[Any] = []
    while view is not None and not any(view is known for known in found):
        view = getattr(view, "__func__", view)  # of a bound method
        found.append(view)
        inner = "func" if type(view) is functools.partial else "__wrapped__"
        view = getattr(view, inner, None)
    return found


def is_guard(function: Any) -> bool:
    """Tell whether a callable is a guard itself, not a wrapper with its mark."""
    return type(function) is FunctionType and function in GUARDS


def login_check(function: Any) -> str | None:
    """Return the name of the login decorator that made a callable, if one did."""
    names, library = _makers(function), _library(function)
    for name in names:
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
        if _LOGIN_NAME.fullmatch(snake):
            return _described(name, library)
    # A view of such a library has no maker; it is no decorator.
    if names and library in _LOGIN_LIBRARIES:
        return _described(names[0], library)
    return None


def shaping(function: Any) -> str | None:
    """Return the name of the serialising decorator that made a callable, if any."""
    library = _library(function)
    for name in _makers(function):
        if name in _SHAPING.get(library, ()):
            return _described(name, library)
    return None


def _described(name: str, library: str) -> str:
    return f"'{name}' of '{library}'"


def _library(function: Any) -> str:
    module = (
        function.__globals__.get("__name__")
        if type(function) is FunctionType
        else type(function).__module__
    )
    return str(module).partition(".")[0]


def _makers(function: Any) -> tuple[str, ...]:
    """
    Return the names of the functions inside which a callable was made.

    Python 3.10 does not keep them with the code, so they are looked for in the module.
    """
    if type(function) is not FunctionType:
        return (type(function).__name__,)
    for name, code in _functions_of(function.__globals__):
        path = _path(code, function.__code__)
        if path is not None:
            return (name, *path[1:]) if path else ()
    return ()


def _functions_of(module: Mapping[str, Any]) -> Iterator[tuple[str, CodeType]]:
    for name, value in list(module.items()):
        yield from _codes(name, value)
        # type() and not isinstance(): a module has proxies, such as current_user,
        # which run code when they are asked for their class.
        if issubclass(type(value), type) and value.__module__ == module["__name__"]:
            for attribute, method in vars(value).items():
                yield from _codes(
                    name if attribute == "__call__" else attribute, method
                )


def _codes(name: str, value: Any) -> Iterator[tuple[str, CodeType]]:
    if type(value) in (FunctionType, classmethod, staticmethod):
        for function in unwrapped(value):
            if type(function) is FunctionType:
                yield name, function.__code__


def _path(code: CodeType, wanted: CodeType) -> list[str] | None:
    """Return the names of the functions from `code` down to `wanted`, without it."""
    if code is wanted:
        return []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            path = _path(constant, wanted)
            if path is not None:
                # The body of a class is code too, but makes nothing.
                is_function = code.co_flags & inspect.CO_OPTIMIZED
                return [code.co_name, *path] if is_function else path
    return None
