"""The types of the public API, as mypy sees them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_public_api_has_the_types_that_users_rely_on(tmp_path: Path) -> None:
    """Guarded views, services and values have their documented types under strict."""
    pytest.importorskip("mypy")
    target = Path(__file__).with_name("public_api.py")
    command = [sys.executable, "-m", "mypy", "--strict", "--warn-unused-ignores"]
    cache = ROOT / ".mypy_cache" if (ROOT / ".mypy_cache").is_dir() else tmp_path
    done = subprocess.run(  # noqa: S603 - our own tool and file
        [*command, "--cache-dir", str(cache), str(target)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    own = [line for line in done.stdout.splitlines() if target.name in line]
    assert own == [], done.stdout
    assert "1 source file" in done.stdout, done.stdout + done.stderr
