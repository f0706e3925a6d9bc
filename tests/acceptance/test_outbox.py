"""``flask idempotency outbox``, as an operator runs it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from flask_idempotency.lifecycle import DeliveryState
from flask_idempotency.outbox.deliveries import MAX_PUBLISHES
from flask_idempotency.state import get_state
from tests.acceptance.test_cli import run
from tests.outbox import KIND, NAME, Outbox
from tests.shop import cut_off

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

    from tests.shop import Shop

MEMBERS = {
    "id",
    "kind",
    "name",
    "task_id",
    "tenant_id",
    "user_id",
    "record_id",
    "unique",
    "repeatable",
    "state",
    "publishes",
    "leased",
    "last_error",
    "payload_size",
    "created_at",
    "due_at",
    "expires_at",
    "published_at",
    "ended_at",
}


@pytest.fixture
def outbox(shop: Shop, tmp_path: Path) -> Outbox:
    """Give the deliveries of an application on each kind of database."""
    return Outbox(shop, tmp_path / "books")


@pytest.fixture
def quick_outbox(quick: Shop, tmp_path: Path) -> Outbox:
    """Give the deliveries of an application on SQLite."""
    return Outbox(quick, tmp_path / "books")


def ask(outbox: Outbox, *arguments: str, typed: str | None = None) -> Result:
    """Run a command of the outbox."""
    return run(outbox.shop.app, "outbox", *arguments, typed=typed)


def report_of(outbox: Outbox, *arguments: str, code: int = 0) -> Any:
    """Run a command of the outbox and return its JSON."""
    result = ask(outbox, *arguments, "--json")
    assert result.exit_code == code
    return json.loads(result.stdout)


def dead(outbox: Outbox, *task_ids: str) -> None:
    """Leave dead letters."""
    for task_id in task_ids:
        outbox.add(task_id)
        outbox.end(task_id, DeliveryState.DEAD)


def test_every_command_on_every_database(outbox: Outbox) -> None:
    """The way of a delivery from its publishing to its purge."""
    outbox.add("t1")
    assert report_of(outbox, "stats")["due"] == 1
    assert report_of(outbox, "dispatch") == {
        "published": 1,
        "failed": 0,
        "released": 0,
        "expired": 0,
        "dead": 0,
    }
    assert outbox.end("t1", DeliveryState.DEAD)
    assert report_of(outbox, "retry", "--yes") == {
        "dry_run": False,
        "due": 1,
        "retried": 1,
    }
    assert report_of(outbox, "dispatch")["published"] == 1
    assert [v["state"] for v in report_of(outbox, "list")] == ["published"]
    assert report_of(outbox, "show", "--task-id", "t1")["publishes"] == 1
    assert report_of(outbox, "purge", "--yes", "--older-than", "0") == {
        "dry_run": False,
        "due": 1,
        "purged": 1,
    }
    assert report_of(outbox, "list") == []
    assert report_of(outbox, "stats") == {
        "counts": {},
        "due": 0,
        "oldest_due_seconds": None,
    }


def test_dispatch_publishes_all_that_is_due(quick_outbox: Outbox) -> None:
    """Batch after batch, and says so in one sentence."""
    for number in range(5):
        quick_outbox.add(f"t{number}")
    result = ask(quick_outbox, "dispatch", "--batch-size", "2")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        "Published 5 deliveries; 0 failed, 0 handed back, 0 expired, 0 dead.\n"
    )


@pytest.mark.parametrize(
    ("publishes", "what"), [(1, "failed"), (MAX_PUBLISHES - 1, "dead")]
)
def test_dispatch_fails_if_a_delivery_does(
    quick_outbox: Outbox, publishes: int, what: str
) -> None:
    """A scheduler notices by the exit status."""
    quick_outbox.books.fails = ("t1",)
    quick_outbox.add("t1")
    quick_outbox.set("t1", publishes=publishes)
    assert report_of(quick_outbox, "dispatch", code=1)[what] == 1


def test_dispatch_without_publishers(quick_outbox: Outbox) -> None:
    """An application that can publish nothing says so, and does not look idle."""
    with quick_outbox.shop.app.app_context():
        get_state().publishers.clear()
    result = ask(quick_outbox, "dispatch", "--loop")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no publisher is registered" in result.stderr


def test_show(quick_outbox: Outbox) -> None:
    """Every member is there, the message and the key are not."""
    quick_outbox.add(
        "t1", payload=b"secret", unique_key="secret", repeatable=True, user_id="u\n1"
    )
    report = report_of(quick_outbox, "show", "--task-id", "t1")
    assert set(report) == MEMBERS
    assert (report["unique"], report["payload_size"]) == (True, 6)
    assert (report["record_id"], report["ended_at"]) == (None, None)
    result = ask(quick_outbox, "show", "--task-id", "t1")
    lines = dict(
        line.split(maxsplit=1) for line in result.stdout.splitlines() if " " in line
    )
    assert (lines["state"], lines["user_id"]) == ("pending", "u\\n1")
    assert "secret" not in result.stdout
    assert "None" not in result.stdout


def test_show_of_what_is_not_there(quick_outbox: Outbox) -> None:
    """An unknown task id is trouble, not an empty answer."""
    quick_outbox.add("t1")
    result = ask(quick_outbox, "show", "--task-id", "t1", "--kind", "event")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "There is no delivery" in result.stderr


def test_list(quick_outbox: Outbox) -> None:
    """One line each, the newest first, filtered by what is asked for."""
    quick_outbox.add("t1", tenant_id="T")
    quick_outbox.add("t2")
    quick_outbox.end("t2", DeliveryState.REVOKED)
    lines = ask(quick_outbox, "list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["revoked", "pending"]
    assert [line.split()[2:] for line in lines] == [
        [KIND, NAME, "t2"],
        [KIND, NAME, "t1"],
    ]
    for options, found in (
        (("--state", "revoked"), ["t2"]),
        (("--tenant-id", "T"), ["t1"]),
        (("--kind", KIND, "--name", NAME, "--limit", "1"), ["t2"]),
        (("--kind", "event"), []),
    ):
        views = report_of(quick_outbox, "list", *options)
        assert [view["task_id"] for view in views] == found
        assert all(set(view) == MEMBERS for view in views)


def test_stats(quick_outbox: Outbox) -> None:
    """Each kind and state is counted, and how long the first has waited."""
    dead(quick_outbox, "t1", "t2")
    quick_outbox.add("t3")
    quick_outbox.move("t3", "due_at")
    report = report_of(quick_outbox, "stats")
    assert report["counts"] == {KIND: {"dead": 2, "pending": 1}}
    assert (report["due"], report["oldest_due_seconds"] > 86400) == (1, True)
    lines = ask(quick_outbox, "stats").stdout.splitlines()
    assert lines[:2] == ["celery  dead  2", "celery  pending  1"]
    assert lines[2].startswith("1 due, the first for ")


@pytest.mark.parametrize(("typed", "state"), [("y\n", "pending"), ("n\n", "dead")])
def test_retry_asks(quick_outbox: Outbox, typed: str, state: str) -> None:
    """Without --yes it asks on stderr."""
    dead(quick_outbox, "t1")
    result = ask(quick_outbox, "retry", typed=typed)
    assert result.exit_code == 0
    assert "Publish 1 deliveries again?" in result.stderr
    assert quick_outbox.state() == state


def test_retry_of_some(quick_outbox: Outbox) -> None:
    """Task id, kind, name, tenant and state say which."""
    dead(quick_outbox, "t1", "t2")
    quick_outbox.add("t3")
    quick_outbox.end("t3", DeliveryState.FAILED)
    options = ("--kind", KIND, "--name", NAME, "--tenant-id", "")
    dry = report_of(quick_outbox, "retry", *options, "--dry-run")
    assert dry == {"dry_run": True, "due": 2, "retried": 0}
    assert ask(quick_outbox, "retry", "--dry-run").stdout == (
        "Would retry 2 deliveries.\n"
    )
    result = ask(quick_outbox, "retry", "--task-id", "t2", "--yes")
    assert result.stdout == "Retried 1 of 1 deliveries.\n"
    assert report_of(quick_outbox, "retry", "--state", "failed", "--yes")["due"] == 1
    states = {
        view["task_id"]: view["state"] for view in report_of(quick_outbox, "list")
    }
    assert states == {"t1": "dead", "t2": "pending", "t3": "pending"}


def test_retry_of_what_is_not_dead(quick_outbox: Outbox) -> None:
    """One that is named and cannot be retried is trouble."""
    quick_outbox.add("t1")
    result = ask(quick_outbox, "retry", "--task-id", "t1", "--yes")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "No dead delivery" in result.stderr


def test_purge(quick_outbox: Outbox) -> None:
    """It counts, asks, and deletes what has ended, in batches."""
    dead(quick_outbox, "t1", "t2", "t3")
    quick_outbox.add("t4", repeatable=True)
    options = ("purge", "--older-than", "0")
    assert ask(quick_outbox, *options, "--dry-run").stdout == (
        "Would purge 3 deliveries.\n"
    )
    result = ask(quick_outbox, *options, typed="n\n")
    assert "Delete 3 deliveries?" in result.stderr
    assert result.stdout == "Purged 0 of 3 due deliveries.\n"
    result = ask(quick_outbox, *options, "--yes", "--batch-size", "2")
    assert result.stdout == "Purged 3 of 3 due deliveries.\n"
    assert [view["task_id"] for view in report_of(quick_outbox, "list")] == ["t4"]
    assert report_of(quick_outbox, "purge", "--yes")["due"] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("dispatch", "--batch-size", "0"),
        ("dispatch", "--poll", "1"),
        ("dispatch", "--loop", "--poll", "0"),
        ("dispatch", "surplus"),
        ("list", "--state", "unknown"),
        ("list", "--limit", "0"),
        ("list", "--name", "n" * 256),
        ("show",),
        ("show", "--task-id", "\udcff"),
        ("retry", "--state", "done"),
        ("retry", "--task-id", "t" * 256),
        ("purge", "--older-than", "-1"),
        ("purge", "--batch-size", "0"),
        ("stats", "--unknown"),
        ("unknown",),
    ],
    ids=lambda words: " ".join(words).encode("ascii", "replace").decode()[:40],
)
def test_wrong_usage(quick_outbox: Outbox, arguments: tuple[str, ...]) -> None:
    """A missing, surplus or impossible option is wrong usage: exit status 2."""
    result = ask(quick_outbox, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: " in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("dispatch",),
        ("list",),
        ("show", "--task-id", "t1"),
        ("retry", "--yes"),
        ("purge", "--yes"),
        ("stats",),
    ],
    ids=lambda words: " ".join(words).encode("ascii", "replace").decode()[:40],
)
def test_without_a_database(
    quick_outbox: Outbox, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """An outage is one sentence and exit status 1."""
    monkeypatch.setattr("flask_idempotency.store.runner._PATIENCE_SECONDS", 0.0)
    with cut_off(quick_outbox.shop):
        result = ask(quick_outbox, *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ")
