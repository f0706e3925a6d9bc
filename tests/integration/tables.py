"""What the two tables of decisions are played with: one application for all rows."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flask import request
from sqlalchemy import text

from flask_idempotency import idempotent
from tests.shop import Shop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from werkzeug.test import TestResponse

    from flask_idempotency import RecordView
    from tests.databases import Database

TIMEOUT = 30
MAX_ATTEMPTS = 2


class World(Shop):
    """
    Routes with different options, whose views do what the test plans for a key.

    Every run adds one account, named after key and run: what is there in the end
    tells which runs took effect.
    """

    def __init__(self, database: Database) -> None:
        super().__init__(database, IDEMPOTENCY_MAX_ATTEMPTS=MAX_ATTEMPTS)
        self.plans: dict[str, list[Callable[[], Any]]] = {}
        self.counted: Counter[str] = Counter()
        for path, options in {
            "/plain": {},
            "/retry": {"retry_failed": True},
            "/recover": {"recover": lambda _record: ({"by": "recovery"}, 201)},
        }.items():
            view = idempotent(required=True, **options)(self._run)  # type: ignore[arg-type]
            self.app.add_url_rule(path, path, view, methods=["POST"])

    def _run(self) -> Any:
        key = request.headers["Idempotency-Key"]
        self.counted[key] += 1
        run = self.counted[key]
        plans = self.plans.get(key)
        self.insert(f"run {run}")
        answer = plans.pop(0)() if plans else None
        return answer or ({"by": f"run {run}"}, 201)

    def insert(self, what: str) -> None:
        """Add an account to the session, without a flush."""
        key = request.headers["Idempotency-Key"]
        self.db.session.add(self.Account(name=f"{key}: {what}"))

    def commit_a_part(self) -> None:
        """Commit an account before the end of the call."""
        self.db.session.expunge_all()
        self.insert("part")
        self.db.session.commit()
        self.insert("rest")

    def effects(self, key: str) -> list[str]:
        """Return what is there of a key."""
        names = (name.split(": ") for name in self.accounts())
        return [what for of, what in names if of == key]

    def ask(self, key: str, path: str, *, same: bool = True) -> TestResponse:
        """Send the request of a key, or another one."""
        return self.post("same" if same else "other", key=key, path=path)

    def of(self, key: str, path: str) -> RecordView | None:
        """Return the record of a key."""
        return self.record(key, route=f"POST {path}")

    @contextmanager
    def hanging(
        self, key: str, path: str, *, commits: bool = False, answer: Any = None
    ) -> Iterator[Future[TestResponse]]:
        """
        Let a call hang in its view for the block; it goes on afterwards.

        Args:
            key: Its key.
            path: Its route.
            commits: It has committed a part before.
            answer: What the view answers in the end, if not that it ran.
        """
        entered, let_go = threading.Event(), threading.Event()

        def hang() -> Any:
            if commits:
                self.commit_a_part()
            entered.set()
            assert let_go.wait(TIMEOUT)
            return answer

        self.plans.setdefault(key, []).append(hang)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(self.ask, key, path)
            assert entered.wait(TIMEOUT)
            try:
                yield call
            finally:
                let_go.set()

    @contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Hold the lock of a record for the block."""
        bound = key.encode() if self.database.name == "mariadb" else key
        query = text(
            "SELECT id FROM idempotency_record WHERE idempotency_key = :key FOR UPDATE"
        )
        with self.app.app_context(), self.db.engine.connect() as connection:
            assert connection.execute(query, {"key": bound}).first() is not None
            yield
            connection.rollback()

    def expire(self, key: str) -> None:
        """Let a key's life end, and mark it."""
        self.outlive(key)
        with self.app.app_context():
            assert self.idempotency.store.expire(limit=100) >= 1
