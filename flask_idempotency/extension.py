"""The extension object: wiring only."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from flask import request

from .atomic import join_atomic_calls
from .config import UNSAID, Config
from .exceptions import IdempotencyConfigError, IdempotencyError
from .late_work import report_late_work
from .models import (
    IdempotencyRecordMixin,
    add_tables_beside,
    build_record_class,
    scope_constraint,
)
from .problems import Unanswered, problem_response, raise_unanswered
from .request import OPTIONS, note_ignored_key, read_key, refusing, scope_of_request
from .responses import key_field
from .settings import checked_route
from .state import EXTENSION_KEY, IdempotencyState, Loaders, get_state
from .unit_of_work import current_transaction

if TYPE_CHECKING:
    from collections.abc import Callable

    from flask import Flask
    from flask_sqlalchemy import SQLAlchemy
    from sqlalchemy.orm import scoped_session, sessionmaker

    from .guard import IdempotencyMutationGuard
    from .lifecycle import Scope
    from .store import IdempotencyStore

Loader = TypeVar("Loader", bound="Callable[[], str | None]")


class Idempotency:
    """
    Idempotency for one or several Flask applications.

    Args:
        app: The application to set up at once.
        db: Its Flask-SQLAlchemy object; taken from the application where left out.
        record_class: Your own subclass of ``IdempotencyRecordMixin``.

    Raises:
        IdempotencyConfigError: If the set-up cannot keep what the library promises.
    """

    def __init__(
        self,
        app: Flask | None = None,
        db: SQLAlchemy | None = None,
        *,
        record_class: type[IdempotencyRecordMixin] | None = None,
    ) -> None:
        self._db = db
        self._record_class = record_class
        self._loaders = Loaders()
        if record_class is not None:
            scope_constraint(record_class.__table__)
            add_tables_beside(record_class.__table__)
        elif db is not None:
            build_record_class(db)
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask, db: SQLAlchemy | None = None) -> None:
        """
        Set an application up, before or after ``db.init_app``.

        Args:
            app: The application.
            db: Its Flask-SQLAlchemy object, if the constructor was not given one.

        Raises:
            IdempotencyConfigError: On a second call for one application, without a
                `db`, or on a wrong ``IDEMPOTENCY_*`` key or value.
        """
        if EXTENSION_KEY in app.extensions:
            raise IdempotencyConfigError(
                "An 'Idempotency' instance is already registered on this Flask app. "
                "Import and use that instance instead."
            )
        db = db or self._db or app.extensions.get("sqlalchemy")
        if db is None:
            raise IdempotencyConfigError(
                "No Flask-SQLAlchemy object is known. Pass it: Idempotency(app, db), "
                "or call 'db.init_app(app)' before 'idempotency.init_app(app)'."
            )
        state = IdempotencyState(
            app=app,
            db=db,
            record_class=self._record_class or build_record_class(db),
            config=Config.from_mapping(app.config),
            loaders=self._loaders,
        )
        app.extensions[EXTENSION_KEY] = state
        app.jinja_env.globals["idempotency_field"] = partial(key_field, state.config)
        app.after_request(partial(note_ignored_key, state))
        app.teardown_request(partial(report_late_work, state))
        if IdempotencyError not in app.error_handler_spec[None][None]:
            app.register_error_handler(
                IdempotencyError, partial(problem_response, config=state.config)
            )
        app.register_error_handler(Unanswered, raise_unanswered)
        if "sqlalchemy" in app.extensions:
            # From here on the fence knows of every transaction that writes.
            with app.app_context():
                _ = state.store

    def tenant_id_loader(self, loader: Loader) -> Loader:
        """
        Register the function that names the tenant of the current request.

        It takes no argument. Returning nothing refuses the request (403).
        """
        self._loaders.tenant_id = loader
        return loader

    def user_id_loader(self, loader: Loader) -> Loader:
        """
        Register the function that names the caller of the current request.

        It takes no argument. Returning nothing refuses the request (403), except on
        routes with ``anonymous=True``. Flask-Login is used where nothing is
        registered and the application has it.
        """
        self._loaders.user_id = loader
        return loader

    def scope(self, route: str, idempotency_key: str | None = None) -> Scope | None:
        """
        Return caller and key of the current request, for a service to claim.

        Args:
            route: Name of the service's operation, such as ``"reports.submit"``.
            idempotency_key: The key, if it does not come with the request.

        Returns:
            ``None`` if the request has no key and needs none, or is only observed
            and would be refused.

        Raises:
            IdempotencyHTTPException: If key or caller are missing or unusable.
            IdempotencyConfigError: If the route's name is reserved or too long.
        """
        try:
            checked_route(route)
        except ValueError as error:
            raise IdempotencyConfigError(f"The route must be {error}.") from error
        state = get_state()
        options = request.environ.get(OPTIONS) or state.options(UNSAID)
        with refusing(state, options):
            key = idempotency_key
            if key is None:
                key = read_key(options, state.config)
            if key is not None:
                return scope_of_request(state, route, key, options)
        return None

    def register_session(
        self, sessions: scoped_session[Any] | sessionmaker[Any]
    ) -> None:
        """
        Let sessions beside ``db.session`` take part in atomic calls.

        Their commits then are savepoints, too. Without it a commit of theirs inside an
        atomic call is refused. The fence covers them in any case.

        Args:
            sessions: The ``sessionmaker``, or the ``scoped_session`` on one.

        Raises:
            IdempotencyConfigError: If it makes its sessions by a plain function.
        """
        join_atomic_calls(sessions, current_transaction)

    @property
    def Record(self) -> type[IdempotencyRecordMixin]:  # noqa: N802 - a class
        """The record's model; exists as soon as a `db` was given."""
        if self._record_class is not None:
            return self._record_class
        return build_record_class(self._db) if self._db else get_state().record_class

    @property
    def guard(self) -> IdempotencyMutationGuard:
        """The guard of the current application."""
        return get_state().guard

    @property
    def store(self) -> IdempotencyStore:
        """The store of the current application."""
        return get_state().store
