"""Applications behind gunicorn, and the way from a test client to them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING

from flask import Response
from werkzeug.datastructures import EnvironHeaders
from werkzeug.test import Client

if TYPE_CHECKING:
    from collections.abc import Iterable
    from wsgiref.types import StartResponse, WSGIEnvironment

#: How gunicorn serves: two processes each, with one call at a time, threads, greenlets.
WORKERS = {
    "sync": ("--worker-class", "sync"),
    "gthread": ("--worker-class", "gthread", "--threads", "4"),
    "gevent": ("--worker-class", "gevent"),
}
TIMEOUT_SECONDS = 30.0
_ROOT = Path(__file__).resolve().parents[1]


class Server:
    """
    An application behind gunicorn, on a port of its own.

    Args:
        app: Where gunicorn finds the application.
        worker: A key of ``WORKERS``.
        log: The file for what gunicorn says.
        options: Further options of gunicorn.
        environ: Variables for the application.
    """

    def __init__(
        self, app: str, worker: str, log: Path, *options: str, **environ: str
    ) -> None:
        self._log = log
        # Listening before gunicorn runs: no port is guessed, and no client comes too
        # early, but waits for the first worker.
        with socket.create_server(("127.0.0.1", 0)) as listener, log.open("wb") as out:
            self.port: int = listener.getsockname()[1]
            command = (
                *(sys.executable, "-m", "gunicorn", "--no-control-socket"),
                *("--bind", f"fd://{listener.fileno()}", "--workers", "2"),
                # A worker that hangs holds the end of the tests up no longer.
                *("--graceful-timeout", "2"),
                *(*WORKERS[worker], *options, app),
            )
            self._process = subprocess.Popen(  # noqa: S603 - our own command, no shell
                command,
                cwd=_ROOT,
                env={**os.environ, **environ},
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=(listener.fileno(),),
            )

    def client(self) -> Client:
        """Return a test client whose requests go to the server."""
        return Client(self._send, Response)

    def wait(self) -> None:
        """Wait until the application answers, whatever it says."""
        try:
            self.client().get("/")
        except OSError as error:
            self.stop()
            log = self._log.read_text(encoding="utf-8")
            raise AssertionError(f"gunicorn does not answer:\n{log}") from error

    def stop(self) -> None:
        """End the server and its workers."""
        self._process.send_signal(signal.SIGINT)  # gunicorn's quick shutdown
        try:
            self._process.wait(TIMEOUT_SECONDS)
        finally:
            self._process.kill()  # no-op where it has ended
            self._process.wait()

    def _send(
        self, environ: WSGIEnvironment, start_response: StartResponse
    ) -> Iterable[bytes]:
        """Send a WSGI request on to the server."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_SECONDS)
        with closing(connection):
            connection.request(
                environ["REQUEST_METHOD"],
                environ["REQUEST_URI"],
                environ["wsgi.input"].read(),
                dict(EnvironHeaders(environ)),
            )
            reply = connection.getresponse()
            start_response(f"{reply.status} {reply.reason}", reply.getheaders())
            return [reply.read()]


class Hook:
    """
    Where a view in another process says that it runs, and waits to be let go.

    The view connects, sends a line, and reads one byte.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(TIMEOUT_SECONDS)
        self.port: int = self._listener.getsockname()[1]
        self._view: socket.socket | None = None

    def process(self) -> int:
        """Wait until the view runs (again), and return the number of its process."""
        self._hang_up()
        self._view, _address = self._listener.accept()
        self._view.settimeout(TIMEOUT_SECONDS)
        return int(self._view.makefile().readline())

    def let_go(self) -> None:
        """Let the view go on."""
        assert self._view is not None
        self._view.sendall(b".")

    def close(self) -> None:
        """Close the connections."""
        self._listener.close()
        self._hang_up()

    def _hang_up(self) -> None:
        if self._view is not None:
            self._view.close()


def ask_hook(port: int) -> None:
    """Say, from within a view, that it runs, and wait to be let go."""
    address = ("127.0.0.1", port)
    with socket.create_connection(address, TIMEOUT_SECONDS) as connection:
        connection.sendall(f"{os.getpid()}\n".encode())
        connection.recv(1)
