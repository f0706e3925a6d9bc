"""The one object that an application has in ``app.extensions["idempotency"]``."""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from flask import current_app
from sqlalchemy import event

from .atomic import join_atomic_calls
from .exceptions import IdempotencyConfigError
from .explain import short_lease
from .fence import attach_fence
from .guard import IdempotencyMutationGuard
from .intents import Intents, OtherEngine
from .outbox.deliveries import Deliveries
from .store import IdempotencyStore
from .store.connections import (
    Connections,
    OwnPool,
    SharedConnection,
    shares_one_connection,
)
from .store.dialects import dialect_for, dialect_of
from .unit_of_work import current_call, current_transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flask import Flask
    from flask_sqlalchemy import SQLAlchemy
    from sqlalchemy import Engine
    from sqlalchemy.orm import Session

    from .config import Config, RouteOptions
    from .models import IdempotencyRecordMixin
    from .outbox.dispatcher import Publisher
    from .store.dialects import Dialect

log = logging.getLogger(__name__)

EXTENSION_KEY = "idempotency"


@dataclass
class Loaders:
    """Functions that name the caller of the current request."""

    tenant_id: Callable[[], str | None] | None = None
    user_id: Callable[[], str | None] | None = None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """
    One thing to know of a set-up.

    Attributes:
        code: Its name, for scripts.
        message: What it is and what to do.
        is_problem: Something is to be done; otherwise it is only good to know.
    """

    code: str
    message: str
    is_problem: bool = False


@dataclass(kw_only=True)
class IdempotencyState:
    """
    What one application needs; store, guard and deliveries are made at first use.

    Attributes:
        app: The application.
        db: Its Flask-SQLAlchemy object.
        record_class: Model of the record on `db`.
        config: The application's settings.
        loaders: Who is calling.
        noted: Endpoints of which the log has said that they ignore keys.
        publishers: Who publishes the deliveries of each kind.
        checks: What ``doctor`` asks besides, of packages that build on this one.
    """

    app: Flask
    db: SQLAlchemy
    record_class: type[IdempotencyRecordMixin]
    config: Config
    loaders: Loaders
    noted: set[str] = field(default_factory=set)
    publishers: dict[str, Publisher] = field(default_factory=dict)
    checks: list[Callable[[], Iterable[Finding]]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _guard: IdempotencyMutationGuard | None = None
    _store: IdempotencyStore | None = None
    _deliveries: Deliveries | None = None
    _routes: dict[int, tuple[RouteOptions, RouteOptions]] = field(default_factory=dict)

    @property
    def store(self) -> IdempotencyStore:
        """The store of the application; needs an application context."""
        self._make()
        return cast("IdempotencyStore", self._store)

    @property
    def guard(self) -> IdempotencyMutationGuard:
        """The guard of the application; needs an application context."""
        self._make()
        return cast("IdempotencyMutationGuard", self._guard)

    @property
    def deliveries(self) -> Deliveries:
        """The messages to publish; needs an application context."""
        self._make()
        return cast("Deliveries", self._deliveries)

    def options(self, declared: RouteOptions) -> RouteOptions:
        """Return a declaration with the application's settings filled in."""
        known = self._routes.get(id(declared))
        if known is None:
            # With the declaration itself, so that its id is not used again.
            options = declared.under(self.config)
            if options.atomic and self.bind_key is not None:
                raise IdempotencyConfigError(
                    "atomic=True needs one transaction for record and rows, and the "
                    f"record is on the bind '{self.bind_key}'."
                )
            known = self._routes[id(declared)] = declared, options
        return known[1]

    @property
    def bind_key(self) -> str | None:
        """The bind of the records; ``None`` is the default one."""
        key: str | None = self.record_class.__table__.metadata.info.get("bind_key")
        return key

    def session(self) -> Session:
        """Return the session of the current context."""
        return cast("Session", self.db.session())

    def _make(self) -> None:
        if self._guard is not None:
            return
        with self._lock:
            if self._guard is None:
                engine = self._engine()
                dialect = dialect_for(engine)
                table = self.record_class.__table__
                connections = self._connections(engine, dialect)
                self._store = IdempotencyStore(table, dialect, connections, self.config)
                self._deliveries = Deliveries(table, dialect, connections, self.config)
                intents = attach_fence(engine, self._store)
                self._watch_others(engine, intents)
                if dialect.timeout_query:
                    check = partial(self._check_lease, dialect)
                    event.listen(engine, "connect", check, once=True)
                join_atomic_calls(self.db.session, current_transaction)
                self._guard = IdempotencyMutationGuard(
                    self._store,
                    self.session,
                    self.config,
                    dumps=self.app.json.dumps,
                    loads=self.app.json.loads,
                    sender=self.app,
                )

    def other_engines(self) -> dict[str | None, object]:
        """Return the isolation level of each bind that holds no records."""
        pool = self.db.engines[self.bind_key].pool
        return {
            key: self._isolation_level(key, engine)
            for key, engine in self.db.engines.items()
            if engine.pool is not pool
        }

    def _watch_others(self, engine: Engine, intents: Intents) -> None:
        """Have it noted before something is committed on another engine."""
        intents.track_connections(self.db.session, engine)
        for key, level in self.other_engines().items():
            other, at_once = self.db.engines[key], level == "AUTOCOMMIT"
            OtherEngine(intents, dialect_of(other), autocommit=at_once).attach(other)

    def _check_lease(self, dialect: Dialect, connection: Any, _record: object) -> None:
        """Warn, with the first connection, of a lease that a statement may outlive."""
        try:
            with contextlib.closing(connection.cursor()) as cursor:
                cursor.execute(dialect.timeout_query)
                limit = dialect.timeout_seconds(list(cursor.fetchall()))
            connection.rollback()
        except Exception:  # a warning may not cost the application its connection
            log.warning("The statement timeout could not be asked for.", exc_info=True)
            return
        if limit is not None and self.config.lease_seconds < limit:
            log.warning("%s", short_lease(self.config.lease_seconds, limit))

    def _isolation_level(self, key: str | None, engine: Engine) -> object:
        """Return the isolation level that the configuration names for an engine."""
        bind = self.app.config.get("SQLALCHEMY_BINDS", {}).get(key)
        options = {
            **self.app.config.get("SQLALCHEMY_ENGINE_OPTIONS", {}),
            **(bind if isinstance(bind, dict) else {}),
            **engine.get_execution_options(),
        }
        return options.get("isolation_level")

    def _engine(self) -> Engine:
        bind_key = self.bind_key
        if bind_key is not None and not self.config.separate_bind:
            raise IdempotencyConfigError(
                f"The record is on the bind '{bind_key}', where no transaction can "
                "hold it together with the business rows. Keep it on the default bind, "
                "or accept unknown outcomes after a crash: IDEMPOTENCY_SEPARATE_BIND."
            )
        engine = self.db.engines[bind_key]
        if self._isolation_level(bind_key, engine) == "AUTOCOMMIT":
            raise IdempotencyConfigError(
                "The engine is in AUTOCOMMIT, so nothing of a failed call could be "
                "rolled back. Use AUTOCOMMIT on single connections only."
            )
        return engine

    def _connections(self, engine: Engine, dialect: Dialect) -> Connections:
        if shares_one_connection(engine):
            return SharedConnection(
                self.session, lambda: current_call.get() is not None
            )
        return OwnPool(engine, pool_size=self.config.pool_size, dialect=dialect)


def get_state() -> IdempotencyState:
    """
    Return the current application's state.

    Raises:
        IdempotencyConfigError: If the extension was not set up on the application.
    """
    state: Any = current_app.extensions.get(EXTENSION_KEY)
    if state is None:
        message = (
            "The current Flask app is not registered with this 'Idempotency' instance. "
            "Did you forget to call 'init_app', or did you create several?"
        )
        raise IdempotencyConfigError(message)
    return cast("IdempotencyState", state)
