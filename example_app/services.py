"""
What accounts, files and tasks do, without HTTP.

Each function hands its work to the guard, which runs it once per scope and commits its
rows together with the answer. So it works the same from a view, a command or a worker.
"""

from __future__ import annotations

import hashlib
import uuid
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import update

from flask_idempotency import current_idempotency, fingerprint

from .extensions import db, idempotency
from .models import Account, Job, StoredFile

if TYPE_CHECKING:
    from sqlalchemy import CursorResult

    from flask_idempotency import MutationResult, Scope


def create_account(scope: Scope | None, tenant_id: str, name: str) -> MutationResult:
    """Open an account."""

    def handler() -> tuple[dict[str, object], int]:
        account = Account(tenant_id=tenant_id, name=name)
        db.session.add(account)
        db.session.flush()  # for the id; the guard commits
        return account.as_dict(), 201

    return idempotency.guard.run(scope, fingerprint({"name": name}), handler)


def store_file(
    scope: Scope | None, tenant_id: str, name: str, media_type: str, content: bytes
) -> MutationResult:
    """Keep an upload."""
    sha256 = hashlib.sha256(content).hexdigest()

    def handler() -> tuple[dict[str, object], int]:
        file = StoredFile(
            tenant_id=tenant_id,
            name=name,
            media_type=media_type,
            size=len(content),
            sha256=sha256,
            content=content,
        )
        db.session.add(file)
        db.session.flush()
        return file.as_dict(), 201

    # The digest stands for the content: how it was sent does not matter.
    request = {"name": name, "media_type": media_type, "sha256": sha256}
    return idempotency.guard.run(scope, fingerprint(request), handler)


def complete_file(scope: Scope | None, tenant_id: str, file_id: int) -> MutationResult:
    """Declare an upload complete; only its first completion succeeds."""

    def handler() -> tuple[dict[str, object], int]:
        # One statement, so that two clients with keys of their own cannot both win.
        update_file = (
            update(StoredFile)
            .where(StoredFile.id == file_id, StoredFile.tenant_id == tenant_id)
            .where(StoredFile.status == "uploaded")
            .values(status="complete")
        )
        done = cast("CursorResult[Any]", db.session.execute(update_file)).rowcount
        file = db.session.get(StoredFile, file_id)
        if file is None or file.tenant_id != tenant_id:
            return {"error": "Not Found", "detail": "There is no such file."}, 404
        if not done:
            return {"error": "Conflict", "detail": "The file is complete."}, 409
        return file.as_dict(), 200

    return idempotency.guard.run(scope, fingerprint({"file_id": file_id}), handler)


def submit_report(scope: Scope | None, tenant_id: str, month: str) -> MutationResult:
    """
    Ask for a report.

    The task's id comes from the claim, so that a retry names the same task.
    """

    def handler() -> tuple[dict[str, object], int]:
        # Without a key there is no claim to derive an id from.
        task_id = current_idempotency.task_id or str(uuid.uuid4())
        db.session.add(Job(tenant_id=tenant_id, task_id=task_id, month=month))
        return {"task_id": task_id}, 202

    return idempotency.guard.run(
        scope,
        fingerprint({"month": month}),
        handler,
        task_id_builder=lambda claim: claim.derive_id("report"),
    )
