"""What the parts of the store share: statements, runner, and values as parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .runner import Runner
from .settling import SettlingStatements

if TYPE_CHECKING:
    from sqlalchemy import Connection, Table

    from flask_idempotency.config import Config
    from flask_idempotency.lifecycle import Claim, Scope

    from .connections import Connections
    from .dialects import Dialect


class StoreBase:
    """
    The set-up of a store.

    Args:
        table: The record's table.
        dialect: Speaks for the database.
        connections: Where statements run that are durable on their own.
        config: Defaults for the life of keys and leases.
    """

    def __init__(
        self, table: Table, dialect: Dialect, connections: Connections, config: Config
    ) -> None:
        self.dialect = dialect
        #: How a session finds the engine of the records.
        self.bind_arguments = {"clause": table}
        self._table = table
        self._sql = SettlingStatements(table, self.dialect)
        self._runner = Runner(self.dialect, connections, table.name)
        self._connections = connections
        self._config = config

    def close(self) -> None:
        """Close the connections of the store's own pool that are not in use."""
        self._connections.close()

    def _scope_parameters(self, scope: Scope) -> dict[str, Any]:
        bind = self.dialect.bind_text
        return {
            "b_tenant_id": bind(scope.tenant_id),
            "b_user_id": bind(scope.user_id),
            "b_route": bind(scope.route),
            "b_idempotency_key": bind(scope.idempotency_key),
        }

    def _owned_update(
        self,
        statement: Any,
        claim: Claim,
        values: dict[str, Any],
        connection: Connection | None,
    ) -> bool:
        parameters = {
            "b_id": claim.record_id,
            "b_owner_token": claim.owner_token,
            **values,
        }
        return self._runner.run(
            lambda c: c.execute(statement, parameters).rowcount == 1, connection
        )
