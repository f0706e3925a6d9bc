"""Who is calling: API tokens for clients, signatures for the provider."""

from __future__ import annotations

import functools
import hashlib
import hmac
from typing import TYPE_CHECKING, Any, NamedTuple

from flask import abort, current_app, g, request
from werkzeug.datastructures import WWWAuthenticate

from .extensions import idempotency

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ParamSpec

    P = ParamSpec("P")


class Caller(NamedTuple):
    """Whose keys and rows a request may touch."""

    tenant_id: str
    user_id: str


#: A real application keeps these in its database and its secret store.
EXAMPLE_TOKENS = {
    "example-token-1": Caller(tenant_id="tenant-a", user_id="user-1"),
    "example-token-2": Caller(tenant_id="tenant-a", user_id="user-2"),
    "example-token-3": Caller(tenant_id="tenant-b", user_id="user-1"),
}
EXAMPLE_SIGNING_KEY = "example-signing-key"
#: The provider belongs to no tenant of ours.
PROVIDER = Caller(tenant_id="provider", user_id="provider")


@idempotency.tenant_id_loader
def tenant_id() -> str | None:
    """Tell keys of different tenants apart; nobody's key is refused."""
    caller: Caller | None = g.get("caller")
    return caller.tenant_id if caller else None


@idempotency.user_id_loader
def user_id() -> str | None:
    """Tell keys of different users apart."""
    caller: Caller | None = g.get("caller")
    return caller.user_id if caller else None


def login_required(view: Callable[P, Any]) -> Callable[P, Any]:
    """
    Refuse requests without a known ``Authorization: Bearer <token>``.

    Stands above ``@idempotent``: a replay is no way around it.
    """

    @functools.wraps(view)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Any:
        given = request.authorization
        token = given.token if given and given.type == "bearer" else None
        g.caller = current_app.config["API_TOKENS"].get(token)
        if g.caller is None:
            abort(401, "Send a known API token.", www_authenticate=_BEARER)
        return view(*args, **kwargs)

    return checked


def verify_signature(view: Callable[P, Any]) -> Callable[P, Any]:
    """
    Refuse webhooks whose ``X-Signature`` the provider did not make.

    Stands above ``@idempotent``: a forged event never claims an event's id.
    """

    @functools.wraps(view)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Any:
        expected = signature(
            current_app.config["PROVIDER_SIGNING_KEY"], request.get_data()
        )
        given = request.headers.get("X-Signature", "")
        if not hmac.compare_digest(expected.encode(), given.encode()):
            abort(401, "The signature is wrong.")
        g.caller = PROVIDER
        return view(*args, **kwargs)

    return checked


def signature(signing_key: str, body: bytes) -> str:
    """Return the ``X-Signature`` of a webhook."""
    return hmac.new(signing_key.encode(), body, hashlib.sha256).hexdigest()


_BEARER = WWWAuthenticate("bearer")
