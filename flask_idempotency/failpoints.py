"""
Named places where a test may end the process, in the order in which a call meets them.

Nothing happens at a place that is not set, at the price of one look into a dict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PLACES = (
    "before_claim",
    "after_claim",
    "before_step",
    "in_step",  # its start is stored, and it is called next
    "after_step",  # it was called, and its result is stored next
    "in_renewal",  # of its lease, in another thread
    "after_intent",  # noted, not yet committed in another database
    "after_view",
    "before_commit",
    "after_commit",
    "before_outcome",  # one that no commit of the session carries
    "after_outcome",
    "before_response",
    "before_publish",  # leased, in the call that made it or in a dispatcher
    "after_publish",  # handed over, and marked next
)

_set: dict[str, Callable[[], object]] = {}


def set_failpoint(place: str, action: Callable[[], object]) -> None:
    """
    Let a place do something in this process from now on.

    Args:
        place: One of ``PLACES``.
        action: Called each time the place is reached.

    Raises:
        ValueError: If there is no such place.
    """
    if place not in PLACES:
        message = f"'{place}' is none of {', '.join(PLACES)}"
        raise ValueError(message)
    _set[place] = action


def reach(place: str) -> None:
    """Do what a test has set for a place."""
    action = _set.get(place)
    if action is not None:
        action()
