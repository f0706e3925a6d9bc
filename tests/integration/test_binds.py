"""Work in another database than the record's is noted before it becomes durable."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import String, create_engine, text
from sqlalchemy.orm import Mapped, mapped_column
from sqlalchemy.pool import NullPool

from flask_idempotency import (
    Idempotency,
    IdempotencyConfigError,
    IdempotencyRecordMixin,
    current_idempotency,
    failpoints,
)
from tests.integration.test_crashes import die, end_process
from tests.shop import Shop, elsewhere, is_replay

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.databases import Database

INSERT = "INSERT INTO note (text) VALUES ('noted')"
STRICT = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]


class Far(Shop):
    """A shop that keeps notes in another database."""

    def __init__(self, database: Database, url: str, **config: Any) -> None:
        binds = {"other": {"url": url, **config.pop("other", {})}}
        super().__init__(database, SQLALCHEMY_BINDS=binds, **config)
        self.other_url = url
        db = self.db

        class Note(db.Model):  # type: ignore[name-defined, misc]
            __bind_key__ = "other"
            id: Mapped[int] = mapped_column(primary_key=True)
            text: Mapped[str] = mapped_column(String(50))

        self.Note = Note
        with self.app.app_context():
            db.create_all("other")

    def close(self) -> None:
        """Close every connection."""
        super().close()
        with self.app.app_context():
            self.db.engines["other"].dispose()

    def both(self) -> tuple[dict[str, Any], int]:
        """Add a row to each database, without a commit."""
        self.db.session.add(self.Note(text="noted"))
        return self.create()

    def notes(self) -> list[str]:
        """Return what is committed in the other database."""
        engine = create_engine(self.other_url, poolclass=NullPool)
        with engine.connect() as connection:
            return list(connection.execute(text("SELECT text FROM note")).scalars())

    def write_note(self) -> None:
        """Write to the other database through its engine."""
        with self.db.engines["other"].begin() as connection:
            connection.execute(text(INSERT))


class Separate(Far):
    """A shop whose records are in the other database."""

    def extension(self) -> Idempotency:
        """Set the extension up with a record of its own."""

        class Record(IdempotencyRecordMixin, self.db.Model):  # type: ignore[name-defined, misc]
            __bind_key__ = "other"

        return Idempotency(self.app, self.db, record_class=Record)


@pytest.fixture
def make_far(database: Database, make_database: Callable[[], Database]) -> Any:
    """Make shops with two databases, which are closed after the test."""
    with contextlib.ExitStack() as opened:

        def make(kind: type[Far] = Far, **config: Any) -> Far:
            far = kind(database, make_database().url, **config)
            opened.callback(far.close)
            return far

        yield make


@pytest.mark.parametrize("level", STRICT)
def test_rows_in_both_databases(
    make_far: Callable[..., Far], database: Database, level: str
) -> None:
    """At any isolation level a healthy request succeeds, and is replayed."""
    options: dict[str, Any] = {"isolation_level": level}
    if database.name == "sqlite":
        options = {}
    elif database.name == "mariadb" and level != "READ COMMITTED":
        snapshots = "SET innodb_snapshot_isolation = ON"
        options["connect_args"] = {"init_command": snapshots}
    far = make_far(SQLALCHEMY_ENGINE_OPTIONS=options)
    far.view(far.both)
    answers = [far.post() for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert is_replay(answers[1])
    assert (far.accounts(), far.notes(), far.runs) == (["first"], ["noted"], ["first"])


def test_failing_view_leaves_nothing_in_either(make_far: Callable[..., Far]) -> None:
    """What was not committed is rolled back in both, and is no effect."""
    far = make_far()

    def view() -> Any:
        far.both()
        raise ValueError

    far.view(view)
    assert far.post().status_code == 500
    record = far.record()
    assert record is not None
    assert (far.accounts(), far.notes(), record.effects_committed_at) == ([], [], None)


def test_commit_elsewhere_is_an_effect(make_far: Callable[..., Far]) -> None:
    """A view that fails after it is not run again."""
    far = make_far()

    def view() -> Any:
        far.runs.append("ran")
        far.write_note()
        raise ValueError

    far.view(view, retry_failed=True)
    assert [far.post().status_code for _ in range(2)] == [500, 500]
    assert (far.runs, far.notes()) == (["ran"], ["noted"])


def test_reading_elsewhere_is_none(make_far: Callable[..., Far]) -> None:
    """A commit that only read leaves no mark."""
    far = make_far()

    def view() -> Any:
        far.db.session.query(far.Note).all()
        far.db.session.commit()
        raise ValueError

    far.view(view)
    assert far.post().status_code == 500
    record = far.record()
    assert record is not None
    assert record.effects_committed_at is None


def test_late_owner_commits_nothing_elsewhere(make_far: Callable[..., Far]) -> None:
    """After a take-over its rows in the other database are rolled back, too."""
    far = make_far()

    def view() -> Any:
        if far.runs:
            return "winner"
        far.runs.append("late")
        elsewhere(far.lapse)
        assert elsewhere(far.post).data == b"winner"
        far.write_note()
        return "late"

    far.view(view)
    answer = far.post()
    assert (answer.data, is_replay(answer), far.notes()) == (b"winner", True, [])


def _crash(database: Database, url: str, place: str) -> None:
    far = Far(database, url)

    def between() -> Any:
        far.write_note()
        end_process()

    if place == "between":
        far.view(between)
    else:
        failpoints.set_failpoint(place, end_process)
        far.view(far.both)
    far.post()


@pytest.mark.parametrize(
    ("place", "notes"), [("after_intent", []), ("between", ["noted"])]
)
def test_kill_around_a_commit_elsewhere(
    make_far: Callable[..., Far],
    database: Database,
    place: str,
    notes: list[str],
) -> None:
    """It leaves an unknown outcome, and never a second run."""
    far = make_far()
    die(_crash, database, far.other_url, place)
    assert far.notes() == notes
    far.view(far.both)
    assert far.post().status_code == 409
    far.lapse()
    answer = far.post()
    assert answer.json is not None
    assert answer.json["code"] == "IDEMPOTENCY_OUTCOME_UNKNOWN"
    assert (far.runs, far.notes()) == ([], notes)


@pytest.mark.parametrize("where", ["main", "other", "engine"])
def test_autocommit_is_noted_before(make_far: Callable[..., Far], where: str) -> None:
    """A statement that is durable at once comes after its note."""
    other = {"isolation_level": "AUTOCOMMIT"} if where == "engine" else {}
    far = make_far(other=other)
    seen: list[Any] = []

    def view() -> Any:
        engine = far.db.engine if where == "main" else far.db.engines["other"]
        row = "INSERT INTO account (name) VALUES ('first')"
        with engine.connect() as connection:
            if where != "engine":
                connection.execution_options(isolation_level="AUTOCOMMIT")
            connection.execute(text(row if where == "main" else INSERT))
            record = elsewhere(far.record)
            seen.append(record and record.effects_committed_at)
            connection.rollback()
        return "done"

    far.view(view)
    assert [far.post().status_code for _ in range(2)] == [200, 200]
    assert seen[0] is not None
    assert far.accounts() + far.notes() == ["first" if where == "main" else "noted"]


def test_inner_call_with_rows_elsewhere(make_far: Callable[..., Far]) -> None:
    """Both records are completed after the commits that could not carry them."""
    far = make_far()

    def view() -> Any:
        result = far.idempotency.guard.run(
            far.scope(route="inner"), "hash", lambda: far.both()[0]
        )
        return result.value

    far.view(view)
    answers = [far.post() for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert (far.accounts(), far.notes()) == (["first"], ["noted"])
    assert (far.status(), far.status(route="inner")) == ("succeeded", "succeeded")


def test_atomic_view_with_rows_elsewhere(
    make_far: Callable[..., Far], database: Database
) -> None:
    """They are committed by themselves; SQLite has no room for the note then."""
    far = make_far()
    far.app.testing = True

    def view() -> Any:
        far.add("first")
        far.write_note()
        return "done"

    far.view(view, atomic=True)
    if database.name == "sqlite":
        with pytest.raises(IdempotencyConfigError, match="another database"):
            far.post()
        assert (far.accounts(), far.notes()) == ([], [])
    else:
        assert far.post().status_code == 200
        assert (far.accounts(), far.notes()) == (["first"], ["noted"])


@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
def test_record_on_a_bind_of_its_own(
    make_far: Callable[..., Far], *, fails: bool
) -> None:
    """Each commit of business rows is noted there first."""
    shop = make_far(Separate, IDEMPOTENCY_SEPARATE_BIND=True)
    seen: list[Any] = []

    def view() -> Any:
        shop.add("first")
        shop.db.session.commit()
        record = elsewhere(shop.record)
        seen.append(record and record.effects_committed_at)
        if fails:
            raise ValueError
        shop.add("second")
        return "done", 201

    shop.view(view, retry_failed=True)
    status = 500 if fails else 201
    assert [shop.post().status_code for _ in range(2)] == [status] * 2
    assert shop.accounts() == (["first"] if fails else ["first", "second"])
    assert seen[0] is not None
    assert len(seen) == 1


def test_record_on_a_bind_of_its_own_cannot_be_atomic(
    make_far: Callable[..., Far],
) -> None:
    """There is no one transaction."""
    shop = make_far(Separate, IDEMPOTENCY_SEPARATE_BIND=True)
    shop.app.testing = True
    shop.view(lambda: "done", atomic=True)
    with pytest.raises(IdempotencyConfigError, match="bind 'other'"):
        shop.post()


@pytest.mark.parametrize("atomic", [False, True], ids=["plain", "atomic"])
@pytest.mark.parametrize("level", STRICT)
def test_step_with_open_rows_elsewhere(
    make_far: Callable[..., Far], database: Database, level: str, *, atomic: bool
) -> None:
    """Ending the read transaction here would commit them, or drop them."""
    engine = {} if database.name == "sqlite" else {"isolation_level": level}
    far = make_far(SQLALCHEMY_ENGINE_OPTIONS=engine)

    def view() -> str:
        far.db.session.add(far.Note(text="noted"))
        far.db.session.flush()
        far.db.session.execute(text("SELECT * FROM account")).all()
        current_idempotency.run_step("charge", far.runs.append)
        return "done"

    far.view(view, atomic=atomic)
    far.app.testing = True
    with pytest.raises(IdempotencyConfigError, match="before the first write"):
        far.post()
    record = far.record()
    assert record is not None
    assert (far.notes(), far.runs, record.effects_committed_at) == ([], [], None)
