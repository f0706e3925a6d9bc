"""Workers in processes of their own, and what a test says to them by a broker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from celery import Celery, signature
from redis import Redis
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from flask_idempotency import fingerprint
from tests.brokers import broker_url
from tests.databases import Database
from tests.shop import Shop

if TYPE_CHECKING:
    from flask_idempotency import Claim

TIMEOUT_SECONDS = 45.0
_ROOT = Path(__file__).resolve().parents[2]


class Workplace:
    """
    A broker's queue, and a worker with two processes at it.

    Args:
        broker: A key of ``BROKERS``.
        database: URL of an empty PostgreSQL database.
        folder: For results and the worker's log.
    """

    def __init__(self, broker: str, database: str, folder: Path) -> None:
        self.broker = broker
        self.queue = f"idempotency-test-{uuid4().hex}"
        self.settings = self._settings(folder)
        self.celery = Celery("publisher", set_as_current=False)
        self.celery.config_from_object(self.settings)
        self.shop = Shop(Database("postgresql", database))
        self._database = database
        self._log = folder / "worker.log"
        self.start()

    def _settings(self, folder: Path) -> dict[str, Any]:
        common = {
            "broker_url": broker_url(self.broker),
            "broker_connection_retry_on_startup": True,
            "task_acks_late": True,
            "task_reject_on_worker_lost": True,
            "task_default_queue": self.queue,
            "task_default_exchange": self.queue,
            "task_default_routing_key": self.queue,
            "worker_prefetch_multiplier": 1,
            "worker_enable_remote_control": False,  # nothing but the queue is left
        }
        if self.broker == "rabbitmq":
            results = f"db+sqlite:///{(folder / 'results.db').as_posix()}"
            return {**common, "result_backend": results}
        prefix = {"global_keyprefix": f"{self.queue}:"}
        return {
            **common,
            "result_backend": broker_url(self.broker),
            "result_backend_transport_options": prefix,
            "broker_transport_options": {
                **prefix,
                "visibility_timeout": 6,
                "unacked_restore_interval": 1,
                "unacked_restore_throttle": 1,
            },
        }

    def start(self) -> None:
        """Start a worker."""
        command = (
            *(sys.executable, "-m", "celery", "-A", "tests.celery.worker_app"),
            *("worker", "--concurrency", "2", "--loglevel", "INFO"),
            *("--without-gossip", "--without-mingle", "--without-heartbeat"),
        )
        environ = {
            **os.environ,
            "TASK_SHOP_DATABASE": self._database,
            "TASK_SHOP_CELERY": json.dumps(self.settings),
        }
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(  # noqa: S603 - our own command, no shell
                command,
                cwd=_ROOT,
                env=environ,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that it is killed with all its processes
            )

    def kill(self) -> None:
        """Kill the worker with all its processes."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End the worker, and remove its queue."""
        self.kill()  # an orderly end takes ten seconds, and there is nothing left to do
        if self.broker == "redis":
            with Redis.from_url(broker_url("redis")) as redis:
                for key in redis.scan_iter(f"*{self.queue}*"):
                    redis.delete(key)
        else:
            with self.celery.connection_for_write() as connection:
                channel = connection.default_channel
                channel.queue_delete(self.queue)
                channel.exchange_delete(self.queue)
        self.celery.close()
        self.shop.close()

    def message(self, name: str, *args: Any, task_id: str | None = None) -> Any:
        """Return the signature of a task."""
        options = {"task_id": task_id or uuid4().hex}
        return signature(name, args, app=self.celery).set(**options)

    def get(self, result: Any) -> Any:
        """Wait for a result."""
        try:
            return result.get(timeout=TIMEOUT_SECONDS, interval=0.05)
        except Exception as error:
            log = self._log.read_text(encoding="utf-8")
            raise AssertionError(f"no result, but:\n{log[-6000:]}") from error

    def hold(self, name: str, task_id: str, *args: Any) -> Claim:
        """Take the record of a run, as a worker does that dies then."""
        scope = self.shop.scope(task_id, user="", route=f"task:{name}")
        with self.shop.app.app_context():
            claim = self.shop.idempotency.store.claim(
                scope, fingerprint([args, {}]), lease_seconds=3
            ).claim
            assert claim is not None
            return claim

    def wait_for(self, words: str) -> None:
        """Wait until the worker has logged something."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while words not in self._log.read_text(encoding="utf-8"):
            assert time.monotonic() < deadline, f"'{words}' was never logged"
            time.sleep(0.05)

    def accounts(self, like: str) -> list[str]:
        """Return the committed names that contain some text."""
        engine = create_engine(self._database, poolclass=NullPool)
        query = text("SELECT name FROM account WHERE name LIKE :like ORDER BY id")
        with engine.connect() as connection:
            rows = connection.execute(query, {"like": f"%{like}%"})
            return list(rows.scalars())
