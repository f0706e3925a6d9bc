"""Between the decorators of API libraries: their answers, errors and documents stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from flask.views import MethodView

from flask_idempotency import idempotent
from tests.shop import elsewhere, is_replay

if TYPE_CHECKING:
    from collections.abc import Callable

    from werkzeug.test import TestResponse

    from tests.shop import Shop


class Served(NamedTuple):
    """
    An application of one library, with ``POST /accounts``.

    Attributes:
        shop: The application; its view answers 201 with name and number of the run.
        document: Where its OpenAPI document is.
        refusal: The status that the library gives to a body of a wrong form.
    """

    shop: Shop
    document: str
    refusal: int


class Account:
    """An object that no JSON encoder knows: only the library's schema makes it JSON."""

    def __init__(self, name: str, run: int) -> None:
        self.name = name
        self.run = run


def added(shop: Shop) -> Account:
    """Add the account that the request names."""
    return Account(shop.add(), len(shop.runs))


def schemas() -> tuple[Any, Any]:
    """Return what marshmallow takes for request and answer."""
    marshmallow: Any = pytest.importorskip("marshmallow")
    text, number = marshmallow.fields.String, marshmallow.fields.Integer
    taken = marshmallow.Schema.from_dict({"name": text(required=True)}, name="Taken")
    given = marshmallow.Schema.from_dict(
        {"name": text(), "run": number()}, name="Given"
    )
    return taken, given


def smorest_api(make_quick: Callable[..., Shop]) -> tuple[Shop, Any, Any]:
    """Return an application with flask-smorest's API, and a blueprint for it."""
    smorest: Any = pytest.importorskip("flask_smorest")
    shop = make_quick(
        API_TITLE="Shop",
        API_VERSION="1",
        OPENAPI_VERSION="3.0.3",
        OPENAPI_URL_PREFIX="/",
    )
    return shop, smorest.Api(shop.app), smorest.Blueprint("api", "api")


def smorest_function(make_quick: Callable[..., Shop]) -> Served:
    """Serve a function by flask-smorest."""
    shop, api, blp = smorest_api(make_quick)
    taken, given = schemas()

    @blp.route("/accounts", methods=["POST"])
    @idempotent(required=True)
    @blp.arguments(taken)
    @blp.response(201, given)
    def create(_data: Any) -> Account:
        return added(shop)

    api.register_blueprint(blp)
    return Served(shop, "/openapi.json", 422)


def smorest_class(make_quick: Callable[..., Shop]) -> Served:
    """Serve a class by flask-smorest."""
    shop, api, blp = smorest_api(make_quick)
    taken, given = schemas()

    @blp.route("/accounts")
    class Accounts(MethodView):
        @idempotent(required=True)
        @blp.arguments(taken)
        @blp.response(201, given)
        def post(self, _data: Any) -> Account:
            return added(shop)

    api.register_blueprint(blp)
    return Served(shop, "/openapi.json", 422)


def apiflask(make_quick: Callable[..., Shop]) -> Served:
    """Serve a function by APIFlask."""
    library: Any = pytest.importorskip("apiflask")
    shop = make_quick(library.APIFlask)
    app: Any = shop.app
    taken, given = schemas()

    @app.post("/accounts")
    @idempotent(required=True)
    @app.input(taken)
    @app.output(given, status_code=201)
    def create(json_data: Any) -> Account:
        assert json_data
        return added(shop)

    return Served(shop, "/openapi.json", 422)


def restx(make_quick: Callable[..., Shop]) -> Served:
    """Serve a resource by Flask-RESTX, guarded by its ``method_decorators``."""
    library: Any = pytest.importorskip("flask_restx")
    shop = make_quick()
    api = library.Api(shop.app)
    fields = {"name": library.fields.String(required=True)}
    taken = api.model("Taken", fields)
    given = api.model("Given", {**fields, "run": library.fields.Integer})

    class Accounts(library.Resource):
        method_decorators = [idempotent(required=True)]  # noqa: RUF012 - as documented

        @api.expect(taken, validate=True)
        @api.marshal_with(given, code=201)
        def post(self) -> tuple[Account, int]:
            return added(shop), 201

    api.add_resource(Accounts, "/accounts")
    return Served(shop, "/swagger.json", 400)


def openapi3(make_quick: Callable[..., Shop]) -> Served:
    """Serve a function by flask-openapi3."""
    library: Any = pytest.importorskip("flask_openapi3")
    pydantic: Any = pytest.importorskip("pydantic")
    shop = make_quick(library.OpenAPI)
    app: Any = shop.app
    taken = pydantic.create_model("Taken", name=(str, ...))
    given = pydantic.create_model("Given", name=(str, ...), run=(int, ...))

    def create(body: Any) -> tuple[dict[str, Any], int]:
        account = added(shop)
        assert account.name == body.name
        return {"name": account.name, "run": account.run}, 201

    create.__annotations__["body"] = taken  # where the library looks for it
    app.post("/accounts", responses={201: given})(idempotent(required=True)(create))
    return Served(shop, "/openapi/openapi.json", 422)


LIBRARIES = [smorest_function, smorest_class, apiflask, restx, openapi3]


@pytest.fixture(params=LIBRARIES)
def served(request: pytest.FixtureRequest, make_quick: Callable[..., Shop]) -> Served:
    """Give an application of each library."""
    served: Served = request.param(make_quick)
    return served


def test_replay_is_the_answer_that_the_library_shaped(served: Served) -> None:
    """Status and bytes of the library's first answer come again, and one row stays."""
    first, again = served.shop.post(), served.shop.post()
    assert (first.status_code, first.json) == (201, {"name": "first", "run": 1})
    assert (again.status_code, again.data) == (201, first.data)
    assert again.mimetype == first.mimetype == "application/json"
    assert (is_replay(first), is_replay(again)) == (False, True)
    assert served.shop.accounts() == ["first"]


def test_document_describes_the_guarded_operation(served: Served) -> None:
    """The guard hides nothing from what the library writes its document of."""
    document = served.shop.app.test_client().get(served.document).json
    assert document is not None
    operation = document["paths"]["/accounts"]["post"]
    assert "201" in operation["responses"]
    assert "Taken" in str(operation)
    assert "Given" in str(operation)


def test_problem_keeps_its_members(served: Served) -> None:
    """A client finds code and retryable in the body whoever renders the error."""
    served.shop.post("first")
    answer = served.shop.post("second")
    assert answer.status_code == 422
    assert answer.headers.getlist("Content-Type") == [answer.content_type]
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.json is not None
    assert answer.json["code"] == "IDEMPOTENCY_KEY_CONFLICT"
    assert answer.json["retryable"] is False
    assert answer.json["status"] == 422


def test_refused_body_has_no_effect(served: Served) -> None:
    """What the library's validation refuses does not reach the view, nor does a retry."""
    answers = [served.shop.post(json={"other": 1}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [served.refusal] * 2
    assert answers[0].data == answers[1].data
    assert served.shop.runs == []


def test_validation_above_the_guard_claims_nothing(
    make_quick: Callable[..., Shop],
) -> None:
    """A body that is refused before the guard leaves the key free for a better one."""
    shop, api, blp = smorest_api(make_quick)
    taken, given = schemas()

    @blp.route("/accounts", methods=["POST"])
    @blp.arguments(taken)
    @idempotent(required=True)
    @blp.response(201, given)
    def create(_data: Any) -> Account:
        return added(shop)

    api.register_blueprint(blp)
    assert shop.post(json={"other": 1}).status_code == 422
    assert shop.status() is None
    assert [shop.post().status_code for _ in range(2)] == [201, 201]
    assert shop.accounts() == ["first"]


def test_body_that_validation_has_read_is_compared(
    make_quick: Callable[..., Shop],
) -> None:
    """Validation above the guard takes nothing from the fingerprint."""
    served = openapi3(make_quick)  # validates before it calls what it serves
    assert served.shop.post("first").status_code == 201
    assert served.shop.post("second").status_code == 422
    assert served.shop.accounts() == ["first"]


def restx_resource(make_quick: Callable[..., Shop], post: Callable[..., Any]) -> Shop:
    """Serve a method by Flask-RESTX, which shapes the answer below the guard."""
    library: Any = pytest.importorskip("flask_restx")
    shop = make_quick()
    api = library.Api(shop.app)

    class Accounts(library.Resource):
        method_decorators = [  # noqa: RUF012 - as documented
            api.output,
            idempotent(required=True),
        ]

    Accounts.post = post
    Accounts.methods = {"POST"}
    api.add_resource(Accounts, "/accounts")
    return shop


@pytest.mark.parametrize(
    ("result", "status", "body"),
    [(None, 200, b"null\n"), ("text", 200, b'"text"\n'), ((None, 201), 201, b"null\n")],
    ids=["none", "text", "status"],
)
def test_restx_shapes_what_flask_would_not(
    make_quick: Callable[..., Shop], result: Any, status: int, body: bytes
) -> None:
    """With ``api.output`` below the guard every result becomes RESTX's JSON."""
    shop = restx_resource(make_quick, lambda _self: result)
    first, again = shop.post(), shop.post()
    for answer in (first, again):
        assert (answer.status_code, answer.data) == (status, body)
        assert answer.mimetype == "application/json"
    assert is_replay(again)


def test_restx_abort_is_stored_as_restx_says_it(
    make_quick: Callable[..., Shop],
) -> None:
    """The answer to ``abort`` is RESTX's own, and is what the retry gets."""
    library: Any = pytest.importorskip("flask_restx")
    shop = restx_resource(
        make_quick, lambda _self: library.abort(410, "gone", hint="new")
    )
    first, again = shop.post(), shop.post()
    assert (first.status_code, first.json) == (410, {"message": "gone", "hint": "new"})
    assert (again.status_code, again.data) == (410, first.data)
    assert is_replay(again)


def test_restx_answers_a_crash_and_keeps_it(make_quick: Callable[..., Shop]) -> None:
    """A crash is answered by RESTX, leaves no row, and is not run again."""
    shop = restx_resource(make_quick, lambda _self: [shop.add(), 1 / 0])
    first, again = shop.post(), shop.post()
    assert (first.status_code, first.json) == (
        500,
        {"message": "Internal Server Error"},
    )
    assert (again.status_code, again.data) == (500, first.data)
    assert is_replay(again)
    assert shop.runs == ["first"]
    assert shop.accounts() == []


def test_restx_keeps_retry_after(make_quick: Callable[..., Shop]) -> None:
    """A duplicate in progress is told when to come again under RESTX, too."""
    inner: list[TestResponse] = []

    def post(_self: object) -> str:
        inner.append(elsewhere(shop.post))
        return "done"

    shop = restx_resource(make_quick, post)
    assert shop.post().status_code == 200
    assert inner[0].status_code == 409
    assert int(inner[0].headers["Retry-After"]) > 0
    assert inner[0].json is not None
    assert inner[0].json["code"] == "IDEMPOTENCY_IN_PROGRESS"


@pytest.mark.parametrize("guard_on", ["method", "class"])
def test_async_method_of_a_class(
    make_quick: Callable[..., Shop], guard_on: str
) -> None:
    """An async method is run and replayed, guarded itself or by its class."""
    pytest.importorskip("asgiref")
    shop, guard = make_quick(), idempotent(required=True)

    async def post(_self: object) -> Any:
        """Create like the others."""
        return shop.create()

    class View(MethodView):
        decorators = [guard] if guard_on == "class" else []

    View.post = guard(post) if guard_on == "method" else post  # type: ignore[attr-defined]
    View.methods = {"POST"}
    shop.app.add_url_rule("/accounts", view_func=View.as_view("accounts"))
    first, again = shop.post(), shop.post()
    assert (first.status_code, first.data) == (again.status_code, again.data)
    assert is_replay(again)
    assert shop.accounts() == ["first"]
