"""A database whose time passes when a test says so."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import DateTime, func, literal, literal_column, update

from flask_idempotency.models import lease_table

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement

    from tests.shop import Shop


def pass_time(shop: Shop, seconds: float) -> None:
    """
    Let time pass, as far as records and leases can tell.

    The instants that are kept move back, since the database's own clock does not move
    for a test; every comparison then comes out as it would after a wait.
    """
    records = shop.idempotency.Record.__table__
    with shop.app.app_context(), shop.db.engine.begin() as connection:
        for table in (records, lease_table(records)):
            instants = [c for c in table.c if isinstance(c.type, DateTime)]
            assert instants
            moved = {c.name: _earlier(shop.database.name, c, seconds) for c in instants}
            connection.execute(update(table).values(**moved))


def _earlier(database: str, instant: Any, seconds: float) -> ColumnElement[Any]:
    if database == "sqlite":
        moved = f"-{seconds:.3f} seconds"
        return func.strftime("%Y-%m-%d %H:%M:%f000", instant, moved)
    if database == "mariadb":
        unit: ColumnElement[Any] = literal_column("SECOND")
        return func.timestampadd(unit, -int(seconds), instant)
    earlier: ColumnElement[Any] = instant - literal(timedelta(seconds=seconds))
    return earlier
