"""All SQL on records lives in this package."""

from .store import IdempotencyStore

__all__ = ["IdempotencyStore"]
