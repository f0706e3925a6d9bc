"""The database picks a transaction as its victim: deadlocks, changed snapshots."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from flask_idempotency import Scope, fingerprint
from tests.shop import elsewhere, is_replay

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.backends import Backends
    from tests.shop import Shop

pytestmark = pytest.mark.parametrize(
    "database", ["postgresql", "mariadb"], indirect=True
)


class Rival:
    """
    A transaction that wants the same rows as the session's, and gets them.

    Args:
        shop: Whose session's transaction becomes the victim.
        backends: The operator's view of the server.
    """

    def __init__(self, shop: Shop, backends: Backends) -> None:
        self._shop, self._backends = shop, backends
        backends.execute(
            "CREATE TABLE pawn (id INT PRIMARY KEY, n INT NOT NULL)",
            "INSERT INTO pawn VALUES (1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0)",
        )

    def run(self, statement: str) -> None:
        """Do something in the session's transaction."""
        self._shop.db.session.execute(text(statement))

    def deadlock(self) -> None:
        """Let the session wait for what waits for it: raises."""
        is_postgresql = self._shop.database.name == "postgresql"
        with self._backends.engine.connect() as other, ThreadPoolExecutor(1) as pool:
            if is_postgresql:  # the one that looks first is the victim
                self.run("SET LOCAL deadlock_timeout = '5ms'")
                other.execute(text("SET LOCAL deadlock_timeout = '60s'"))
            else:  # the one that has done less is the victim
                other.execute(text("UPDATE pawn SET n = 7 WHERE id BETWEEN 3 AND 6"))
                other.execute(text("INSERT INTO pawn VALUES (7, 0), (8, 0), (9, 0)"))
            self.run("UPDATE pawn SET n = 1 WHERE id = 1")
            other.execute(text("UPDATE pawn SET n = 2 WHERE id = 2"))
            other_waits = text("UPDATE pawn SET n = 2 WHERE id = 1")
            waiting = pool.submit(other.execute, other_waits)
            self._backends.waiting()
            try:
                self.run("UPDATE pawn SET n = 1 WHERE id = 2")
            finally:
                waiting.result()

    def change_after_snapshot(self) -> None:
        """Let somebody change what the session's snapshot shows: raises."""
        self.run("SELECT * FROM pawn")
        self._backends.execute("UPDATE pawn SET n = n + 1 WHERE id = 1")
        self.run("UPDATE pawn SET n = n + 1 WHERE id = 1")


@pytest.fixture
def make_strict(make_shop: Callable[..., Shop]) -> Callable[..., Shop]:
    """Make shops whose transactions fail when what they saw has changed."""

    def make(level: str = "REPEATABLE READ") -> Shop:
        hook = {"init_command": "SET innodb_snapshot_isolation = ON"}
        probe = make_shop()
        mariadb = {"connect_args": hook} if probe.database.name == "mariadb" else {}
        options = {"isolation_level": level, **mariadb}
        return make_shop(SQLALCHEMY_ENGINE_OPTIONS=options)

    return make


@pytest.mark.parametrize("kind", ["deadlock", "change_after_snapshot"])
def test_victim_is_a_failure_that_may_be_tried_again(
    make_strict: Callable[..., Shop], backends: Backends, kind: str
) -> None:
    """Nothing of a victim stays; at once a route that retries failures runs again."""
    shop = make_strict()
    rival = Rival(shop, backends)

    def view() -> Any:
        answer = shop.create()
        if len(shop.runs) == 1:
            getattr(rival, kind)()
        return answer

    shop.view(view, retry_failed=True)
    assert shop.post().status_code == 500
    assert (shop.status(), shop.accounts()) == ("failed", [])
    assert [shop.post().status_code for _ in range(2)] == [201, 201]
    assert shop.accounts() == ["first"]


def test_victim_may_free_its_key(shop: Shop, backends: Backends) -> None:
    """An answer in release_on lets the client come back at once, on any route."""
    rival = Rival(shop, backends)

    def view() -> Any:
        answer = shop.create()
        if len(shop.runs) == 1:
            with pytest.raises(DBAPIError):
                rival.deadlock()
            return "busy", 429
        return answer

    shop.view(view)
    assert (shop.post().status_code, shop.status()) == (429, None)
    assert [shop.post().status_code for _ in range(2)] == [201, 201]
    assert shop.accounts() == ["first"]


def test_victim_may_answer_for_itself(shop: Shop, backends: Backends) -> None:
    """The answer of a view that noticed is kept, without the rows."""
    rival = Rival(shop, backends)

    def view() -> Any:
        shop.create()
        with pytest.raises(DBAPIError):
            rival.deadlock()
        return "nothing done"

    shop.view(view)
    assert [shop.post().data for _ in range(2)] == [b"nothing done"] * 2
    assert (shop.accounts(), shop.runs) == ([], ["first"])


def test_victim_may_do_everything_again(shop: Shop, backends: Backends) -> None:
    """After a rollback the rest of the call is a unit like any other."""
    rival = Rival(shop, backends)

    def view() -> Any:
        shop.add()
        with pytest.raises(DBAPIError):
            rival.deadlock()
        shop.db.session.rollback()
        return shop.create()

    shop.view(view)
    assert [shop.post().status_code for _ in range(2)] == [201, 201]
    assert shop.accounts() == ["first"]


@pytest.mark.parametrize("commit", ["guard", "view"])
def test_victim_that_goes_on_commits_no_half(
    shop: Shop, backends: Backends, commit: str
) -> None:
    """What comes after a deadlock is not committed without what was before it."""
    rival = Rival(shop, backends)

    def view() -> Any:
        shop.add("before")
        with pytest.raises(DBAPIError):
            rival.deadlock()
        shop.add("after")
        if commit == "view":
            shop.db.session.commit()
        return "done"

    shop.view(view)
    assert [shop.post().status_code for _ in range(2)] == [500, 500]
    assert (shop.status(), shop.accounts()) == ("failed", [])


def test_victim_whose_savepoint_is_gone(shop: Shop, backends: Backends) -> None:
    """A view goes on after its savepoint only where the rows before it are there."""
    rival = Rival(shop, backends)

    def view() -> Any:
        answer = shop.create()
        with pytest.raises(DBAPIError), shop.db.session.begin_nested():
            rival.deadlock()
        return answer

    shop.view(view)
    # MariaDB rolls back the whole transaction, PostgreSQL to the savepoint.
    stays = shop.database.name == "postgresql"
    assert [shop.post().status_code for _ in range(2)] == [201 if stays else 500] * 2
    assert shop.accounts() == (["first"] if stays else [])


@pytest.mark.parametrize("kind", ["deadlock", "change_after_snapshot"])
def test_victim_in_an_inner_call(
    make_strict: Callable[..., Shop],
    make_shop: Callable[..., Shop],
    backends: Backends,
    kind: str,
) -> None:
    """What ended inside the call before is undone with it, or stays with it."""
    strict = kind == "change_after_snapshot"
    shop = make_strict() if strict else make_shop()
    rival = Rival(shop, backends)

    def inner(key: str, handler: Callable[[], Any]) -> Any:
        scope = Scope(tenant_id="", user_id="u1", route="inner", idempotency_key=key)
        return shop.idempotency.guard.run(scope, fingerprint(key), handler)

    def view() -> Any:
        answer = shop.create()
        inner("early", lambda: shop.add("inner"))
        if shop.runs.count("inner") == 1:
            with pytest.raises(DBAPIError, match=r"[Dd]eadlock|since|concurrent"):
                inner("late", getattr(rival, kind))
        return answer

    shop.view(view, retry_failed=True)
    first = shop.post()
    if shop.database.name == "mariadb":
        assert (first.status_code, shop.accounts()) == (500, [])
        assert shop.status("early", route="inner") is None
        assert shop.post().status_code == 201
    assert (shop.status(), shop.status("early", route="inner")) == ("succeeded",) * 2
    # A claim that is a part of the session's transaction ends with that.
    gone = strict and shop.database.name == "mariadb"
    assert shop.status("late", route="inner") == (None if gone else "failed")
    assert shop.accounts() == ["first", "inner"]
    assert is_replay(shop.post())


@pytest.mark.parametrize("retry", [True, False])
def test_victim_at_its_commit(
    make_strict: Callable[..., Shop], backends: Backends, *, retry: bool
) -> None:
    """A COMMIT that fails leaves a failure, for who asks next."""
    shop = make_strict("SERIALIZABLE")
    if shop.database.name != "postgresql":
        pytest.skip("only PostgreSQL finds a victim as late as that")
    backends.execute("CREATE TABLE pawn (id INT PRIMARY KEY, n INT)")

    def read_and_write(number: int) -> None:
        session = shop.db.session
        session.execute(text("SELECT sum(n) FROM pawn"))
        insert = text("INSERT INTO pawn VALUES (:number, 1)")
        session.execute(insert, {"number": number})

    def rival() -> None:
        with shop.app.app_context():
            read_and_write(99)
            shop.db.session.commit()

    def view() -> Any:
        answer = shop.create()
        read_and_write(len(shop.runs))
        if len(shop.runs) == 1:
            elsewhere(rival)
        return answer

    shop.view(view, retry_failed=retry)
    assert shop.post().status_code == 500
    assert (shop.status(), shop.accounts()) == ("failed", [])
    record = shop.record()
    assert record is not None
    assert record.effects_committed_at is None
    assert [shop.post().status_code for _ in range(2)] == [201 if retry else 500] * 2
    assert shop.accounts() == (["first"] if retry else [])


HICCUP = """
    CREATE FUNCTION hiccup() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF nextval('hiccups') <= {times} THEN
    RAISE EXCEPTION 'hiccup' USING ERRCODE = '{code}'; END IF;
    IF TG_OP = 'DELETE' THEN RETURN OLD; END IF; RETURN NEW; END $$
"""
TRIGGER = "CREATE TRIGGER hiccup BEFORE {verb} ON idempotency_record FOR EACH ROW "
SIGNAL = """
    IF nextval(hiccups) <= {times} THEN
    SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = {code}; END IF
"""
STATEMENTS = {
    "postgresql": (
        "CREATE SEQUENCE hiccups",
        HICCUP,
        TRIGGER + "EXECUTE FUNCTION hiccup()",
    ),
    "mariadb": ("CREATE SEQUENCE hiccups NOCACHE", TRIGGER + SIGNAL),
}
CODES = {"postgresql": ("40001", "40P01"), "mariadb": ("1213", "1020")}
REFUSALS = {"UPDATE": 404, "DELETE": 429}


def hiccups(shop: Shop, backends: Backends, verb: str, which: int, times: int) -> None:
    """Let the server refuse a statement on the record some times, by a code."""
    code = CODES[shop.database.name][which]
    for statement in STATEMENTS[shop.database.name]:
        backends.execute(statement.format(verb=verb, code=code, times=times))


@pytest.mark.parametrize("which", [0, 1], ids=["first code", "second code"])
def test_claim_that_is_a_victim_is_sent_again(
    shop: Shop, backends: Backends, which: int
) -> None:
    """The claim is the library's own to repeat, and is one attempt."""
    hiccups(shop, backends, "INSERT", which, 3)
    shop.creating_view()
    assert [shop.post().status_code for _ in range(2)] == [201, 201]
    record = shop.record()
    assert record is not None
    assert (record.attempts, shop.accounts()) == (1, ["first"])


@pytest.mark.parametrize("verb", REFUSALS)
def test_outcome_that_is_a_victim_is_sent_again(
    shop: Shop, backends: Backends, verb: str
) -> None:
    """An outcome that is written on its own is the library's own to repeat."""
    hiccups(shop, backends, verb, 0, 3)
    status = REFUSALS[verb]
    shop.view(lambda: ("no", status))
    assert shop.post().status_code == status
    assert shop.status() == (None if verb == "DELETE" else "succeeded")


def test_take_over_that_is_a_victim_is_sent_again(
    shop: Shop, backends: Backends
) -> None:
    """A lapsed record is taken over, whatever the server says at first."""
    shop.creating_view()
    with shop.app.app_context():
        shop.idempotency.store.claim(shop.scope(), "other")
    shop.lapse()
    shop.outlive()
    hiccups(shop, backends, "UPDATE", 0, 3)
    assert [shop.post().status_code for _ in range(2)] == [201, 201]
    assert shop.accounts() == ["first"]


def test_record_that_is_a_victim_in_the_one_commit(
    shop: Shop, backends: Backends
) -> None:
    """There nothing is repeated: the rows go with it, and the call failed."""
    hiccups(shop, backends, "UPDATE", 0, 1)
    shop.creating_view(retry_failed=True)
    assert shop.post().status_code == 500
    assert (shop.status(), shop.accounts()) == ("failed", [])
    assert [shop.post().status_code for _ in range(2)] == [201, 201]
    assert shop.accounts() == ["first"]
