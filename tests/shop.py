"""A small application, and what tests ask of it and of its database."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TypeVar

from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import Engine, String, create_engine, event, text, update
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.pool import NullPool

from flask_idempotency import Idempotency, Scope, idempotent
from flask_idempotency.keeper import keeper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from werkzeug.test import Client, TestResponse

    from flask_idempotency import RecordView

    from .databases import Database

T = TypeVar("T")

ROUTE = "POST /accounts"


class Shop:
    """
    An application with accounts, whose views each test brings itself.

    Args:
        database: Where the accounts are.
        app_class: What makes the application, where another library brings its own.
        config: The application's settings.

    Attributes:
        runs: What ran, in order; views append to it.
    """

    def __init__(
        self,
        database: Database,
        app_class: Callable[[str], Flask] = Flask,
        /,
        **config: object,
    ) -> None:
        self.database = database
        self.app = app_class("shop")
        self.app.config.update(SQLALCHEMY_DATABASE_URI=database.url, **config)

        class Base(DeclarativeBase):
            pass

        self.db = SQLAlchemy(model_class=Base)
        self.db.init_app(self.app)
        self.idempotency = self.extension()
        self.idempotency.user_id_loader(lambda: request.headers.get("X-User"))
        self.runs: list[Any] = []

        class Account(self.db.Model):  # type: ignore[name-defined, misc]
            id: Mapped[int] = mapped_column(primary_key=True)
            name: Mapped[str] = mapped_column(String(50), unique=True)

        self.Account = Account
        with self.app.app_context():
            if database.name == "sqlite":
                with self.db.engine.connect() as connection:
                    connection.execute(text("PRAGMA journal_mode = WAL"))
            self.db.create_all()

    def extension(self) -> Idempotency:
        """Set the extension up."""
        return Idempotency(self.app, self.db)

    def close(self) -> None:
        """Close every connection, after the last statement on any of them."""
        keeper.stop()
        with self.app.app_context():
            self.db.session.remove()
            self.db.engine.dispose()
            self.idempotency.store.close()

    def client(self) -> Client:
        """Return a client of its own; it may also lead to a real server."""
        return self.app.test_client()

    def view(self, function: Callable[..., Any], **options: Any) -> None:
        """Serve ``POST /accounts`` by a guarded view."""
        self.app.add_url_rule(
            "/accounts",
            endpoint="accounts",
            view_func=idempotent(**{"required": True, **options})(function),
            methods=["POST"],
        )

    def creating_view(self, **options: Any) -> None:
        """Serve ``POST /accounts`` by a view that adds one account per run."""
        self.view(self.create, **options)

    def create(self) -> tuple[dict[str, Any], int]:
        """Add the account that the request names, without a commit."""
        name = self.add()
        return {"name": name, "run": len(self.runs)}, 201

    def add(self, name: str | None = None) -> str:
        """Add an account to the session and flush it."""
        name = name or request.get_json()["name"]
        self.runs.append(name)
        self.db.session.add(self.Account(name=name))
        self.db.session.flush()
        return name

    def post(
        self,
        name: str = "first",
        *,
        key: str | None = "k",
        user: str = "u1",
        path: str = "/accounts",
        headers: dict[str, str] | None = None,
        **options: Any,
    ) -> TestResponse:
        """Ask for an account, by a client of its own."""
        sent = {"X-User": user, **(headers or {})}
        if key is not None:
            sent["Idempotency-Key"] = key
        if not {"data", "json"} & options.keys():
            options["json"] = {"name": name}
        return self.client().post(path, headers=sent, **options)

    def accounts(self) -> list[str]:
        """Return the committed names, as another connection sees them."""
        engine = create_engine(self.database.url, poolclass=NullPool)
        with engine.connect() as connection:
            rows = connection.execute(text("SELECT name FROM account ORDER BY id"))
            return list(rows.scalars())

    def scope(self, key: str = "k", user: str = "u1", route: str = ROUTE) -> Scope:
        """Return the scope of a request that ``post`` sends."""
        return Scope(tenant_id="", user_id=user, route=route, idempotency_key=key)

    def record(self, key: str = "k", **scope: str) -> RecordView | None:
        """Return the record of a key."""
        with self.app.app_context():
            return self.idempotency.store.look(self.scope(key, **scope))

    def status(self, key: str = "k", **scope: str) -> str | None:
        """Return the status of a key's record."""
        record = self.record(key, **scope)
        return record.status.value if record else None

    def lapse(self, key: str = "k") -> None:
        """Move the end of a key's lease into the past."""
        self._change(key, locked_until=long_ago(self.database))

    def outlive(self, key: str = "k") -> None:
        """Move the end of a key's life into the past."""
        self._change(key, expires_at=long_ago(self.database))

    def _change(self, key: str, **values: Any) -> None:
        table = self.idempotency.Record.__table__
        bound = key.encode() if self.database.name == "mariadb" else key
        with self.app.app_context(), self.db.engine.begin() as connection:
            changed = connection.execute(
                update(table).where(table.c.idempotency_key == bound).values(**values)
            )
            assert changed.rowcount == 1


def is_replay(answer: TestResponse) -> bool:
    """Tell whether an answer is marked as a stored one."""
    return answer.headers.get("Idempotent-Replayed") == "true"


def long_ago(database: Database) -> datetime:
    """Return an instant of the past, as the database's driver takes it."""
    instant = datetime(2020, 1, 1, tzinfo=timezone.utc)
    return instant if database.name == "postgresql" else instant.replace(tzinfo=None)


@contextmanager
def statements_sent() -> Iterator[list[str]]:
    """Collect the SQL statements that this process sends, on whatever engine."""
    statements: list[str] = []

    def listen(_c: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        statements.append(statement)

    event.listen(Engine, "before_cursor_execute", listen)
    try:
        yield statements
    finally:
        event.remove(Engine, "before_cursor_execute", listen)


def unavailable(response: TestResponse) -> None:
    """Check that an answer is the documented 503."""
    assert response.status_code == 503
    assert response.mimetype == "application/problem+json"
    assert int(response.headers["Retry-After"]) >= 1
    assert response.json is not None
    assert response.json["code"] == "IDEMPOTENCY_STORE_UNAVAILABLE"
    assert response.json["retryable"] is True


def elsewhere(function: Callable[[], T]) -> T:
    """Run `function` as another process would: in a thread without our context."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(function).result()


@contextmanager
def cut_off(shop: Shop) -> Iterator[None]:
    """Let every new connection of an application go to where nothing answers."""

    def redirect(dialect: Any, _record: Any, cargs: Any, cparams: Any) -> Any:
        # With copies: SQLAlchemy 2.0 would keep what is changed in place.
        args, params = list(cargs), dict(cparams)
        if shop.database.name == "sqlite":
            args[0] = "nonexistent/x.db"
        else:
            params["port"] = 1  # reserved, and open nowhere
        return dialect.connect(*args, **params)

    with shop.app.app_context():
        engine = shop.db.engine
        engine.dispose()
        shop.idempotency.store.close()
    # The store's pool is a copy of the application's, and connects as that does.
    event.listen(engine, "do_connect", redirect)
    yield
    event.remove(engine, "do_connect", redirect)
