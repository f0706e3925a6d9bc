"""``flask idempotency resolve``, as an operator runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from flask_idempotency import signals
from tests.shop import ROUTE

from .test_cli import claimed, diagnose, outcome_unknown, report_of, run

if TYPE_CHECKING:
    from click.testing import Result

    from tests.shop import Shop

WHO = ("--by", "operator-1", "--reason", "seen in the books")


def resolve(shop: Shop, *options: str, typed: str | None = None) -> Result:
    """Settle the key of the tests."""
    return run(
        shop.app,
        "resolve",
        *("--user-id", "u1", "--route", ROUTE, "--idempotency-key", "k"),
        *options,
        typed=typed,
    )


def test_success_is_what_duplicates_get(shop: Shop) -> None:
    """Status, body and media type are replayed; who and why are in the diagnosis."""
    outcome_unknown(shop)
    answer = ("--response-code", "201", "--response-body", '{"id": 7}')
    result = resolve(shop, "--succeeded", *answer, *WHO, "--yes", "--json")
    report = report_of(result)
    assert (report["resolved"], report["diagnosis"]) == ("succeeded", "outcome_unknown")
    found = report_of(diagnose(shop, "--json"))
    assert {name: found[name] for name in ("diagnosis", "response_code")} == {
        "diagnosis": "replayable",
        "response_code": 201,
    }
    assert found["response_body"] == '{"id": 7}'
    assert (found["resolved_by"], found["resolved_reason"]) == (
        "operator-1",
        "seen in the books",
    )
    assert found["explanation"].startswith("Settled by operator-1: seen in the books.")
    record = shop.record()
    assert record is not None
    assert record.response is not None
    assert record.response.headers == (("Content-Type", "application/json"),)


@pytest.mark.parametrize(
    ("outcome", "diagnosis"),
    [("--failed", "failed_retry_requires_opt_in"), ("--release", "expired_reusable")],
)
def test_other_outcomes(shop: Shop, outcome: str, diagnosis: str) -> None:
    """A failure is kept as one; a freed key runs anew."""
    outcome_unknown(shop)
    result = resolve(shop, outcome, *WHO, "--yes")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"Settled as '{outcome[2:]}'.")
    assert report_of(diagnose(shop, "--json"))["diagnosis"] == diagnosis


def test_operator_is_asked_first(shop: Shop) -> None:
    """Without --yes the question says what is known; "no" changes nothing."""
    outcome_unknown(shop)
    result = resolve(shop, "--failed", *WHO, typed="n\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "never run again" in result.stderr
    assert report_of(diagnose(shop, "--json"))["diagnosis"] == "outcome_unknown"
    assert resolve(shop, "--failed", *WHO, typed="y\n").exit_code == 0


def test_call_that_runs_needs_force(shop: Shop) -> None:
    """What is not unknown is left alone, and the text says what it is."""
    claimed(shop)
    result = resolve(shop, "--release", *WHO, "--yes")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "it is 'in_progress'" in result.stderr
    assert "--force" in result.stderr
    assert resolve(shop, "--release", *WHO, "--yes", "--force").exit_code == 0
    assert report_of(diagnose(shop, "--json"))["diagnosis"] == "expired_reusable"


@pytest.mark.parametrize("options", [(), ("--force",)])
def test_key_without_a_record(shop: Shop, options: tuple[str, ...]) -> None:
    """There is nothing to settle, and the exit status says so."""
    result = resolve(shop, "--release", *WHO, "--yes", *options)
    assert (result.exit_code, result.stdout) == (1, "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*WHO,), "one of --succeeded, --failed and --release"),
        (("--failed",), "--reason"),
        (("--failed", "--reason", " "), "must say something"),
        (("--failed", "--reason", "r" * 1001), "has 1001 characters"),
        (("--failed", *WHO, "--response-body", "x"), "--succeeded only"),
        (("--succeeded", *WHO, "--response-code", "99"), "response-code"),
    ],
)
def test_wrong_usage(shop: Shop, options: tuple[str, ...], message: str) -> None:
    """Wrong usage is exit status 2, with what is missing, and settles nothing."""
    outcome_unknown(shop)
    result = resolve(shop, *options, "--yes")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert report_of(diagnose(shop, "--json"))["diagnosis"] == "outcome_unknown"


def test_resolution_is_logged_and_counted(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator's word is no secret: a log line and a signal, without the key."""
    outcome_unknown(shop)
    seen: list[dict[str, Any]] = []

    def receiver(_sender: Any, **payload: Any) -> None:
        seen.append(payload)

    with signals.resolved.connected_to(receiver):
        resolve(shop, "--failed", *WHO, "--yes")
    assert seen == [{"route": ROUTE, "status": "failed"}]
    assert "was settled as failed by 'operator-1'" in caplog.text


@pytest.mark.parametrize(
    "answer",
    [
        ("--content-type", "text/plain\r\nX-Other: 1"),
        ("--content-type", "text/plain; name=ä"),
        ("--response-body", "x\udcff"),
        ("--response-code", "100"),
    ],
    ids=["line", "umlaut", "bytes", "interim"],
)
def test_answer_that_could_not_be_given_out(
    shop: Shop, answer: tuple[str, str]
) -> None:
    """It is refused at once, and not each time a duplicate asks for it."""
    outcome_unknown(shop)
    result = resolve(shop, "--succeeded", *answer, *WHO, "--yes")
    assert result.exit_code == 2
    assert answer[0] in result.stderr
    assert shop.status() == "processing"
