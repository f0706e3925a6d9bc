"""The running calls: which one is current, in which session, and how it ended."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, cast
from uuid import UUID, uuid4

from sqlalchemy.exc import SQLAlchemyError

from .lifecycle import Failure, Retried, StoredResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from .atomic import AtomicTransaction
    from .codec import ResultCodec
    from .lifecycle import Claim, Step
    from .store import IdempotencyStore

log = logging.getLogger(__name__)

FORGOTTEN = (
    "The handler of an inner call has rolled back the session's transaction, and with it "
    "its own claim, which had to be a part of that: nothing would be known of what it "
    "does. Undo in begin_nested(), or make the inner call before the session writes."
)


@dataclass(frozen=True)
class Release:
    """
    The ending of a call that leaves no record.

    Attributes:
        otherwise: What is recorded if a part of the call is durable already.
    """

    otherwise: StoredResponse | Failure


@dataclass(frozen=True)
class HandedBack:
    """
    The ending of a call that says nothing: the next request makes it again.

    Attributes:
        attempts: How many do not count as such.
    """

    attempts: int = 0


#: What is written as the outcome of a call.
Ending = StoredResponse | Failure | Release | Retried | HandedBack


class Effect(Enum):
    """What has become of a call's effect, by the commit that is to complete it."""

    #: Not committed, or rolled back.
    OPEN = "open"
    #: Committed without the call's ending, which is still to be written.
    COMMITTED = "committed"
    #: Committed with the call's ending.
    SETTLED = "settled"


@dataclass(eq=False)
class Hook:
    """
    Something to do when the transaction in which it was asked for is committed.

    Attributes:
        run: What to do.
        due: That transaction was really committed.
    """

    run: Callable[[], object]
    due: bool = False


@dataclass(kw_only=True, eq=False)
class Call:
    """
    One guarded call while it runs.

    Attributes:
        claim: ``None`` for a call that is not recorded.
        session: The session whose commit completes the call.
        find_session: Gives the session of the current context.
        results: How the results of steps are kept.
        parent: The call around it.
        transaction: The one of an atomic call, in which commits are savepoints.
        lease_seconds: How long its claim lasts, and each renewal of it.
        max_runtime_seconds: After this time it is not renewed any more.
        recovering: It finds out how an earlier call ended, and runs no handler.
        joined: The claim is part of the session's transaction, and ends with it.
        forgotten: Its handler has undone that transaction, and the claim with it.
        ending: What the commit of the transaction that holds its effect writes.
        effect: What has become of that effect.
        completed: Of an outermost call: the recorded calls that ended inside it.
        hooks: Of an outermost call: what is to be done after its commits.
        partly_committed: Something of it became durable before that commit.
        lost: The record is no longer ours; nothing of this call may be committed.
        elsewhere: It writes on another engine, so that no commit can carry its ending.
        step: Name of the step that runs; there is one at a time.
        unrecorded_steps: Without a claim, which has its own: the steps so far.
        answered_steps: Names of the steps whose result this call has got.
    """

    claim: Claim | None
    store: IdempotencyStore
    session: Session
    find_session: Callable[[], Session]
    results: ResultCodec
    parent: Call | None = None
    transaction: AtomicTransaction | None = None
    lease_seconds: float = 0.0
    max_runtime_seconds: float = 0.0
    recovering: bool = False
    joined: bool = False
    forgotten: bool = False
    ending: Ending | None = None
    effect: Effect = Effect.OPEN
    completed: list[Call] = field(default_factory=list)
    hooks: list[Hook] = field(default_factory=list)
    partly_committed: bool = False
    lost: bool = False
    elsewhere: bool = False
    step: str | None = None
    unrecorded_steps: tuple[Step, ...] = ()
    answered_steps: set[str] = field(default_factory=set)

    @cached_property
    def loose_id(self) -> UUID:
        """Stands for the operation where there is no claim."""
        return uuid4()

    @property
    def settled(self) -> bool:
        """Whether its ending is committed, with its effect."""
        return self.effect is Effect.SETTLED

    @property
    def host(self) -> Call | None:
        """The outermost call around this one in the same session: its commit is ours."""
        around = self.parent.chain() if self.parent else iter(())
        hosts = [call for call in around if call.session is self.session]
        return hosts[-1] if hosts else None

    @property
    def atomic(self) -> AtomicTransaction | None:
        """The transaction that this call is a part of, its own or that of one around."""
        return next((c.transaction for c in self.chain() if c.transaction), None)

    def abandon(self) -> None:
        """Write nothing more for this call: what became of its commit is not known."""
        self.claim = None
        self.completed.clear()

    def chain(self) -> Iterator[Call]:
        """Yield this call and those around it, from the inside out."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.parent


current_call: ContextVar[Call | None] = ContextVar("flask_idempotency", default=None)


@contextmanager
def running(call: Call) -> Iterator[None]:
    """Make `call` the current one, so that commits inside pass its fence."""
    token = current_call.set(call)
    try:
        yield
    finally:
        current_call.reset(token)


def _disown() -> None:
    """Leave the calls of the parent to the parent, in a process that was forked."""
    call = current_call.get()
    if call is not None:
        for inherited in call.chain():
            inherited.lost = True
        current_call.set(None)


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_disown)


def connection_of(call: Call) -> Connection:
    """Return the session's connection to the engine of the records."""
    if call.transaction is not None and call.transaction.has_begun:
        return cast("Connection", call.transaction.connection)
    return call.session.connection(bind_arguments=call.store.bind_arguments)


def can_commit(call: Call) -> bool:
    """
    Tell whether a commit of the session would make its work durable.

    Not after a flush error that the view caught, in a transaction that the server
    has aborted, or when the connection is gone.
    """
    if not call.session.is_active:
        return False
    if not call.session.in_transaction():
        return True
    try:
        connection = connection_of(call)
        # A view that committed this very connection has left the session without one.
        gone = connection.invalidated or not connection.in_transaction()
        return not (gone or call.store.dialect.is_aborted(connection))
    except SQLAlchemyError:
        return False


def current_transaction() -> AtomicTransaction | None:
    """Return the transaction of the running call, if it is atomic."""
    call = current_call.get()
    return call.atomic if call else None


def undo(call: Call) -> None:
    """Roll back what is not durable of an outermost call."""
    if call.transaction is not None:
        call.transaction.roll_back()
    roll_back(call.session)


def roll_back(session: Session) -> None:
    """Roll back, also when the connection is gone and its transaction with it."""
    try:
        session.rollback()
    except SQLAlchemyError:
        log.warning("A connection was lost before its rollback.", exc_info=True)
        session.invalidate()


def write_ending(
    store: IdempotencyStore,
    claim: Claim,
    ending: Ending,
    connection: Connection | None = None,
) -> bool:
    """
    Write how a call ended.

    Args:
        store: Keeps its record.
        claim: Its claim.
        ending: The outcome.
        connection: The transaction that carries it; without one it is written on its
            own.

    Returns:
        Whether the record still belonged to the claim.
    """
    if isinstance(ending, Release):
        if store.release(claim, connection=connection):
            return True
        ending = ending.otherwise
    if isinstance(ending, Retried):
        if store.postpone(claim, ending, connection=connection):
            return True
        ending = ending.otherwise
    if isinstance(ending, HandedBack):
        return store.hand_back(claim, attempts=ending.attempts, connection=connection)
    if isinstance(ending, Failure):
        return store.mark_failed(claim, ending, connection=connection)
    return store.mark_succeeded(claim, ending, connection=connection)
