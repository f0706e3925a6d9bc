"""
A simulated payment provider: another company's program, with its own memory.

It charges once per ``Idempotency-Key``, remembers every request, and can be told to
fail. Run it with ``python -m example_app.provider``.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click
from flask import Flask, request

from .serving import serve

if TYPE_CHECKING:
    from flask.typing import ResponseReturnValue

PORT = 5001


@dataclass
class Ledger:
    """
    What the provider remembers.

    Attributes:
        requests: The key of each request for a charge, in their order.
        charges: The charges that were really made, by key.
        failures: When the next requests are to fail: ``"before"`` the charge is made,
            or ``"after"``, as when the answer is lost on the way.
    """

    requests: list[str] = field(default_factory=list)
    charges: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def charge(self, key: str, amount: int) -> tuple[dict[str, Any], int]:
        """Charge once per key."""
        with self.lock:
            self.requests.append(key)
            failure = self.failures.pop(0) if self.failures else None
            if failure == "before":
                return {"error": "The provider is out of order."}, 503
            if key not in self.charges:
                number = len(self.charges) + 1
                self.charges[key] = {"id": f"charge-{number}", "amount": amount}
            if failure == "after":
                return {"error": "The provider lost its answer."}, 500
            if self.charges[key]["amount"] != amount:
                return {"error": "The key belongs to another charge."}, 422
            return self.charges[key], 201


def create_provider() -> Flask:
    """Return the provider's application."""
    app = Flask("example_provider")
    ledger = Ledger()

    @app.post("/charges")
    def create_charge() -> ResponseReturnValue:
        key = request.headers.get("Idempotency-Key")
        if not key:
            return {"error": "Send an Idempotency-Key."}, 400
        return ledger.charge(key, request.get_json()["amount"])

    @app.post("/failures")
    def plan_failure() -> ResponseReturnValue:
        ledger.failures.append(request.get_json()["when"])
        return "", 204

    @app.get("/log")
    def show_log() -> ResponseReturnValue:
        with ledger.lock:
            return {
                "requests": ledger.requests,
                "charges": list(ledger.charges.values()),
            }

    return app


@click.command()
@click.option("--port", default=PORT, show_default=True, help="0: any free one.")
@click.option("--until-eof", is_flag=True, help="End when standard input ends.")
def main(*, port: int, until_eof: bool) -> None:
    """Serve the simulated provider on this machine."""
    serve(create_provider(), port, until_eof=until_eof)


if __name__ == "__main__":
    main()
