"""The demo's child processes: servers and ``flask`` commands."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO

#: Where `python -m` finds the example.
ROOT = Path(__file__).resolve().parents[2]
#: Longest time that a server may take to end by itself.
END_SECONDS = 5.0
_ERROR_LINES = 5


class Children(ExitStack):
    """
    Starts processes on one database and ends them all when its block ends.

    Args:
        database_uri: The database that all of them use.
        log: The file that takes what they print on standard error.
    """

    def __init__(self, database_uri: str, log: Path) -> None:
        super().__init__()
        self.database_uri = database_uri
        self._log = log
        # The caller's FLASK_DEBUG, FLASK_APP and so on are not meant for these.
        self._environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("FLASK_")
        }
        self._environ["EXAMPLE_DATABASE_URI"] = database_uri
        # Each command is a process, most of whose time goes into imports.
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self.callback(self._pool.shutdown, cancel_futures=True)

    def serve(self, module: str) -> str:
        """
        Start a server and return its address, on which it answers by then.

        A provider's address is known to the servers that are started after it.
        """
        address = self.enter_context(self._server(module))
        if module.endswith(".provider"):
            # A new dict, since a command may be starting with the old one.
            self._environ = {**self._environ, "EXAMPLE_PROVIDER_URL": address}
        return address

    def flask(self, *arguments: str) -> Future[str]:
        """Start a ``flask`` command, whose output is the future's result."""
        return self._pool.submit(self._run, arguments)

    def _run(self, arguments: tuple[str, ...]) -> str:
        done = subprocess.run(  # noqa: S603 - our own command, without a shell
            [sys.executable, "-m", "flask", "--app", "example_app", *arguments],
            cwd=ROOT,
            env=self._environ,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            command = " ".join(arguments)
            # A traceback says at its end what happened.
            reason = "\n".join(done.stderr.splitlines()[-_ERROR_LINES:])
            raise click.ClickException(f"'flask {command}' failed:\n{reason}")
        return done.stdout

    @contextmanager
    def _server(self, module: str) -> Iterator[str]:
        with (
            self._log.open("ab") as log,
            subprocess.Popen(  # noqa: S603 - our own module, without a shell
                [sys.executable, "-m", module, "--port", "0", "--until-eof"],
                cwd=ROOT,
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            ) as process,
        ):
            try:
                yield self._address(module, process)
            finally:
                _end(process)

    def _address(self, module: str, process: subprocess.Popen[str]) -> str:
        # The port is bound when this line is printed: nothing to wait for.
        address = cast("IO[str]", process.stdout).readline().strip()
        if not address:
            printed = self._log.read_text(encoding="utf-8", errors="replace")
            raise click.ClickException(f"'{module}' did not start:\n{printed}")
        return address


def _end(process: subprocess.Popen[str]) -> None:
    """Let a server end by the end of its input, or end it."""
    cast("IO[str]", process.stdin).close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
