"""What a guarded call is asked to do: its work, and how it is claimed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from .lifecycle import Failure, StoredResponse
from .unit_of_work import Release

if TYPE_CHECKING:
    from collections.abc import Callable

    from .answers import Answer
    from .lifecycle import IdBuilder, RecordView
    from .unit_of_work import Ending

R = TypeVar("R")

CLIENT_ERROR, SERVER_ERROR = 400, 500


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """
    How one call is claimed; see ``IdempotencyMutationGuard.run``.

    ``None`` is the application's setting.
    """

    ttl_seconds: float | None = None
    lease_seconds: float | None = None
    #: ``None`` is ten leases.
    max_runtime_seconds: float | None = None
    wait_seconds: float | None = None
    mode: str | None = None
    retry_failed: bool = False
    #: Run unrecorded while the store cannot be reached.
    fail_open: bool = False
    #: ``None`` is the application's setting; an inner call is part of the outer one.
    atomic: bool | None = None
    task_id_builder: IdBuilder | None = None
    outbox_event_id_builder: IdBuilder | None = None


@dataclass(frozen=True, kw_only=True)
class Work(Generic[R]):
    """
    How a call is run and its result stored.

    Attributes:
        handler: The effect; called once at most.
        encode: Result to stored answer.
        rescue: Exception to result, where the application answers it; raises it
            again otherwise.
        releases: Whether a result of 400 or above says that nothing was done, so
            that the key is freed if that is so.
        admit: Raises what a duplicate gets that may not, or cannot, have the stored
            answer.
        recover: Finds the result of a call whose outcome is unknown, or ``None``.
        leaves: What is recorded of an exception that is no failure, else ``None``.
    """

    handler: Callable[[], R]
    encode: Callable[[R], StoredResponse]
    rescue: Callable[[Exception], R]
    releases: Callable[[R], bool]
    admit: Callable[[Answer[R]], None]
    recover: Callable[[RecordView], R | None] | None = None
    leaves: Callable[[BaseException], Ending | None] | None = None

    def ending(self, stored: StoredResponse, result: R) -> Ending:
        """Return what is recorded of a result."""
        ending: StoredResponse | Failure = stored
        if stored.code >= SERVER_ERROR:
            ending = Failure(reason=f"answer {stored.code}", response=stored)
        if stored.code >= CLIENT_ERROR and self.releases(result):
            return Release(ending)
        return ending


def failure_of(error: BaseException) -> Failure:
    """Return what is recorded of an exception: the name of its class, no value."""
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    return Failure(reason=name.encode("ascii", "backslashreplace").decode())
