"""
Signals (Blinker) that count what becomes of keys; the sender is the application.

``claimed(route, attempt)``: a call got its record.
``replayed(route, enforced)``: a duplicate got the stored answer.
``refused(route, error_code, enforced)``: a request got an error of this library.

With ``enforced=False`` nothing was answered: that is what observe mode, or
``fail_open``, let pass. No signal carries a key, a body or an identity.
"""

from __future__ import annotations

from blinker import Namespace

_namespace = Namespace()

claimed = _namespace.signal("idempotency-claimed")
replayed = _namespace.signal("idempotency-replayed")
refused = _namespace.signal("idempotency-refused")
