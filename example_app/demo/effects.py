"""What the story left behind: rows in the database, charges at the provider."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import Select, create_engine, func, select
from sqlalchemy.pool import NullPool

from example_app.extensions import idempotency
from example_app.httpclient import send
from example_app.models import Account, Job, Payment, ProviderEvent, StoredFile

if TYPE_CHECKING:
    from .report import Report

#: What each chapter may have left, whatever was retried.
EXPECTED = {
    "accounts": 2,
    "accounts of the broken handler": 0,
    "files": 1,
    "files, complete": 1,
    "jobs": 1,
    "payments": 1,
    "payments, settled": 1,
    "provider events": 1,
    "idempotency records": 8,
    "calls at the provider": 2,
    "charges at the provider": 1,
}


class Effects:
    """
    Counts before the story, and again after it.

    Args:
        database_uri: The application's database, which may hold rows already.
        provider: The provider's address.
    """

    def __init__(self, database_uri: str, provider: str) -> None:
        self._database_uri = database_uri
        self._provider = provider
        self._before = self._count()

    def compare(self, report: Report) -> None:
        """Print and check what has come to be."""
        report.chapter("What there is of it all")
        after = self._count()
        for name, wanted in EXPECTED.items():
            count = after[name] - self._before[name]
            report.line(f"     {name:<31} {count:>3}")
            report.expect(f"the number of {name}", count, wanted)

    def _count(self) -> dict[str, int]:
        engine = create_engine(self._database_uri, poolclass=NullPool)
        with engine.connect() as connection:
            counts = {
                name: connection.execute(statement).scalar_one()
                for name, statement in _statements().items()
            }
        log = send("GET", f"{self._provider}/log").json()
        counts["calls at the provider"] = len(log["requests"])
        counts["charges at the provider"] = len(log["charges"])
        return counts


def _statements() -> dict[str, Select[Any]]:
    return {
        "accounts": _rows(Account),
        "accounts of the broken handler": _rows(Account).where(
            Account.name == "Broken"
        ),
        "files": _rows(StoredFile),
        "files, complete": _rows(StoredFile).where(StoredFile.status == "complete"),
        "jobs": _rows(Job),
        "payments": _rows(Payment),
        "payments, settled": _rows(Payment).where(Payment.status == "settled"),
        "provider events": _rows(ProviderEvent),
        "idempotency records": _rows(idempotency.Record),
    }


def _rows(model: type[Any]) -> Select[Any]:
    return select(func.count()).select_from(model)
