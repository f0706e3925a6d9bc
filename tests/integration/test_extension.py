"""Set-up of applications, kinds of views, and the application's own error handlers."""

from __future__ import annotations

import threading
from functools import wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from flask import Blueprint, Flask, current_app, request
from flask.views import MethodView
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import (
    ForeignKey,
    Index,
    MetaData,
    UniqueConstraint,
    create_engine,
    inspect,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.pool import NullPool
from werkzeug.exceptions import HTTPException

from flask_idempotency import (
    Idempotency,
    IdempotencyConfigError,
    IdempotencyError,
    IdempotencyRecordMixin,
    fingerprint,
    idempotent,
    not_idempotent,
)
from flask_idempotency.exceptions import IdempotencyHTTPException
from flask_idempotency.state import get_state
from flask_idempotency.store.dialects import dialect_for
from tests.databases import sqlite_database
from tests.shop import Shop, statements_sent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from werkzeug.test import TestResponse

    from tests.databases import Database

on_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
on_postgresql = pytest.mark.parametrize("database", ["postgresql"], indirect=True)


@pytest.fixture
def used() -> Iterator[list[tuple[Flask, SQLAlchemy]]]:
    """Close the connections of the applications that a test makes by itself."""
    made: list[tuple[Flask, SQLAlchemy]] = []
    yield made
    for app, db in made:
        with app.app_context():
            db.engine.dispose()
            if "idempotency" in app.extensions:
                get_state().store.close()


def bare_app(url: str = "sqlite://", **config: object) -> Flask:
    """Return an application without extensions."""
    app = Flask("bare")
    app.config.update(SQLALCHEMY_DATABASE_URI=url, **config)
    return app


def post(app: Flask, path: str = "/x", key: str = "k", **options: Any) -> TestResponse:
    """Send one request by a client of its own."""
    headers = {"Idempotency-Key": key, **options.pop("headers", {})}
    return app.test_client().post(path, headers=headers, **options)


def replayed(*answers: TestResponse) -> bool:
    """Tell whether all answers but the first are replays of it."""
    first, *others = answers
    return "Idempotent-Replayed" not in first.headers and all(
        other.headers.get("Idempotent-Replayed") == "true"
        and (other.status_code, other.data) == (first.status_code, first.data)
        for other in others
    )


def counting(runs: list[Any]) -> Callable[..., dict[str, int]]:
    """Return a view that counts its runs."""

    def view(**_arguments: object) -> dict[str, int]:
        runs.append(1)
        return {"run": len(runs)}

    return view


def set_up_db_first(app: Flask, db: SQLAlchemy) -> None:
    """Initialise the database and then the extension."""
    db.init_app(app)
    Idempotency(db=db).init_app(app)


def set_up_db_last(app: Flask, db: SQLAlchemy) -> None:
    """Initialise the extension and then the database."""
    Idempotency(db=db).init_app(app)
    db.init_app(app)


def set_up_with_db_late(app: Flask, db: SQLAlchemy) -> None:
    """Give the database to init_app, before its own."""
    Idempotency().init_app(app, db)
    db.init_app(app)


def set_up_without_db(app: Flask, db: SQLAlchemy) -> None:
    """Let the extension find the database."""
    db.init_app(app)
    Idempotency().init_app(app)


def set_up_at_once(app: Flask, db: SQLAlchemy) -> None:
    """Set everything up in constructors."""
    db.init_app(app)
    Idempotency(app, db)


@pytest.mark.parametrize(
    "set_up",
    [
        set_up_db_first,
        set_up_db_last,
        set_up_with_db_late,
        set_up_without_db,
        set_up_at_once,
    ],
)
def test_order_of_set_up_does_not_matter(
    tmp_path: Path,
    used: list[tuple[Flask, SQLAlchemy]],
    set_up: Callable[[Flask, SQLAlchemy], None],
) -> None:
    """A factory may initialise database and extension in either order."""
    app, db = bare_app(sqlite_database(tmp_path).url), SQLAlchemy()
    set_up(app, db)
    used.append((app, db))
    runs: list[int] = []
    app.post("/x")(idempotent(anonymous=True)(counting(runs)))
    with app.app_context():
        get_state().loaders.user_id = lambda: None
        db.create_all()
    assert replayed(post(app), post(app))
    assert runs == [1]


def test_second_set_up_is_refused(quick: Shop) -> None:
    """One application has one extension, and the error says so."""
    with pytest.raises(IdempotencyConfigError, match="already registered"):
        quick.idempotency.init_app(quick.app)
    with pytest.raises(IdempotencyConfigError, match="already registered"):
        Idempotency(quick.app, quick.db)


def test_set_up_without_a_database_is_refused() -> None:
    """Without Flask-SQLAlchemy the error names both ways out."""
    with pytest.raises(IdempotencyConfigError) as caught:
        Idempotency(bare_app())
    assert "Idempotency(app, db)" in str(caught.value)
    assert "db.init_app(app)" in str(caught.value)


def test_failed_set_up_can_be_repeated() -> None:
    """A set-up that was refused leaves nothing registered."""
    app, db = bare_app(IDEMPOTENCY_TTL=0), SQLAlchemy()
    with pytest.raises(IdempotencyConfigError, match="IDEMPOTENCY_TTL"):
        Idempotency(app, db)
    app.config["IDEMPOTENCY_TTL"] = 60
    Idempotency(app, db)
    assert "idempotency" in app.extensions


def test_application_without_the_extension_is_told() -> None:
    """A guarded view of an application that was not set up says what was forgotten."""
    app = bare_app(TESTING=True)
    app.post("/x")(idempotent(lambda: "x"))
    with pytest.raises(
        IdempotencyConfigError, match="Did you forget to call 'init_app'"
    ):
        post(app)


@pytest.mark.parametrize("name", ["guard", "store", "Record"])
def test_attribute_without_set_up_is_an_error(name: str) -> None:
    """An extension that no application knows says what was forgotten."""
    with (
        bare_app().app_context(),
        pytest.raises(
            IdempotencyConfigError, match="Did you forget to call 'init_app'"
        ),
    ):
        getattr(Idempotency(), name)


def test_model_exists_before_any_application() -> None:
    """A model is there as soon as the database object is, and only once."""
    db = SQLAlchemy()
    idempotency = Idempotency(db=db)
    assert idempotency.Record is Idempotency(db=db).Record
    assert set(db.metadata.tables) == {
        "idempotency_record",
        "idempotency_lease",
        "idempotency_delivery",
    }


@pytest.fixture
def pair(
    database: Database,
    make_database: Callable[[], Database],
    used: list[tuple[Flask, SQLAlchemy]],
) -> list[SimpleNamespace]:
    """Give two applications with one extension, one view and two databases."""
    db = SQLAlchemy()
    idempotency = Idempotency(db=db)
    runs: list[str] = []
    inside: list[Callable[[], object]] = []

    @idempotent
    def view() -> dict[str, str]:
        runs.append(current_app.name)
        for step in inside:
            step()
        return {"app": current_app.name}

    idempotency.user_id_loader(lambda: "u1")
    pair = []
    settings: list[tuple[str, Database, dict[str, Any]]] = [
        ("first", database, {"IDEMPOTENCY_REQUIRED": True, "IDEMPOTENCY_LEASE": 20}),
        ("second", make_database(), {"IDEMPOTENCY_HEADER": "X-Once"}),
    ]
    for name, other, config in settings:
        app = Flask(name)
        app.config.update(SQLALCHEMY_DATABASE_URI=other.url, **config)
        db.init_app(app)
        idempotency.init_app(app)
        app.add_url_rule("/x", view_func=view, methods=["POST"])
        used.append((app, db))
        with app.app_context():
            db.create_all()
        pair.append(SimpleNamespace(app=app, db=db, runs=runs, inside=inside))
    return pair


def ask(part: SimpleNamespace, key: str | None = "k") -> TestResponse:
    """Send one application a key in its own header."""
    header = "X-Once" if part.app.name == "second" else "Idempotency-Key"
    headers = {header: key} if key else {}
    answer: TestResponse = part.app.test_client().post("/x", headers=headers)
    return answer


def record_count(part: SimpleNamespace) -> int:
    """Count the records in one application's database."""
    with part.app.app_context(), part.db.engine.connect() as connection:
        query = text("SELECT count(*) FROM idempotency_record")
        return int(connection.execute(query).scalar_one())


def test_two_applications_keep_answers_and_records_apart(
    pair: list[SimpleNamespace],
) -> None:
    """One extension and one view serve each application from its own database."""
    for part in pair:
        answers = ask(part), ask(part)
        assert replayed(*answers)
        assert answers[0].json == {"app": part.app.name}
    assert pair[0].runs == ["first", "second"]
    assert [record_count(part) for part in pair] == [1, 1]


@on_sqlite
def test_two_applications_keep_their_settings_apart(
    pair: list[SimpleNamespace],
) -> None:
    """One view is judged by the settings of the application that it runs in."""
    first, second = pair
    assert ask(first, key=None).status_code == 400
    assert ask(second, key=None).status_code == 200
    with second.app.app_context():
        assert get_state().config.lease_seconds == 30
    with first.app.app_context():
        assert get_state().config.lease_seconds == 20


def test_two_applications_at_the_same_time(pair: list[SimpleNamespace]) -> None:
    """While both run, each completes its own record."""
    meeting = threading.Barrier(2, timeout=10)
    pair[0].inside.append(meeting.wait)
    answers: list[TestResponse] = []
    threads = [
        threading.Thread(target=lambda part=part: answers.append(ask(part)))
        for part in pair
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [a.status_code for a in answers] == [200, 200]
    pair[0].inside.clear()
    assert [ask(part).json for part in pair] == [{"app": "first"}, {"app": "second"}]
    assert sorted(pair[0].runs) == ["first", "second"]
    assert [record_count(part) for part in pair] == [1, 1]


def test_call_into_another_application(pair: list[SimpleNamespace]) -> None:
    """A view that calls another application's view leaves one record in each."""
    first, second = pair

    def call_second() -> None:
        first.inside.clear()
        assert ask(second).status_code == 200

    first.inside.append(call_second)
    assert ask(first).status_code == 200
    assert [record_count(part) for part in pair] == [1, 1]
    assert [ask(part).json for part in pair] == [{"app": "first"}, {"app": "second"}]


class Custom:
    """An application with a record class of its own."""

    def __init__(
        self,
        database: Database,
        metadata: MetaData | None = None,
        **namespace: Any,
    ) -> None:
        self.app = bare_app(database.url, **namespace.pop("config", {}))
        declared = metadata

        class Base(DeclarativeBase):
            if declared is not None:
                metadata = declared

        self.db = SQLAlchemy(model_class=Base)
        self.record = type(
            "Own",
            (IdempotencyRecordMixin, self.db.Model),
            {"__module__": __name__, **namespace},
        )
        self.idempotency = Idempotency(db=self.db, record_class=self.record)
        self.idempotency.user_id_loader(lambda: "u1")
        self.db.init_app(self.app)
        self.idempotency.init_app(self.app)
        self.runs: list[int] = []
        self.app.post("/x")(idempotent(counting(self.runs)))

    @property
    def part(self) -> tuple[Flask, SQLAlchemy]:
        """What has connections to close."""
        return self.app, self.db


def test_own_record_class_works_end_to_end(
    database: Database, used: list[tuple[Flask, SQLAlchemy]]
) -> None:
    """A record class with its own table name and column claims and replays."""
    extra: Any = mapped_column(default=None, nullable=True)
    custom = Custom(
        database,
        __tablename__="api_calls",
        __annotations__={"note": Mapped[int | None]},
        note=extra,
    )
    used.append(custom.part)
    with custom.app.app_context():
        custom.db.create_all()
        tables = inspect(custom.db.engine).get_table_names()
        constraints = inspect(custom.db.engine).get_unique_constraints("api_calls")
    assert set(tables) == {"api_calls", "api_calls_lease", "api_calls_delivery"}
    assert [c["name"] for c in constraints] == ["uq_api_calls_scope"]
    assert replayed(*(post(custom.app) for _ in range(3)))
    assert custom.runs == [1]
    assert custom.idempotency.Record is custom.record


CONVENTION = {
    "uq": "house_uq_%(table_name)s_%(column_0_name)s",
    "ck": "house_ck_%(table_name)s_%(constraint_name)s",
    "ix": "house_ix_%(column_0_label)s",
    "pk": "house_pk_%(table_name)s",
}


def test_naming_convention_does_not_rename_the_constraint(
    database: Database, used: list[tuple[Flask, SQLAlchemy]]
) -> None:
    """The name by which a duplicate is known stays under any convention."""
    custom = Custom(database, MetaData(naming_convention=CONVENTION))
    used.append(custom.part)
    with custom.app.app_context():
        custom.db.create_all()
        inspector = inspect(custom.db.engine)
        constraints = inspector.get_unique_constraints("idempotency_record")
    assert [c["name"] for c in constraints] == ["uq_idempotency_record_scope"]
    assert replayed(post(custom.app), post(custom.app))


@on_postgresql
def test_record_in_a_schema(
    database: Database, used: list[tuple[Flask, SQLAlchemy]]
) -> None:
    """A metadata with a schema puts the record there, and duplicates collide."""
    engine = create_engine(database.url, poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA house"))
    custom = Custom(database, MetaData(schema="house", naming_convention=CONVENTION))
    used.append(custom.part)
    with custom.app.app_context():
        custom.db.create_all()
    assert replayed(post(custom.app), post(custom.app))
    with engine.connect() as connection:
        query = text("SELECT count(*) FROM house.idempotency_record")
        assert connection.execute(query).scalar_one() == 1


def declare(**namespace: Any) -> None:
    """Declare a record class and give it to an extension."""
    db = SQLAlchemy()
    bases: Any = (IdempotencyRecordMixin, db.Model)
    record = type("Own", bases, {"__module__": __name__, **namespace})
    Idempotency(db=db, record_class=record)


@pytest.mark.parametrize(
    "arguments",
    [
        (Index("ix_own", "route"),),
        (UniqueConstraint("tenant_id", "user_id", "idempotency_key", name="uq_own"),),
        (UniqueConstraint("route", "idempotency_key", name="uq_own"),),
        ({"comment": "ours"},),
    ],
    ids=["index", "without route", "two columns", "options"],
)
def test_record_class_that_lost_the_constraint_is_refused(arguments: Any) -> None:
    """Without the constraint that makes duplicates collide there is no set-up."""
    with pytest.raises(IdempotencyConfigError) as caught:
        declare(__table_args__=arguments)
    assert "no named UNIQUE constraint" in str(caught.value)
    assert "__table_args__" in str(caught.value)


@pytest.mark.parametrize("column", ["tenant_id", "user_id", "route", "idempotency_key"])
def test_record_class_with_a_nullable_column_is_refused(column: str) -> None:
    """NULLs never collide, so none is allowed in a scope."""
    nullable: Any = mapped_column(nullable=True)
    with pytest.raises(IdempotencyConfigError, match=f"makes {column} nullable"):
        declare(**{column: nullable, "__annotations__": {column: Mapped[str | None]}})


def test_foreign_key_to_the_record(
    database: Database, used: list[tuple[Flask, SQLAlchemy]]
) -> None:
    """A model of the application can point at the record of its request."""
    app, db = bare_app(database.url), SQLAlchemy()
    used.append((app, db))
    idempotency = Idempotency(db=db)
    record: Any = idempotency.Record

    class Payment(db.Model):  # type: ignore[name-defined, misc]
        id: Mapped[int] = mapped_column(primary_key=True)
        record_id = mapped_column(ForeignKey("idempotency_record.id"))

    db.init_app(app)
    idempotency.init_app(app)
    with app.app_context():
        db.create_all()
        result = idempotency.guard.run(
            Shop.scope(SimpleNamespace()),  # type: ignore[arg-type]
            fingerprint(1),
            lambda: None,
        )
        db.session.add(Payment(record_id=result.record_id))
        db.session.commit()
        payment = db.session.execute(db.select(Payment).join(record)).scalar_one()
        assert payment.record_id == result.record_id


def test_record_on_another_bind_is_refused(tmp_path: Path) -> None:
    """A record that cannot share the transaction of the rows is an error."""
    other = sqlite_database(tmp_path, "other").url
    with pytest.raises(IdempotencyConfigError, match="bind 'other'"):
        Custom(
            sqlite_database(tmp_path),
            __bind_key__="other",
            config={"SQLALCHEMY_BINDS": {"other": other}},
        )


@pytest.mark.parametrize(
    ("name", "driver", "text"),
    [
        ("oracle", "oracledb", r"'oracle' is not supported.*mysql"),
        ("postgresql", "psycopg2", r"'psycopg2'.*postgresql\+psycopg://"),
    ],
)
def test_untested_database_or_driver_is_refused(
    name: str, driver: str, text: str
) -> None:
    """What is not tested is named, with what to use."""
    engine: Any = SimpleNamespace(dialect=SimpleNamespace(name=name, driver=driver))
    with pytest.raises(IdempotencyConfigError, match=text):
        dialect_for(engine)


def test_blueprint_routes(quick: Shop) -> None:
    """Routes of nested blueprints, and of one registered twice, are apart."""
    inner, outer = Blueprint("inner", __name__), Blueprint("outer", __name__)
    inner.post("/x/<int:number>")(idempotent(counting(quick.runs)))
    outer.register_blueprint(inner, url_prefix="/inner")
    quick.app.register_blueprint(outer, url_prefix="/a")
    quick.app.register_blueprint(outer, url_prefix="/b", name="again")
    for prefix in ("/a", "/b"):
        answers = [quick.post(path=f"{prefix}/inner/x/1") for _ in range(2)]
        assert replayed(*answers)
    assert quick.status(route="POST /a/inner/x/<int:number>") == "succeeded"
    assert len(quick.runs) == 2


class Accounts(MethodView):
    """A class-based view with one method of each kind."""

    runs: list[str]

    @idempotent(required=True)
    def post(self, number: int) -> dict[str, Any]:
        """Create something."""
        self.runs.append("post")
        return {"number": number, "run": len(self.runs)}

    @idempotent
    def put(self, number: int) -> dict[str, Any]:
        """Replace something."""
        self.runs.append("put")
        return {"number": number, "run": len(self.runs)}

    @not_idempotent("deleting twice is deleting once")
    def delete(self, number: int) -> dict[str, Any]:
        """Delete something."""
        self.runs.append("delete")
        return {"number": number, "run": len(self.runs)}

    def get(self, number: int) -> dict[str, Any]:
        """Show something."""
        return {"number": number}


@pytest.fixture
def class_view(quick: Shop) -> Shop:
    """Give an application with a class-based view."""
    Accounts.runs = quick.runs
    view = Accounts.as_view("accounts")
    quick.app.add_url_rule("/accounts/<int:number>", view_func=view)
    return quick


def by(shop: Shop, method: str, path: str, **headers: str) -> TestResponse:
    """Send a request with any method and a key."""
    sent = {"Idempotency-Key": "k", "X-User": "u1", **headers}
    return shop.app.test_client().open(path, method=method, headers=sent)


def test_methods_of_a_class_are_routes_of_their_own(class_view: Shop) -> None:
    """Each guarded method of a class has records of its own."""
    for method in ("POST", "PUT"):
        assert replayed(*(by(class_view, method, "/accounts/1") for _ in range(2)))
        route = f"{method} /accounts/<int:number>"
        assert class_view.status(route=route) == "succeeded"
    assert class_view.runs == ["post", "put"]


def test_path_argument_is_part_of_the_request(class_view: Shop) -> None:
    """One key for two resources is a conflict, never the other's answer."""
    assert by(class_view, "POST", "/accounts/1").status_code == 200
    assert by(class_view, "POST", "/accounts/2").status_code == 422


def test_method_that_is_declared_not_idempotent_runs_each_time(
    class_view: Shop,
) -> None:
    """A route that needs no guard ignores the key."""
    for _ in range(2):
        assert by(class_view, "DELETE", "/accounts/1").status_code == 200
    assert class_view.runs == ["delete", "delete"]


def test_decorators_of_a_class(quick: Shop) -> None:
    """A class may name the guard in its decorators; safe methods still pass."""

    class View(MethodView):
        decorators: ClassVar[list[Callable[..., Any]]] = [idempotent(required=True)]

        def get(self) -> str:
            return "got"

        def post(self) -> dict[str, int]:
            return counting(quick.runs)()

    quick.app.add_url_rule("/x", view_func=View.as_view("x"))
    assert quick.app.test_client().get("/x").text == "got"
    assert replayed(*(quick.post(path="/x") for _ in range(2)))


def test_async_view(quick: Shop) -> None:
    """An async view is run and replayed like any other."""
    pytest.importorskip("asgiref")

    async def view() -> dict[str, int]:
        """Count like the others."""
        return counting(quick.runs)()

    quick.app.post("/x")(idempotent(view))
    assert replayed(*(quick.post(path="/x") for _ in range(2)))


def test_decorated_view_keeps_its_name_and_arguments(quick: Shop) -> None:
    """The guard looks like the view that it guards."""

    def view(number: int, name: str) -> dict[str, Any]:
        """Say it."""
        return {"number": number, "name": name}

    guarded = idempotent(view)
    assert (guarded.__name__, guarded.__doc__) == ("view", "Say it.")
    quick.app.post("/<int:number>/<name>")(guarded)
    assert quick.post(path="/7/x").json == {"number": 7, "name": "x"}


SAFE = ["GET", "HEAD", "OPTIONS"]


@pytest.mark.parametrize("method", SAFE)
@pytest.mark.parametrize("key", ["k", "", '"', "k" * 300], ids=["k", "", "q", "long"])
def test_safe_method_passes_through(quick: Shop, method: str, key: str) -> None:
    """A safe method of a guarded view is neither claimed nor checked for a key."""
    methods = [*SAFE, "POST"]
    view = idempotent(required=True)(counting(quick.runs))
    quick.app.add_url_rule("/x", view_func=view, methods=methods)
    headers = {"Idempotency-Key": key}
    for _ in range(2):
        answer = by(quick, method, "/x", **headers)
        assert answer.status_code == 200
        assert "Idempotent-Replayed" not in answer.headers
    assert len(quick.runs) == 2
    assert quick.status(route=f"{method} /x") is None


def test_safe_method_needs_no_caller(quick: Shop) -> None:
    """Nobody has to be known to look at a form."""
    quick.idempotency.user_id_loader(lambda: None)
    view = idempotent(required=True)(counting(quick.runs))
    quick.app.add_url_rule("/x", view_func=view, methods=["GET", "POST"])
    assert quick.app.test_client().get("/x").status_code == 200


def test_safe_method_is_no_unit_of_work(quick: Shop) -> None:
    """A GET commits only what it commits itself."""

    @quick.app.get("/x")
    @idempotent
    def view() -> str:
        quick.add("first")
        return "x"

    assert quick.app.test_client().get("/x").status_code == 200
    assert quick.accounts() == []


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_other_methods_are_guarded(quick: Shop, method: str) -> None:
    """Every method that may change something is guarded."""
    view = idempotent(counting(quick.runs))
    quick.app.add_url_rule("/x", view_func=view, methods=[method])
    assert replayed(*(by(quick, method, "/x") for _ in range(2)))


def test_positional_option_is_refused() -> None:
    """A route name without its keyword is answered with the right spelling."""
    with pytest.raises(IdempotencyConfigError, match=r"@idempotent\(route='POST /x'\)"):
        idempotent("POST /x")  # type: ignore[call-overload]


def test_class_is_refused() -> None:
    """A class is told where the guard belongs."""
    with pytest.raises(IdempotencyConfigError, match=r"'Accounts'.*'decorators'"):
        idempotent(Accounts)


def plain() -> str:
    """Answer nothing."""
    return ""


def wrapped(view: Any) -> Any:
    """Wrap a view as other libraries do."""

    @wraps(view)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return view(*args, **kwargs)

    return outer


@pytest.mark.parametrize(
    "declare_twice",
    [
        lambda v: idempotent(idempotent(v)),
        lambda v: idempotent(required=True)(idempotent(v)),
        lambda v: idempotent(wrapped(idempotent(v))),
        lambda v: idempotent(not_idempotent("why")(v)),
        lambda v: not_idempotent("why")(idempotent(v)),
        lambda v: not_idempotent("why")(wrapped(idempotent(v))),
    ],
    ids=[
        "bare",
        "options",
        "wrapped",
        "guard on none",
        "none on guard",
        "none on wrap",
    ],
)
def test_second_declaration_is_refused(declare_twice: Any) -> None:
    """A view says once what it is, also behind other decorators."""

    def view() -> str:
        return ""

    with pytest.raises(IdempotencyConfigError, match="'view' is declared twice"):
        declare_twice(view)


@pytest.mark.parametrize("reason", ["", "  ", None, 1, plain])
def test_not_idempotent_needs_a_reason(reason: Any) -> None:
    """A view without a guard says why."""
    with pytest.raises(IdempotencyConfigError, match="needs the reason"):
        not_idempotent(reason)


def test_not_idempotent_returns_the_view() -> None:
    """A view without a guard stays as it is, so that views of others can be marked."""

    def view() -> str:
        return ""

    assert not_idempotent("read only")(view) is view


def conflict(shop: Shop, **headers: str) -> TestResponse:
    """Return the answer to a key that was used for another request."""
    if "accounts" not in shop.app.view_functions:
        shop.creating_view()
    shop.post("first")
    return shop.post("second", headers=headers)


MEMBERS = {
    "type": "about:blank",
    "title": "Unprocessable Entity",
    "status": 422,
    "code": "IDEMPOTENCY_KEY_CONFLICT",
    "retryable": False,
}


@pytest.mark.parametrize("handled", [None, HTTPException, Exception, 500, 422], ids=str)
def test_handlers_of_the_application_do_not_lose_members(
    quick: Shop, handled: Any
) -> None:
    """A general handler of the application leaves our Problems as they are."""
    if handled is not None:
        quick.app.register_error_handler(handled, lambda _error: ("theirs", 418))
    response = conflict(quick)
    assert response.status_code == 422
    assert response.mimetype == "application/problem+json"
    assert response.json is not None
    assert response.json.items() >= MEMBERS.items()
    assert set(response.json) == {*MEMBERS, "detail", "expires_at"}


def test_problem_is_not_to_be_cached(quick: Shop) -> None:
    """An answer about a key is nothing for a cache."""
    assert conflict(quick).headers["Cache-Control"] == "no-store"


@on_sqlite
def test_problem_type(make_shop: Callable[..., Shop]) -> None:
    """The type of a Problem is the documentation's address and the code."""
    shop = make_shop(IDEMPOTENCY_PROBLEM_TYPE="https://docs.test/errors")
    response = conflict(shop)
    assert response.json is not None
    assert response.json["type"] == "https://docs.test/errors#IDEMPOTENCY_KEY_CONFLICT"


@pytest.mark.parametrize("handled", [IdempotencyError, IdempotencyHTTPException])
def test_handler_for_our_errors_is_respected(quick: Shop, handled: Any) -> None:
    """An application that handles our errors itself answers them itself."""
    quick.app.register_error_handler(
        handled, lambda error: ({"theirs": error.error_code}, 499)
    )
    response = conflict(quick)
    assert response.status_code == 499
    assert response.json == {"theirs": "IDEMPOTENCY_KEY_CONFLICT"}


@pytest.mark.parametrize("handled", [IdempotencyError, IdempotencyHTTPException])
def test_handler_that_was_there_before_is_respected(
    tmp_path: Path, used: list[tuple[Flask, SQLAlchemy]], handled: Any
) -> None:
    """A handler that was registered before the set-up stays in force."""
    app, db = bare_app(sqlite_database(tmp_path).url), SQLAlchemy()
    app.register_error_handler(handled, lambda _error: ("theirs", 499))
    used.append((app, db))
    db.init_app(app)
    Idempotency(app, db)
    app.post("/x")(idempotent(plain))
    assert post(app, key="").status_code == 499


BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.mark.parametrize(
    ("accept", "mimetype"),
    [
        (BROWSER, "text/html"),
        ("text/html", "text/html"),
        ("*/*", "application/problem+json"),
        ("application/json", "application/problem+json"),
        ("application/problem+json", "application/problem+json"),
        ("application/json, text/html;q=0.5", "application/problem+json"),
        ("image/png", "application/problem+json"),
    ],
)
def test_problem_or_page(quick: Shop, accept: str, mimetype: str) -> None:
    """A browser gets a page and every other client a Problem, with one status."""
    response = conflict(quick, Accept=accept)
    assert response.status_code == 422
    assert response.mimetype == mimetype


def test_form_post_of_a_browser_gets_a_page(quick: Shop) -> None:
    """A person who posts a form without a key reads a page."""
    quick.app.post("/x")(idempotent(required=True)(plain))
    response = quick.app.test_client().post(
        "/x", data={"name": "first"}, headers={"Accept": BROWSER}
    )
    assert (response.status_code, response.mimetype) == (400, "text/html")
    assert "Bad Request" in response.text


def test_page_keeps_the_headers(quick: Shop) -> None:
    """The page of a stored failure is marked as a replay too."""
    quick.view(lambda: 1 / 0)
    quick.post()
    response = quick.post(headers={"Accept": BROWSER})
    assert response.mimetype == "text/html"
    assert response.headers["Idempotent-Replayed"] == "true"


def test_route_that_declares_nothing_sends_nothing(quick: Shop) -> None:
    """The one hook of the set-up looks for a header; there is no statement."""
    assert quick.app.before_request_funcs == {}
    assert len(quick.app.after_request_funcs[None]) == 1
    quick.app.add_url_rule("/accounts", view_func=lambda: "", methods=["POST"])
    with statements_sent() as statements:
        assert quick.post().status_code == 200
    assert statements == []


class User:
    """What Flask-Login wants of a user."""

    is_authenticated = True
    is_active = True
    is_anonymous = False

    def __init__(self, number: str) -> None:
        self.number = number

    def get_id(self) -> str:
        """Return who it is."""
        return self.number


@pytest.fixture
def login_shop(quick: Shop) -> Shop:
    """Give an application whose users are known by Flask-Login alone."""
    flask_login: Any = pytest.importorskip("flask_login")
    manager = flask_login.LoginManager()
    manager.init_app(quick.app)

    def load(sent: Any) -> User | None:
        name = sent.headers.get("X-User")
        return User(name) if name else None

    manager.request_loader(load)
    quick.idempotency._loaders.user_id = None
    quick.app.secret_key = "test"  # noqa: S105 - of a test
    quick.app.post("/x")(idempotent(counting(quick.runs)))
    quick.app.post("/anyone", endpoint="anyone")(
        idempotent(anonymous=True)(counting(quick.runs))
    )
    return quick


def test_flask_login_names_the_caller(login_shop: Shop) -> None:
    """Without a loader the user of Flask-Login is the caller."""
    for user in ("u1", "u2"):
        assert replayed(*(login_shop.post(path="/x", user=user) for _ in range(2)))
        assert login_shop.status(route="POST /x", user=user) == "succeeded"
    assert len(login_shop.runs) == 2


def test_user_who_is_not_logged_in_is_refused(login_shop: Shop) -> None:
    """An anonymous user of Flask-Login is nobody."""
    assert post(login_shop.app).status_code == 403
    assert login_shop.runs == []


def test_user_who_is_not_logged_in_may_be_anonymous(login_shop: Shop) -> None:
    """Where anonymous callers are let in, Flask-Login's anonymous user is one."""
    assert replayed(*(post(login_shop.app, "/anyone") for _ in range(2)))
    assert login_shop.status(route="POST /anyone", user="") == "succeeded"


def test_own_loader_comes_before_flask_login(login_shop: Shop) -> None:
    """A registered loader decides, whatever else is there."""
    login_shop.idempotency.user_id_loader(lambda: request.headers["X-Other"])
    assert login_shop.post(path="/x", headers={"X-Other": "o"}).status_code == 200
    assert login_shop.status(route="POST /x", user="o") == "succeeded"
