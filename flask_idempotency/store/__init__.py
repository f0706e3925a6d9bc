"""All SQL on records lives in this package."""

from __future__ import annotations

from .claims import Claims
from .outcomes import Outcomes
from .queries import Queries
from .retention import Retention

__all__ = ["IdempotencyStore"]


class IdempotencyStore(Claims, Outcomes, Queries, Retention):
    """
    Keeps the records of one table on one database.

    Each method is one move or one question; together they are the only place that
    writes a record.
    """
