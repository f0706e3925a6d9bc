"""Serve an application on this machine, with a thread for each request."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

import click
from werkzeug.serving import make_server

if TYPE_CHECKING:
    from flask import Flask
    from werkzeug.serving import BaseWSGIServer


def serve(app: Flask, port: int = 0, *, until_eof: bool = False) -> None:
    """
    Serve an application until Ctrl-C.

    The first line on standard output is its address; from then on it answers.

    Args:
        app: The application.
        port: Where to listen; 0 lets the operating system choose.
        until_eof: End also when standard input ends, as it does when the process that
            holds its other end is gone, in whatever way.
    """
    server = make_server("127.0.0.1", port, app, threaded=True)
    click.echo(f"http://127.0.0.1:{server.server_port}")
    if until_eof:
        threading.Thread(target=_stop_at_eof, args=(server,), daemon=True).start()
    server.serve_forever(poll_interval=0.1)


def _stop_at_eof(server: BaseWSGIServer) -> None:
    # Not sys.stdin.read(): its lock would block the end of the interpreter.
    while os.read(sys.stdin.fileno(), 1024):
        pass
    server.shutdown()
