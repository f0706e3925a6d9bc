"""``flask idempotency routes``, on applications with every kind of route."""

from __future__ import annotations

import functools
import json
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from flask import Blueprint, Flask
from flask.views import MethodView, View
from flask_sqlalchemy import SQLAlchemy

from example_app import create_app
from example_app.demo.routes import demo_blueprint
from flask_idempotency import Idempotency, idempotent, not_idempotent
from tests.acceptance.test_cli import one_clear_sentence, run

if TYPE_CHECKING:
    from collections.abc import Callable

    Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


@pytest.fixture
def app() -> Flask:
    """Give an application without routes of its own, except for static files."""
    app = Flask("audited")
    app.config["SQLALCHEMY_DATABASE_URI"] = "sqlite://"
    Idempotency(app, SQLAlchemy(app))
    return app


def report(app: Flask) -> dict[str, Any]:
    """Return the whole report of an application, with and without --check."""
    result = run(app, "routes", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    checked = run(app, "routes", "--json", "--check")
    assert (checked.stdout, checked.stderr) == (result.stdout, "")
    read: dict[str, Any] = json.loads(result.stdout)
    assert checked.exit_code == (0 if read["ok"] else 1)
    return read


def found(app: Flask) -> dict[str, list[str]]:
    """Return the problems of each route that has some."""
    return {
        f"{route['method']} {route['rule']}": [p["problem"] for p in route["problems"]]
        for route in report(app)["routes"]
        if route["problems"]
    }


def listed(app: Flask) -> dict[str, str | None]:
    """Return what each route declares."""
    return {
        f"{route['method']} {route['rule']}": route["declaration"]
        for route in report(app)["routes"]
    }


def message(app: Flask) -> str:
    """Return the sentence about the only problem of an application."""
    (route,) = [route for route in report(app)["routes"] if route["problems"]]
    (problem,) = route["problems"]
    text: str = problem["message"]
    return text


def plain(**_arguments: Any) -> str:
    """Answer something."""
    return ""


def view(*decorators: Decorator) -> Callable[..., Any]:
    """Return a new view with decorators, the outermost first."""

    def made(**_arguments: Any) -> str:
        """Answer something."""
        return ""

    decorated: Callable[..., Any] = made
    for decorator in reversed(decorators):
        decorated = decorator(decorated)
    return decorated


def timed(view: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate like any library that keeps to functools.wraps."""

    @functools.wraps(view)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return view(*args, **kwargs)

    return wrapper


def login_required(view: Callable[..., Any]) -> Callable[..., Any]:
    """Stand for an application's own login decorator."""

    @functools.wraps(view)
    def checked(*args: Any, **kwargs: Any) -> Any:
        return view(*args, **kwargs)

    return checked


def post(app: Flask, *decorators: Decorator, rule: str = "/x") -> None:
    """Add a route that changes something."""
    app.add_url_rule(rule, rule, view(*decorators), methods=["POST"])


def event_key() -> str:
    """Name a webhook's event."""
    return "e1"


@pytest.fixture
def mixed(app: Flask) -> Flask:
    """Give an application with one route of each declaration, and a wrong one."""
    post(app, rule="/said-nothing")
    post(app, login_required, idempotent(claim=False, required=True), rule="/service")
    post(app, not_idempotent("it's only\na search"), rule="/search")
    post(app, idempotent, login_required, rule="/wrong")
    hook = idempotent(key=event_key, anonymous=True, ttl=1_000_000, route="hook")
    app.add_url_rule("/hook/<name>", "hook", view(hook), methods=["PUT"])
    app.add_url_rule("/read", "read", plain)
    return app


def test_json_is_reported_whole(mixed: Flask) -> None:
    """Every member is there for every route, sorted, with null for what is not said."""
    nothing: dict[str, Any] = {
        "declaration": None,
        "options": None,
        "reason": None,
        "problems": [],
    }
    assert report(mixed) == {
        "ok": False,
        "routes": [
            {
                **nothing,
                "rule": "/hook/<name>",
                "method": "PUT",
                "endpoint": "hook",
                "declaration": "idempotent",
                "options": {
                    "key": "event_key",
                    "anonymous": True,
                    "ttl_seconds": 1_000_000,
                    "route": "hook",
                },
            },
            {
                **nothing,
                "rule": "/said-nothing",
                "method": "POST",
                "endpoint": "/said-nothing",
                "problems": [
                    {
                        "problem": "undeclared",
                        "message": "It declares nothing: add @idempotent below the "
                        "route and login decorators, or "
                        '@not_idempotent("why"). A decorator without functools.wraps '
                        "hides a declaration.",
                    }
                ],
            },
            {
                **nothing,
                "rule": "/search",
                "method": "POST",
                "endpoint": "/search",
                "declaration": "not_idempotent",
                "reason": "it's only\na search",
            },
            {
                **nothing,
                "rule": "/service",
                "method": "POST",
                "endpoint": "/service",
                "declaration": "idempotent",
                "options": {"required": True, "claim": False},
            },
            {
                **nothing,
                "rule": "/wrong",
                "method": "POST",
                "endpoint": "/wrong",
                "declaration": "idempotent",
                "options": {},
                "problems": [
                    {
                        "problem": "login_inside",
                        "message": "'login_required' of 'tests' runs inside "
                        "@idempotent, so that a replay bypasses it: put "
                        "@idempotent below it.",
                    }
                ],
            },
        ],
    }


TEXT = """\
PUT   /hook/<name>   @idempotent(key=event_key, route='hook', ttl=1000000, \
anonymous=True)
POST  /said-nothing  -
  undeclared: It declares nothing: add @idempotent below the route and login \
decorators, or @not_idempotent("why"). A decorator without functools.wraps hides a \
declaration.
POST  /search        @not_idempotent("it's only\\na search")
POST  /service       @idempotent(required=True, claim=False)
POST  /wrong         @idempotent
  login_inside: 'login_required' of 'tests' runs inside @idempotent, so that a \
replay bypasses it: put @idempotent below it.
Routes: 5, problems: 2.
"""


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--check",), 1)])
def test_text(mixed: Flask, options: tuple[str, ...], code: int) -> None:
    """People read the same, each route on a line and each problem below it."""
    result = run(mixed, "routes", *options)
    assert (result.exit_code, result.stdout, result.stderr) == (code, TEXT, "")


def test_application_without_mutating_routes(app: Flask) -> None:
    """Static files and pages need no declaration."""
    app.add_url_rule("/read", "read", plain)
    assert report(app) == {"ok": True, "routes": []}
    result = run(app, "routes", "--check")
    assert (result.exit_code, result.stdout) == (0, "Routes: 0, problems: 0.\n")


def test_application_without_the_extension() -> None:
    """An application that was not set up is told what was forgotten."""
    for options in ((), ("--check",), ("--json",)):
        one_clear_sentence(run(Flask("bare"), "routes", *options), "init_app")


@pytest.mark.parametrize("argument", ["surplus", "--unknown", "--check=yes"])
def test_wrong_usage(app: Flask, argument: str) -> None:
    """A surplus or unknown option is wrong usage: exit status 2."""
    result = run(app, "routes", argument)
    assert (result.exit_code, result.stdout) == (2, "")


def test_help_documents_the_json(app: Flask) -> None:
    """Every member and every problem of the JSON is explained in the help."""
    help_text = run(app, "routes", "--help").stdout
    post(app)
    (route,) = report(app)["routes"]
    (problem,) = route["problems"]
    for word in ("ok", "routes", *route, *problem, "null"):
        assert word in help_text


def test_example_is_declared() -> None:
    """The example and the demo's own routes have no problem."""
    example = create_app({"SQLALCHEMY_DATABASE_URI": "sqlite://"})
    example.register_blueprint(demo_blueprint())
    assert report(example)["ok"]
    assert listed(example)["POST /demo/gate"] == "not_idempotent"


@pytest.mark.parametrize("order", [1, -1])
def test_other_decorators(app: Flask, order: int) -> None:
    """A declaration is found on either side of another library's decorator."""
    guarded: list[Decorator] = [idempotent, timed]
    skipped: list[Decorator] = [not_idempotent("why"), timed]
    post(app, *guarded[::order], rule="/run")
    post(app, *skipped[::order], rule="/skip")
    assert listed(app) == {"POST /run": "idempotent", "POST /skip": "not_idempotent"}
    assert found(app) == {}


def test_blueprints(app: Flask) -> None:
    """Nested and doubly registered blueprints give one route for each rule."""
    inner, outer = Blueprint("inner", __name__), Blueprint("outer", __name__)
    inner.add_url_rule("/good", "good", view(idempotent), methods=["POST"])
    inner.add_url_rule("/bad", "bad", view(), methods=["POST"])
    outer.register_blueprint(inner, url_prefix="/inner")
    app.register_blueprint(outer, url_prefix="/a")
    app.register_blueprint(outer, url_prefix="/b", name="again")
    routes = report(app)["routes"]
    assert [(r["rule"], r["endpoint"], len(r["problems"])) for r in routes] == [
        ("/a/inner/bad", "outer.inner.bad", 1),
        ("/a/inner/good", "outer.inner.good", 0),
        ("/b/inner/bad", "again.inner.bad", 1),
        ("/b/inner/good", "again.inner.good", 0),
    ]


def test_every_mutating_method_is_a_route(app: Flask) -> None:
    """A rule with several methods is listed once for each that changes something."""
    methods = ["GET", "POST", "DELETE", "PROPPATCH"]
    app.add_url_rule("/x", "x", view(idempotent), methods=methods)
    assert list(listed(app)) == ["DELETE /x", "POST /x", "PROPPATCH /x"]


def test_rules_that_lead_to_no_view(app: Flask) -> None:
    """A rule that only builds URLs is no route; one for any method is."""
    app.url_map.add(app.url_rule_class("/built", endpoint="x", build_only=True))
    app.url_map.add(app.url_rule_class("/redirected", redirect_to="/x"))
    app.url_map.add(app.url_rule_class("/any", endpoint="x"))
    app.endpoint("x")(view())
    assert list(found(app)) == ["DELETE /any", "PATCH /any", "POST /any", "PUT /any"]


class Accounts(MethodView):
    """A class whose methods declare different things."""

    @idempotent(required=True)
    def put(self) -> str:
        """Replace something."""
        return ""

    @timed
    @not_idempotent("patching twice is patching once")
    def patch(self) -> str:
        """Change something."""
        return ""

    def delete(self) -> str:
        """Delete something."""
        return ""

    def get(self) -> str:
        """Show something."""
        return ""


def test_method_view(app: Flask) -> None:
    """Each method of a class declares for itself; only the silent one is reported."""
    app.add_url_rule("/x", view_func=Accounts.as_view("x"))
    assert listed(app) == {
        "DELETE /x": None,
        "PATCH /x": "not_idempotent",
        "PUT /x": "idempotent",
    }
    assert found(app) == {"DELETE /x": ["undeclared"]}


def with_decorators(base: Any, *decorators: Decorator, **members: Any) -> Any:
    """Return a class-based view with decorators, the innermost first."""
    made: Any = type("Made", (base,), {"decorators": decorators, **members})
    return made.as_view("x")


def dispatch_request(_self: Any) -> str:
    """Answer something."""
    return ""


@pytest.mark.parametrize("declare", [idempotent(), not_idempotent("why")])
def test_decorators_of_a_class(app: Flask, declare: Decorator) -> None:
    """The decorators of a class declare all of its methods."""

    class Made(MethodView):
        decorators: ClassVar[list[Decorator]] = [declare, login_required]

        def post(self) -> str:
            return ""

        def get(self) -> str:
            return ""

    app.add_url_rule("/x", view_func=Made.as_view("x"))
    made = with_decorators(View, declare, dispatch_request=dispatch_request)
    app.add_url_rule("/y", "y", made, methods=["GET", "PUT"])
    assert found(app) == {}
    assert set(listed(app)) == {"POST /x", "PUT /y"}


def test_view_that_dispatches_itself(app: Flask) -> None:
    """A guard may stand on the method that a class is called by."""
    guarded = with_decorators(View, dispatch_request=idempotent(dispatch_request))
    app.add_url_rule("/x", view_func=guarded, methods=["POST"])
    assert listed(app) == {"POST /x": "idempotent"}
    assert found(app) == {}


def test_async_views(app: Flask) -> None:
    """Async views are declared like any other."""

    async def run_async() -> str:
        """Answer something."""
        return ""

    async def skip_async() -> str:
        """Answer something."""
        return ""

    app.add_url_rule("/run", view_func=idempotent(run_async), methods=["POST"])
    skipped = not_idempotent("why")(skip_async)
    app.add_url_rule("/skip", view_func=skipped, methods=["POST"])
    assert listed(app) == {"POST /run": "idempotent", "POST /skip": "not_idempotent"}
    assert found(app) == {}


@pytest.mark.parametrize("bare", [True, False], ids=["bare", "options"])
def test_method_decorators(app: Flask, *, bare: bool) -> None:
    """Flask-RESTX and Flask-RESTful decorate the methods of a class when they run."""
    guard: Any = idempotent if bare else idempotent(required=True)

    class Resource(MethodView):
        method_decorators = (guard,)

        def post(self) -> str:
            """Answer something."""
            return ""

    class Mapped(MethodView):
        method_decorators: ClassVar[dict[str, Any]] = {"put": [guard]}

        def put(self) -> str:
            """Answer something."""
            return ""

        def delete(self) -> str:
            """Answer something."""
            return ""

    app.add_url_rule("/x", view_func=Resource.as_view("x"))
    app.add_url_rule("/y", view_func=Mapped.as_view("y"))
    assert listed(app)["POST /x"] == listed(app)["PUT /y"] == "idempotent"
    assert found(app) == {"DELETE /y": ["undeclared"]}


def test_marked_method_of_an_object(app: Flask) -> None:
    """A bound method, which can have no mark, is marked as a function."""

    class Admin:
        def edit(self) -> str:
            """Answer something."""
            return "edited"

    app.add_url_rule("/x", "x", Admin().edit, methods=["POST"])
    app.view_functions["x"] = not_idempotent("why")(app.view_functions["x"])
    assert listed(app) == {"POST /x": "not_idempotent"}
    assert app.test_client().post("/x").data == b"edited"


def test_bound_method_and_partial_as_views(app: Flask) -> None:
    """A view need not be a function."""

    class Controller:
        @idempotent
        def create(self) -> str:
            return ""

    app.add_url_rule("/bound", "b", Controller().create, methods=["POST"])
    partial = functools.partial(view(idempotent), name="x")
    app.add_url_rule("/partial", "p", partial, methods=["POST"])
    assert listed(app) == {"POST /bound": "idempotent", "POST /partial": "idempotent"}
    assert found(app) == {}


THIRD_PARTY = """
from flask import Blueprint
from flask.views import MethodView

admin = Blueprint("admin", __name__, url_prefix="/admin")

@admin.post("/cache")
def clear_cache():
    return ""

class Users(MethodView):
    def post(self):
        return ""

admin.add_url_rule("/users", view_func=Users.as_view("users"))
"""


@pytest.fixture
def third_party(app: Flask) -> Flask:
    """Give an application that uses somebody else's blueprint."""
    module = ModuleType("third_party_admin")
    exec(THIRD_PARTY, vars(module))  # noqa: S102 - stands for another package
    app.register_blueprint(module.admin)
    return app


def test_views_of_others(third_party: Flask) -> None:
    """Views of another package are listed until the application declares them."""
    app = third_party
    assert set(found(app)) == {"POST /admin/cache", "POST /admin/users"}
    not_idempotent("clearing twice is clearing once")(
        app.view_functions["admin.clear_cache"]
    )
    app.view_functions["admin.users"] = idempotent(app.view_functions["admin.users"])
    assert report(app)["ok"]
    assert listed(app) == {
        "POST /admin/cache": "not_idempotent",
        "POST /admin/users": "idempotent",
    }


def requires_role(_role: str) -> Decorator:
    """Stand for an application's login decorator with an argument."""

    def decorator(view: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(view)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return view(*args, **kwargs)

        return wrapper

    return decorator


@pytest.mark.parametrize("login", [login_required, requires_role("admin")])
def test_own_login_decorator_inside_the_guard(app: Flask, login: Decorator) -> None:
    """An application's login decorator is known by its name, with others between."""
    post(app, timed, login, timed, idempotent, timed, rule="/right")
    post(app, timed, idempotent, timed, login, rule="/wrong")
    post(app, idempotent(claim=False), login, rule="/service")  # replays nothing
    assert found(app) == {"POST /wrong": ["login_inside"]}


def test_flask_login(app: Flask) -> None:
    """Flask-Login's decorator belongs outside of the guard."""
    flask_login: Any = pytest.importorskip("flask_login")
    post(app, flask_login.login_required, idempotent, rule="/right")
    post(app, idempotent, flask_login.login_required, rule="/wrong")
    assert found(app) == {"POST /wrong": ["login_inside"]}
    assert message(app).startswith("'login_required' of 'flask_login' runs inside")


def test_login_inside_the_guard_of_a_class(app: Flask) -> None:
    """The guard of a class is outside of what its methods check."""

    class Wrong(MethodView):
        decorators: ClassVar[list[Decorator]] = [login_required, idempotent()]

        def post(self) -> str:
            return ""

    class AlsoWrong(MethodView):
        decorators: ClassVar[list[Decorator]] = [idempotent()]

        @login_required
        def post(self) -> str:
            return ""

    app.add_url_rule("/wrong", view_func=Wrong.as_view("wrong"))
    app.add_url_rule("/also", view_func=AlsoWrong.as_view("also"))
    assert found(app) == {
        "POST /wrong": ["login_inside"],
        "POST /also": ["login_inside"],
    }


def test_guard_above_the_route(app: Flask) -> None:
    """A guard that no rule leads to is told from none at all."""
    view = app.post("/x")(plain)
    guard = idempotent(view)
    assert found(app) == {"POST /x": ["above_route"]}
    assert message(app) == (
        "The view was registered without its guard: put @idempotent below the route "
        "decorator."
    )
    del guard  # A module's name would have kept it.
    assert found(app) == {"POST /x": ["undeclared"]}


def test_view_that_another_rule_guards(app: Flask) -> None:
    """A guard that is in use elsewhere was not misplaced; the rule says nothing."""
    create = view()
    app.add_url_rule("/bare", "bare", create, methods=["POST"])
    app.add_url_rule("/guarded", "guarded", idempotent(create), methods=["POST"])
    assert found(app) == {"POST /bare": ["undeclared"]}


@pytest.mark.parametrize("method", [idempotent, not_idempotent("why")])
def test_class_and_method_are_both_declared(app: Flask, method: Decorator) -> None:
    """What a class has declared its methods cannot declare again."""

    class Made(MethodView):
        decorators: ClassVar[list[Decorator]] = [idempotent()]

        @method
        def post(self) -> str:
            return ""

        def put(self) -> str:
            return ""

    app.add_url_rule("/x", view_func=Made.as_view("x"))
    assert found(app) == {"POST /x": ["declared_twice"]}
    assert message(app) == (
        "It is declared twice, such as by a class and by its method: "
        "keep one of the two."
    )


def test_guard_within_a_guard(app: Flask) -> None:
    """A decorator that hides the first guard from the second does not from us."""

    def hiding(view: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(view, updated=())(lambda: view())  # noqa: PLW0108

    post(app, idempotent, hiding, idempotent, rule="/twice")
    post(app, hiding, idempotent, rule="/once")
    assert found(app) == {"POST /twice": ["declared_twice"]}


def test_guard_of_a_safe_route(app: Flask) -> None:
    """A guard that never has anything to do is reported."""

    class Made(MethodView):
        @idempotent
        def get(self) -> str:
            return ""

        @idempotent
        def post(self) -> str:
            return ""

    app.add_url_rule("/class", view_func=Made.as_view("class"))
    app.add_url_rule("/function", "function", view(timed, idempotent))
    app.add_url_rule("/why", "why", view(not_idempotent("reading is harmless")))
    assert found(app) == {
        "GET /class": ["safe_method"],
        "GET /function": ["safe_method"],
    }


def test_guard_of_a_view_with_a_safe_rule_beside(app: Flask) -> None:
    """One view may be read by one rule and change something by another."""
    both = view(idempotent)
    app.add_url_rule("/form", "both", both)
    app.add_url_rule("/send", "both", both, methods=["POST"])

    class Made(MethodView):
        decorators: ClassVar[list[Decorator]] = [idempotent]

        def get(self) -> str:
            return ""

        def post(self) -> str:
            return ""

    app.add_url_rule("/read", view_func=Made.as_view("read"), methods=["GET"])
    app.add_url_rule("/write", view_func=Made.as_view("write"), methods=["POST"])
    assert found(app) == {}


def test_flask_smorest(app: Flask) -> None:
    """Flask-Smorest's response belongs inside of the guard, arguments anywhere."""
    smorest: Any = pytest.importorskip("flask_smorest")
    schema = pytest.importorskip("marshmallow").Schema
    app.config.update(API_TITLE="t", API_VERSION="1", OPENAPI_VERSION="3.0.3")
    blueprint = smorest.Blueprint("b", __name__)
    takes: Decorator = blueprint.arguments(schema)
    gives: Decorator = blueprint.response(201, schema)
    for name, decorators in {
        "right": (takes, idempotent, gives),
        "also": (idempotent, takes, gives),
        "wrong": (takes, gives, idempotent),
    }.items():
        blueprint.route(f"/{name}", methods=["POST"], endpoint=name)(view(*decorators))

    class Made(MethodView):
        @gives
        @idempotent
        def put(self) -> str:
            return ""

        def delete(self) -> str:
            return ""

    blueprint.route("/class")(Made)
    smorest.Api(app).register_blueprint(blueprint)
    assert found(app) == {
        "POST /wrong": ["shaped_outside"],
        "PUT /class": ["shaped_outside"],
        "DELETE /class": ["undeclared"],
    }
    (text,) = {
        problem["message"]
        for route in report(app)["routes"]
        for problem in route["problems"]
        if problem["problem"] == "shaped_outside"
    }
    assert text == (
        "'response' of 'flask_smorest' shapes the answer outside of @idempotent, where "
        "it can no longer do so: put @idempotent above it."
    )


def test_apiflask() -> None:
    """APIFlask's output belongs inside of the guard, its login outside."""
    apiflask: Any = pytest.importorskip("apiflask")
    app = apiflask.APIFlask("audited")
    app.config["SQLALCHEMY_DATABASE_URI"] = "sqlite://"
    Idempotency(app, SQLAlchemy(app))
    login = app.auth_required(apiflask.HTTPTokenAuth())
    takes, gives = app.input(apiflask.Schema), app.output(apiflask.Schema)
    post(app, login, takes, idempotent, gives, rule="/right")
    post(app, login, gives, idempotent, takes, rule="/shaped")
    post(app, idempotent, login, gives, rule="/bypassed")
    assert found(app) == {
        "POST /shaped": ["shaped_outside"],
        "POST /bypassed": ["login_inside"],
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flask_restx(app: Flask) -> None:
    """Flask-RESTX's marshalling belongs inside of the guard; resources are classes."""
    restx: Any = pytest.importorskip("flask_restx")
    api = restx.Api(app)
    expected: Decorator = api.expect()
    shaped: Decorator = api.marshal_with(
        api.model("Model", {"id": restx.fields.Integer})
    )

    @api.route("/x")
    class Made(restx.Resource):  # type: ignore[misc]
        @expected
        @idempotent
        @shaped
        def post(self) -> str:
            return ""

        @shaped
        @idempotent
        def put(self) -> str:
            return ""

        def delete(self) -> str:
            return ""

    assert found(app) == {"PUT /x": ["shaped_outside"], "DELETE /x": ["undeclared"]}
