"""
``flask demo``: the example's whole story, played over HTTP and checked.

The application and the payment provider run as processes of their own; every answer is
compared with the one that it has to be.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING

import click
from sqlalchemy import make_url

from .processes import Children
from .report import Report
from .story import Story

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["demo"]


@click.command("demo")
@click.option(
    "--database-uri",
    help="Play on this database, which keeps the rows. [default: a new SQLite file]",
)
@click.pass_context
def demo(context: click.Context, database_uri: str | None) -> None:
    """Play the example's story over HTTP; exit 1 if an answer is wrong."""
    # So that the children and the folder go, too, where a supervisor ends the demo.
    signal.signal(signal.SIGTERM, _exit)
    report = Report()
    with tempfile.TemporaryDirectory(
        prefix="example-app-", ignore_cleanup_errors=True
    ) as folder:
        uri = _absolute(database_uri or f"sqlite:///{Path(folder, 'demo.sqlite3')}")
        log = Path(folder, "log.txt")
        try:
            _play(report, uri, log)
        except (OSError, HTTPException) as error:
            report.fail(f"the story broke off: {type(error).__name__}: {error}")
        report.summarise(log)
    context.exit(report.exit_code)


def _play(report: Report, uri: str, log: Path) -> None:
    with Children(uri, log) as children:
        migration = children.flask("db", "upgrade")
        provider = children.serve("example_app.provider")
        address = children.serve("example_app.demo.server")
        migration.result()
        report.line(f"Application  {address}")
        report.line(f"Provider     {provider}")
        report.line(f"Database     {make_url(uri).render_as_string()}")
        story = Story(report, children, address=address, provider=provider)
        story.play()


def _absolute(uri: str) -> str:
    """Return a name of the database that means the same to every process."""
    url = make_url(uri)
    if url.get_backend_name() == "sqlite":
        if url.database in {None, "", ":memory:"}:
            message = "A database in memory cannot be shared: name a file."
            raise click.BadParameter(message)
        url = url.set(database=str(Path(str(url.database)).resolve()))
    return url.render_as_string(hide_password=False)


def _exit(signum: int, _frame: FrameType | None) -> None:
    sys.exit(128 + signum)
