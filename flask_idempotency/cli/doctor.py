"""``doctor``."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from flask.cli import with_appcontext

from flask_idempotency.ops.doctor import NOT_FENCED, examine
from flask_idempotency.state import get_state

from .errors import clear_errors


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_appcontext
@clear_errors
def doctor(*, as_json: bool) -> None:
    """
    Say what of the set-up weakens the guarantees, or is wrong.

    Exits with 1 if there is a problem.

    JSON: ok (no problems), findings (each with code, is_problem and message),
    not_fenced (what no set-up changes).
    """
    findings = examine(get_state())
    ok = not any(finding.is_problem for finding in findings)
    if as_json:
        shown = {
            "ok": ok,
            "findings": [asdict(finding) for finding in findings],
            "not_fenced": NOT_FENCED,
        }
        click.echo(json.dumps(shown, sort_keys=True, indent=2))
    else:
        for finding in findings:
            kind = "problem" if finding.is_problem else "note"
            click.echo(f"{kind}: {finding.code}: {finding.message}")
        click.echo(f"Never fenced: {'; '.join(NOT_FENCED)}.")
        click.echo("Problems: none." if ok else "There are problems.")
    if not ok:
        click.get_current_context().exit(1)
