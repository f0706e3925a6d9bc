"""
What a type checker must see of the public API; checked by mypy, and never run.

Lines with ``type: ignore`` are mistakes that must be reported: mypy is told to
complain where an ignore is not needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import timedelta
    from typing import Any
    from uuid import UUID

    from flask import Flask, Response
    from flask.views import MethodView
    from flask_sqlalchemy import SQLAlchemy
    from typing_extensions import assert_type

    from flask_idempotency import (
        Claim,
        Diagnosis,
        Fingerprint,
        Idempotency,
        IdempotencyMutationGuard,
        IdempotencyRecordMixin,
        IdempotencyStore,
        MutationResult,
        RecordView,
        Scope,
        Verdict,
        current_idempotency,
        fingerprint,
        idempotent,
        not_idempotent,
    )
    from flask_idempotency.exceptions import IdempotencyHTTPException

    def plain(number: int, *, name: str = "") -> tuple[dict[str, Any], int]:
        """Be a plain view."""
        return {"number": number, "name": name}, 201

    async def coroutine(number: int) -> str:
        """Be an async view."""
        return str(number)

    def check_views() -> None:
        """Check that a guarded view keeps its arguments and answers a Response."""
        assert_type(idempotent(plain)(1, name="x"), Response)
        assert_type(idempotent(required=True)(plain)(1), Response)
        assert_type(idempotent(coroutine)(1), Response)
        assert_type(idempotent(lease=5)(coroutine)(1), Response)
        idempotent(plain)("1")  # type: ignore[arg-type]
        idempotent(plain)(1, other=2)  # type: ignore[call-arg]

    def check_options() -> None:
        """Check the types of the options."""
        idempotent(
            required=True,
            key=lambda: None,
            route="accounts.create",
            ttl=timedelta(days=1),
            lease=1.5,
            max_runtime=60,
            retry_failed=True,
            anonymous=False,
            claim=True,
            tenant_id="t",
            user_id=lambda: None,
            fingerprint=Fingerprint(ignore=("/sent_at",), headers=("X-Version",)),
            wait=2,
            release_on={503},
            store_body=False,
            rebuild=lambda record: {"route": record.scope.route},
            authorize_replay=lambda record: record.task_id is not None,
            recover=lambda record: None if record.gone else ("found", 201),
            fail_open=True,
            mode="observe",
        )
        idempotent(fingerprint=None, release_on=lambda response: response.is_json)
        idempotent(fingerprint=lambda: {"amount": 1}, claim=False)
        idempotent(mode="off")  # type: ignore[call-overload]
        idempotent(release_on=503)  # type: ignore[call-overload]
        idempotent(authorize_replay=lambda: True)  # type: ignore[arg-type, misc]
        idempotent(required="yes")  # type: ignore[call-overload]
        idempotent(ttl="1h")  # type: ignore[call-overload]
        idempotent(key=len)  # type: ignore[arg-type]
        idempotent(unknown=1)  # type: ignore[call-overload]
        idempotent("POST /x")  # type: ignore[call-overload]

    class View(MethodView):
        """Have guarded methods, bare and with options."""

        @idempotent
        def post(self, number: int) -> str:
            """Create something."""
            return str(number)

        @idempotent(required=True)
        def put(self, number: int) -> str:
            """Replace something."""
            return str(number)

        @idempotent
        async def patch(self, number: int) -> str:
            """Change something."""
            return str(number)

        @not_idempotent("deleting twice is deleting once")
        def delete(self, number: int) -> str:
            """Delete something."""
            return str(number)

    def check_methods(view: View) -> None:
        """Check that guarded methods are methods."""
        assert_type(view.post(1), Response)
        assert_type(view.put(1), Response)
        assert_type(view.patch(1), Response)
        assert_type(view.delete(1), str)

    def check_marked_view() -> None:
        """Check that a view without a guard keeps its type."""
        assert_type(not_idempotent("why")(plain)(1), tuple[dict[str, Any], int])
        not_idempotent(1)  # type: ignore[arg-type]

    def check_extension(app: Flask, db: SQLAlchemy) -> None:
        """Check what the extension offers."""
        extension = Idempotency(app, db)
        Idempotency(db=db).init_app(app)
        assert_type(extension.guard, IdempotencyMutationGuard)
        assert_type(extension.store, IdempotencyStore)
        assert_type(extension.Record, type[IdempotencyRecordMixin])
        assert_type(extension.scope("accounts.create"), Scope | None)
        Idempotency(app, db, IdempotencyRecordMixin)  # type: ignore[call-arg]

        @extension.user_id_loader
        def caller() -> str | None:
            return None

        assert_type(caller(), str | None)
        extension.user_id_loader(lambda: 7)  # type: ignore[type-var]

    def check_guard(guard: IdempotencyMutationGuard, scope: Scope) -> None:
        """Check what a service gives and gets."""

        def task_id(claim: Claim) -> str:
            assert_type(claim.attempt, int)
            return claim.derive_id("report")

        result = guard.run(
            scope,
            fingerprint({"month": "2030-01"}),
            lambda: {"id": 1},
            task_id_builder=task_id,
            ttl=timedelta(days=1),
        )
        assert_type(result, MutationResult)
        assert_type(result.response_code, int)
        assert_type(result.response_body, bytes)
        assert_type(result.replayed, bool)
        assert_type(result.task_id, str | None)
        assert_type(result.record_id, UUID | None)
        guard.run(None, "v1:x", lambda: None)
        guard.run("k", "v1:x", lambda: None)  # type: ignore[arg-type]

    def check_store(store: IdempotencyStore, scope: Scope) -> None:
        """Check what an operator's code gets."""
        diagnosis = store.diagnose(scope)
        assert_type(diagnosis, Diagnosis)
        assert_type(diagnosis.diagnosis, Verdict)
        assert_type(diagnosis.record, RecordView | None)
        assert_type(store.expire(limit=10), int)
        assert_type(store.purge(limit=10, tenant_id="t"), int)

    def check_current_call() -> None:
        """Check what a view sees of its own call."""
        assert_type(current_idempotency.active, bool)
        assert_type(current_idempotency.scope, Scope | None)
        assert_type(current_idempotency.attempt, int)
        assert_type(current_idempotency.derive_key("charge"), str)
        assert_type(current_idempotency.run_step("charge", str, repeatable=True), Any)
        current_idempotency.run_step("charge", str, definite=(ValueError, KeyError))
        current_idempotency.run_step("charge", str, definite=ValueError)  # type: ignore[arg-type]
        current_idempotency.active = True  # type: ignore[misc]

    def check_values(scope: Scope, error: IdempotencyHTTPException) -> None:
        """Check that values are frozen and errors have their facts."""
        Scope("t", "u", "r", "k")  # type: ignore[call-arg]
        scope.user_id = "u2"  # type: ignore[misc]
        assert_type(error.error_code, str)
        assert_type(error.retryable, bool)
        assert_type(error.data, dict[str, Any])
