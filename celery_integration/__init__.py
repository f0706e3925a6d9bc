"""
Celery for applications with ``flask_idempotency``: tasks that take effect once.

Celery itself is imported at the first use of what needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import OutcomeUnknown, RetryAfterEffects

if TYPE_CHECKING:
    from .app import findings, init_celery
    from .task import IdempotentTask

__all__ = [
    "IdempotentTask",
    "OutcomeUnknown",
    "RetryAfterEffects",
    "findings",
    "init_celery",
]

_MODULES = {"IdempotentTask": ".task", "findings": ".app", "init_celery": ".app"}


def __getattr__(name: str) -> Any:
    """Import what needs Celery (PEP 562), or say how to install it."""
    if name not in _MODULES:
        message = f"module '{__name__}' has no attribute '{name}'"
        raise AttributeError(message)
    try:
        return getattr(import_module(_MODULES[name], __name__), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in {"celery", "kombu"}:
            raise
        raise ImportError(
            f"'{__name__}.{name}' needs Celery, which is not installed: "
            "pip install 'flask-idempotency[celery]'"
        ) from error
