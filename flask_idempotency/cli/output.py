"""How commands ask, show progress and print: data on stdout, all else on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

import click

from flask_idempotency.lifecycle import SCOPE_LENGTHS, check_text
from flask_idempotency.settings import seconds_of

if TYPE_CHECKING:
    from datetime import datetime


def age(_context: click.Context, _option: Any, seconds: float | None) -> float | None:
    """Check an option that is an age in seconds."""
    try:
        return seconds if seconds is None else seconds_of(seconds, minimum=0)
    except ValueError as error:
        raise click.BadParameter(f"must be {error}.") from error


def printable(text: str) -> str:
    """Keep a stored body from steering the terminal, or from faking a line."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def instant(value: datetime | None) -> str | None:
    """Return an instant as it stands in JSON."""
    return value.isoformat() if value else None


def checked(name: str, value: str | None) -> str | None:
    """Return a part of a scope, or say what is wrong with it."""
    try:
        return value if value is None else check_text(name, value, SCOPE_LENGTHS[name])
    except ValueError as error:
        raise click.UsageError(f"{error}.") from error


def confirmed(question: str, *, yes: bool) -> bool:
    """Ask on stderr, unless the answer was given."""
    # click 8.1 sends a blank to stdout, which belongs to the report alone.
    with contextlib.redirect_stdout(sys.stderr):
        return yes or click.confirm(question, err=True)


def progress(length: int, label: str) -> Any:
    """Show a bar on stderr."""
    return click.progressbar(length=length, label=label, file=sys.stderr)


def print_report(report: dict[str, Any], sentence: str, *, as_json: bool) -> None:
    """Print what was done, as JSON or as a sentence."""
    text = json.dumps(report, sort_keys=True) if as_json else sentence.format(**report)
    click.echo(text)
