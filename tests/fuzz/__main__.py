"""Throw generated requests at the example until something is wrong, or enough."""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
import tempfile
import time
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.databases import NAMES, SERVERS, Database, Server, sqlite_database

from .model import FindingError
from .playing import play
from .target import Target, say

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator


def main() -> int:
    """Return 1 on a finding."""
    options = _options()
    # So that a database on a server is dropped whenever we end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started, seed = time.monotonic(), options.seed
    with _database(options.database) as database, closing(Target(database)) as target:
        try:
            for seed in play(target, seed=options.seed, requests=options.requests):
                played = target.statistics["requests"]
                seconds = time.monotonic() - started
                say(f"{played} requests in {seconds:.0f} s; seed {seed}")
        except FindingError as finding:
            again = f"python3 dev.py fuzz 1 --database {database.name} --seed {seed}"
            print(f"FINDING: {finding}\n\nIt comes again with: {again}")
            return 1
    seconds = time.monotonic() - started
    seeds = f"seeds {options.seed} to {seed}"
    print(f"{database.name}, {seeds}, {seconds:.0f} s: nothing found")
    _summarise(target.statistics)
    return 0


def _summarise(statistics: Counter[str]) -> None:
    for name, count in sorted(statistics.items()):
        print(f"{count:9} {name}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py fuzz", description=__doc__)
    parser.add_argument("requests", nargs="?", type=int, default=100_000)
    parser.add_argument("--database", choices=NAMES, default="sqlite")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    return parser.parse_args()


@contextmanager
def _database(name: str) -> Iterator[Database]:
    if name not in SERVERS:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            yield sqlite_database(Path(folder))
        return
    server = Server(name)
    if absence := server.absence():
        sys.exit(absence)
    url = server.create()
    try:
        yield Database(name, url)
    finally:
        server.drop(url)


if __name__ == "__main__":
    sys.exit(main())
