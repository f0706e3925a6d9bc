"""Once-per-key effects for Flask: claim, rows and answer in one transaction."""

from __future__ import annotations

from . import exceptions, signals
from .current import current_idempotency
from .decorator import idempotent, not_idempotent
from .exceptions import IdempotencyConfigError, IdempotencyError
from .extension import Idempotency
from .fingerprint import Fingerprint, fingerprint
from .guard import IdempotencyMutationGuard, MutationResult
from .lifecycle import (
    Claim,
    Decision,
    Diagnosis,
    Failure,
    RecordView,
    Resolution,
    Scope,
    Status,
    StoredResponse,
    Verdict,
)
from .models import IdempotencyRecordMixin, record_table_args
from .store import IdempotencyStore

__all__ = [
    "Claim",
    "Decision",
    "Diagnosis",
    "Failure",
    "Fingerprint",
    "Idempotency",
    "IdempotencyConfigError",
    "IdempotencyError",
    "IdempotencyMutationGuard",
    "IdempotencyRecordMixin",
    "IdempotencyStore",
    "MutationResult",
    "RecordView",
    "Resolution",
    "Scope",
    "Status",
    "StoredResponse",
    "Verdict",
    "current_idempotency",
    "exceptions",
    "fingerprint",
    "idempotent",
    "not_idempotent",
    "record_table_args",
    "signals",
]
