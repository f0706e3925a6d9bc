"""What the answers have to be: a second, much simpler account of the promises."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from example_app.auth import Caller
from flask_idempotency import exceptions
from flask_idempotency.exceptions import REPLAYED, IdempotencyHTTPException

from .requests import MARKS, ME, UNKNOWN, WEBHOOK, Request, Unknown

if TYPE_CHECKING:
    from werkzeug.test import TestResponse

    from .requests import Wire

COMPLETE = "/files/<row_id:file_id>/complete"
#: Routes with a guard, and the status of an effect.
EFFECTS = {
    "/accounts": 201,
    "/files": 201,
    COMPLETE: 200,
    "/tasks": 202,
    "/payments": 201,
    WEBHOOK: 204,
}
#: Errors that the example answers itself; more only where ``_OWN`` says so.
_STATUSES = {400, 401, 404, 405, 413, 415}
_OWN = {(COMPLETE, 409), ("/payments", 502), (WEBHOOK, 503)}
PROBLEMS: dict[str, type[IdempotencyHTTPException]] = {
    value.error_code: value
    for value in vars(exceptions).values()
    if isinstance(value, type)
    and issubclass(value, IdempotencyHTTPException)
    and hasattr(value, "error_code")
}
_PROBLEM = "application/problem+json"
#: Caller, rule and key.
Scope = tuple[Caller | None, str, str | Unknown | None]


class FindingError(AssertionError):
    """A promise that was not kept."""


@dataclass(frozen=True)
class Kept:
    """What of an answer is the same in each replay."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


@dataclass(frozen=True)
class First:
    """The request that took effect, and its answer."""

    same: object
    kept: Kept
    query: object


def expect(claim: object, message: str) -> None:
    """Raise a finding unless `claim` holds."""
    if not claim:
        raise FindingError(message)


class Model:
    """
    Judges each answer of one scenario by those before.

    Attributes:
        effects: How many requests took effect, by rule.
        statistics: What to tell at the end, over all scenarios.
        operations: Payments that may have reached the provider.
        scopes: Under which guarded requests came.
    """

    def __init__(self, statistics: Counter[str]) -> None:
        self.statistics = statistics
        self.effects: Counter[str] = Counter()
        self.operations: set[object] = set()
        self.scopes: set[Scope] = set()
        self._firsts: dict[Scope, First] = {}
        self._answers: defaultdict[Scope, list[Kept]] = defaultdict(list)
        self._tenants: dict[str, str] = {}

    def judge(self, request: Request, wire: Wire, response: TestResponse) -> None:
        """Check one answer."""
        status, problem = response.status_code, _problem(response)
        replayed = response.headers.get(REPLAYED) == "true"
        self._count(status, problem, replayed=replayed)
        expect(status < 500 or (request.rule, status) in _OWN, f"{status}")
        _check_error(request, response, problem)
        _check_access(request, response)
        self._check_marks(request, response)
        if request.verb != "POST" or request.rule not in EFFECTS:
            expect(not replayed, "a replay where nothing is guarded")
        elif request.caller is not None:
            self._judge_guarded(request, wire, response, replayed=replayed)

    def _count(
        self, status: int, problem: dict[str, Any] | None, *, replayed: bool
    ) -> None:
        self.statistics["requests"] += 1
        self.statistics[f"status {status}"] += 1
        if problem:
            self.statistics[problem["code"]] += 1
        if replayed:
            self.statistics["replays"] += 1

    def _judge_guarded(
        self, request: Request, wire: Wire, response: TestResponse, *, replayed: bool
    ) -> None:
        scope: Scope = (request.caller, request.rule, request.key_in_force())
        kept, same = _kept(response), _sameness(request, wire)
        first = self._firsts.get(scope)
        self.scopes.add(scope)
        if scope[2] is None:
            _check_refusal(request, response)
        if first is not None and first.same == same:
            expect(replayed and kept == first.kept, "an unchanged retry got no replay")
        if replayed:
            expect(_is_own(response), "the library's error came as a replay")
            expect(kept in self._known(scope), "a replay of what was never answered")
            if first is not None:
                expect(kept == first.kept, "not the answer of the effect")
                queries = (_query(request), first.query)
                same_query = None in queries or queries[0] == queries[1]
                expect(same_query, "a replay for another query")
        elif _is_own(response):
            self._note_run(scope, First(same, kept, _query(request)))
        if kept.status == EFFECTS[request.rule]:
            self._check_content(request, response)

    def _known(self, scope: Scope) -> list[Kept]:
        """Return what a caller may have got for a key before."""
        found = list(self._answers[scope])
        for other, answers in self._answers.items():
            if other[:2] == scope[:2] and UNKNOWN in {other[2], scope[2]}:
                found += answers
        return found

    def _note_run(self, scope: Scope, run: First) -> None:
        """Take an answer of the example itself down, which may be an effect."""
        kept = run.kept
        _caller, rule, key = scope
        if rule == "/payments" and kept.status in {201, 502}:
            self.operations.add(object() if key is UNKNOWN else scope)
        if kept.status == EFFECTS[rule]:
            expect(scope not in self._firsts, "a second effect under one key")
            self.effects[rule] += 1
            if key is not UNKNOWN:
                self._firsts[scope] = run
        self._answers[scope].append(kept)

    def check_record(self, caller: Caller, key: str) -> None:
        """Check that a record belongs to a key that its caller sent."""
        sent = {known for owner, _, known in self.scopes if owner == caller}
        expect(sent & {key, UNKNOWN}, f"a record of {key!r}, which {caller} never sent")

    def _check_content(self, request: Request, response: TestResponse) -> None:
        """Check that a success speaks of what this request asked for."""
        if not request.body.asks or request.rule == COMPLETE:  # takes no body
            return
        mark = MARKS[request.caller].encode() if request.caller in MARKS else b""
        answer = json.loads(response.data)
        for name, value in request.body.asks:
            asked = value
            if isinstance(value, str):
                asked = value.replace(ME.decode(), mark.decode())
            expect(
                answer[name] == asked, f"{name}: {answer[name]!r} instead of {asked!r}"
            )

    def _check_marks(self, request: Request, response: TestResponse) -> None:
        """Check that nothing of another caller or tenant is in the answer."""
        caller = request.caller
        # A colleague may complete a file, and is shown it then.
        if caller is None or (request.verb == "POST" and request.rule != COMPLETE):
            visible = {caller}
        else:
            visible = {c for c in MARKS if c.tenant_id == caller.tenant_id}
        for owner, mark in MARKS.items():
            foreign = owner not in visible and mark.encode() in response.data
            expect(not foreign, f"the answer contains {mark}, which is {owner}'s")
        if response.status_code < 300 and caller is not None and response.is_json:
            answer: dict[str, Any] = response.get_json(silent=True) or {}
            for name in {"reference", "task_id"} & set(answer):
                tenant = self._tenants.setdefault(answer[name], caller.tenant_id)
                expect(tenant == caller.tenant_id, f"the {name} is {tenant}'s")


def _is_own(response: TestResponse) -> bool:
    """Tell whether an answer is the example's own."""
    return response.status_code < 400 or response.mimetype == "application/json"


def _problem(response: TestResponse) -> dict[str, Any] | None:
    if response.mimetype != _PROBLEM or not response.data:
        return None
    problem = json.loads(response.data)
    expect(isinstance(problem, dict), "a Problem is no object")
    expect(problem.get("code") in PROBLEMS, "a Problem without a known code")
    return dict(problem)


def _check_error(
    request: Request, response: TestResponse, problem: dict[str, Any] | None
) -> None:
    """Check that an error is a Problem, or one of the example's own answers."""
    status = response.status_code
    if status < 400 or request.verb == "HEAD":
        return
    if problem is not None:
        kind = PROBLEMS[problem["code"]]
        expect(problem["status"] == status == kind.code, "a Problem's status is wrong")
        expect(problem["retryable"] is kind.retryable, "a Problem's retryable is wrong")
        expect({"type", "title", "detail"} <= set(problem), "a Problem lacks a member")
        expect("type" not in problem or problem["type"] == "about:blank", "wrong type")
        if kind.retryable:
            after = response.headers.get("Retry-After", "")
            expect(after.isdigit() and int(after) > 0, "a Problem lacks Retry-After")
    elif response.mimetype == "text/html":
        accepts = [v for n, v in request.headers if n == "Accept"]
        expect(any("text/" in value for value in accepts), "HTML that nobody asked for")
    else:
        answer = json.loads(response.data)
        expect(set(answer) == {"error", "detail"}, "an error of neither kind")
        expect(
            status in _STATUSES or (request.rule, status) in _OWN,
            f"{status} is none of the example's own",
        )


def _check_access(request: Request, response: TestResponse) -> None:
    """Check that who is not known gets nothing."""
    if request.caller is None and request.verb != "OPTIONS":
        expect(response.status_code >= 300, "an answer for nobody")
        expect(REPLAYED not in response.headers, "a replay for nobody")


def _check_refusal(request: Request, response: TestResponse) -> None:
    """Check that a request without a usable key was refused."""
    expect(response.status_code >= 400 or response.status_code == 308, "it needs a key")
    sent_elsewhere = response.status_code in {404, 405, 308}
    if request.rule == WEBHOOK or sent_elsewhere or not request.body.sound:
        return
    codes = {"IDEMPOTENCY_KEY_MISSING", "IDEMPOTENCY_KEY_INVALID"}
    if response.mimetype == _PROBLEM:
        expect(response.get_json()["code"] in codes, "refused, but not for its key")
    elif response.status_code not in {400, 413} or response.mimetype != "text/html":
        expect(response.status_code == 413, "refused, but not for its key")


def _kept(response: TestResponse) -> Kept:
    passing = {REPLAYED.lower(), "content-length", "date"}
    headers = [(n, v) for n, v in response.headers if n.lower() not in passing]
    return Kept(response.status_code, tuple(sorted(headers)), response.data)


def _query(request: Request) -> object:
    """Return what a query means, where it is a part of what is asked for."""
    # Services compare what they were called with, and an event's id says it all.
    # Escapes are left to unit tests.
    if request.rule != "/payments":
        return None
    if "%" in request.query or not request.query.isascii():
        return None
    return sorted(parse_qs(request.query, keep_blank_values=True).items())


def _sameness(request: Request, wire: Wire) -> object:
    """Return what is equal in a request and its unchanged retry."""
    body: object = request.body.meaning
    if body is None or not request.body.sound:
        body = wire.body
    if not request.body.sound:
        body = (body, request.body.length)
    headers = [(n, v) for n, v in request.headers if n != "Accept"]
    kind = (request.body.content_type or "").partition(";")[0]
    kind = request.body.content_type or "" if not request.body.sound else kind
    return (request.verb, wire.path, wire.query, body, kind, tuple(sorted(headers)))
