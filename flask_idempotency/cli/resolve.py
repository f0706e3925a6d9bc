"""``resolve``: an operator settles a call whose outcome is unknown."""

from __future__ import annotations

import getpass
import json
from typing import TYPE_CHECKING, Any

import click
from flask import current_app
from flask.cli import with_appcontext

from flask_idempotency.lifecycle import (
    Failure,
    Resolution,
    Scope,
    StoredResponse,
    Verdict,
)
from flask_idempotency.ops import settlement
from flask_idempotency.state import get_state

from .errors import clear_errors
from .output import confirmed, printable
from .records import scope_options

if TYPE_CHECKING:
    from flask_idempotency.lifecycle import Diagnosis


@click.command()
@scope_options
@click.option("--succeeded", is_flag=True, help="It took effect.")
@click.option("--failed", is_flag=True, help="It failed for good.")
@click.option("--release", is_flag=True, help="Nothing stayed: free the key.")
@click.option("--response-code", type=click.IntRange(200, 599), help="[default: 200]")
@click.option("--response-body", help="What duplicates get.")
@click.option("--content-type", help="[default: application/json]")
@click.option("--reason", required=True, help="How you know. Kept on the record.")
@click.option(
    "--by", default=getpass.getuser, help="Who you are. [default: your login]"
)
@click.option("--force", is_flag=True, help="Also where nothing is unknown yet.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@with_appcontext
@clear_errors
def resolve(*, as_json: bool, force: bool, yes: bool, **given: Any) -> None:
    """
    Settle a request that committed a part, or left a step open, without an answer.

    Look at it with 'diagnose' first, and at what it left in your tables. Afterwards
    duplicates get what you say here; a process that wakes up late commits nothing.
    --force settles a request that is still running, too.

    JSON: resolved, diagnosis (before), explanation (now).
    """
    outcome = _outcome(given)
    scope = Scope(**{name: given[name] for name in Scope.__dataclass_fields__})
    ending = _ending(outcome, given)
    try:
        resolution = Resolution(ending=ending, by=given["by"], reason=given["reason"])
    except ValueError as error:
        raise click.UsageError(f"{error}.") from error
    store = get_state().store
    before = store.diagnose(scope)
    if not (force or _is_unknown(before)):
        raise click.ClickException(_nothing_unknown(before))
    if not confirmed(
        f"{printable(before.explanation)} Settle it as '{outcome}'?", yes=yes
    ):
        raise click.Abort
    record = settlement.resolve(current_app, store, scope, resolution, force=force)
    if record is None:
        raise click.ClickException(
            "Nothing was settled: an answer that was given, and what was settled, is "
            f"not replaced. {printable(store.diagnose(scope).explanation)}"
        )
    now = store.diagnose(scope).explanation
    report = {
        "resolved": outcome,
        "diagnosis": before.diagnosis.value,
        "explanation": now,
    }
    sentence = f"Settled as '{outcome}'. {now}"
    click.echo(json.dumps(report, sort_keys=True) if as_json else printable(sentence))


def _outcome(given: dict[str, Any]) -> str:
    named = [name for name in ("succeeded", "failed", "release") if given[name]]
    if len(named) != 1:
        raise click.UsageError("Give one of --succeeded, --failed and --release.")
    return named[0]


def _is_unknown(diagnosis: Diagnosis) -> bool:
    """Tell whether nobody knows what it did: also of a failure, if a step is open."""
    record = diagnosis.record
    open_step = record is not None and record.open_step and not record.resolved_by
    failed = diagnosis.diagnosis is Verdict.FAILED_RETRY_REQUIRES_OPT_IN
    return diagnosis.diagnosis is Verdict.OUTCOME_UNKNOWN or bool(failed and open_step)


def _ending(outcome: str, given: dict[str, Any]) -> StoredResponse | Failure | None:
    answer = {"response_code", "response_body", "content_type"}
    named = [name for name in sorted(answer) if given[name] is not None]
    if outcome != "succeeded" and named:
        option = named[0].replace("_", "-")
        raise click.UsageError(f"--{option} goes with --succeeded only.")
    if outcome == "failed":
        return Failure(reason="resolved as failed")
    if outcome == "release":
        return None
    media_type = given["content_type"] or "application/json"
    if not (media_type.isascii() and media_type.isprintable()):
        raise click.UsageError(
            "--content-type can be no header: it has other characters."
        )
    try:
        body = (given["response_body"] or "").encode()
    except UnicodeEncodeError as error:
        raise click.UsageError("--response-body is no text.") from error
    code = given["response_code"] or 200
    headers = (("Content-Type", media_type),) if body else ()
    return StoredResponse(code=code, headers=headers, body=body)


def _nothing_unknown(diagnosis: Diagnosis) -> str:
    running = diagnosis.diagnosis is Verdict.IN_PROGRESS
    hint = " --force settles it all the same." if running else ""
    return (
        f"The outcome is not unknown: it is '{diagnosis.diagnosis.value}'. "
        f"{diagnosis.explanation}{hint}"
    )
