"""Rows of the record table to frozen values."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from flask_idempotency.codec import decode_body, decode_headers, decode_steps
from flask_idempotency.lifecycle import RecordView, Scope, Status, StoredResponse
from flask_idempotency.models import SCOPE_COLUMNS

if TYPE_CHECKING:
    from sqlalchemy import Row


def record_of(row: Row[Any]) -> RecordView:
    """Return the record that a row of ``Statements.look`` shows."""
    return RecordView(
        id=row.id,
        operation_id=row.operation_id,
        scope=Scope(**{name: text_of(getattr(row, name)) for name in SCOPE_COLUMNS}),
        request_hash=text_of(row.request_hash),
        status=Status(row.status),
        owner_token=row.owner_token,
        attempts=row.attempts,
        retries=row.retries,
        response=_response(row),
        task_id=text_of(row.task_id),
        outbox_event_id=text_of(row.outbox_event_id),
        failure=row.failure,
        resolved_by=text_of(row.resolved_by),
        resolved_reason=text_of(row.resolved_reason),
        effects_committed_at=instant_of(row.effects_committed_at),
        all_steps=decode_steps(row.steps),
        open_step=text_of(row.open_step),
        locked_until=instant_of(row.locked_until),
        expires_at=instant_of(row.expires_at),
        created_at=instant_of(row.created_at),
        completed_at=instant_of(row.completed_at),
        lapsed=bool(row.lapsed),
        gone=bool(row.gone),
        lease_seconds_left=max(
            0.0, float(row.lease_seconds_left), float(row.renewed_seconds_left)
        ),
    )


def _response(row: Row[Any]) -> StoredResponse | None:
    if row.response_code is None:
        return None
    return StoredResponse(
        code=row.response_code,
        headers=decode_headers(row.response_headers),
        body=decode_body(row.response_body, row.response_encoding),
    )


def text_of(value: Any) -> Any:
    """Return the text of a byte-exact column."""
    return value.decode() if isinstance(value, bytes) else value


def instant_of(value: datetime | None) -> Any:
    """Return an instant with its time zone, UTC."""
    if value is None:
        return None
    if value.tzinfo is None:
        return value.replace(tzinfo=timezone.utc)
    return value.astimezone(timezone.utc)
