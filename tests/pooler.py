"""PgBouncer in transaction mode, between an application and PostgreSQL."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

from sqlalchemy import make_url

from .databases import Database

if TYPE_CHECKING:
    from pathlib import Path

# Debian has it where only root looks for programs.
PROGRAM = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
ABSENT = "pgbouncer is not installed"
_CONFIG = """
[databases]
* = host={host} port={port} user={user} {password}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen_port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {pool_size}
max_client_conn = 200
"""
_START_SECONDS = 10


class Pooler:
    """
    A PgBouncer of its own.

    Args:
        database: On PostgreSQL.
        folder: For its configuration and log.
        pool_size: Connections to the server, which all clients share.
    """

    def __init__(self, database: Database, folder: Path, *, pool_size: int) -> None:
        url = make_url(database.url)
        port = free_port()
        config = folder / "pgbouncer.ini"
        config.write_text(
            _CONFIG.format(
                host=url.host or "127.0.0.1",
                port=url.port or 5432,
                user=url.username or "postgres",
                password=f"password={url.password}" if url.password else "",
                listen_port=port,
                pool_size=pool_size,
            )
        )
        # It refuses to be root, and gives that up once it has read the file.
        other = ("-u", "nobody") if os.geteuid() == 0 else ()
        with (folder / "pgbouncer.log").open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own command, no shell
                (str(PROGRAM), *other, str(config)), stderr=log
            )
        self._wait(port)
        #: The database as it is reached through the pooler.
        self.database = Database(
            database.name,
            url.set(host="127.0.0.1", port=port).render_as_string(hide_password=False),
        )

    def close(self) -> None:
        """End it, with all its connections."""
        self._process.kill()
        self._process.wait()

    def _wait(self, port: int) -> None:
        pause, deadline = threading.Event(), time.monotonic() + _START_SECONDS
        with closing(socket.socket()) as client:
            while client.connect_ex(("127.0.0.1", port)):
                assert self._process.poll() is None
                assert time.monotonic() < deadline
                pause.wait(0.02)


def free_port() -> int:
    """Return a port that nobody listens on, for the moment."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port: int = listener.getsockname()[1]
        return port
