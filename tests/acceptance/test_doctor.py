"""``flask idempotency doctor``, as an operator runs it."""

from __future__ import annotations

import contextlib
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from flask_idempotency.state import Finding, IdempotencyState
from tests.databases import Database, sqlite_database
from tests.integration.test_binds import Separate

from .test_cli import outcome_unknown, run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.shop import Shop


def codes(shop: Shop, code: int) -> list[tuple[str, bool]]:
    """Return what is found, and check the exit status."""
    result = run(shop.app, "doctor", "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["ok"]) == (code, code == 0)
    assert report["not_fenced"]
    return [(finding["code"], finding["is_problem"]) for finding in report["findings"]]


def test_healthy_set_up_has_no_findings(shop: Shop) -> None:
    """Only what is never fenced is listed."""
    assert codes(shop, 0) == []
    result = run(shop.app, "doctor")
    assert "Never fenced: commits through a raw driver connection" in result.stdout
    assert result.stdout.endswith("Problems: none.\n")


def test_forgotten_outcome_is_a_problem(shop: Shop) -> None:
    """It waits for an operator for ever."""
    outcome_unknown(shop)
    shop.outlive()
    assert codes(shop, 1) == [("outcome_unknown", True)]
    result = run(shop.app, "doctor")
    assert "problem: outcome_unknown: Calls of unknown outcome" in result.stdout


def test_missing_table_is_a_problem(shop: Shop) -> None:
    """With the way out."""
    with shop.app.app_context():
        shop.db.drop_all()
    assert codes(shop, 1) == [("store_unavailable", True)]
    assert "flask db upgrade" in run(shop.app, "doctor").stdout


def test_checks_of_other_packages(shop: Shop) -> None:
    """What builds on this package has its own findings shown here."""
    problem = Finding(code="other", message="Something else.", is_problem=True)
    state: IdempotencyState = shop.app.extensions["idempotency"]
    state.checks.append(lambda: [problem])
    assert codes(shop, 1) == [("other", True)]


def test_other_binds_are_noted(open_shop: Callable[..., Shop], tmp_path: Path) -> None:
    """They are no problem, but no part of the one transaction."""
    url = sqlite_database(tmp_path, "other").url
    binds: dict[str, Any] = {
        "a": url,
        "b": {"url": url, "isolation_level": "AUTOCOMMIT"},
    }
    shop = open_shop(sqlite_database(tmp_path), SQLALCHEMY_BINDS=binds)
    assert codes(shop, 0) == [
        ("other_bind", False),
        ("other_bind", False),
        ("autocommit_bind", False),
    ]


def test_record_on_a_bind_of_its_own_is_noted(tmp_path: Path) -> None:
    """Then every business row is on another bind."""
    other = sqlite_database(tmp_path, "other").url
    shop = Separate(sqlite_database(tmp_path), other, IDEMPOTENCY_SEPARATE_BIND=True)
    with contextlib.closing(shop):
        assert codes(shop, 0) == [("separate_bind", False), ("other_bind", False)]


def test_memory_is_noted(open_shop: Callable[..., Shop]) -> None:
    """It is for tests."""
    shop = open_shop(Database("sqlite", "sqlite://"))
    assert codes(shop, 0) == [("in_memory", False)]


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_lease_that_a_statement_may_outlive(
    make_shop: Callable[..., Shop],
    database: Database,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log says so with the first connection, and doctor whenever it is asked."""
    arguments = {
        "postgresql": {"options": "-c statement_timeout=40s"},
        "mariadb": {"init_command": "SET SESSION max_statement_time = 40"},
    }
    options = {"connect_args": arguments[database.name]}
    with caplog.at_level(logging.WARNING):
        shop = make_shop(SQLALCHEMY_ENGINE_OPTIONS=options)
    sentence = "The lease is 30 s, and the server lets a statement run 40 s."
    assert caplog.text.count(sentence) == 1
    assert codes(shop, 1) == [("lease_below_timeout", True)]
    longer = make_shop(SQLALCHEMY_ENGINE_OPTIONS=options, IDEMPOTENCY_LEASE=60)
    assert codes(longer, 0) == []
