"""Every real commit inside a call passes the fence, whatever makes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from flask import Flask
from sqlalchemy import __version__, event, text
from sqlalchemy.orm import Session

from flask_idempotency import Idempotency, IdempotencyConfigError, idempotent
from flask_idempotency.ledger import after_commit
from flask_idempotency.unit_of_work import Call, current_call
from tests.shop import elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.databases import Database
    from tests.shop import Shop

SQLALCHEMY = tuple(int(part) for part in __version__.split(".")[:2])

INSERT = "INSERT INTO account (name) VALUES ('first')"


def by_session(shop: Shop) -> None:
    """Commit through db.session."""
    shop.db.session.execute(text(INSERT))
    shop.db.session.commit()


def by_other_session(shop: Shop) -> None:
    """Commit through a session that the application does not manage."""
    with Session(shop.db.engine) as session:
        session.execute(text(INSERT))
        session.commit()


def by_session_begin(shop: Shop) -> None:
    """Commit at the end of a with block."""
    with Session(shop.db.engine) as session, session.begin():
        session.execute(text(INSERT))


def by_engine_begin(shop: Shop) -> None:
    """Commit through the engine."""
    with shop.db.engine.begin() as connection:
        connection.execute(text(INSERT))


def by_session_connection(shop: Shop) -> None:
    """Commit through the connection of db.session."""
    connection = shop.db.session.connection()
    connection.execute(text(INSERT))
    connection.commit()


def by_savepoint(shop: Shop) -> None:
    """Commit after a savepoint."""
    with shop.db.session.begin_nested():
        shop.db.session.execute(text(INSERT))
    shop.db.session.commit()


def by_two_phases(shop: Shop) -> None:
    """Prepare the transaction, then commit it."""
    if shop.database.name == "sqlite":
        pytest.skip("SQLite has no two-phase commit")
    with shop.db.engine.connect() as connection:
        query = text("SELECT setting FROM pg_settings WHERE name LIKE 'max_prepared%'")
        if shop.database.name == "postgresql" and connection.scalar(query) == "0":
            pytest.skip("max_prepared_transactions is 0 on this server")
    with Session(shop.db.engine, twophase=True) as session:
        session.execute(text(INSERT))
        session.commit()


COMMITS = [
    by_session,
    by_other_session,
    by_session_begin,
    by_engine_begin,
    by_session_connection,
    by_savepoint,
    by_two_phases,
]


# SQLAlchemy's own warning about a session whose connection was committed.
@pytest.mark.filterwarnings("ignore:transaction already deassociated")
@pytest.mark.parametrize("commit", COMMITS)
def test_commit_inside_the_view_marks_the_effect(
    shop: Shop, commit: Callable[[Shop], None]
) -> None:
    """A commit by whatever way is noted on the record in the same transaction."""
    seen: list[Any] = []

    def view() -> str:
        commit(shop)
        record = elsewhere(shop.record)
        assert record is not None
        seen.append(record.effects_committed_at)
        return "done"

    shop.view(view)
    assert shop.post().status_code == 200
    assert seen[0] is not None
    assert (shop.accounts(), shop.status()) == (["first"], "succeeded")


@pytest.mark.parametrize("commit", COMMITS)
def test_commit_of_a_late_owner_is_undone(
    shop: Shop, commit: Callable[[Shop], None]
) -> None:
    """After a take-over no way of committing makes anything durable."""

    def view() -> str:
        if shop.runs:
            return "winner"
        shop.runs.append(1)
        elsewhere(shop.lapse)
        assert elsewhere(shop.post).data == b"winner"
        commit(shop)
        return "late"

    shop.view(view)
    assert shop.post().data == b"winner"
    assert shop.accounts() == []


def test_commit_that_only_read_leaves_no_mark(shop: Shop) -> None:
    """Ending a read transaction is no effect."""
    seen: list[Any] = []

    def view() -> str:
        shop.db.session.execute(text("SELECT count(*) FROM account"))
        shop.db.session.commit()
        record = elsewhere(shop.record)
        assert record is not None
        seen.append(record.effects_committed_at)
        raise ValueError

    shop.view(view, retry_failed=True)
    assert shop.post().status_code == 500
    assert seen == [None]


def test_savepoint_of_a_failing_view_leaves_nothing(shop: Shop) -> None:
    """Rows of a released savepoint do not outlive the rollback."""

    def view() -> None:
        with shop.db.session.begin_nested():
            shop.db.session.execute(text(INSERT))
        raise ValueError

    shop.view(view)
    assert shop.post().status_code == 500
    assert (shop.accounts(), shop.status()) == ([], "failed")


def test_work_outside_of_calls_is_left_alone(shop: Shop) -> None:
    """The fence does nothing where no guarded call is running."""
    with shop.app.app_context():
        by_session(shop)
    assert shop.accounts() == ["first"]


def test_view_mode_drops_what_the_view_left_uncommitted(
    make_shop: Callable[..., Shop],
) -> None:
    """With IDEMPOTENCY_COMMIT = 'view' only the view commits business rows."""
    shop = make_shop(IDEMPOTENCY_COMMIT="view")

    def view() -> str:
        by_session(shop)
        shop.add("dropped")
        return "done"

    shop.view(view)
    assert [shop.post().data for _ in range(2)] == [b"done", b"done"]
    assert (shop.accounts(), shop.status()) == (["first"], "succeeded")


def test_server_side_abort_that_the_view_survives(shop: Shop) -> None:
    """A caught database error is rolled back; the view's answer counts."""

    def view() -> str:
        shop.runs.append(1)
        with pytest.raises(Exception, match="no_such_table"):
            shop.db.session.execute(text("SELECT * FROM no_such_table"))
        return "survived"

    shop.view(view)
    assert [shop.post().data for _ in range(2)] == [b"survived"] * 2
    assert (shop.status(), shop.runs) == ("succeeded", [1])


@pytest.fixture
def strict_shop(
    database: Database, make_shop: Callable[..., Shop]
) -> Callable[..., Shop]:
    """Make shops whose transactions keep one snapshot, as strictly as it gets."""

    def make(level: str, **config: object) -> Shop:
        if database.name == "sqlite":  # which has only one level
            shop = make_shop(**config)
            _begin_explicitly(shop)
            return shop
        options: dict[str, Any] = {"isolation_level": level}
        if database.name == "mariadb":  # the default from MariaDB 11.8 on
            snapshots = "SET innodb_snapshot_isolation = ON"
            options["connect_args"] = {"init_command": snapshots}
        return make_shop(SQLALCHEMY_ENGINE_OPTIONS=options, **config)

    return make


def _begin_explicitly(shop: Shop) -> None:
    """Set SQLAlchemy's recipe for transactions that begin at the first statement."""
    with shop.app.app_context():
        engine = shop.db.engine

    @event.listens_for(engine, "connect")
    def connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")

    engine.dispose()


LEVELS = ["REPEATABLE READ", "SERIALIZABLE"]


@pytest.mark.parametrize("level", LEVELS)
def test_user_loaded_before_the_view(
    strict_shop: Callable[..., Shop], level: str
) -> None:
    """A snapshot opened before the claim does not make a first request fail."""
    shop = strict_shop(level)

    @shop.app.before_request
    def load_user() -> None:
        shop.db.session.query(shop.Account).all()

    shop.creating_view()
    assert [shop.post().status_code for _ in range(2)] == [201, 201]
    assert (shop.accounts(), shop.runs) == (["first"], ["first"])


@pytest.mark.parametrize("level", LEVELS)
def test_nested_calls_under_strict_isolation(
    strict_shop: Callable[..., Shop], level: str
) -> None:
    """An inner claim becomes part of a transaction that could not see it."""
    shop = strict_shop(level)

    def view() -> dict[str, Any]:
        shop.add("outer")
        result = shop.idempotency.guard.run(
            shop.scope(route="inner"), "hash", lambda: shop.add("inner")
        )
        return {"inner": result.value}

    shop.view(view)
    answers = [shop.post() for _ in range(2)]
    assert [a.json for a in answers] == [{"inner": "inner"}] * 2
    assert shop.accounts() == ["outer", "inner"]
    assert shop.status(route="inner") == "succeeded"


def test_early_writes_are_refused_where_they_would_hide_the_claim(
    strict_shop: Callable[..., Shop],
) -> None:
    """Uncommitted rows from before the view get a clear error, and no claim."""
    shop = strict_shop("SERIALIZABLE")
    shop.app.testing = True

    @shop.app.before_request
    def audit() -> None:
        shop.add("audit")

    shop.creating_view()
    with pytest.raises(IdempotencyConfigError, match="IDEMPOTENCY_BEFORE_VIEW_WRITES"):
        shop.post()
    assert (shop.accounts(), shop.status()) == ([], None)


def test_early_writes_can_be_committed(strict_shop: Callable[..., Shop]) -> None:
    """With the setting they are committed before the claim."""
    shop = strict_shop("SERIALIZABLE", IDEMPOTENCY_BEFORE_VIEW_WRITES="commit")

    @shop.app.before_request
    def audit() -> None:
        shop.add(f"audit {len(shop.runs)}")

    shop.creating_view()
    assert shop.post().status_code == 201
    assert shop.accounts() == ["audit 0", "first"]


def test_early_writes_need_no_care_at_read_committed(
    make_shop: Callable[..., Shop],
) -> None:
    """Where nothing hides the claim, rows from before the view join its unit."""
    shop = make_shop()
    if shop.database.name == "sqlite":
        pytest.skip("SQLite has one writer")

    @shop.app.before_request
    def audit() -> None:
        shop.add(f"audit {len(shop.runs)}")

    shop.creating_view()
    assert shop.post().status_code == 201
    assert shop.accounts() == ["audit 0", "first"]


def test_connect_hooks_of_the_application_apply(make_shop: Callable[..., Shop]) -> None:
    """A hook that runs SQL on each connection never ends as success without rows."""
    shop = make_shop()
    with shop.app.app_context():
        engine = shop.db.engine

    @event.listens_for(engine, "engine_connect")
    def check(connection: Any) -> None:
        connection.exec_driver_sql("SELECT 1")

    shop.creating_view()
    answers = [shop.post().status_code for _ in range(2)]
    if SQLALCHEMY >= (2, 1):
        assert (answers, shop.accounts()) == ([201, 201], ["first"])
    else:  # whose session joins the hook's transaction, and commits nothing
        assert (answers, shop.accounts()) == ([500, 500], [])
        assert shop.status() == "failed"


def test_view_that_removes_its_session(shop: Shop) -> None:
    """What a view adds to the session that follows a removed one is committed."""

    def view() -> str:
        shop.db.session.execute(text("SELECT 1"))
        shop.db.session.remove()
        shop.add()
        return "done"

    shop.view(view)
    assert [shop.post().status_code for _ in range(2)] == [200, 200]
    assert (shop.accounts(), shop.status()) == (["first"], "succeeded")


def test_savepoints_of_one_name(shop: Shop) -> None:
    """A rollback to the last one of a name leaves what was done before it an effect."""

    def view() -> None:
        connection = shop.db.session.connection()
        for statement in ("SAVEPOINT a", INSERT, "SAVEPOINT a", "ROLLBACK TO a"):
            connection.execute(text(statement))
        shop.db.session.commit()
        raise ValueError

    shop.view(view)
    assert shop.post().status_code == 500
    record = shop.record()
    assert record is not None
    assert record.effects_committed_at is not None
    assert shop.accounts() == ["first"]


def test_savepoint_without_a_key(shop: Shop) -> None:
    """Also an unrecorded unit of work rolls a released savepoint back."""

    @shop.app.post("/accounts")
    @idempotent
    def view() -> tuple[str, int]:
        with shop.db.session.begin_nested():
            shop.db.session.execute(text(INSERT))
        return "no", 400

    assert shop.post(key=None).status_code == 400
    assert shop.accounts() == []


@pytest.mark.parametrize("flush", [False, True], ids=["added", "flushed"])
def test_rows_of_an_after_request_function_are_reported(
    shop: Shop, caplog: pytest.LogCaptureFixture, *, flush: bool
) -> None:
    """They come after the commit of the call, and nobody commits them."""

    @shop.app.after_request
    def add(response: Any) -> Any:
        shop.db.session.add(shop.Account(name="late"))
        if flush:
            shop.db.session.flush()
        return response

    shop.creating_view()
    assert shop.post().status_code == 201
    assert "'accounts' changed the session after its call had ended" in caplog.text
    assert shop.accounts() == ["first"]


def test_commit_of_an_after_request_function_is_reported(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """It is done for each replay, too, and says so; another request is not touched."""

    @shop.app.after_request
    def add(response: Any) -> Any:
        by_session(shop)
        return response

    shop.app.add_url_rule("/plain", view_func=lambda: "done", endpoint="plain")
    shop.view(lambda: "done")
    assert shop.client().get("/plain").status_code == 200
    assert "had ended" not in caplog.text
    with shop.app.app_context(), shop.db.engine.begin() as connection:
        connection.execute(text("DELETE FROM account"))
    caplog.clear()
    assert shop.post().status_code == 200
    assert "committed after the call of 'accounts' had ended" in caplog.text
    caplog.clear()
    with shop.app.app_context():
        shop.db.session.execute(text("DELETE FROM account"))
        shop.db.session.commit()
    assert caplog.text == ""


def running_call() -> Call:
    """Return the call in which a view runs."""
    call = current_call.get()
    assert call is not None
    return call


class Publisher:
    """Publishes what is committed, and notes what was durable then."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self.seen: list[str] = []
        self.durable: list[str] = []

    def publish(self, name: str) -> None:
        """Add an account, and publish it after the commit."""

        def run() -> None:
            self.seen.append(name)
            self.durable = self._shop.accounts()

        self._shop.add(name)
        after_commit(running_call(), run)

    def publish_several(self) -> None:
        """Publish in a savepoint, in one that is undone, and in an inner call."""
        session, guard = self._shop.db.session, self._shop.idempotency.guard
        self.publish("one")
        with session.begin_nested():
            self.publish("two")
        savepoint = session.begin_nested()
        self.publish("undone")
        savepoint.rollback()
        scope = self._shop.scope(route="inner")
        guard.run(scope, "hash", lambda: self.publish("inner"))


@pytest.mark.parametrize("atomic", [False, True], ids=["plain", "atomic"])
@pytest.mark.parametrize(
    ("ending", "published"),
    [
        ("succeeds", ["one", "two", "inner", "last"]),
        ("refuses", ["one", "two", "inner"]),
        ("raises", ["one", "two", "inner"]),
    ],
)
def test_hooks_run_after_the_real_commit(
    shop: Shop, ending: str, published: list[str], *, atomic: bool
) -> None:
    """What is undone is not published, and nothing before it is durable."""
    publisher = Publisher(shop)

    def view() -> Any:
        publisher.publish_several()
        shop.db.session.commit()
        assert publisher.seen == []
        publisher.publish("last")
        if ending == "raises":
            raise RuntimeError
        return "done", 201 if ending == "succeeds" else 404

    if atomic and ending == "raises":
        published = []
    shop.view(view, atomic=atomic)
    shop.post()
    assert publisher.seen == publisher.durable == published
    shop.post()
    assert publisher.seen == published


def test_failing_hook_does_not_change_the_answer(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """The effect is durable, and the others are run."""
    seen: list[str] = []

    def fail() -> None:
        raise ValueError

    def view() -> Any:
        shop.add()
        after_commit(running_call(), fail)
        after_commit(running_call(), lambda: seen.append("second"))
        return "done", 201

    shop.view(view)
    assert shop.post().status_code == 201
    assert seen == ["second"]
    assert "What was to be done after a commit failed" in caplog.text


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_hook_of_a_failed_commit_does_not_run(shop: Shop) -> None:
    """A COMMIT that the server refuses publishes nothing."""
    with shop.app.app_context(), shop.db.engine.begin() as connection:
        connection.execute(
            text(
                "ALTER TABLE account ADD CONSTRAINT late UNIQUE (name) "
                "DEFERRABLE INITIALLY DEFERRED"
            )
        )
        connection.execute(text("ALTER TABLE account DROP CONSTRAINT account_name_key"))
    seen: list[str] = []

    def view() -> Any:
        for _ in range(2):
            shop.add("first")
        after_commit(running_call(), lambda: seen.append("published"))
        return "done", 201

    shop.view(view)
    assert shop.post().status_code == 500
    assert (seen, shop.accounts(), shop.status()) == ([], [], "failed")


def test_transaction_that_is_older_than_the_fence(shop: Shop) -> None:
    """A commit of it is noted, too: the extension may be set up before ``db``."""
    app = Flask("late")
    app.config.update(SQLALCHEMY_DATABASE_URI=shop.database.url)
    late = Idempotency(app, shop.db)
    shop.db.init_app(app)

    @app.before_request
    def read() -> None:
        shop.db.session.execute(text("SELECT * FROM account")).all()

    @idempotent(required=True, retry_failed=True, user_id="u1")
    def view() -> None:
        shop.add(f"run {len(shop.runs)}")
        shop.db.session.commit()
        raise ValueError

    app.add_url_rule("/accounts", "accounts", view, methods=["POST"])
    headers = {"Idempotency-Key": "k"}
    for _ in range(2):
        answer = app.test_client().post("/accounts", headers=headers, json={})
        assert answer.status_code == 500
    assert shop.accounts() == ["run 0"]
    with app.app_context():
        shop.db.session.remove()
        shop.db.engine.dispose()
        late.store.close()


CTE = "WITH x AS (SELECT 1) UPDATE account SET name = name || 'x'"


@pytest.mark.parametrize(
    ("statement", "options"),
    [
        (CTE, {}),
        (CTE, {"isolation_level": None}),
        ("UPDATE account SET name = name || 'x'", {"isolation_level": None}),
        ("CREATE TABLE extra (id INT)", {}),
    ],
    ids=["cte", "cte, no level", "no level", "ddl"],
)
def test_write_before_which_the_driver_does_not_begin(
    make_quick: Callable[..., Shop], statement: str, options: dict[str, Any]
) -> None:
    """SQLite's driver does so by the first word only; a call has a transaction anyway."""
    shop = make_quick(SQLALCHEMY_ENGINE_OPTIONS={"connect_args": options})
    with shop.app.app_context():
        shop.db.session.execute(text(INSERT))
        shop.db.session.commit()

    def view() -> str:
        shop.db.session.execute(text(statement))
        if not shop.runs:
            shop.runs.append(1)
            raise ValueError
        return "done"

    shop.view(view, retry_failed=True)
    assert [shop.post().status_code for _ in range(2)] == [500, 200]
    assert shop.accounts() == ["firstx" if "name" in statement else "first"]


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.parametrize("fails", [True, False], ids=["failure", "success"])
def test_driver_that_commits_each_statement(
    make_shop: Callable[..., Shop], *, fails: bool
) -> None:
    """An option of the driver is AUTOCOMMIT, too: what is durable is noted before."""
    options = {"connect_args": {"autocommit": True}}
    shop = make_shop(SQLALCHEMY_ENGINE_OPTIONS=options)

    def view() -> str:
        shop.add(f"run {len(shop.runs)}")
        if fails:
            raise ValueError
        return "done"

    shop.view(view, retry_failed=True)
    code = 500 if fails else 200
    assert [shop.post().status_code for _ in range(2)] == [code, code]
    assert shop.accounts() == ["run 0"]
    record = shop.record()
    assert record is not None
    assert record.effects_committed_at is not None


@pytest.mark.parametrize("atomic", [False, True], ids=["plain", "atomic"])
@pytest.mark.parametrize(
    ("database", "statement"),
    [
        ("postgresql", "SELECT 1; COMMIT"),
        *(
            ("mariadb", statement)
            for statement in (
                "CALL ends()",
                "FLUSH TABLES",
                "CHECK TABLE account",
                "SET @x = 1, autocommit = 1",
            )
        ),
    ],
    indirect=["database"],
)
def test_statement_that_commits_by_the_way(
    shop: Shop, statement: str, *, atomic: bool
) -> None:
    """What became durable by it is never done again; an atomic view may not send it."""
    if shop.database.name == "mariadb":
        with shop.app.app_context(), shop.db.engine.begin() as connection:
            connection.execute(text("CREATE PROCEDURE ends() COMMIT"))

    def view() -> None:
        shop.add(f"run {len(shop.runs)}")
        shop.db.session.execute(text(statement))
        raise ValueError

    shop.view(view, retry_failed=True, atomic=atomic)
    assert [shop.post().status_code for _ in range(2)] == [500, 500]
    sent = not atomic or statement.startswith("CALL")  # what it does is not in its text
    assert shop.accounts() == (["run 0"] if sent else [])
    assert len(shop.runs) == (1 if sent else 2)


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
@pytest.mark.parametrize("atomic", [False, True], ids=["plain", "atomic"])
def test_procedure_that_does_not_commit(shop: Shop, *, atomic: bool) -> None:
    """What was written for the case that it does is undone with the rest."""
    with shop.app.app_context(), shop.db.engine.begin() as connection:
        connection.execute(text("CREATE PROCEDURE goes_on() SELECT 1"))

    def view() -> str:
        shop.add(f"run {len(shop.runs)}")
        shop.db.session.connection().exec_driver_sql("CALL goes_on()").close()
        if len(shop.runs) == 1:
            raise ValueError
        return "done"

    shop.view(view, retry_failed=True, atomic=atomic)
    assert [shop.post().status_code for _ in range(2)] == [500, 200]
    assert shop.accounts() == ["run 1"]


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
@pytest.mark.parametrize("atomic", [False, True], ids=["plain", "atomic"])
def test_temporary_table(shop: Shop, *, atomic: bool) -> None:
    """It commits nothing, unlike other DDL on MariaDB."""

    def view() -> str:
        shop.add(f"run {len(shop.runs)}")
        shop.db.session.execute(text("CREATE TEMPORARY TABLE t AS SELECT 1 AS x"))
        shop.db.session.execute(text("DROP TEMPORARY TABLE t"))
        if len(shop.runs) == 1:
            raise ValueError
        return "done"

    shop.view(view, retry_failed=True, atomic=atomic)
    assert [shop.post().status_code for _ in range(2)] == [500, 200]
    assert shop.accounts() == ["run 1"]


@pytest.mark.parametrize(
    ("begin", "undo"),
    [
        ("SAVEPOINT a", "ROLLBACK TO A"),
        ("SAVEPOINT a", "/* who */ ROLLBACK TO SAVEPOINT a"),
        ("-- who\nSAVEPOINT a", "ROLLBACK TRANSACTION TO a"),
        ('SAVEPOINT "a-b"', 'ROLLBACK TO SAVEPOINT "a-b"'),
    ],
)
def test_savepoint_of_any_spelling(shop: Shop, begin: str, undo: str) -> None:
    """A savepoint that is undone undoes what the transaction holds, and no more."""
    mariadb = shop.database.name == "mariadb"
    own = {'"': "`", "TRANSACTION": "WORK"} if mariadb else {}
    for old, new in own.items():
        begin, undo = begin.replace(old, new), undo.replace(old, new)
    scope = shop.scope(route="inner")

    def view() -> str:
        shop.add("outer")
        session = shop.db.session
        session.execute(text(begin))
        shop.idempotency.guard.run(scope, "h", lambda: shop.add("inner"))
        session.execute(text('SAVEPOINT "a-c"'.replace('"', own.get('"', '"'))))
        session.execute(text(undo))
        return "done"

    shop.view(view)
    assert shop.post().status_code == 200
    assert (shop.accounts(), shop.status(route="inner")) == (["outer"], None)


def test_savepoint_whose_name_is_used_again(shop: Shop) -> None:
    """A rollback to it is one to the last of that name."""

    def view() -> None:
        session = shop.db.session
        session.execute(text("BEGIN" if shop.database.name == "sqlite" else "SELECT 1"))
        session.execute(text("SAVEPOINT a"))
        shop.add(f"run {len(shop.runs)}")
        session.execute(text("SAVEPOINT a"))
        shop.add("dropped")
        session.execute(text("ROLLBACK TO SAVEPOINT a"))
        session.commit()
        raise ValueError

    shop.view(view, retry_failed=True)
    assert [shop.post().status_code for _ in range(2)] == [500, 500]
    assert shop.accounts() == ["run 0"]
