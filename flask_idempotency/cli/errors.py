"""What every command does with an error."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flask_idempotency.exceptions import IdempotencyError, IdempotencyStoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")


def clear_errors(command: F) -> F:
    """Turn what can go wrong into one sentence and exit status 1."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except IdempotencyStoreUnavailable as error:
            raise click.ClickException(error.reason) from error
        except IdempotencyError as error:
            raise click.ClickException(str(error)) from error

    return wrapper  # type: ignore[return-value]
