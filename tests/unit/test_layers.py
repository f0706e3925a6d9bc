"""Which decorators of a view are known for what they do."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
from werkzeug.local import LocalProxy

from flask_idempotency import idempotent
from flask_idempotency.ops.layers import is_guard, login_check, shaping, unwrapped

if TYPE_CHECKING:
    from collections.abc import Callable

SOURCE = """
import functools
{definition}
"""
PLAIN = """
def {name}(view):
    @functools.wraps(view)
    def wrapper(**kwargs):
        return view(**kwargs)
    return wrapper
"""
WITH_ARGUMENT = """
def {name}(*roles):
    def decorator(view):
        @functools.wraps(view)
        def wrapper(**kwargs):
            return view(**kwargs)
        return wrapper
    return decorator
decorate = {name}()
"""
METHOD = """
class Auth:
    def {name}(self, view):
        @functools.wraps(view)
        def wrapper(**kwargs):
            return view(**kwargs)
        return wrapper
decorate = Auth().{name}
"""
STATIC = """
class Auth:
    @staticmethod
    def {name}(view):
        @functools.wraps(view)
        def wrapper(**kwargs):
            return view(**kwargs)
        return wrapper
decorate = Auth.{name}
"""
CALLABLE = """
class {name}:
    def __call__(self, view):
        @functools.wraps(view)
        def wrapper(**kwargs):
            return view(**kwargs)
        return wrapper
decorate = {name}()
"""
WRAPPER = """
class {name}:
    def __init__(self, view):
        functools.update_wrapper(self, view)
"""
NESTED = """
def create_auth():
    def {name}(view):
        @functools.wraps(view)
        def wrapper(**kwargs):
            return view(**kwargs)
        return wrapper
    return {name}
decorate = create_auth()
"""
DECORATED = """
def optional(decorator):
    @functools.wraps(decorator)
    def wrapper(view):
        return decorator(view)
    return wrapper
@optional
def {name}(view):
    @functools.wraps(view)
    def wrapper(**kwargs):
        return view(**kwargs)
    return wrapper
"""


def view() -> str:
    """Answer something."""
    return ""


def decorated(definition: str, name: str, module: str = "shop.auth") -> Any:
    """Return a view with a decorator of another module."""
    names: dict[str, Any] = {"__name__": module}
    source = SOURCE.format(definition=definition.format(name=name))
    exec(source, names)  # noqa: S102 - stands for another module
    decorate = names["decorate"] if "decorate" in names else names[name]
    return decorate(view)


KINDS = {
    "plain": PLAIN,
    "argument": WITH_ARGUMENT,
    "method": METHOD,
    "static": STATIC,
    "nested": NESTED,
    "decorated": DECORATED,
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_kind_of_login_decorator_is_known(kind: str) -> None:
    """A wrapper is traced to the decorator that made it, however it was written."""
    layer = decorated(kind, "login_required")
    assert layer.__name__ == "view"
    assert login_check(layer) == "'login_required' of 'shop'"
    assert shaping(layer) is None
    assert login_check(decorated(kind, "log_calls")) is None


@pytest.mark.parametrize("kind", [CALLABLE, WRAPPER], ids=["made", "is"])
def test_class_as_login_decorator(kind: str) -> None:
    """A class is known by its own name."""
    assert login_check(decorated(kind, "LoginRequired")) == (
        "'LoginRequired' of 'shop'"
    )
    assert login_check(decorated(kind, "Timed")) is None


@pytest.mark.parametrize(
    "name",
    [
        "admin_or_staff_required",
        "admin_only",
        "admin_required",
        "api_key_required",
        "auth_required",
        "authenticated",
        "authorize",
        "check_permission",
        "fresh_login_required",
        "jwt_required",
        "permissions_accepted",
        "permission_required",
        "require_api_key",
        "require_auth",
        "require_oauth_token",
        "requires_role",
        "roles_required",
        "scope_required",
        "token_required",
        "user_required",
        "verify_signature",
        "verify_webhook_signature",
    ],
)
def test_name_of_a_login_decorator(name: str) -> None:
    """What names a caller and demands something is a login decorator."""
    assert login_check(decorated(PLAIN, name)) is not None


@pytest.mark.parametrize(
    "name",
    [
        "author_required",
        "check_email_of_user",
        "check_quota",
        "ensure_unique_user",
        "require_json_scope",
        "verify_invoice_token",
        "csrf_token_required",
        "fields_required",
        "inject_user",
        "json_required",
        "log_user",
        "parse_token",
        "rate_limit",
        "require_json",
        "requires_content_type",
        "track_login",
        "validate",
        "validate_user_payload",
        "verify_csrf_token",
        "with_session",
    ],
)
def test_name_of_another_decorator(name: str) -> None:
    """A decorator is not reported for half of a name."""
    assert login_check(decorated(PLAIN, name)) is None


@pytest.mark.parametrize(
    ("module", "name"),
    [("flask_principal", "IdentityContext"), ("authlib.flask", "Protector")],
)
def test_library_for_logins(module: str, name: str) -> None:
    """The decorators of a login library are known whatever their name."""
    library = module.partition(".")[0]
    layer = decorated(CALLABLE, name, module)
    assert login_check(layer) == f"'{name}' of '{library}'"


def test_decorator_that_its_module_forgot() -> None:
    """A wrapper whose decorator is out of reach is not guessed at."""
    layer = decorated(PLAIN, "login_required")
    del layer.__globals__["login_required"]
    assert login_check(layer) is None


def test_view_of_a_login_library_is_no_check() -> None:
    """What a library offers as a view may be guarded from outside."""
    names: dict[str, Any] = {"__name__": "flask_security.views"}
    exec("def logout(): pass", names)  # noqa: S102 - stands for another module
    assert login_check(names["logout"]) is None


class LoginRequiredView:
    """A class with the name of a check."""

    def post(self) -> str:
        """Answer something."""
        return ""


def test_method_is_not_taken_for_a_check_by_its_class() -> None:
    """What a class is called says nothing about its methods."""
    assert login_check(LoginRequiredView.post) is None

    class AdminRequired:
        def post(self) -> str:
            return ""

    assert login_check(AdminRequired.post) is None


@pytest.mark.parametrize(
    ("kind", "module", "name", "shapes"),
    [
        (METHOD, "flask_smorest.response", "response", True),
        (METHOD, "flask_smorest.response", "alt_response", False),
        (METHOD, "flask_smorest.arguments", "arguments", False),
        (METHOD, "apiflask.scaffold", "output", True),
        (METHOD, "apiflask.scaffold", "input", False),
        (CALLABLE, "flask_restx.marshalling", "marshal_with", True),
        (CALLABLE, "flask_restful", "marshal_with_field", True),
        (METHOD, "flask_restx.api", "output", False),
        (METHOD, "shop.views", "response", False),
    ],
)
def test_what_shapes_the_answer(
    kind: str, module: str, name: str, *, shapes: bool
) -> None:
    """Serialising decorators are known, those that only parse are not."""
    assert (shaping(decorated(kind, name, module)) is not None) is shapes


def unreachable() -> object:
    """Fail like a proxy without its context."""
    message = "Working outside of something."
    raise ValueError(message)


def test_proxies_of_a_module_are_left_alone() -> None:
    """Looking through a module runs none of its code."""
    layer = decorated(PLAIN, "login_required")
    names = {"proxy": LocalProxy(unreachable), **layer.__globals__}
    layer.__globals__.clear()
    layer.__globals__.update(names)
    assert login_check(layer) is not None


def test_layers_from_the_outside_in() -> None:
    """Wrappers, partials and bound methods are followed to the view."""

    class Controller:
        @idempotent
        def create(self) -> str:
            return ""

    bound = Controller().create
    assert unwrapped(functools.partial(bound))[1:] == [
        Controller.create,
        inner(Controller.create),
    ]


def inner(function: Callable[..., Any]) -> Any:
    """Return what a function wraps."""
    return function.__wrapped__  # type: ignore[attr-defined]


def test_circle_ends() -> None:
    """A wrapper that names itself does not hang the command."""

    def odd() -> str:
        return ""

    odd.__wrapped__ = odd  # type: ignore[attr-defined]
    assert unwrapped(odd) == [odd]


def test_only_the_guard_is_a_guard() -> None:
    """A wrapper has the guard's mark, and is not taken for it."""
    guard = idempotent(view)

    @functools.wraps(guard)
    def wrapper() -> Any:
        return guard()

    assert [is_guard(layer) for layer in unwrapped(wrapper)] == [False, True, False]
    assert not is_guard([])
