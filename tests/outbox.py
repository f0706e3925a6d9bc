"""Deliveries in the database of a shop, and who publishes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import update

from flask_idempotency.models import delivery_table
from flask_idempotency.outbox import Delivery, Dispatcher
from flask_idempotency.state import get_state
from tests.shop import long_ago

if TYPE_CHECKING:
    from pathlib import Path

    from flask_idempotency.lifecycle import DeliveryState
    from flask_idempotency.outbox import Deliveries, DeliveryView, Report
    from tests.shop import Shop

KIND = "celery"
NAME = "reports.build"


class Books:
    """
    A publisher whose broker is a file, which outlives whoever is killed.

    Args:
        path: Where it writes what was published.
        fails: Task ids that it cannot publish.
    """

    def __init__(self, path: Path, fails: tuple[str, ...] = ()) -> None:
        self._path = path
        self.fails = fails

    def publish(self, delivery: Delivery) -> None:
        """Write the task id down, in one piece."""
        if delivery.task_id in self.fails:
            raise ConnectionError(f"no broker for {delivery.payload!r}")
        with self._path.open("a") as books:
            books.write(f"{delivery.task_id}\n")

    @property
    def published(self) -> list[str]:
        """The task id of each message, in order."""
        return self._path.read_text().split() if self._path.exists() else []


class Outbox:
    """
    What a test does with the deliveries of a shop.

    Args:
        shop: The application.
        path: Where what it publishes is written down.
    """

    def __init__(self, shop: Shop, path: Path) -> None:
        self.shop = shop
        self.books = Books(path)
        with shop.app.app_context():
            get_state().publishers[KIND] = self.books

    @property
    def deliveries(self) -> Deliveries:
        """All SQL; needs an application context."""
        return get_state().deliveries

    def add(
        self,
        task_id: str = "t1",
        *,
        leased: bool = False,
        due_in_seconds: float = 0.0,
        expires_in_seconds: float | None = None,
        **values: Any,
    ) -> Delivery | None:
        """Commit a delivery, by default of a request that died right after."""
        delivery = Delivery(
            **{
                "kind": KIND,
                "name": NAME,
                "task_id": task_id,
                "payload": b"\x00\xff",
                **values,
            }
        )
        with self.shop.app.app_context(), self.shop.db.engine.begin() as connection:
            added = self.deliveries.add(
                delivery,
                connection,
                due_in_seconds=due_in_seconds,
                expires_in_seconds=expires_in_seconds,
            )
        if added and not leased:
            self.move(task_id, "leased_until")
        return delivery if added else None

    def move(self, task_id: str, *instants: str) -> None:
        """Move instants of a delivery into the past."""
        past = long_ago(self.shop.database)
        self.set(task_id, **dict.fromkeys(instants, past))

    def set(self, task_id: str, **values: Any) -> None:
        """Change a delivery past all rules."""
        bound = task_id.encode() if self.shop.database.name == "mariadb" else task_id
        with self.shop.app.app_context(), self.shop.db.engine.begin() as connection:
            table = delivery_table(self.shop.idempotency.Record.__table__)
            changed = connection.execute(
                update(table).where(table.c.task_id == bound).values(**values)
            )
        assert changed.rowcount == 1

    def dispatch(self, limit: int = 100) -> Report:
        """Let a dispatcher publish one batch."""
        with self.shop.app.app_context():
            state = get_state()
            return Dispatcher(state.deliveries, state.publishers).run_once(limit)

    def end(self, task_id: str, state: DeliveryState) -> bool:
        """Report the end of the work."""
        with self.shop.app.app_context():
            return self.deliveries.end(KIND, task_id, state)

    def look(self, task_id: str = "t1") -> DeliveryView:
        """Return a delivery."""
        with self.shop.app.app_context():
            view = self.deliveries.look(KIND, task_id)
        assert view is not None
        return view

    def state(self, task_id: str = "t1") -> str:
        """Return the state of a delivery."""
        return self.look(task_id).state.value
