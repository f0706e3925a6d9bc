"""What a generated request says, and how it goes over the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from example_app.auth import (
    EXAMPLE_SIGNING_KEY,
    EXAMPLE_TOKENS,
    PROVIDER,
    Caller,
    signature,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

WEBHOOK = "/webhooks/provider"
#: Stands, in a body, for the mark of whoever sends it.
ME = b"<me>"
#: What only the texts of one user contain.
MARKS = {
    caller: f"mark-{number}" for number, caller in enumerate(EXAMPLE_TOKENS.values())
}
_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")


class Unknown:
    """The key of a request of which nobody can say what it is."""

    def __repr__(self) -> str:
        """Name the only one."""
        return "UNKNOWN"


UNKNOWN = Unknown()


@dataclass(frozen=True)
class Key:
    """
    A key as it is sent.

    Attributes:
        raw: The value of the header or form field.
        value: The key that it stands for; ``None`` if it has to be refused.
    """

    raw: str
    value: str | None = None


@dataclass(frozen=True)
class Body:
    """
    A body, and what its author knows of it.

    Attributes:
        meaning: Equal where two bodies ask for the same thing, byte by byte or not.
        asks: Members that a successful answer has to repeat.
        event: The id of an event, where the body is one.
        form_key: The key in the form.
        sound: Whether the fields of the form, or the event, can certainly be read.
        length: A Content-Length that is none of its own.
    """

    data: bytes = b""
    content_type: str | None = None
    meaning: str | None = None
    asks: tuple[tuple[str, object], ...] = ()
    event: str | None = None
    form_key: Key | None = None
    sound: bool = True
    length: str | None = None


@dataclass(frozen=True)
class Wire:
    """A request as the WSGI server hands it over."""

    method: str
    path: str
    query: str
    body: bytes
    headers: tuple[tuple[str, str], ...]

    def arguments(self) -> dict[str, Any]:
        """Return what ``client.open`` is called with."""
        fields: dict[str, Any] = {
            "PATH_INFO": self.path,
            "QUERY_STRING": self.query,
            "CONTENT_LENGTH": str(len(self.body)),
        }
        for name, value in self.headers:
            variable = name.upper().replace("-", "_")
            own = variable in {"CONTENT_TYPE", "CONTENT_LENGTH"}
            fields[variable if own else f"HTTP_{variable}"] = value
        if "HTTP_TRANSFER_ENCODING" in fields:
            # What servers do that take bodies of unknown length.
            del fields["CONTENT_LENGTH"]
            fields["wsgi.input_terminated"] = True
        return {"method": self.method, "data": self.body, "environ_overrides": fields}

    def __str__(self) -> str:
        """Return the call that sends the request again."""
        parts = ", ".join(f"{n}={_short(v)}" for n, v in self.arguments().items())
        return f"client.open({parts})"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 700 else f"{text[:600]}...({len(text)} characters)"


@dataclass(frozen=True)
class Request:
    """
    A generated request.

    Attributes:
        rule: The rule of the example that it is made for.
        path: As WSGI has it, with ``{file}`` and the like for ids that come to be.
        authorization: The header; a known token makes ``caller`` somebody.
        signed: Whether the signature is the provider's.
    """

    rule: str
    method: str = "POST"
    path: str = "/"
    query: str = ""
    authorization: str | None = None
    key: Key | None = None
    body: Body = Body()
    headers: tuple[tuple[str, str], ...] = ()
    signed: bool = True

    @property
    def verb(self) -> str:
        """The method as Werkzeug takes it."""
        return self.method.upper()

    @property
    def caller(self) -> Caller | None:
        """Who sends the request, as the example has to see it."""
        if self.rule == WEBHOOK:
            return PROVIDER if self.signed else None
        scheme, _, token = (self.authorization or "").partition(" ")
        return EXAMPLE_TOKENS.get(token) if scheme.lower() == "bearer" else None

    def key_in_force(self) -> str | Unknown | None:
        """Return the key by which the request has to be known, as README says."""
        body = self.body
        if self.rule == WEBHOOK:
            return body.event if body.sound else UNKNOWN
        header = self.key.value if self.key else None
        if self.key is not None and header is None:
            return None
        is_form = (body.content_type or "").lower().startswith(_FORMS)
        if is_form and not body.sound:
            return header or UNKNOWN
        if not is_form or body.form_key is None:
            return header
        in_form = body.form_key.value
        return in_form if self.key is None or header == in_form else None

    def wire(self, ids: Mapping[str, str]) -> Wire:
        """Return the request with the ids of what was created before."""
        mark = MARKS.get(self.caller, "mark-of-nobody") if self.caller else ""
        body = self.body.data.replace(ME, mark.encode())
        headers = list(self.headers)
        if self.body.content_type is not None:
            headers.append(("Content-Type", self.body.content_type))
        if self.body.length is not None:
            headers.append(("Content-Length", self.body.length))
        if self.authorization is not None:
            headers.append(("Authorization", self.authorization))
        if self.key is not None:
            headers.append(("Idempotency-Key", self.key.raw))
        if self.rule == WEBHOOK:
            right = signature(EXAMPLE_SIGNING_KEY, body)
            headers.append(("X-Signature", right if self.signed else right[::-1]))
        path = self.path
        for name, value in ids.items():
            path = path.replace(f"{{{name}}}", value)
        return Wire(self.method, path, self.query, body, tuple(headers))


@dataclass(frozen=True)
class Step:
    """A request, and those that arrive while the provider works for it."""

    request: Request
    during: tuple[Request, ...] = ()


@dataclass(frozen=True)
class Scenario:
    """
    Requests on an empty database.

    Attributes:
        provider: Whether the provider listens.
        failures: How its first answers fail, as its ledger has it.
    """

    steps: list[Step]
    provider: bool = True
    failures: tuple[str, ...] = ()
