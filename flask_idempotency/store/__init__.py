"""All SQL on records lives in this package."""

from __future__ import annotations

from .leases import Leases
from .outcomes import Outcomes
from .retention import Retention
from .settlement import Settlement

__all__ = ["IdempotencyStore"]


class IdempotencyStore(Settlement, Outcomes, Leases, Retention):
    """
    Keeps the records of one table on one database.

    Each method is one move or one question; together they are the only place that
    writes a record.
    """
