"""``flask demo``: what it prints, its exit code, and what it leaves behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from example_app.demo.report import Report

if TYPE_CHECKING:
    from tests.databases import Database

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def flask(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a ``flask`` command of the example in a process of its own."""
    return subprocess.run(  # noqa: S603 - our own command, without a shell
        [sys.executable, "-m", "flask", "--app", "example_app", *arguments],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder in which the demo makes its own."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def played(folder: Path) -> subprocess.CompletedProcess[str]:
    """Play the demo once."""
    return flask("demo", TMPDIR=str(folder))


def test_demo_succeeds(played: subprocess.CompletedProcess[str]) -> None:
    """Every answer of the story is the right one."""
    assert played.returncode == 0, played.stdout + played.stderr
    assert "WRONG" not in played.stdout


@pytest.mark.parametrize(
    "line",
    [
        r"POST /accounts +account-\w+ +201$",
        r"POST /accounts +account-\w+ +201 replayed$",
        r"POST /accounts +account-\w+ +422\n +IDEMPOTENCY_KEY_CONFLICT$",
        r"POST /demo/slow +slow-\w+ +409\n +IDEMPOTENCY_IN_PROGRESS\n +Retry-After: \d+$",
        r"POST /demo/broken +broken-\w+ +500 replayed\n",
        r"POST /payments +payment-\w+ +502$",
        r"POST /webhooks/provider +event-\w+ +204 replayed$",
        r"charges at the provider +1$",
        r"provider events +1$",
        r"account-\w+ +accounts\.create +replayable$",
        r"broken-\w+ +POST /demo/broken +failed_retry_requires_opt_in$",
        r"payment-\w+ +POST /payments +replayable\n.*\n +Steps: step 'charge' has finished\.$",
    ],
)
def test_demo_tells_the_story(
    played: subprocess.CompletedProcess[str], line: str
) -> None:
    """Each chapter is there with its request, key and answer."""
    assert re.search(line, played.stdout, re.MULTILINE)


def test_demo_fits_a_terminal(played: subprocess.CompletedProcess[str]) -> None:
    """No line but the database's name is wider than a terminal."""
    lines = [line for line in played.stdout.splitlines() if "sqlite" not in line]

    assert max(map(len, lines)) <= 80


def test_demo_leaves_nothing(
    played: subprocess.CompletedProcess[str], folder: Path
) -> None:
    """Its folder is removed when it ends."""
    assert played.returncode == 0
    assert list(folder.iterdir()) == []


@pytest.mark.torture
@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_demo_plays_on_a_server(database: Database) -> None:
    """The same story is true on a database of the user's choice."""
    done = flask("demo", "--database-uri", database.url)

    assert done.returncode == 0, done.stdout + done.stderr


def test_demo_fails_when_something_is_wrong(tmp_path: Path) -> None:
    """A database that doubles an effect by itself is found out."""
    uri = f"sqlite:///{tmp_path / 'doubling.sqlite3'}"
    assert flask("db", "upgrade", EXAMPLE_DATABASE_URI=uri).returncode == 0
    with create_engine(uri, poolclass=NullPool).begin() as connection:
        connection.execute(
            text(
                "CREATE TRIGGER doubling AFTER INSERT ON provider_event BEGIN "
                "INSERT INTO provider_event (event_id, payload) VALUES ('x', 'x'); END"
            )
        )
    done = flask("demo", "--database-uri", uri)

    assert done.returncode == 1
    assert "the number of provider events is 2; it has to be 1" in done.stdout


def test_demo_refuses_a_database_in_memory() -> None:
    """Processes cannot share it, so the command says what to give instead."""
    done = flask("demo", "--database-uri", "sqlite://")

    assert done.returncode == 2
    assert "name a file" in done.stderr


def test_report_without_failures_is_a_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is as it has to be leads to exit code 0."""
    report = Report()
    report.step("A step.")
    report.expect("the status", 201, 201)
    report.summarise(tmp_path / "log.txt")

    assert report.exit_code == 0
    assert "Every answer was the right one." in capsys.readouterr().out


def test_report_lists_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong is listed with its step, and leads to exit code 1."""
    report = Report()
    report.step("A step.")
    report.expect("the status", 500, 201)
    report.summarise(tmp_path / "log.txt")

    assert report.exit_code == 1
    assert "  Step 1: the status is 500; it has to be 201." in capsys.readouterr().out


def test_report_shows_the_log_after_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reason of a failure is often in the servers' log."""
    log = tmp_path / "log.txt"
    log.write_text("Traceback of the server\n", encoding="utf-8")
    report = Report()
    report.fail("something is wrong")
    report.summarise(log)

    assert "Traceback of the server" in capsys.readouterr().err
