"""
Errors of this library, their codes and HTTP statuses.

::

    IdempotencyError
    ├── IdempotencyConfigError          the application is set up wrongly
    ├── LeaseLost                       another owner took the operation over
    ├── NestedCallError                 a call or step where none may be
    ├── ResultNotStorable               a result has no JSON form, or a long one
    └── IdempotencyHTTPException        answered to the client as a Problem
        ├── IdempotencyKeyMissing               400
        ├── IdempotencyKeyInvalid               400
        ├── IdempotencyCallerUnknown            403
        ├── IdempotencyReplayForbidden          403
        ├── IdempotencyInProgress               409, retryable
        ├── IdempotencyOutcomeUnknown           409
        ├── IdempotencyResponseUnavailable      409
        ├── IdempotencyKeyConflict              422
        ├── IdempotencyPreviousFailure          500
        ├── IdempotencyStoreUnavailable         503, retryable
        └── IdempotencyLeaseLost                503, retryable
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from werkzeug.exceptions import HTTPException

if TYPE_CHECKING:
    from datetime import datetime


#: Response header that marks a replay.
REPLAYED = "Idempotent-Replayed"


class IdempotencyError(Exception):
    """Base class of every error of this library."""


class IdempotencyConfigError(IdempotencyError):
    """The application, its configuration or a declaration is wrong."""


class LeaseLost(IdempotencyError):  # noqa: N818 - the word that users search for
    """
    The record no longer belongs to this call; its transaction was rolled back.

    Raised inside the call, by the commit that would have doubled an effect.
    The guard answers the client with the result of the owner that took over.
    """


class NestedCallError(IdempotencyError):
    """A guarded call or step stands inside another one that does not allow it."""


class ResultNotStorable(IdempotencyError):  # noqa: N818 - a state, as ``LeaseLost``
    """A result has no JSON form or is too large, so no duplicate could get it."""


class IdempotencyHTTPException(IdempotencyError, HTTPException):  # noqa: N818
    """
    Base class of the errors that are answered to the client.

    Args:
        description: The text for the client; the class attribute by default.
        task_id: Task bound to the record, where known.
        outbox_event_id: Event bound to the record, where known.
        expires_at: When the key becomes reusable, where known.
        retry_after_seconds: Whole seconds for the ``Retry-After`` header.
        replayed: Whether this error repeats an outcome that was stored before.
        safe_new_key: Whether it is certain that nothing of the earlier call took
            effect, so that the operation may be sent again under a new key.
    """

    error_code: ClassVar[str]
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        description: str | None = None,
        *,
        task_id: str | None = None,
        outbox_event_id: str | None = None,
        expires_at: datetime | None = None,
        retry_after_seconds: int | None = None,
        replayed: bool = False,
        safe_new_key: bool = False,
    ) -> None:
        HTTPException.__init__(self, description)
        self.task_id = task_id
        self.outbox_event_id = outbox_event_id
        self.expires_at = expires_at
        self.retry_after_seconds = retry_after_seconds
        self.replayed = replayed
        self.safe_new_key = safe_new_key

    @property
    def data(self) -> dict[str, Any]:
        """The members of the Problem (RFC 9457, section 3) without its type."""
        members: dict[str, Any] = {
            "title": self.name,
            "status": self.code,
            "detail": self.description,
            "code": self.error_code,
            "retryable": self.retryable,
            "task_id": self.task_id,
            "outbox_event_id": self.outbox_event_id,
            "expires_at": self.expires_at.isoformat() if self.expires_at else None,
            "safe_new_key": self.safe_new_key or None,
        }
        return {name: value for name, value in members.items() if value is not None}

    def get_headers(self, *args: Any, **kwargs: Any) -> list[tuple[str, str]]:
        """Add ``Retry-After`` and the replay marker, whoever renders the error."""
        headers = list(super().get_headers(*args, **kwargs))
        headers.append(("Cache-Control", "no-store"))
        if self.retry_after_seconds is not None:
            headers.append(("Retry-After", str(self.retry_after_seconds)))
        if self.replayed:
            headers.append((REPLAYED, "true"))
        return headers


class IdempotencyKeyMissing(IdempotencyHTTPException):
    """The route requires a key and the request has none."""

    code = 400
    error_code = "IDEMPOTENCY_KEY_MISSING"
    description = "This operation needs an idempotency key."


class IdempotencyKeyInvalid(IdempotencyHTTPException):
    """The key is empty, malformed, too long, or sent more than once."""

    code = 400
    error_code = "IDEMPOTENCY_KEY_INVALID"
    description = "The idempotency key is malformed."


class IdempotencyCallerUnknown(IdempotencyHTTPException):
    """No tenant or user is known, so that keys of callers could meet."""

    code = 403
    error_code = "IDEMPOTENCY_CALLER_UNKNOWN"
    description = (
        "The caller could not be identified, so its idempotency key cannot be kept "
        "apart from those of others. Authenticate and send the request again."
    )


class IdempotencyReplayForbidden(IdempotencyHTTPException):
    """The route's ``authorize_replay`` refused to give the stored answer out."""

    code = 403
    error_code = "IDEMPOTENCY_REPLAY_FORBIDDEN"
    description = (
        "The request with this idempotency key was answered before, and this caller "
        "may not see that answer any more. It is not run again."
    )


class IdempotencyInProgress(IdempotencyHTTPException):
    """Another call with the key is at work."""

    code = 409
    error_code = "IDEMPOTENCY_IN_PROGRESS"
    retryable = True
    description = (
        "A request with this idempotency key is still being processed. "
        "Send the same request again later."
    )


class IdempotencyOutcomeUnknown(IdempotencyHTTPException):
    """A call stopped after a part had, or may have, taken effect; it left no answer."""

    code = 409
    error_code = "IDEMPOTENCY_OUTCOME_UNKNOWN"
    description = (
        "An earlier request with this idempotency key was interrupted after a part of "
        "it had taken effect, or may have. It is not run again; ask the operator of "
        "the service."
    )


class IdempotencyResponseUnavailable(IdempotencyHTTPException):
    """The call was answered, but its answer was too large or too secret to keep."""

    code = 409
    error_code = "IDEMPOTENCY_RESPONSE_UNAVAILABLE"
    description = (
        "The request with this idempotency key was answered, but the answer was not "
        "kept. It is not run again; look its result up."
    )


class IdempotencyKeyConflict(IdempotencyHTTPException):
    """The key was used for another request."""

    code = 422
    error_code = "IDEMPOTENCY_KEY_CONFLICT"
    description = (
        "This idempotency key was used for a different request. "
        "Send the first request unchanged, or a new key."
    )


class IdempotencyPreviousFailure(IdempotencyHTTPException):
    """The call with the key raised, and a retry was not opted in to."""

    code = 500
    error_code = "IDEMPOTENCY_PREVIOUS_FAILURE"
    description = (
        "The request with this idempotency key failed, and this operation is not "
        "run again under the same key."
    )


class IdempotencyStoreUnavailable(IdempotencyHTTPException):
    """
    The database cannot claim a key or record an outcome now.

    Args:
        reason: One sentence for the operator; never sent to the client.
    """

    code = 503
    error_code = "IDEMPOTENCY_STORE_UNAVAILABLE"
    retryable = True
    description = (
        "The idempotency store cannot be reached, so the outcome of this request is "
        "not recorded. Send the same request again later."
    )

    def __init__(self, reason: str) -> None:
        super().__init__(retry_after_seconds=1)
        self.reason = reason


class IdempotencyLeaseLost(IdempotencyHTTPException):
    """The owner's record is gone; nothing was committed."""

    code = 503
    error_code = "IDEMPOTENCY_LEASE_LOST"
    retryable = True
    description = (
        "The record of this request vanished while it ran, so nothing of it was "
        "committed. Send the same request again."
    )
