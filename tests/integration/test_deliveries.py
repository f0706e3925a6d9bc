"""The moves of a delivery, each on every database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from sqlalchemy import text

from flask_idempotency.lifecycle import DeliveryState
from flask_idempotency.outbox import Delivery, Report
from flask_idempotency.outbox.deliveries import MAX_PUBLISHES
from tests.databases import Database
from tests.outbox import KIND, NAME, Outbox
from tests.shop import statements_sent

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.shop import Shop

    from .tables import World

ENDS = sorted(
    state.value
    for state in DeliveryState
    if state not in {DeliveryState.PENDING, DeliveryState.PUBLISHED}
)
every_end = pytest.mark.parametrize("end", ENDS)


@pytest.fixture
def outbox(world: World, tmp_path: Path) -> Outbox:
    """Give the deliveries of an application on each kind of database, none so far."""
    with world.app.app_context(), world.db.engine.begin() as connection:
        for table in ("idempotency_delivery", "idempotency_record", "account"):
            connection.execute(text(f"DELETE FROM {table}"))  # noqa: S608
    return Outbox(world, tmp_path / "books")


@pytest.fixture
def quick_outbox(quick: Shop, tmp_path: Path) -> Outbox:
    """Give the deliveries of an application on SQLite."""
    return Outbox(quick, tmp_path / "books")


def test_a_delivery_is_read_as_it_was_written(outbox: Outbox) -> None:
    """Texts and bytes come back exactly, and times by the database's clock."""
    record_id = uuid4()
    delivery = outbox.add(
        "Tä 1 ",
        leased=True,
        tenant_id="T ",
        user_id="ü",
        record_id=record_id,
        unique_key="k ",
        repeatable=True,
        due_in_seconds=60,
        expires_in_seconds=120,
    )
    assert delivery is not None
    view = outbox.look("Tä 1 ")
    assert (view.id, view.kind, view.name, view.task_id) == (
        delivery.id,
        KIND,
        NAME,
        "Tä 1 ",
    )
    assert (view.tenant_id, view.user_id, view.record_id) == ("T ", "ü", record_id)
    assert (view.unique_key, view.repeatable, view.payload_size) == ("k ", True, 2)
    assert (view.state, view.publishes, view.leased) == ("pending", 1, True)
    assert view.expires_at is not None
    seconds = [
        round((instant - view.created_at).total_seconds())
        for instant in (view.due_at, view.expires_at)
    ]
    assert seconds == [60, 120]
    assert (view.last_error, view.published_at, view.ended_at) == (None, None, None)


def test_a_delivery_that_is_rolled_back_was_never_there(outbox: Outbox) -> None:
    """It lives and dies with the transaction of the rows."""
    delivery = Delivery(kind=KIND, name=NAME, task_id="t1", payload=b"")
    with outbox.shop.app.app_context():
        with outbox.shop.db.engine.connect() as connection:
            assert outbox.deliveries.add(delivery, connection)
            connection.rollback()
        assert outbox.deliveries.look(KIND, "t1") is None
    assert outbox.dispatch() == Report()


@pytest.mark.parametrize(
    "other",
    [{"task_id": "t1", "unique_key": None}, {"task_id": "t2", "unique_key": "k"}],
    ids=["task_id", "unique_key"],
)
def test_a_second_one_leaves_the_transaction_usable(
    outbox: Outbox, other: dict[str, Any]
) -> None:
    """A duplicate is told, and what else the transaction does is committed."""
    outbox.add("t1", unique_key="k", repeatable=True)
    shop = outbox.shop
    delivery = Delivery(kind=KIND, name=NAME, payload=b"", repeatable=True, **other)
    with shop.app.app_context(), shop.db.engine.begin() as connection:
        connection.execute(text("INSERT INTO account (name) VALUES ('before')"))
        assert outbox.deliveries.add(delivery, connection) is False
        connection.execute(text("INSERT INTO account (name) VALUES ('after')"))
    assert shop.accounts() == ["before", "after"]


def test_neighbours_of_a_key_are_others(outbox: Outbox) -> None:
    """Another name, kind or spelling is another unique key, on every database."""
    spellings = ["k", "K", "k ", "ḱ"]
    for number, unique_key in enumerate(spellings):
        assert outbox.add(f"t{number}", unique_key=unique_key, repeatable=True)
    assert outbox.add("u1", unique_key="k", repeatable=True, name="other")
    assert outbox.add("u2", unique_key="k", repeatable=True, kind="event")


@every_end
def test_an_end_frees_the_unique_key(outbox: Outbox, end: str) -> None:
    """A key is held until the end, and then by the next one."""
    outbox.add("t1", unique_key="k", repeatable=True)
    outbox.dispatch()
    with outbox.shop.app.app_context():
        holder = outbox.deliveries.find_open(KIND, NAME, "k")
    assert holder == outbox.look("t1")
    assert outbox.add("t2", unique_key="k", repeatable=True) is None
    assert outbox.end("t1", DeliveryState(end))
    with outbox.shop.app.app_context():
        assert outbox.deliveries.find_open(KIND, NAME, "k") is None
    assert outbox.add("t2", unique_key="k", repeatable=True)


def test_the_first_end_stays(outbox: Outbox) -> None:
    """A later report changes nothing, and one of nothing neither."""
    outbox.add("t1")
    assert outbox.end("t1", DeliveryState.REVOKED)
    assert not outbox.end("t1", DeliveryState.DONE)
    assert not outbox.end("t2", DeliveryState.DONE)
    assert outbox.state() == "revoked"
    assert outbox.dispatch() == Report()


def test_an_end_that_is_rolled_back_did_not_happen(outbox: Outbox) -> None:
    """In the transaction of the work it is durable with the work alone."""
    outbox.add("t1")
    shop = outbox.shop
    with shop.app.app_context(), shop.db.engine.connect() as connection:
        assert outbox.deliveries.end(
            KIND, "t1", DeliveryState.DONE, connection=connection
        )
        connection.rollback()
    assert outbox.state() == "pending"


def test_only_an_end_ends(quick_outbox: Outbox) -> None:
    """Nobody can report that a delivery has ended as published."""
    quick_outbox.add("t1")
    with pytest.raises(ValueError, match=r"'published' is no end"):
        quick_outbox.end("t1", DeliveryState.PUBLISHED)


def test_an_end_that_comes_before_the_note_of_publishing(outbox: Outbox) -> None:
    """A quick worker is done first, and the publisher then has nothing to note."""
    delivery = outbox.add("t1", leased=True, repeatable=True)
    assert delivery is not None
    assert outbox.end("t1", DeliveryState.DONE)
    with outbox.shop.app.app_context():
        assert not outbox.deliveries.mark_published(delivery)
        assert not outbox.deliveries.release(delivery)
        assert not outbox.deliveries.mark_unpublished(delivery, "late")
    assert outbox.state() == "done"


def test_an_end_that_is_being_written_is_not_waited_for(outbox: Outbox) -> None:
    """A publisher leaves a delivery alone whose work is just committing its end."""
    delivery = outbox.add("t1", leased=True, repeatable=True)
    assert delivery is not None
    shop = outbox.shop
    if shop.database.name == "sqlite":
        pytest.skip("one writer at a time: it waits for its turn")
    with shop.app.app_context(), shop.db.engine.begin() as connection:
        outbox.deliveries.end(KIND, "t1", DeliveryState.DONE, connection=connection)
        assert not outbox.deliveries.mark_published(delivery)
        assert outbox.dispatch() == Report()
    assert outbox.state() == "done"


def test_a_leased_delivery_is_left_to_its_writer(outbox: Outbox) -> None:
    """For 30 seconds nobody but the request that wrote it publishes it."""
    outbox.add("t1", leased=True)
    assert outbox.dispatch() == Report()
    outbox.move("t1", "leased_until")
    assert outbox.dispatch() == Report(published=1)
    assert outbox.books.published == ["t1"]


def test_nothing_is_published_before_it_is_due(outbox: Outbox) -> None:
    """What is wanted later is published later."""
    outbox.add("t1", due_in_seconds=60)
    assert outbox.dispatch() == Report()
    outbox.move("t1", "due_at")
    assert outbox.dispatch() == Report(published=1)


def test_due_ones_come_in_their_order(outbox: Outbox) -> None:
    """The one that has waited longest is published first, however small the batch."""
    for task_id in ("t1", "t2", "t3"):
        outbox.add(task_id)
    outbox.move("t3", "due_at")
    for _ in range(3):
        assert outbox.dispatch(limit=1) == Report(published=1)
    assert outbox.books.published == ["t3", "t1", "t2"]


def test_what_need_not_report_is_over_with_its_publishing(outbox: Outbox) -> None:
    """It is published once, stays ``published``, and an end is still noted."""
    outbox.add("t1")
    outbox.dispatch()
    view = outbox.look()
    assert (view.state, view.ended_at is not None) == ("published", True)
    outbox.move("t1", "due_at")
    assert outbox.dispatch() == Report()
    assert outbox.end("t1", DeliveryState.FAILED)
    assert outbox.state() == "failed"


def test_a_repeatable_one_without_an_end_is_published_again(outbox: Outbox) -> None:
    """Until its end is reported, after pauses that grow, under one task id."""
    outbox.add("t1", repeatable=True)
    pauses = []
    for _ in range(3):
        assert outbox.dispatch() == Report(published=1)
        view = outbox.look()
        assert view.published_at is not None
        pauses.append(round((view.due_at - view.published_at).total_seconds()))
        assert outbox.dispatch() == Report()
        outbox.move("t1", "due_at")
    assert pauses == [600, 1200, 2400]  # the first writer's try counts
    assert outbox.end("t1", DeliveryState.DONE)
    assert outbox.dispatch() == Report()
    assert outbox.books.published == ["t1"] * 3


def test_the_pause_counts_from_when_the_work_is_due(outbox: Outbox) -> None:
    """A message that waits for its time at the broker is not sent again meanwhile."""
    delivery = outbox.add("t1", leased=True, repeatable=True, due_in_seconds=3600)
    assert delivery is not None
    with outbox.shop.app.app_context():
        assert outbox.deliveries.mark_published(delivery)
    view = outbox.look()
    assert round((view.due_at - view.created_at).total_seconds()) == 3900


def test_a_failure_is_tried_again_later(outbox: Outbox) -> None:
    """The others of the batch are published, and the error is noted without values."""
    outbox.books.fails = ("t2",)
    for task_id in ("t1", "t2", "t3"):
        outbox.add(task_id)
    assert outbox.dispatch() == Report(published=2, failed=1)
    assert sorted(outbox.books.published) == ["t1", "t3"]
    view = outbox.look("t2")
    assert (view.state, view.leased, view.publishes) == ("pending", False, 2)
    assert view.last_error == "builtins.ConnectionError"
    outbox.books.fails = ()
    outbox.move("t2", "due_at")
    assert outbox.dispatch() == Report(published=1)
    assert outbox.look("t2").last_error is None


def test_the_pause_after_a_failure_grows(
    quick_outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to half an hour, spread by chance."""
    longest = []

    def note(_low: float, high: float) -> float:
        longest.append(high)
        return 0.0

    monkeypatch.setattr("random.uniform", note)
    quick_outbox.books.fails = ("t1",)
    quick_outbox.add("t1")
    quick_outbox.set("t1", publishes=0)
    for _ in range(12):
        assert quick_outbox.dispatch() == Report(failed=1)
    assert longest == [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1800, 1800]


def test_a_delivery_that_fails_too_often_is_dead(outbox: Outbox) -> None:
    """It is not tried any more until somebody asks for it."""
    outbox.books.fails = ("t1",)
    outbox.add("t1")
    outbox.set("t1", publishes=MAX_PUBLISHES - 1)
    assert outbox.dispatch() == Report(dead=1)
    view = outbox.look()
    assert (view.state, view.last_error) == ("dead", "builtins.ConnectionError")
    assert outbox.dispatch() == Report()


@pytest.mark.parametrize("repeatable", [False, True])
def test_a_delivery_that_nobody_survives_is_dead(
    outbox: Outbox, *, repeatable: bool
) -> None:
    """A process that dies of it counts, and so does an end that is never reported."""
    outbox.add("t1", repeatable=repeatable)
    outbox.set("t1", publishes=MAX_PUBLISHES)
    assert outbox.dispatch() == Report(dead=1)
    view = outbox.look()
    assert (view.state, view.last_error) == ("dead", "no end after 25 publishings")


@pytest.mark.parametrize("published", [False, True])
def test_an_expired_message_is_not_published(
    outbox: Outbox, *, published: bool
) -> None:
    """Whether for the first time or again: its delivery ends as expired."""
    outbox.add("t1", repeatable=True, expires_in_seconds=60)
    if published:
        assert outbox.dispatch() == Report(published=1)
    outbox.move("t1", "expires_at", "due_at")
    assert outbox.dispatch() == Report(expired=1)
    assert outbox.state() == "expired"
    assert len(outbox.books.published) == published


def test_an_unknown_kind_is_left_to_others(outbox: Outbox) -> None:
    """A process claims what it has a publisher for."""
    outbox.add("t1", kind="event")
    assert outbox.dispatch() == Report()


@pytest.mark.parametrize("end", ["dead", "failed"])
def test_a_dead_letter_is_retried_on_request(outbox: Outbox, end: str) -> None:
    """It is published again under its task id, with its tries counted anew."""
    for task_id in ("t1", "t2"):
        outbox.add(task_id)
        assert outbox.end(task_id, DeliveryState(end))
    with outbox.shop.app.app_context():
        state, chosen = DeliveryState(end), {"kind": KIND, "task_id": "t1"}
        deliveries = outbox.deliveries
        assert deliveries.count_retryable(state, **chosen) == 1
        assert deliveries.retry(state, limit=10, task_id="t1", kind=None) == 1
        assert deliveries.retry(state, limit=10, task_id="t1") == 0
    assert outbox.dispatch() == Report(published=1)
    assert (outbox.look("t1").publishes, outbox.state("t2")) == (1, end)
    assert outbox.books.published == ["t1"]


def test_an_expired_dead_letter_stays_dead(outbox: Outbox) -> None:
    """A message whose life is over cannot be published."""
    outbox.add("t1", expires_in_seconds=60)
    outbox.end("t1", DeliveryState.DEAD)
    outbox.move("t1", "expires_at")
    with outbox.shop.app.app_context():
        assert outbox.deliveries.retry(DeliveryState.DEAD, limit=10) == 0


def test_what_has_succeeded_cannot_be_retried(quick_outbox: Outbox) -> None:
    """Only what failed or was given up is published once more."""
    quick_outbox.add("t1")
    quick_outbox.end("t1", DeliveryState.DONE)
    with (
        quick_outbox.shop.app.app_context(),
        pytest.raises(ValueError, match="'done' cannot be retried"),
    ):
        quick_outbox.deliveries.retry(DeliveryState.DONE, limit=1)


def fill(outbox: Outbox) -> None:
    """Leave a delivery in every state, each as old as can be."""
    for end in ENDS:
        outbox.add(end)
        outbox.end(end, DeliveryState(end))
        outbox.move(end, "ended_at")
    outbox.add("published")
    outbox.add("again", repeatable=True)
    outbox.dispatch()
    outbox.move("published", "ended_at")
    outbox.add("pending")
    for open_one in ("again", "pending"):
        outbox.move(open_one, "created_at", "due_at", "leased_until")


def test_purge_deletes_what_has_ended_long_ago(outbox: Outbox) -> None:
    """In batches, by age; what is open stays however old it is."""
    fill(outbox)
    outbox.add("young")
    outbox.end("young", DeliveryState.DONE)
    with outbox.shop.app.app_context():
        deliveries = outbox.deliveries
        assert deliveries.count_purgeable() == len(ENDS) + 1
        assert deliveries.purge(limit=5) == 5
        assert deliveries.purge(limit=5) == len(ENDS) - 4
        assert deliveries.purge(limit=5, older_than_seconds=3600) == 0
        left = {view.task_id for view in deliveries.list(limit=10)}
        assert left == {"again", "pending", "young"}
        assert deliveries.purge(limit=5, older_than_seconds=0) == 1


def test_list_and_stats(outbox: Outbox) -> None:
    """The newest come first, and each is counted once."""
    fill(outbox)
    outbox.add("other", kind="event", name="other", tenant_id="T", leased=True)
    with outbox.shop.app.app_context():
        deliveries = outbox.deliveries
        assert [v.task_id for v in deliveries.list(limit=2)] == ["other", "pending"]
        for views, found in (
            (deliveries.list(limit=9, kind="event"), ["other"]),
            (deliveries.list(limit=9, name="other"), ["other"]),
            (deliveries.list(limit=9, tenant_id="T"), ["other"]),
            (deliveries.list(limit=9, state=DeliveryState.DEAD), ["dead"]),
        ):
            assert [view.task_id for view in views] == found
        stats = deliveries.stats()
    assert stats.due == 2
    assert stats.oldest_due_seconds is not None
    assert stats.oldest_due_seconds > 86400
    counts = {(kind, state.value): n for (kind, state), n in stats.counts.items()}
    assert counts == {
        **{(KIND, end): 1 for end in ENDS},
        (KIND, "pending"): 1,
        (KIND, "published"): 2,
        ("event", "pending"): 1,
    }


def test_a_record_outlives_its_open_deliveries(outbox: Outbox) -> None:
    """It is not purged before the work that it asked for has come to an end."""
    shop = outbox.shop
    shop.post(path="/plain")
    record = shop.record(route="POST /plain")
    assert record is not None
    outbox.add("t1", repeatable=True, record_id=record.id)
    shop.outlive()
    with shop.app.app_context():
        store = shop.idempotency.store
        assert store.expire(limit=10) == 1
        assert store.count_purgeable(older_than_seconds=0) == 0
        assert store.purge(limit=10, older_than_seconds=0) == 0
        assert outbox.end("t1", DeliveryState.DONE)
        assert store.purge(limit=10, older_than_seconds=0) == 1


def test_no_batch_looks_at_every_delivery(quick_outbox: Outbox) -> None:
    """Dispatchers and both purges find their rows by an index."""
    shop = quick_outbox.shop
    with shop.app.app_context(), statements_sent() as sent:
        quick_outbox.deliveries.claim_due(10, [KIND])
        quick_outbox.deliveries.purge(limit=10)
        shop.idempotency.store.purge(limit=10)
    queries = [statement for statement in sent if statement.startswith("SELECT")]
    plans = []
    with shop.app.app_context(), shop.db.engine.connect() as connection:
        for query in queries:
            unbound = (1,) * query.count("?")
            rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}", unbound)
            plans.append(" ".join(row.detail for row in rows))
    used = (
        "due_at (ended_at=? AND due_at<?)",
        "due_at (ended_at<?)",
        "record_id=? AND",
    )
    assert len(plans) == len(used)
    for plan, index in zip(plans, used, strict=True):
        assert index in plan
        assert "SCAN idempotency" not in plan


def test_a_database_in_memory(open_shop: Callable[..., Shop], tmp_path: Path) -> None:
    """Where there is one connection for all, a delivery takes the same way."""
    shop = open_shop(Database("sqlite", "sqlite://"))
    outbox = Outbox(shop, tmp_path / "books")
    outbox.add("t1", repeatable=True)
    assert outbox.dispatch() == Report(published=1)
    assert outbox.end("t1", DeliveryState.DONE)
    assert outbox.state() == "done"


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"kind": "k" * 17}, "'kind' has 17 characters"),
        ({"kind": ""}, "'kind' is empty"),
        ({"name": "n" * 256}, "'name' has 256 characters"),
        ({"task_id": "a\0"}, "'task_id' contains NUL"),
        ({"task_id": ""}, "'task_id' is empty"),
        ({"tenant_id": "t" * 65}, "'tenant_id' has 65 characters"),
        ({"user_id": "u" * 129}, "'user_id' has 129 characters"),
        ({"unique_key": "k" * 256}, "'unique_key' has 256 characters"),
        ({"unique_key": "k", "repeatable": False}, "a delivery that reports its end"),
    ],
)
def test_what_cannot_be_kept_is_refused(values: dict[str, Any], fault: str) -> None:
    """A text that is too long is refused before any SQL, never cut."""
    good = {"kind": KIND, "name": NAME, "task_id": "t", "repeatable": True}
    with pytest.raises(ValueError, match=fault):
        Delivery(**{**good, "payload": b"", **values})
