"""
Fixtures: an empty database for each test, and applications on it.

A test with the fixture ``database`` runs once on each kind of database. A server
that does not answer is skipped with one line in the summary; with ``CI=true`` it
fails the run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from typing import TYPE_CHECKING, Any

import pytest
from flask import Flask

from . import pooler
from .brokers import BROKERS, broker_absence
from .databases import NAMES, SERVERS, Database, Server, sqlite_database
from .shop import Shop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ABSENT = pytest.StashKey[dict[str, str]]()
#: Rounds of a slow proof that every run of the tests plays.
SAMPLE = 1


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let ``dev.py torture`` say how long slow proofs go on."""
    parser.addoption(
        "--rounds", type=int, help="run the slow proofs alone, with so many rounds each"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Look once which servers answer."""
    found = {name: Server(name).absence() for name in SERVERS}
    found |= {name: broker_absence(name) for name in BROKERS}
    absent = {name: reason for name, reason in found.items() if reason}
    config.stash[ABSENT] = absent
    if absent and os.environ.get("CI") == "true":
        raise pytest.UsageError("\n".join(absent.values()))


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """
    Choose between the tests that everybody runs and the slow proofs.

    Everybody runs one round of what has rounds, and nothing that is marked ``torture``.
    """
    alone = config.getoption("--rounds") is not None
    sorted_: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        sorted_[_belongs(item, alone=alone)].append(item)
    config.hook.pytest_deselected(items=sorted_[False])
    items[:] = sorted_[True]


def _belongs(item: pytest.Item, *, alone: bool) -> bool:
    marked = item.get_closest_marker("torture") is not None
    has_rounds = "rounds" in getattr(item, "fixturenames", ())
    return (marked or has_rounds) if alone else not marked


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say in one line per server what was not tested."""
    for reason in config.stash[ABSENT].values():
        terminalreporter.write_line(f"SKIPPED: {reason}", yellow=True)
    if pooler.PROGRAM is None:
        terminalreporter.write_line(f"SKIPPED: {pooler.ABSENT}", yellow=True)


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> int:
    """Say how many rounds a slow proof plays."""
    count: int | None = request.config.getoption("--rounds")
    return SAMPLE if count is None else count


@pytest.fixture(scope="session")
def server_databases() -> Iterator[dict[str, str]]:
    """Keep one database of this run per server, made at first use."""
    made: dict[str, str] = {}
    yield made
    for name, url in made.items():
        Server(name).drop(url)


@pytest.fixture(params=NAMES)
def database(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    server_databases: dict[str, str],
) -> Database:
    """Give an empty database of each kind."""
    name: str = request.param
    if name == "sqlite":
        return sqlite_database(tmp_path)
    if name in request.config.stash[ABSENT]:
        pytest.skip(f"{name} is absent")
    server = Server(name)
    if name in server_databases:
        server.empty(server_databases[name])
    else:
        server_databases[name] = server.create()
    return Database(name, server_databases[name])


@pytest.fixture
def make_database(
    database: Database, tmp_path: Path
) -> Iterator[Callable[[], Database]]:
    """Make further databases of the kind that the test runs on."""
    made: list[Database] = []

    def make() -> Database:
        if database.name == "sqlite":
            other = sqlite_database(tmp_path, f"other{len(made)}")
        else:
            other = Database(database.name, Server(database.name).create())
        made.append(other)
        return other

    yield make
    for other in made:
        if other.name != "sqlite":
            Server(other.name).drop(other.url)


@pytest.fixture
def open_shop() -> Iterator[Callable[..., Shop]]:
    """Make applications on any database, which are closed after the test."""
    with contextlib.ExitStack() as opened:

        def make(
            database: Database, app_class: Callable[[str], Flask] = Flask, **config: Any
        ) -> Shop:
            shop = Shop(database, app_class, **config)
            opened.callback(shop.close)
            return shop

        yield make


@pytest.fixture
def make_shop(
    open_shop: Callable[..., Shop], database: Database
) -> Callable[..., Shop]:
    """Make applications on the test's database, each with its own configuration."""
    return functools.partial(open_shop, database)


@pytest.fixture
def shop(make_shop: Callable[..., Shop]) -> Shop:
    """Give an application with the default configuration."""
    return make_shop()


@pytest.fixture
def make_quick(open_shop: Callable[..., Shop], tmp_path: Path) -> Callable[..., Shop]:
    """Make applications on SQLite, for what does not depend on the database."""
    numbers = itertools.count()

    def make(*app_class: Callable[[str], Flask], **config: object) -> Shop:
        database = sqlite_database(tmp_path, f"quick{next(numbers)}")
        return open_shop(database, *app_class, **config)

    return make


@pytest.fixture
def quick(make_quick: Callable[..., Shop]) -> Shop:
    """Give an application on SQLite with the default configuration."""
    return make_quick()
