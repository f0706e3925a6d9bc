"""Services: mutations without HTTP, whose results are JSON-like values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .answers import refuse_without_body
from .calls import GuardedCalls
from .exceptions import REPLAYED, IdempotencyConfigError, ResultNotStorable
from .lifecycle import StoredResponse
from .settings import seconds_of
from .work import CallOptions, Work

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from .lifecycle import IdBuilder, RecordView, Scope
    from .settings import Duration

_SUCCESS = 200


@dataclass(frozen=True, kw_only=True)
class MutationResult:
    """
    What ``run()`` returns, first call and duplicate alike.

    Attributes:
        value: The decoded JSON of the handler's result, also on the first call.
        response_code: The status that the handler gave, 200 by default.
        response_body: The JSON as it is stored.
        replayed: Whether the handler was not run for this call.
        task_id: Task bound to the record.
        outbox_event_id: Event bound to the record.
        record_id: Primary key of the record; ``None`` without a scope.
    """

    value: Any
    response_code: int
    response_body: bytes
    replayed: bool
    task_id: str | None = None
    outbox_event_id: str | None = None
    record_id: UUID | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The marker of a replay, for a view that answers with this result."""
        return {REPLAYED: "true"} if self.replayed else {}


class IdempotencyMutationGuard(GuardedCalls):
    """Runs mutations so that each takes effect once per scope."""

    def run(
        self,
        scope: Scope | None,
        request_hash: str,
        handler: Callable[[], object],
        *,
        task_id_builder: IdBuilder | None = None,
        outbox_event_id_builder: IdBuilder | None = None,
        retry_failed: bool = False,
        ttl: Duration | None = None,
        lease: Duration | None = None,
        wait: Duration | None = None,
        recover: Callable[[RecordView], object] | None = None,
    ) -> MutationResult:
        """
        Run `handler` once for `scope`; answer duplicates with its first result.

        Rows that the handler wrote in the session and the record are committed
        together by this call, or by the guarded call around it.

        Args:
            scope: What the key is bound to; ``None`` runs unrecorded, in the same
                unit of work.
            request_hash: What is asked for, as ``fingerprint(value)`` gives it.
            handler: Returns a JSON-like value, or ``(value, status)``. A status of
                400 or above rolls its rows back. An exception, also one of
                ``abort()``, is a failure.
            task_id_builder: Called with the claim before the handler runs; a
                duplicate gets the same id. Pure: it may be called and dropped.
            outbox_event_id_builder: The same for an event.
            retry_failed: Run a failed operation again if nothing of it stayed.
            ttl: Life of the key, in seconds or as timedelta.
            lease: How long a crash can block the key.
            wait: How long a duplicate waits for a first call in progress. A call
                inside another one, or whose session has changes, does not wait.
            recover: Called with the record, instead of the handler, when an earlier
                call committed a part and left no answer. Returns what the handler
                would have returned, or ``None``: the outcome stays unknown.

        Raises:
            IdempotencyHTTPException: For a duplicate that has no answer to get (in
                progress, conflict, failed before, outcome unknown, not kept), or if
                the store cannot be reached.
            IdempotencyConfigError: If a duration is none, or if a transaction with
                changes would hide the claim.
            NestedCallError: If a call around this one has the same scope.
            ResultNotStorable: If the result has no JSON form; nothing is committed.
        """
        work = Work(
            handler=lambda: _split(handler()),
            encode=self._encode,
            rescue=_reraise,
            releases=lambda result: result[1] in self._config.release_on,
            admit=refuse_without_body,
            recover=_split_unless_none(recover),
        )
        options = CallOptions(
            ttl_seconds=None if ttl is None else _seconds("ttl", ttl),
            lease_seconds=None if lease is None else _seconds("lease", lease),
            wait_seconds=None if wait is None else _seconds("wait", wait, minimum=0),
            retry_failed=retry_failed,
            task_id_builder=task_id_builder,
            outbox_event_id_builder=outbox_event_id_builder,
        )
        answer = self.call(scope, request_hash, work, options)
        body = answer.stored.body or b"null"
        return MutationResult(
            value=self._loads(body),
            response_code=answer.stored.code,
            response_body=body,
            replayed=answer.replayed,
            task_id=answer.task_id,
            outbox_event_id=answer.outbox_event_id,
            record_id=answer.record_id,
        )

    def _encode(self, result: tuple[object, int]) -> StoredResponse:
        value, status = result
        try:
            body = self._dumps(value).encode()
        except (TypeError, ValueError) as error:
            raise ResultNotStorable(
                f"The handler's result has no JSON form: {error}. "
                "Return dicts, lists, str, int, float, bool or None."
            ) from error
        return StoredResponse(code=status, body=body)


def _reraise(error: Exception) -> Any:
    raise error


def _split_unless_none(
    recover: Callable[[RecordView], object] | None,
) -> Callable[[RecordView], tuple[object, int] | None] | None:
    if recover is None:
        return None

    def split(record: RecordView) -> tuple[object, int] | None:
        result = recover(record)
        return None if result is None else _split(result)

    return split


def _split(result: object) -> tuple[object, int]:
    if isinstance(result, tuple) and len(result) == 2:  # noqa: PLR2004 - value, status
        value, status = result
        if type(status) is int and 100 <= status <= 599:  # noqa: PLR2004 - RFC 9110, 15
            return value, status
    return result, _SUCCESS


def _seconds(name: str, value: Duration, *, minimum: float = 1.0) -> float:
    try:
        return seconds_of(value, minimum=minimum)
    except ValueError as error:
        raise IdempotencyConfigError(
            f"{name} is {value!r}; it must be {error}."
        ) from error
