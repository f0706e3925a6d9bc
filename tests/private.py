"""Database servers that a test has for itself, where what others do would count."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

from .databases import Database
from .pooler import free_port

if TYPE_CHECKING:
    from collections.abc import Sequence

_START_SECONDS = 30


def _program(name: str) -> str | None:
    """Find a server's program, which Debian hides from users."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    hidden = os.pathsep.join(map(str, (*folders, "/usr/sbin")))
    return shutil.which(name) or shutil.which(name, path=hidden)


class PrivateServer:
    """
    A server with an empty data directory, which ends with the test.

    Attributes:
        database: An empty database on it.
    """

    name: str
    programs: tuple[str, ...]
    url: str

    def __init__(self) -> None:
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="idempotency-"))
        # The servers refuse to be root, who may become anybody.
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            self._user = {"user": "nobody", "group": "nogroup", "extra_groups": []}
            shutil.chown(self.folder, "nobody", "nogroup")
        self._run(self.set_up())
        self._process = subprocess.Popen(  # noqa: S603 - our own command, no shell
            self.serve(),
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **self._user,
        )
        self.database = Database(self.name, self.url.format(port=self.port))
        self._engine = create_engine(self.database.url, poolclass=NullPool)
        self._wait()

    @classmethod
    def absence(cls) -> str | None:
        """Return why there can be no such server, or None."""
        absent = [name for name in cls.programs if _program(name) is None]
        return f"no {' and no '.join(absent)} here" if absent else None

    def set_up(self) -> Sequence[str]:
        """Return the command that makes the data directory."""
        raise NotImplementedError

    def serve(self) -> Sequence[str]:
        """Return the command that serves it, with as little background work as can be."""
        raise NotImplementedError

    def flushes(self) -> int:
        """Return how often the log was flushed to disk, once nobody is connected."""
        raise NotImplementedError

    def close(self) -> None:
        """End it, and remove its data."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.folder)

    def scalar(self, query: str) -> Any:
        """Return the answer to a question of the operator's."""
        with self._engine.connect() as connection:
            return connection.execute(text(query)).scalar_one()

    def wait_for(self, query: str) -> None:
        """Ask again and again until the answer is yes."""
        pause, deadline = threading.Event(), time.monotonic() + _START_SECONDS
        while not self._answers(query):
            assert self._process.poll() is None
            assert time.monotonic() < deadline
            pause.wait(0.05)

    def _answers(self, query: str) -> bool:
        try:
            return bool(self.scalar(query))
        except OperationalError:  # not yet
            return False

    def _run(self, command: Sequence[str]) -> None:
        subprocess.run(  # noqa: S603 - our own command, no shell
            command, check=True, capture_output=True, cwd=self.folder, **self._user
        )

    def _wait(self) -> None:
        self.wait_for("SELECT 1")


class PrivatePostgreSQL(PrivateServer):
    """PostgreSQL 14 or later, which counts its flushes."""

    name = "postgresql"
    programs = ("initdb", "postgres")
    url = "postgresql+psycopg://postgres@127.0.0.1:{port}/postgres"

    def set_up(self) -> Sequence[str]:
        """Make it quickly, without a password."""
        return (
            *(str(_program("initdb")), "-D", str(self.folder / "data")),
            *("-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C"),
            "--no-sync",
        )

    def serve(self) -> Sequence[str]:
        """Flush what has to be flushed, and nothing by itself."""
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "autovacuum": "off",
            "checkpoint_timeout": "1d",
            "wal_writer_delay": "10s",
            "shared_buffers": "16MB",
        }
        options = (f"--{name}={value}" for name, value in settings.items())
        return str(_program("postgres")), "-D", str(self.folder / "data"), *options

    def flushes(self) -> int:
        """Ask the server's own count."""
        # A process hands in its counts before it leaves this list.
        self.wait_for(
            "SELECT count(*) = 0 FROM pg_stat_activity "
            "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        if self.scalar("SELECT current_setting('server_version_num')::int") >= 180000:
            query = "SELECT sum(fsyncs) FROM pg_stat_io WHERE object = 'wal'"
        else:
            query = "SELECT wal_sync FROM pg_stat_wal"
        return int(self.scalar(query))


class PrivateMariaDB(PrivateServer):
    """MariaDB without a binary log."""

    name = "mariadb"
    programs = ("mariadb-install-db", "mariadbd")
    url = "mysql+pymysql://root@127.0.0.1:{port}/test"

    def set_up(self) -> Sequence[str]:
        """Make it quickly, without a password."""
        return (
            *(str(_program("mariadb-install-db")), "--no-defaults"),
            *(f"--datadir={self.folder / 'data'}", "--skip-name-resolve"),
            "--auth-root-authentication-method=normal",
        )

    def serve(self) -> Sequence[str]:
        """Flush what has to be flushed, and nothing by itself."""
        return (
            *(str(_program("mariadbd")), "--no-defaults"),
            *(f"--datadir={self.folder / 'data'}", f"--port={self.port}"),
            *("--bind-address=127.0.0.1", f"--socket={self.folder / 'socket'}"),
            *("--innodb-flush-log-at-timeout=2700", "--skip-log-bin"),
            "--innodb-buffer-pool-size=16M",
        )

    def flushes(self) -> int:
        """Ask the server's own count."""
        # Newer releases count no flushes; each write of the log is followed by one.
        query = (
            "SELECT variable_value FROM information_schema.global_status "
            "WHERE variable_name = 'Innodb_log_writes'"
        )
        return int(self.scalar(query))
