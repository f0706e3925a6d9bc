"""
A process whose clocks are wrong from its first import on.

Run as ``python -m tests.skewed SECONDS DATABASE URL``; it is a clerk then.
"""

from __future__ import annotations

import datetime
import importlib
import sys
import time

_TRUE_DATETIME = datetime.datetime
_BY = datetime.timedelta()


class _Kind(type):
    """Takes what drivers written in C return for what it is."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _TRUE_DATETIME)


class _WrongDatetime(datetime.datetime, metaclass=_Kind):
    """Tells the wrong time."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _WrongDatetime:
        return super().now(tz) + _BY

    @classmethod
    def utcnow(cls) -> _WrongDatetime:
        return cls.now(datetime.timezone.utc).replace(tzinfo=None)


def shift(seconds: float) -> None:
    """Let every clock that Python code can read be wrong."""
    global _BY  # noqa: PLW0603 - there is one clock
    _BY = datetime.timedelta(seconds=seconds)
    true_time, true_time_ns = time.time, time.time_ns
    time.time = lambda: true_time() + seconds
    time.time_ns = lambda: true_time_ns() + int(seconds * 1e9)
    datetime.datetime = _WrongDatetime  # type: ignore[misc]


if __name__ == "__main__":
    shift(float(sys.argv[1]))
    # Only now, so that nothing has got hold of a right clock.
    importlib.import_module("tests.clerk").serve(*sys.argv[2:])
