"""The operator's view: the real command, once for each key."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from example_app.auth import EXAMPLE_TOKENS, PROVIDER, Caller

from .client import TOKEN

if TYPE_CHECKING:
    from concurrent.futures import Future

    from .processes import Children
    from .report import Report


@dataclass(frozen=True, kw_only=True)
class Diagnosed:
    """
    A key of the story and what has to be said of it.

    Attributes:
        route: The operation's name in the record.
        key: The idempotency key.
        diagnosis: The word that the command has to say.
        caller: Whose key it is.
    """

    route: str
    key: str
    diagnosis: str = "replayable"
    caller: Caller = EXAMPLE_TOKENS[TOKEN]

    def command(self) -> list[str]:
        """Return the command that asks for it."""
        scope = {
            "--tenant-id": self.caller.tenant_id,
            "--user-id": self.caller.user_id,
            "--route": self.route,
            "--idempotency-key": self.key,
        }
        options = [part for option in scope.items() for part in option]
        return ["idempotency", "diagnose", *options, "--json"]


class Inspection:
    """
    Asks for keys while the story goes on, and prints the answers at its end.

    Args:
        children: Runs the commands.
    """

    def __init__(self, children: Children) -> None:
        self._children = children
        self._asked: list[tuple[Diagnosed, Future[str]]] = []

    def ask(self, route: str, key: str, diagnosis: str = "replayable") -> None:
        """Ask for a key of the client, whose record is final by now."""
        self._ask(Diagnosed(route=route, key=key, diagnosis=diagnosis))

    def ask_for_event(self, route: str, key: str) -> None:
        """Ask for a key of the provider."""
        self._ask(Diagnosed(route=route, key=key, caller=PROVIDER))

    def tell(self, report: Report) -> None:
        """Print and check every answer."""
        for case, output in self._asked:
            _print(report, case, json.loads(output.result()))

    def _ask(self, case: Diagnosed) -> None:
        self._asked.append((case, self._children.flask(*case.command())))


def _print(report: Report, case: Diagnosed, found: dict[str, Any]) -> None:
    report.line(f"     {case.key:<13} {case.route:<23} {found['diagnosis']}")
    for line in textwrap.wrap(found["explanation"], 70):
        report.line(f"       {line}")
    what = f"the diagnosis of {case.key}"
    report.expect(what, found["diagnosis"], case.diagnosis)
