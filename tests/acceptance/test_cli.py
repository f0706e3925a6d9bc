"""``flask idempotency expire``, ``purge`` and ``diagnose``, as an operator runs them."""

from __future__ import annotations

import base64
import io
import json
import uuid
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from importlib.metadata import PackageNotFoundError, distribution
from typing import TYPE_CHECKING, Any

import click
import pytest
from flask import Flask, request
from flask.cli import FlaskGroup, ScriptInfo
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from flask_idempotency import Idempotency, current_idempotency, fingerprint
from flask_idempotency.cli import idempotency as group
from tests.shop import ROUTE, cut_off, elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from click.testing import Result

    from tests.shop import Shop

on_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
FIELDS = {
    "diagnosis": str,
    "explanation": str,
    "tenant_id": str,
    "user_id": str,
    "route": str,
    "idempotency_key": str,
    "status": str,
    "attempts": int,
    "request_hash": str,
    "response_code": int,
    "response_body": str,
    "response_body_encoding": str,
    "task_id": str,
    "outbox_event_id": str,
    "failure": str,
    "resolved_by": str,
    "resolved_reason": str,
    "open_step": str,
    "steps": list,
    "record_id": str,
    "operation_id": str,
    "created_at": str,
    "completed_at": str,
    "effects_committed_at": str,
    "locked_until": str,
    "expires_at": str,
}
#: What is known without a record.
ALWAYS = {
    "diagnosis",
    "explanation",
    "tenant_id",
    "user_id",
    "route",
    "idempotency_key",
}


def run(app: Flask, *arguments: str, typed: str | None = None) -> Result:
    """Run ``flask idempotency`` with the two outputs apart."""
    try:
        runner = app.test_cli_runner(mix_stderr=False)  # click 8.1
    except TypeError:
        runner = app.test_cli_runner()
    return runner.invoke(group, arguments, input=typed)


def diagnose(shop: Shop, *options: str, key: str = "k", user: str = "u1") -> Result:
    """Ask what the next request with a key would meet."""
    return run(
        shop.app,
        "diagnose",
        *("--user-id", user, "--route", ROUTE, "--idempotency-key", key),
        *options,
    )


def report_of(result: Result) -> dict[str, Any]:
    """Return the JSON on stdout of a command that ended well."""
    assert (result.exit_code, result.stderr) == (0, "")
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def claimed(shop: Shop, **options: Any) -> Any:
    """Leave the record of a call whose process died."""
    with shop.app.app_context():
        decision = shop.idempotency.store.claim(shop.scope(), fingerprint(1), **options)
    assert decision.claim is not None
    return decision.claim


def replayable(shop: Shop) -> None:
    """Let a request succeed."""
    shop.creating_view()
    assert shop.post().status_code == 201


def in_progress(shop: Shop) -> None:
    """Let a call die whose lease still lasts."""
    claimed(shop)


def lease_lapsed(shop: Shop) -> None:
    """Let a call die and its lease end."""
    claimed(shop)
    shop.lapse()


def outcome_unknown(shop: Shop) -> None:
    """Let a call die after it had committed a part, and its lease end."""
    claim = claimed(shop)
    with shop.app.app_context(), shop.db.engine.begin() as connection:
        assert shop.idempotency.store.mark_effects(claim, connection)
    shop.lapse()


def failed(shop: Shop) -> None:
    """Let a request fail."""
    shop.view(lambda: 1 / 0)
    assert shop.post().status_code == 500


def expired(shop: Shop) -> None:
    """Let a request succeed and its key's life end."""
    replayable(shop)
    shop.outlive()


OTHER_HASH = ("--request-hash", "v1:other")
#: Diagnosis, how it comes about, options of the command, status of the record.
SITUATIONS: list[tuple[str, Callable[[Shop], None], tuple[str, ...], str | None]] = [
    ("missing", lambda _shop: None, (), None),
    ("replayable", replayable, (), "succeeded"),
    ("request_hash_conflict", replayable, OTHER_HASH, "succeeded"),
    ("in_progress", in_progress, (), "processing"),
    ("lease_lapsed", lease_lapsed, (), "processing"),
    ("outcome_unknown", outcome_unknown, (), "processing"),
    ("failed_retry_requires_opt_in", failed, (), "failed"),
    ("expired_reusable", expired, (), "succeeded"),
]
every_situation = pytest.mark.parametrize(
    ("diagnosis", "situation", "options", "status"),
    SITUATIONS,
    ids=[name for name, *_ in SITUATIONS],
)


@every_situation
def test_diagnosis(
    shop: Shop,
    diagnosis: str,
    situation: Callable[[Shop], None],
    options: tuple[str, ...],
    status: str | None,
) -> None:
    """Each real situation is told from the others, as JSON of one fixed shape."""
    situation(shop)
    result = diagnose(shop, *options, "--json")
    report = report_of(result)
    assert (report["diagnosis"], report["status"]) == (diagnosis, status)
    assert list(report) == sorted(FIELDS)
    for name, value in report.items():
        assert value is None or type(value) is FIELDS[name], name
    known = {name for name, value in report.items() if value is not None}
    assert known >= ALWAYS


@on_sqlite
@every_situation
def test_diagnosis_as_text(
    shop: Shop,
    diagnosis: str,
    situation: Callable[[Shop], None],
    options: tuple[str, ...],
    status: str | None,
) -> None:
    """The text starts with the diagnosis and leaves out what there is not."""
    situation(shop)
    result = diagnose(shop, *options)
    assert (result.exit_code, result.stderr) == (0, "")
    parts = [line.partition(" ") for line in result.stdout.splitlines()]
    lines = {name: value.strip() for name, _, value in parts}
    assert next(iter(lines)) == "diagnosis"
    assert lines["diagnosis"] == diagnosis
    assert lines.get("status") == status
    assert "None" not in result.stdout


@on_sqlite
def test_diagnosis_changes_nothing(shop: Shop) -> None:
    """An operator can ask as often as it takes."""
    lease_lapsed(shop)
    before = shop.record()
    diagnose(shop)
    diagnose(shop, *OTHER_HASH, "--json")
    assert shop.record() == before


def test_replayable_is_reported_whole(shop: Shop) -> None:
    """A finished operation is shown with its answer, its ids and its times."""
    with shop.app.app_context():
        result = shop.idempotency.guard.run(
            shop.scope(),
            fingerprint(1),
            lambda: ({"name": shop.add("first")}, 202),
            task_id_builder=lambda claim: claim.derive_id("task"),
            outbox_event_id_builder=lambda claim: claim.derive_id("event"),
            ttl=3600,
        )
    report = report_of(diagnose(shop, "--json"))
    times = {
        n: datetime.fromisoformat(report.pop(n)) for n in ("created_at", "expires_at")
    }
    assert times["created_at"].utcoffset() == timedelta(0)
    life = times["expires_at"] - times["created_at"]
    assert abs(life - timedelta(hours=1)) < timedelta(seconds=1)
    completed = datetime.fromisoformat(report.pop("completed_at"))
    assert abs(datetime.now(timezone.utc) - completed) < timedelta(minutes=1)
    assert report.pop("effects_committed_at")
    assert uuid.UUID(report.pop("operation_id"))
    assert report == {
        "diagnosis": "replayable",
        "explanation": report["explanation"],
        "tenant_id": "",
        "user_id": "u1",
        "route": ROUTE,
        "idempotency_key": "k",
        "status": "succeeded",
        "attempts": 1,
        "request_hash": fingerprint(1),
        "response_code": 202,
        "response_body": '{"name": "first"}',
        "response_body_encoding": "text",
        "task_id": result.task_id,
        "outbox_event_id": result.outbox_event_id,
        "failure": None,
        "resolved_by": None,
        "resolved_reason": None,
        "open_step": None,
        "steps": None,
        "record_id": str(result.record_id),
        "locked_until": None,
    }


@pytest.mark.parametrize(
    ("body", "shown", "encoding"),
    [
        (b"\x00\xff", base64.b64encode(b"\x00\xff").decode(), "base64"),
        ("\xe9".encode(), "\xe9", "text"),
        (b"", "", "text"),
        (b"x" * 5000, "x" * 5000, "text"),
    ],
    ids=["binary", "UTF-8", "empty", "long"],
)
@on_sqlite
def test_body_is_shown(shop: Shop, body: bytes, shown: str, encoding: str) -> None:
    """A body that is text is shown as text, any other in base64."""
    shop.view(lambda: body)
    shop.post()
    report = report_of(diagnose(shop, "--json"))
    assert report["response_body"] == shown
    assert report["response_body_encoding"] == encoding


@on_sqlite
def test_body_that_was_not_kept_is_not_shown(make_shop: Callable[..., Shop]) -> None:
    """An answer without its body is told from an empty one."""
    shop = make_shop(IDEMPOTENCY_MAX_RESPONSE_SIZE=3)
    shop.view(lambda: "long")
    shop.post()
    report = report_of(diagnose(shop, "--json"))
    assert (report["diagnosis"], report["response_code"]) == ("replayable", 200)
    assert (report["response_body"], report["response_body_encoding"]) == (None, None)


@on_sqlite
def test_conflict_does_not_show_the_others_answer(shop: Shop) -> None:
    """Who asks for another request does not see the stored answer."""
    replayable(shop)
    report = report_of(diagnose(shop, *OTHER_HASH, "--json"))
    assert report["response_code"] is None
    assert report["response_body"] is None


@on_sqlite
def test_failure_is_explained(shop: Shop) -> None:
    """An operator sees what failed."""
    failed(shop)
    report = report_of(diagnose(shop, "--json"))
    assert report["failure"] == "builtins.ZeroDivisionError"
    assert "ZeroDivisionError" in report["explanation"]


def stepping(shop: Shop) -> None:
    """Let a request fail in the third of its steps."""

    def view() -> None:
        current_idempotency.run_step("charge", lambda _key: {"id": 7})
        with suppress(ValueError):
            current_idempotency.run_step("ask", lambda _k: int("x"), repeatable=True)
        with suppress(ValueError):
            current_idempotency.run_step(
                "try", lambda _k: int("x"), definite=(ValueError,)
            )
        current_idempotency.run_step("mail", lambda _key: 1 / 0)

    shop.view(view)
    assert shop.post().status_code == 500


STEPS_IN_WORDS = (
    "step 'charge' has finished, step 'ask' was started and not finished and may be "
    "repeated, step 'try' failed without effect, step 'mail' was started and not "
    "finished"
)


@on_sqlite
def test_steps_are_reported(shop: Shop) -> None:
    """An operator sees what each step is known to have done."""
    stepping(shop)
    report = report_of(diagnose(shop, "--json"))
    assert report["open_step"] == "mail"
    members = ("name", "state", "repeatable", "result")
    assert [tuple(step[m] for m in members) for step in report["steps"]] == [
        ("charge", "finished", False, {"id": 7}),
        ("ask", "started", True, None),
        ("try", "failed", False, None),
        ("mail", "started", False, None),
    ]
    assert report["explanation"] == (
        "The operation failed (builtins.ZeroDivisionError) after a step that may have "
        "taken effect; a duplicate gets the failure, also with retry_failed=True. "
        f"Steps: {STEPS_IN_WORDS}."
    )
    other = report_of(diagnose(shop, *OTHER_HASH, "--json"))
    assert [step["result"] for step in other["steps"]] == [None] * 4


@on_sqlite
def test_steps_are_shown_in_words(shop: Shop) -> None:
    """The text says the same to people."""
    stepping(shop)
    shop.outlive()
    lines = diagnose(shop).stdout.splitlines()
    assert lines[0].split() == ["diagnosis", "outcome_unknown"]
    assert lines[1].partition(" ")[2].strip().startswith("Attempt 1 ended in a step")
    found = [line.partition(" ")[2].strip() for line in lines if line[:5] == "steps"]
    assert found == [STEPS_IN_WORDS]


@on_sqlite
@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--route", ROUTE),
        ("--idempotency-key", "k"),
        ("--route", ROUTE, "--idempotency-key", ""),
        ("--route", ROUTE, "--idempotency-key", "k" * 256),
        ("--route", "r" * 256, "--idempotency-key", "k"),
        ("--route", ROUTE, "--idempotency-key", "k", "--tenant-id", "t" * 65),
        ("--route", ROUTE, "--idempotency-key", "k", "--user-id", "u" * 129),
        ("--route", ROUTE, "--idempotency-key", "k", "--unknown"),
        ("--route", ROUTE, "--idempotency-key", "k", "surplus"),
    ],
)
def test_wrong_usage_of_diagnose(shop: Shop, arguments: tuple[str, ...]) -> None:
    """A missing, surplus or impossible option is wrong usage: exit status 2."""
    result = run(shop.app, "diagnose", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: " in result.stderr
    assert "Traceback" not in result.stderr


def fill(shop: Shop, *, living: int = 1, dead: int = 3) -> None:
    """Leave finished records, some of them past their life."""
    shop.creating_view()
    for number in range(living + dead):
        shop.post(f"n{number}", key=f"k{number}")
    for number in range(dead):
        shop.outlive(f"k{number}")


def statuses(shop: Shop) -> list[str]:
    """Return the status of every record, sorted."""
    engine = create_engine(shop.database.url, poolclass=NullPool)
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT status FROM idempotency_record"))
        return sorted(rows.scalars())


def test_expire_marks_what_is_over(shop: Shop) -> None:
    """Records past their life are marked, the others left, and once only."""
    fill(shop)
    reports = [report_of_expire(shop) for _ in range(2)]
    assert reports == [
        {"dry_run": False, "due": 3, "expired": 3, "outcome_unknown": 0},
        {"dry_run": False, "due": 0, "expired": 0, "outcome_unknown": 0},
    ]
    assert statuses(shop) == ["expired"] * 3 + ["succeeded"]


def report_of_expire(shop: Shop, *options: str) -> dict[str, Any]:
    """Run expire and return its JSON."""
    result = run(shop.app, "expire", "--yes", "--json", *options)
    assert result.exit_code == 0
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_expire_leaves_unknown_outcomes(shop: Shop) -> None:
    """A record whose outcome is unknown is counted, and never marked."""
    outcome_unknown(shop)
    shop.outlive()
    assert report_of_expire(shop) == {
        "dry_run": False,
        "due": 0,
        "expired": 0,
        "outcome_unknown": 1,
    }
    assert statuses(shop) == ["processing"]
    assert report_of(diagnose(shop, "--json"))["diagnosis"] == "outcome_unknown"


@on_sqlite
def test_expire_says_in_words_what_was_left(shop: Shop) -> None:
    """The sentence for people has the same numbers."""
    outcome_unknown(shop)
    shop.outlive()
    result = run(shop.app, "expire", "--yes")
    assert result.stdout == (
        "Expired 0 of 0 due records; 1 with an unknown outcome left alone.\n"
    )


def test_expire_marks_a_lapsed_call_without_effects(shop: Shop) -> None:
    """A call that died without an effect is over with its key's life."""
    claimed(shop)
    shop.outlive()
    assert report_of_expire(shop)["due"] == 0  # its lease still lasts
    shop.lapse()
    assert report_of_expire(shop)["expired"] == 1
    assert statuses(shop) == ["expired"]


@pytest.mark.parametrize("size", [1, 2, 1000])
@on_sqlite
def test_expire_in_batches(shop: Shop, size: int) -> None:
    """Batches of any size add up to all."""
    fill(shop)
    assert report_of_expire(shop, "--batch-size", str(size))["expired"] == 3


@on_sqlite
def test_dry_run_of_expire_changes_nothing(shop: Shop) -> None:
    """A dry run counts, asks nothing and marks nothing."""
    fill(shop)
    result = run(shop.app, "expire", "--dry-run", "--json")
    assert report_of(result) == {
        "dry_run": True,
        "due": 3,
        "expired": 0,
        "outcome_unknown": 0,
    }
    assert "expired" not in statuses(shop)


COMMANDS = ["expire", "purge"]
every_command = pytest.mark.parametrize("command", COMMANDS)


def due(shop: Shop, command: str) -> None:
    """Leave records for a command to change."""
    fill(shop)
    if command == "purge":
        report_of_expire(shop)


def left(shop: Shop, command: str) -> int:
    """Count the records that a command has not changed yet."""
    found = statuses(shop)
    return (
        found.count("expired") if command == "purge" else found.count("succeeded") - 1
    )


@on_sqlite
@every_command
@pytest.mark.parametrize(("typed", "remaining"), [("y\n", 0), ("n\n", 3), ("\n", 3)])
def test_prompt(shop: Shop, command: str, typed: str, remaining: int) -> None:
    """Without --yes the command asks on stderr, and no is the default."""
    due(shop, command)
    result = run(shop.app, command, "--json", typed=typed)
    assert result.exit_code == 0
    assert "3 records" in result.stderr
    assert json.loads(result.stdout)["due"] == 3
    assert left(shop, command) == remaining


@on_sqlite
@every_command
def test_no_answer_to_the_prompt_changes_nothing(
    shop: Shop,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A job without a terminal that forgot --yes is aborted."""
    due(shop, command)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    info = ScriptInfo(create_app=lambda: shop.app)
    with pytest.raises(click.Abort):
        group.main([command], standalone_mode=False, obj=info)
    assert capsys.readouterr().out == ""
    assert left(shop, command) == 3


@on_sqlite
@every_command
def test_nothing_to_do_asks_nothing(shop: Shop, command: str) -> None:
    """Where nothing is due, a command ends at once."""
    result = run(shop.app, command)
    assert (result.exit_code, result.stderr) == (0, "")
    assert " 0 of 0 due records" in result.stdout


@on_sqlite
@every_command
def test_progress_is_not_data(shop: Shop, command: str) -> None:
    """Progress goes to stderr; stdout is one line of JSON with sorted names."""
    due(shop, command)
    result = run(shop.app, command, "--yes", "--json")
    assert {"expire": "Expiring", "purge": "Purging"}[command] in result.stderr
    assert result.stdout.count("\n") == 1
    report = json.loads(result.stdout)
    assert list(report) == sorted(report)


@on_sqlite
@every_command
@pytest.mark.parametrize("size", ["0", "-1", "many"])
def test_batch_size_that_makes_no_sense(shop: Shop, command: str, size: str) -> None:
    """A batch of nothing is wrong usage: exit status 2."""
    result = run(shop.app, command, "--yes", "--batch-size", size)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--batch-size" in result.stderr


def purged(shop: Shop, *options: str) -> dict[str, Any]:
    """Run purge and return its JSON."""
    result = run(shop.app, "purge", "--yes", "--json", *options)
    assert result.exit_code == 0
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_purge_deletes_what_was_expired(shop: Shop) -> None:
    """Expired records past their retention are deleted, no others."""
    fill(shop)
    assert purged(shop) == {"dry_run": False, "due": 0, "purged": 0}
    report_of_expire(shop)
    assert purged(shop, "--batch-size", "2") == {
        "dry_run": False,
        "due": 3,
        "purged": 3,
    }
    assert purged(shop)["purged"] == 0
    assert statuses(shop) == ["succeeded"]


def test_purge_waits_for_the_retention(make_shop: Callable[..., Shop]) -> None:
    """An expired record is kept for its retention, unless an age is given."""
    shop = make_shop(IDEMPOTENCY_RETENTION=timedelta(days=36500))
    fill(shop)
    report_of_expire(shop)
    assert purged(shop)["due"] == 0
    assert purged(shop, "--older-than", "3e9")["due"] == 0
    assert purged(shop, "--older-than", "0")["purged"] == 3


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (("--user-id", ""), {"a1", "a2", "b1"}),
        (("--tenant-id", "a", "--user-id", "u2"), {"a1", "b1"}),
        (("--tenant-id", "A"), {"a1", "a2", "b1"}),
    ],
    ids=["nobody", "both", "other case"],
)
def test_purge_of_one_caller(
    shop: Shop, options: tuple[str, ...], keys: set[str]
) -> None:
    """Only the records of the given tenant and user are deleted."""
    shop.idempotency.tenant_id_loader(lambda: request.headers["X-Tenant"])
    shop.creating_view()
    for tenant, user, key in [("a", "u1", "a1"), ("a", "u2", "a2"), ("b", "u1", "b1")]:
        shop.post(key, key=key, user=user, headers={"X-Tenant": tenant})
        shop.outlive(key)
    report_of_expire(shop)
    purged(shop, *options)
    engine = create_engine(shop.database.url, poolclass=NullPool)
    with engine.connect() as connection:
        rows = connection.execute(
            text("SELECT idempotency_key FROM idempotency_record")
        )
        stored = {k.decode() if isinstance(k, bytes) else k for k in rows.scalars()}
    assert stored == keys


@on_sqlite
def test_dry_run_of_purge_changes_nothing(shop: Shop) -> None:
    """A dry run counts, asks nothing and deletes nothing."""
    due(shop, "purge")
    result = run(shop.app, "purge", "--dry-run", "--json")
    assert report_of(result) == {"dry_run": True, "due": 3, "purged": 0}
    assert left(shop, "purge") == 3


@on_sqlite
@pytest.mark.parametrize("age", ["-1", "soon", ""])
def test_age_that_is_no_number(shop: Shop, age: str) -> None:
    """An age that is no time is wrong usage."""
    result = run(shop.app, "purge", "--yes", "--older-than", age)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--older-than" in result.stderr


@pytest.mark.parametrize("age", ["nan", "1e300"])
def test_age_that_no_database_can_compute(shop: Shop, age: str) -> None:
    """A number that is no time is wrong usage on every database, never a traceback."""
    result = run(shop.app, "purge", "--yes", "--older-than", age)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--older-than" in result.stderr


@on_sqlite
@pytest.mark.parametrize(
    "options", [("--tenant-id", "t" * 65), ("--user-id", "u" * 129)], ids=["t", "u"]
)
def test_filter_that_no_record_can_have(shop: Shop, options: tuple[str, ...]) -> None:
    """A filter that is longer than its column is wrong usage."""
    result = run(shop.app, "purge", "--yes", *options)
    assert (result.exit_code, result.stdout) == (2, "")


EVERY = [
    ("expire", "--yes"),
    ("purge", "--yes"),
    ("diagnose", "--route", ROUTE, "--idempotency-key", "k"),
]
every_line = pytest.mark.parametrize("line", EVERY, ids=lambda line: line[0])


def one_clear_sentence(result: Result, *words: str) -> None:
    """Check that a command failed with one line on stderr, and nothing else."""
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("Error: ")
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_missing_table(shop: Shop) -> None:
    """A table that was not migrated is told in one sentence that says what to do."""
    engine = create_engine(shop.database.url, poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE idempotency_record"))
    for line in EVERY:
        result = run(shop.app, *line)
        one_clear_sentence(result, "'idempotency_record'", "flask db upgrade")


@pytest.fixture
def down(shop: Shop) -> Iterator[Shop]:
    """Give an application whose database cannot be reached."""
    with cut_off(shop):
        yield shop


def test_unreachable_database(down: Shop) -> None:
    """A database that does not answer is told in one sentence."""
    for line in EVERY:
        one_clear_sentence(run(down.app, *line), "The database could not answer")


@every_line
def test_application_without_the_extension(line: tuple[str, ...]) -> None:
    """An application that was not set up is told what was forgotten."""
    one_clear_sentence(run(Flask("bare"), *line), "init_app")


@every_line
def test_record_on_another_bind(line: tuple[str, ...]) -> None:
    """A set-up error that shows late is one sentence too."""
    app = Flask("bare")
    app.config["SQLALCHEMY_DATABASE_URI"] = "sqlite://"
    db = SQLAlchemy()
    bases: Any = (Idempotency(db=SQLAlchemy()).Record.__mro__[1], db.Model)
    record = type("Own", bases, {"__module__": __name__, "__bind_key__": "other"})
    Idempotency(app, db, record_class=record)
    db.init_app(app)
    one_clear_sentence(run(app, *line), "bind 'other'")


def test_commands_while_a_request_runs(shop: Shop) -> None:
    """An operator can ask at any moment, also about a call that is at work."""
    reports: list[dict[str, Any]] = []

    def view() -> Any:
        reports.append(elsewhere(lambda: report_of(diagnose(shop, "--json"))))
        return shop.create()

    shop.view(view)
    assert shop.post().status_code == 201
    assert (reports[0]["diagnosis"], reports[0]["attempts"]) == ("in_progress", 1)


def test_help_names_the_commands() -> None:
    """The group says what there is."""
    result = run(Flask("bare"), "--help")
    assert result.exit_code == 0
    assert all(
        name in result.stdout for name in ("diagnose", "expire", "purge", "routes")
    )


def test_commands_are_found_by_flask() -> None:
    """An installed distribution adds the group to the flask command."""
    try:
        entry_points = distribution("flask-idempotency").entry_points
    except PackageNotFoundError:
        pytest.skip("the distribution is not installed")
    (found,) = [e for e in entry_points if e.group == "flask.commands"]
    assert found.name == "idempotency"
    assert found.load() is group
    flask = FlaskGroup(create_app=lambda: Flask("bare"))
    context = flask.make_context("flask", ["idempotency", "--help"])
    assert flask.get_command(context, "idempotency") is group


@on_sqlite
def test_key_may_be_pasted_from_a_header(shop: Shop) -> None:
    """A key in quotes is the same key; what is no key at all is wrong usage."""
    shop.view(lambda: "made")
    shop.post()
    assert report_of(diagnose(shop, "--json", key='"k"'))["diagnosis"] == "replayable"
    result = diagnose(shop, key='"k')
    assert (result.exit_code, result.stdout) == (2, "")
    assert "unbalanced quote" in result.stderr
