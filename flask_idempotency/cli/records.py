"""``expire``, ``purge`` and ``diagnose``."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any, TypeVar

import click
from flask.cli import with_appcontext

from flask_idempotency.exceptions import IdempotencyKeyInvalid
from flask_idempotency.explain import describe_steps
from flask_idempotency.keys import parse_key
from flask_idempotency.lifecycle import Scope, Verdict
from flask_idempotency.ops import maintenance
from flask_idempotency.state import get_state

from .errors import clear_errors
from .output import age, checked, confirmed, instant, print_report, printable, progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from flask_idempotency.lifecycle import Diagnosis, RecordView

F = TypeVar("F", bound="Callable[..., Any]")


def batch_options(command: F) -> F:
    """Add the options of what changes many rows."""
    for option in (
        click.option(
            "--batch-size",
            type=click.IntRange(min=1, max=maintenance.MAX_BATCH_SIZE),
            default=maintenance.BATCH_SIZE,
            show_default=True,
            help="Rows of one transaction.",
        ),
        click.option("--dry-run", is_flag=True, help="Only count."),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option("--yes", is_flag=True, help="Do not ask."),
    ):
        command = option(command)
    return command


def scope_options(command: F) -> F:
    """Add the options that name one record."""
    for option in (
        click.option(
            "--idempotency-key",
            required=True,
            callback=_part("idempotency_key"),
            help="The client's key.",
        ),
        click.option(
            "--route",
            required=True,
            callback=_part("route"),
            help='Such as "POST /accounts".',
        ),
        click.option(
            "--user-id",
            default="",
            callback=_part("user_id"),
            help="Caller; empty for anonymous callers.",
        ),
        click.option(
            "--tenant-id",
            default="",
            callback=_part("tenant_id"),
            help="Tenant; empty for a single tenant.",
        ),
    ):
        command = option(command)
    return command


def _part(name: str) -> Callable[[click.Context, Any, str], str]:
    def check(_context: click.Context, _option: Any, value: str) -> str:
        if name == "idempotency_key" and not value:
            raise click.UsageError("--idempotency-key is empty.")
        if name == "idempotency_key" and value.startswith('"'):
            return _unquoted(value)
        return checked(name, value) or ""

    return check


def _unquoted(header: str) -> str:
    """Read a key as it stands in a header or log."""
    try:
        return parse_key(header)
    except IdempotencyKeyInvalid as error:
        raise click.UsageError(str(error.description)) from error


@click.command()
@batch_options
@with_appcontext
@clear_errors
def expire(*, yes: bool, as_json: bool, dry_run: bool, batch_size: int) -> None:
    """
    Mark the records whose key's life is over.

    A key is reusable from its expiry on, marked or not; a marked record can be
    purged. Records with an unknown outcome are counted and left alone.

    JSON: dry_run, due (before), expired (now), outcome_unknown.
    """
    store = get_state().store
    due = store.count_expirable()
    done = 0
    if not dry_run and due and confirmed(f"Mark {due} records as expired?", yes=yes):
        with progress(due, "Expiring") as bar:
            done = maintenance.expire(store, bar.update, batch_size=batch_size)
    report = {
        "dry_run": dry_run,
        "due": due,
        "expired": done,
        "outcome_unknown": store.count_unknown_outcomes(past_expiry=True),
    }
    print_report(
        report,
        f"{'Would expire' if dry_run else 'Expired'} {due if dry_run else done} of "
        "{due} due records; {outcome_unknown} with an unknown outcome left alone.",
        as_json=as_json,
    )


@click.command()
@batch_options
@click.option(
    "--older-than",
    type=float,
    callback=age,
    metavar="SECONDS",
    help="Time since the end of the key's life. [default: IDEMPOTENCY_RETENTION]",
)
@click.option("--tenant-id", help="Only this tenant's records.")
@click.option("--user-id", help="Only this user's records.")
@with_appcontext
@clear_errors
def purge(
    *,
    yes: bool,
    as_json: bool,
    dry_run: bool,
    batch_size: int,
    older_than: float | None,
    tenant_id: str | None,
    user_id: str | None,
) -> None:
    """
    Delete expired records, once their retention is over.

    JSON: dry_run, due (before), purged (now).
    """
    store = get_state().store
    chosen: dict[str, Any] = {
        "older_than_seconds": older_than,
        "tenant_id": checked("tenant_id", tenant_id),
        "user_id": checked("user_id", user_id),
    }
    due = store.count_purgeable(**chosen)
    done = 0
    if not dry_run and due and confirmed(f"Delete {due} records?", yes=yes):
        with progress(due, "Purging") as bar:
            done = maintenance.purge(store, bar.update, batch_size=batch_size, **chosen)
    report = {"dry_run": dry_run, "due": due, "purged": done}
    sentence = (
        "Would purge {due} records."
        if dry_run
        else "Purged {purged} of {due} due records."
    )
    print_report(report, sentence, as_json=as_json)


@click.command()
@scope_options
@click.option("--request-hash", help="Hash of the request that asks; default: equal.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_appcontext
@clear_errors
def diagnose(*, request_hash: str | None, as_json: bool, **scope_parts: str) -> None:
    """
    Say what the next request with a key would meet, and why.

    \b
    The diagnosis is one of:
      missing                       no record: the request runs
      replayable                    it gets the stored answer
      request_hash_conflict         the key is another request's: 422
      in_progress                   the first request still runs: 409
      lease_lapsed                  the first one died without effect: it runs
      outcome_unknown               the first one died after an effect, or in a step
                                    that may have had one: 409
      failed_retry_requires_opt_in  it gets the failure, or runs if opted in
      expired_reusable              the key's life is over: it runs anew

    \b
    JSON: always the same members, null where there is nothing to say.
      diagnosis, explanation, tenant_id, user_id, route, idempotency_key,
      status, attempts, request_hash, response_code, response_body,
      response_body_encoding ("text" or "base64"), task_id, outbox_event_id,
      failure, resolved_by, resolved_reason, open_step (its name), steps (each with
      name, state "started", "finished" or "failed", repeatable and result),
      record_id, operation_id, and in UTC created_at, completed_at,
      effects_committed_at, locked_until, expires_at.
    """  # noqa: D301 - click keeps the lines of a paragraph after a backspace
    diagnosis = get_state().store.diagnose(Scope(**scope_parts), request_hash)
    report = _diagnosis_report(diagnosis)
    if as_json:
        click.echo(json.dumps(report, sort_keys=True, indent=2))
        return
    record = diagnosis.record
    report["steps"] = describe_steps(record.all_steps) or None if record else None
    width = max(map(len, report))
    for name, value in report.items():
        if value is not None:
            click.echo(f"{name:<{width}}  {printable(str(value))}".rstrip())


def _diagnosis_report(diagnosis: Diagnosis) -> dict[str, Any]:
    record, scope = diagnosis.record, diagnosis.scope
    return {
        "diagnosis": diagnosis.diagnosis.value,
        "explanation": diagnosis.explanation,
        "tenant_id": scope.tenant_id,
        "user_id": scope.user_id,
        "route": scope.route,
        "idempotency_key": scope.idempotency_key,
        "status": record and record.status.value,
        "attempts": record and record.attempts,
        "request_hash": record and record.request_hash,
        **_answer_report(diagnosis.diagnosis, record),
        "task_id": record and record.task_id,
        "outbox_event_id": record and record.outbox_event_id,
        "failure": record and record.failure,
        "resolved_by": record and record.resolved_by,
        "resolved_reason": record and record.resolved_reason,
        "open_step": record and record.open_step,
        "steps": _steps_report(diagnosis.diagnosis, record),
        "record_id": record and str(record.id),
        "operation_id": record and str(record.operation_id),
        "created_at": record and instant(record.created_at),
        "completed_at": record and instant(record.completed_at),
        "effects_committed_at": record and instant(record.effects_committed_at),
        "locked_until": record and instant(record.locked_until),
        "expires_at": record and instant(record.expires_at),
    }


def _answer_report(verdict: Verdict, record: RecordView | None) -> dict[str, Any]:
    """Show the stored answer to whoever would get it, not to another request."""
    response = record.response if record else None
    if response is None or verdict is Verdict.REQUEST_HASH_CONFLICT:
        return dict.fromkeys(
            ("response_code", "response_body", "response_body_encoding")
        )
    body, encoding = response.body, None
    text: str | None = None
    if body is not None:
        try:
            text, encoding = body.decode(), "text"
        except UnicodeDecodeError:
            text, encoding = base64.b64encode(body).decode(), "base64"
    return {
        "response_code": response.code,
        "response_body": text,
        "response_body_encoding": encoding,
    }


def _steps_report(
    verdict: Verdict, record: RecordView | None
) -> list[dict[str, Any]] | None:
    """Show the steps; their results, as the answer, not to another request."""
    if record is None or not record.all_steps:
        return None
    hidden = verdict is Verdict.REQUEST_HASH_CONFLICT
    return [
        {
            "name": step.name,
            "state": step.state.value,
            "key": record.step_key(step.name),
            "repeatable": step.repeatable,
            "result": None if hidden else record.steps.get(step.name),
        }
        for step in record.all_steps
    ]
