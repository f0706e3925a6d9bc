"""Somebody who does at a shop what a test says, here or in another process."""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from flask_idempotency import StoredResponse

from .databases import Database
from .shop import Shop, is_replay

if TYPE_CHECKING:
    from flask_idempotency import Claim

HASH = "v1:clerk"


class Clerk:
    """
    Does what it is told, each time with a key.

    Args:
        shop: Where.
    """

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self._claims: dict[str, Claim] = {}

    def do(self, what: str, key: str = "") -> Any:
        """Do one of the following, and return what came of it, ready for JSON."""
        with self.shop.app.app_context():
            return getattr(self, what)(key)

    def clocks(self, _key: str) -> list[float]:
        """Return what this process takes for the time."""
        return [time.time(), datetime.now(timezone.utc).timestamp()]

    def claim(self, key: str) -> list[Any]:
        """Claim a key; return the verdict and which attempt it is."""
        decision = self.shop.idempotency.store.claim(self.shop.scope(key), HASH)
        if decision.claim is not None:
            self._claims[key] = decision.claim
        return [decision.outcome.value, decision.claim and decision.claim.attempt]

    def finish(self, key: str) -> bool:
        """Store an answer, as the owner who may have lost the key by now."""
        answer = StoredResponse(code=201)
        return self.shop.idempotency.store.mark_succeeded(self._claims[key], answer)

    def renew(self, key: str) -> None:
        """Renew a lease by a minute."""
        self.shop.idempotency.store.renew({self._claims[key].owner_token: 60.0})

    def diagnose(self, key: str) -> list[Any]:
        """Return what the next request meets, and the seconds that a lease lasts."""
        found = self.shop.idempotency.store.diagnose(self.shop.scope(key), HASH)
        return [found.diagnosis.value, found.record and found.record.lease_seconds_left]

    def expire(self, _key: str) -> int:
        """Mark what is over."""
        return self.shop.idempotency.store.expire(limit=100)

    def purge(self, _key: str) -> int:
        """Delete what was over a minute ago."""
        store = self.shop.idempotency.store
        return store.purge(limit=100, older_than_seconds=60)

    def post(self, key: str) -> list[Any]:
        """Ask for an account."""
        answer = self.shop.post(key, key=key)
        return [answer.status_code, is_replay(answer)]


def serve(name: str, url: str) -> None:
    """Do what each line of the input says, and write a line about it."""
    shop = Shop(Database(name, url))
    shop.creating_view()
    clerk = Clerk(shop)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(clerk.do(*json.loads(line))) + "\n")
        sys.stdout.flush()
    shop.close()
