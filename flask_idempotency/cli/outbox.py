"""``outbox``: publish deliveries, and look after them."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import click
from flask.cli import AppGroup, with_appcontext

from flask_idempotency.lifecycle import BOUND_ID_LENGTH, DeliveryState, check_text
from flask_idempotency.ops import maintenance
from flask_idempotency.outbox import Dispatcher, Report
from flask_idempotency.outbox.deliveries import RETRYABLE_STATES
from flask_idempotency.outbox.dispatcher import BATCH_SIZE, POLL_SECONDS
from flask_idempotency.state import get_state

from .errors import clear_errors
from .output import age, confirmed, instant, print_report, printable, progress
from .records import batch_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flask_idempotency.outbox import DeliveryView

F = TypeVar("F", bound="Callable[..., Any]")

outbox = AppGroup("outbox", help="Publish deliveries, and look after them.")

_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _text_option(name: str, **settings: Any) -> Callable[[F], F]:
    return click.option(name, callback=_checked, **settings)


def _checked(
    _context: click.Context, option: click.Parameter, value: str | None
) -> str | None:
    try:
        return value and check_text(str(option.name), value, BOUND_ID_LENGTH)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from error


@outbox.command()
@click.option("--loop", is_flag=True, help="Go on until SIGTERM or SIGINT.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1, max=maintenance.MAX_BATCH_SIZE),
    default=BATCH_SIZE,
    show_default=True,
    help="Deliveries that are claimed at once.",
)
@click.option(
    "--poll",
    "poll_seconds",
    type=click.FloatRange(min=0.01),
    metavar="SECONDS",
    help=f"Pause of --loop when nothing is due. [default: {POLL_SECONDS:g}]",
)
@_json_option
@with_appcontext
@clear_errors
def dispatch(
    *, loop: bool, batch_size: int, poll_seconds: float | None, as_json: bool
) -> None:
    """
    Publish the deliveries that are due.

    Those of a kind that this application does not publish are left to others. Any
    number of dispatchers may run. A signal lets the message in hand be published and
    hands the others back.

    Without --loop the exit status is 1 if a delivery could not be published.

    JSON: published, failed (tried again later), released (handed back), expired, dead.
    """
    if poll_seconds is not None and not loop:
        raise click.UsageError("--poll goes with --loop only.")
    state = get_state()
    if not state.publishers:
        raise click.ClickException(
            "This application publishes nothing: no publisher is registered. "
            "Is it the application that your Celery object is made for?"
        )
    dispatcher = Dispatcher(state.deliveries, state.publishers)
    with _stop_on_signal() as stop:
        if loop:
            kinds = ", ".join(sorted(state.publishers))
            click.echo(f"Dispatching deliveries of kind {kinds}.", err=True)
            report = dispatcher.run(
                stop, limit=batch_size, poll_seconds=poll_seconds or POLL_SECONDS
            )
        else:
            report = _drain(dispatcher, batch_size, stop)
    print_report(
        vars(report),
        "Published {published} deliveries; {failed} failed, {released} handed back, "
        "{expired} expired, {dead} dead.",
        as_json=as_json,
    )
    if not loop and (report.failed or report.dead):
        raise click.exceptions.Exit(1)


def _drain(dispatcher: Dispatcher, limit: int, stop: threading.Event) -> Report:
    """Publish what is due, until a batch is not full."""
    total = Report()
    while not stop.is_set():
        report = dispatcher.run_once(limit, stop)
        total += report
        if report.claimed < limit:
            break
    return total


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[threading.Event]:
    stop = threading.Event()
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: stop.set()) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@outbox.command("list")
@_text_option("--kind", help="Only this kind.")
@_text_option("--name", help="Only this name.")
@_text_option("--tenant-id", help="Only this tenant's.")
@click.option(
    "--state",
    type=click.Choice([state.value for state in DeliveryState]),
    help="Only this state.",
)
@click.option(
    "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Most."
)
@_json_option
@with_appcontext
@clear_errors
def list_deliveries(
    *, state: str | None, limit: int, as_json: bool, **filters: str | None
) -> None:
    """
    List deliveries, the newest first.

    JSON: a list of what 'show' prints.
    """
    chosen = DeliveryState(state) if state else None
    found = get_state().deliveries.list(limit=limit, state=chosen, **filters)
    if as_json:
        click.echo(json.dumps([_report_of(view) for view in found], sort_keys=True))
        return
    for view in found:
        created = instant(view.created_at)
        words = (view.state.value, created, view.kind, view.name, view.task_id)
        click.echo("  ".join(printable(str(word)) for word in words))


@outbox.command()
@_text_option("--task-id", required=True, help="Its task id.")
@_text_option("--kind", default="celery", show_default=True, help="Its kind.")
@_json_option
@with_appcontext
@clear_errors
def show(*, task_id: str, kind: str, as_json: bool) -> None:
    """
    Show one delivery, without its message.

    \b
    JSON: always the same members, null where there is nothing to say.
      id, kind, name, task_id, tenant_id, user_id, record_id, unique (it has a key that
      nobody else may have now), repeatable, state, publishes, leased, last_error,
      payload_size, and in UTC created_at, due_at, expires_at, published_at, ended_at.
    """  # noqa: D301 - click keeps the lines of a paragraph after a backspace
    view = get_state().deliveries.look(kind, task_id)
    if view is None:
        raise click.ClickException("There is no delivery with this kind and task id.")
    report = _report_of(view)
    if as_json:
        click.echo(json.dumps(report, sort_keys=True, indent=2))
        return
    width = max(map(len, report))
    for name, value in report.items():
        if value is not None:
            click.echo(f"{name:<{width}}  {printable(str(value))}".rstrip())


def _report_of(view: DeliveryView) -> dict[str, Any]:
    report = {**vars(view), "state": view.state.value, "id": str(view.id)}
    report["record_id"] = view.record_id and str(view.record_id)
    # The key itself may be made of the work's arguments.
    report["unique"] = report.pop("unique_key") is not None
    times = {name: value for name, value in report.items() if name.endswith("_at")}
    return {**report, **{name: instant(value) for name, value in times.items()}}


@outbox.command()
@click.option(
    "--state",
    type=click.Choice(sorted(state.value for state in RETRYABLE_STATES)),
    default="dead",
    show_default=True,
    help="What became of them.",
)
@_text_option("--task-id", help="Only this one.")
@_text_option("--kind", help="Only this kind.")
@_text_option("--name", help="Only this name.")
@_text_option("--tenant-id", help="Only this tenant's.")
@click.option("--dry-run", is_flag=True, help="Only count.")
@_json_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@with_appcontext
@clear_errors
def retry(
    *, state: str, dry_run: bool, as_json: bool, yes: bool, **chosen: str | None
) -> None:
    """
    Have dead or failed deliveries published again.

    Each keeps its task id. A unique key is not held again, and a message whose life is
    over stays where it is. With --task-id the exit status is 1 if nothing is found.

    JSON: dry_run, due (before), retried (now).
    """
    deliveries = get_state().deliveries
    found = DeliveryState(state)
    due = deliveries.count_retryable(found, **chosen)
    if chosen["task_id"] and not due:
        raise click.ClickException(f"No {state} delivery with this task id can run.")
    done = 0
    if not dry_run and due and confirmed(f"Publish {due} deliveries again?", yes=yes):
        done = maintenance.retry_deliveries(deliveries, found, **chosen)
    report = {"dry_run": dry_run, "due": due, "retried": done}
    sentence = (
        "Would retry {due} deliveries."
        if dry_run
        else "Retried {retried} of {due} deliveries."
    )
    print_report(report, sentence, as_json=as_json)


@outbox.command()
@batch_options
@click.option(
    "--older-than",
    type=float,
    callback=age,
    metavar="SECONDS",
    help="Time since the end. [default: IDEMPOTENCY_RETENTION]",
)
@with_appcontext
@clear_errors
def purge(
    *,
    yes: bool,
    as_json: bool,
    dry_run: bool,
    batch_size: int,
    older_than: float | None,
) -> None:
    """
    Delete ended deliveries, once their retention is over; never an open one.

    JSON: dry_run, due (before), purged (now).
    """
    deliveries = get_state().deliveries
    due = deliveries.count_purgeable(older_than_seconds=older_than)
    done = 0
    if not dry_run and due and confirmed(f"Delete {due} deliveries?", yes=yes):
        with progress(due, "Purging") as bar:
            done = maintenance.purge_deliveries(
                deliveries,
                bar.update,
                batch_size=batch_size,
                older_than_seconds=older_than,
            )
    report = {"dry_run": dry_run, "due": due, "purged": done}
    sentence = (
        "Would purge {due} deliveries."
        if dry_run
        else "Purged {purged} of {due} due deliveries."
    )
    print_report(report, sentence, as_json=as_json)


@outbox.command()
@_json_option
@with_appcontext
@clear_errors
def stats(*, as_json: bool) -> None:
    """
    Count the deliveries.

    \b
    JSON: counts (for each kind the number in each state), due (that wait for a
      dispatcher now), oldest_due_seconds (how long the first has waited, or null).
    """  # noqa: D301 - click keeps the lines of a paragraph after a backspace
    found = get_state().deliveries.stats()
    counts: dict[str, dict[str, int]] = {}
    for (kind, in_state), number in sorted(found.counts.items()):
        counts.setdefault(kind, {})[in_state.value] = number
    if as_json:
        report = {
            "counts": counts,
            "due": found.due,
            "oldest_due_seconds": found.oldest_due_seconds,
        }
        click.echo(json.dumps(report, sort_keys=True))
        return
    for kind, states in counts.items():
        for state, number in states.items():
            click.echo(f"{printable(kind)}  {state}  {number}")
    oldest = found.oldest_due_seconds
    waiting = "" if oldest is None else f", the first for {oldest:.0f} s"
    click.echo(f"{found.due} due{waiting}")
