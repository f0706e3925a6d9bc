"""What the demo prints, and what it found to be wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pathlib import Path

_LOG_LINES = 25


class Report:
    """
    Prints the story and collects what is not as it has to be.

    Attributes:
        failures: One sentence for each wrong answer.
    """

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._step = 0

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        return 1 if self.failures else 0

    def line(self, text: str = "") -> None:
        """Print a line."""
        click.echo(text)

    def chapter(self, title: str) -> None:
        """Print the title of what follows."""
        click.echo(f"\n{title}")

    def step(self, text: str) -> None:
        """Print what happens next, with its number."""
        self._step += 1
        click.echo(f"{self._step:>3}. {text}")

    def expect(self, what: str, seen: object, wanted: object) -> bool:
        """
        Note a failure unless the two are equal.

        Args:
            what: What is looked at, such as ``"the status"``.
            seen: What it is.
            wanted: What it has to be.
        """
        if seen != wanted:
            self.fail(f"{what} is {seen!r}; it has to be {wanted!r}")
        return seen == wanted

    def fail(self, text: str) -> None:
        """Note a failure of the current step."""
        self.failures.append(f"Step {self._step}: {text}.")
        click.echo(f"     WRONG: {text}.")

    def summarise(self, log: Path) -> None:
        """Print how it went, and after failures what the servers logged last."""
        click.echo()
        if not self.failures:
            click.echo("Every answer was the right one.")
            return
        click.echo(f"{len(self.failures)} things were wrong:")
        for failure in self.failures:
            click.echo(f"  {failure}")
        if log.exists():
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            click.echo("The servers' log ends with:", err=True)
            click.echo("\n".join(lines[-_LOG_LINES:]), err=True)
