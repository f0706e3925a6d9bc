"""``routes``."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import click
from flask.cli import with_appcontext

from flask_idempotency.config import RouteOptions
from flask_idempotency.fingerprint import Fingerprint
from flask_idempotency.ops.audit import audit
from flask_idempotency.state import get_state

from .errors import clear_errors

if TYPE_CHECKING:
    from flask_idempotency.ops.audit import RouteReport


@click.command()
@click.option("--check", is_flag=True, help="Exit with 1 if there is a problem.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_appcontext
@clear_errors
def routes(*, check: bool, as_json: bool) -> None:
    """
    Say what every mutating route declares, and what is wrong with it.

    \b
    A view of another package is declared where the application is made:
      app.view_functions["x"] = not_idempotent("why")(app.view_functions["x"])

    \b
    A problem is one of:
      undeclared      neither @idempotent nor @not_idempotent
      above_route     @idempotent stands above the route and guards nothing
      login_inside    @idempotent stands above a login check: a replay bypasses it
      shaped_outside  @idempotent stands below what serialises the answer
      declared_twice  twice, such as by a class and by its method
      safe_method     @idempotent guards a route that changes nothing

    \b
    JSON: ok (no problems), and routes, sorted by rule and method, each with
      rule, method, endpoint,
      declaration ("idempotent", "not_idempotent" or null),
      options (of @idempotent that were set, durations in seconds; or null),
      reason (of @not_idempotent, or null),
      problems (each with problem and message).
    """  # noqa: D301 - click keeps the lines of a paragraph after a backspace
    reports = audit(get_state().app)
    ok = not any(report.problems for report in reports)
    if as_json:
        shown = {"ok": ok, "routes": [_as_json(report) for report in reports]}
        click.echo(json.dumps(shown, sort_keys=True, indent=2))
    else:
        _print_text(reports)
    if check and not ok:
        click.get_current_context().exit(1)


def _as_json(report: RouteReport) -> dict[str, Any]:
    declared, kind = report.declaration, None
    if declared is not None:
        kind = "not_idempotent" if isinstance(declared, str) else "idempotent"
    return {
        "rule": report.rule,
        "method": report.method,
        "endpoint": report.endpoint,
        "declaration": kind,
        "options": _options(declared) if isinstance(declared, RouteOptions) else None,
        "reason": declared if isinstance(declared, str) else None,
        "problems": [
            {"problem": problem.code, "message": problem.message}
            for problem in report.problems
        ],
    }


def _options(declared: RouteOptions) -> dict[str, Any]:
    """Return what differs from an ``@idempotent`` without options."""
    return {
        f.name: _named(getattr(declared, f.name))
        for f in fields(declared)
        if getattr(declared, f.name) != f.default
    }


def _named(value: Any) -> Any:
    """Return a value as JSON has it, a function by its name."""
    if callable(value):
        return getattr(value, "__qualname__", repr(value))
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Fingerprint):
        return asdict(value)
    return value


def _print_text(reports: list[RouteReport]) -> None:
    methods = max((len(report.method) for report in reports), default=0)
    rules = max((len(report.rule) for report in reports), default=0)
    for report in reports:
        said = _said(report.declaration)
        click.echo(f"{report.method:<{methods}}  {report.rule:<{rules}}  {said}")
        for problem in report.problems:
            click.echo(f"  {problem.code}: {problem.message}")
    problems = sum(len(report.problems) for report in reports)
    click.echo(f"Routes: {len(reports)}, problems: {problems}.")


def _said(declared: RouteOptions | str | None) -> str:
    """Return a declaration as it stands in the source."""
    if declared is None:
        return "-"
    if isinstance(declared, str):
        return f"@not_idempotent({declared!r})"
    shown = [
        f"{f.name.removesuffix('_seconds')}={_literal(getattr(declared, f.name))}"
        for f in fields(declared)
        if getattr(declared, f.name) != f.default
    ]
    return f"@idempotent({', '.join(shown)})" if shown else "@idempotent"


def _literal(value: Any) -> str:
    if callable(value) or isinstance(value, frozenset):
        named = _named(value)
        return named if isinstance(named, str) else repr(named)
    return f"{value:.15g}" if isinstance(value, float) else repr(value)
