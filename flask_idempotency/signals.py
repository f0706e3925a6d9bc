"""
Signals (Blinker) that count what becomes of keys; the sender is the application.

``claimed(route, attempt)``: a call got its record.
``replayed(route, enforced)``: a duplicate got the stored answer.
``refused(route, error_code, enforced)``: a request got an error of this library.
``resolved(route, status)``: somebody has settled a call of unknown outcome.

With ``enforced=False`` nothing was answered: that is what observe mode, or
``fail_open``, let pass. No signal carries a key, a body or an identity.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from blinker import Namespace

if TYPE_CHECKING:
    from blinker import NamedSignal

log = logging.getLogger(__name__)

_namespace = Namespace()

claimed = _namespace.signal("idempotency-claimed")
replayed = _namespace.signal("idempotency-replayed")
refused = _namespace.signal("idempotency-refused")
resolved = _namespace.signal("idempotency-resolved")


def send(signal: NamedSignal, sender: object, **payload: Any) -> None:
    """Send a signal; a receiver that fails may not fail what it counts."""
    try:
        signal.send(sender, **payload)
    except Exception:
        log.exception("A receiver of the signal '%s' failed.", signal.name)


def count_refusal(
    sender: object, route: str, error_code: str, *, enforced: bool
) -> None:
    """Count an error of this library."""
    send(refused, sender, route=route, error_code=error_code, enforced=enforced)
