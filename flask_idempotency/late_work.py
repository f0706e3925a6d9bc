"""
Work of a request after its guarded call has ended, which is never silent.

An ``after_request`` function, or a stream past the size that is kept, may still use the
session. What it leaves there is lost, and what it commits it does for replays, too.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flask import request

from .fence import watch_late_commits
from .ledger import has_changes

if TYPE_CHECKING:
    from .state import IdempotencyState

log = logging.getLogger(__name__)

_ENDED = "flask_idempotency.ended"


def call_ended() -> None:
    """Note that what comes now in this request is not a part of its call."""
    endpoint = str(request.endpoint)
    request.environ[_ENDED] = endpoint
    watch_late_commits(endpoint)


def report_late_work(state: IdempotencyState, _error: BaseException | None) -> None:
    """Report, when a request is over, what nobody has committed."""
    watch_late_commits(None)
    endpoint = request.environ.pop(_ENDED, None)
    used = endpoint is not None and state.db.session.registry.has()
    if used and has_changes(state.session()):
        log.error(
            "The request of '%s' changed the session after its call had ended (a "
            "stream, or an after_request function?), and nothing commits that. Write in "
            "the view, or before the stream starts.",
            endpoint,
        )
