"""
Accounts, files and tasks over HTTP.

Every mutating route says ``@idempotent``. These ones say ``claim=False``: the route
asks for the key, and the service claims it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flask import Blueprint, Response, abort, g, request
from sqlalchemy import select

from flask_idempotency import idempotent

from . import services
from .auth import login_required
from .extensions import db, idempotency
from .models import TEXT_LENGTH, Account, Job

if TYPE_CHECKING:
    from uuid import UUID

    from flask.typing import ResponseReturnValue

    from flask_idempotency import MutationResult

bp = Blueprint("api", __name__)


@bp.post("/accounts")
@login_required
@idempotent(required=True, claim=False)
def create_account() -> ResponseReturnValue:
    """Open an account: ``{"name": "Savings"}``."""
    name = checked_text("name", body_field("name"))
    scope = idempotency.scope("accounts.create")
    return answer(services.create_account(scope, g.caller.tenant_id, name))


@bp.get("/accounts")
@login_required
def list_accounts() -> ResponseReturnValue:
    """List the tenant's accounts."""
    rows = db.session.scalars(
        select(Account)
        .where(Account.tenant_id == g.caller.tenant_id)
        .order_by(Account.id)
    )
    return {"accounts": [account.as_dict() for account in rows]}


@bp.get("/accounts/<row_id:account_id>")
@login_required
def show_account(account_id: int) -> ResponseReturnValue:
    """Show one account."""
    account = db.session.get(Account, account_id)
    if account is None or account.tenant_id != g.caller.tenant_id:
        abort(404, "There is no such account.")
    return account.as_dict()


@bp.post("/files")
@login_required
@idempotent(required=True, claim=False)
def upload_file() -> ResponseReturnValue:
    """Keep the upload in the form field ``file``."""
    upload = request.files.get("file")
    if upload is None:
        abort(400, "Send the file in the form field 'file'.")
    name = checked_text("file name", upload.filename)
    media_type = checked_text("media type", upload.mimetype)
    scope = idempotency.scope("files.store")
    return answer(
        services.store_file(
            scope, g.caller.tenant_id, name, media_type, upload.stream.read()
        )
    )


@bp.post("/files/<row_id:file_id>/complete")
@login_required
@idempotent(required=True, claim=False)
def complete_file(file_id: int) -> ResponseReturnValue:
    """Declare an upload complete."""
    scope = idempotency.scope("files.complete")
    return answer(services.complete_file(scope, g.caller.tenant_id, file_id))


@bp.post("/tasks")
@login_required
@idempotent(required=True, claim=False)
def submit_task() -> ResponseReturnValue:
    """Ask for a report: ``{"month": "2030-01"}``."""
    month = checked_text("month", body_field("month"))
    scope = idempotency.scope("tasks.submit")
    return answer(services.submit_report(scope, g.caller.tenant_id, month))


@bp.get("/tasks/<uuid:task_id>")
@login_required
def show_task(task_id: UUID) -> ResponseReturnValue:
    """Show one task."""
    job = db.session.scalar(
        select(Job)
        .where(Job.task_id == str(task_id))
        .where(Job.tenant_id == g.caller.tenant_id)
    )
    if job is None:
        abort(404, "There is no such task.")
    return job.as_dict()


def answer(result: MutationResult) -> Response:
    """Turn a service's result into the answer, first call and retry alike."""
    return Response(
        result.response_body,
        result.response_code,
        result.headers,
        mimetype="application/json",
    )


def body_field(name: str) -> Any:
    """Return a member of the JSON body, ``None`` where it is missing."""
    try:
        body = request.get_json()
    except RecursionError:  # which Flask takes for a failure of the application
        abort(400, "The body is nested too deeply.")
    return body.get(name) if isinstance(body, dict) else None


def checked_text(name: str, value: object) -> str:
    """Return a text that every database can keep, or answer 400."""
    # What cannot be printed is NUL, other control characters, and half surrogates.
    if not isinstance(value, str) or not value or not value.isprintable():
        abort(400, f"The {name} must be a printable text.")
    if len(value) > TEXT_LENGTH:
        abort(400, f"The {name} must have at most {TEXT_LENGTH} characters.")
    return value
