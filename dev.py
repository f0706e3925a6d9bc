#!/usr/bin/env python3
"""
Run the tasks of this project: `python3 dev.py` lists them.

Only the standard library is used; what a task needs is installed into `.venv`.
Python 3.6 to 3.9 must still parse this file, to say that they are too old.
"""

import contextlib
import difflib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036 - who has such a Python is told so.
    sys.exit("dev.py needs Python 3.10 or newer, not " + sys.version.split()[0] + ".")

ROOT = Path(__file__).resolve().parent
PYTHON = "Scripts/python.exe" if os.name == "nt" else "bin/python"
ALL_CORES = ("--numprocesses", "auto")
DEMO = ("-m", "flask", "--app", "example_app", "demo")
LINT = "import importlinter.cli as c; c.lint_imports_command()"
CHECKS = {
    "ruff check": ("-m", "ruff", "check", "."),
    "ruff format": ("-m", "ruff", "format", "--check", "."),
    "mypy": ("-m", "mypy"),
    "lint-imports": ("-c", LINT, "--no-logo"),
    "interrogate": ("-m", "interrogate", "tests"),
    "codespell": ("-m", "codespell_lib"),
    "routes": (*DEMO[:-1], "idempotency", "routes", "--check"),
}
# Variables that would send a child to the packages or folders of another Python.
BENDING = ("PIP_PREFIX", "PIP_TARGET", "PIP_USER", "PYTHONHOME", "PYTHONPATH")


def environ(home: Path) -> dict[str, str]:
    """Return the variables for a child that runs in the environment `home`."""
    kept = {name: value for name, value in os.environ.items() if name not in BENDING}
    scripts = str((home / PYTHON).parent)
    path = os.pathsep.join((scripts, kept.get("PATH", os.defpath)))
    return {**kept, "PATH": path, "VIRTUAL_ENV": str(home)}


def run(home: Path, *args: str, cwd: Path = ROOT) -> int:
    """Run the Python of `home` in the foreground and return its exit code."""
    command = [str(home / PYTHON), *args]
    process = subprocess.Popen(command, cwd=cwd, env=environ(home))
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    while process.poll() is None:
        # Ctrl-C reaches the child too, which decides when it ends.
        with contextlib.suppress(KeyboardInterrupt):
            process.wait()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def quiet(home: Path, python: Path | str, *args: str) -> bool:
    """Run a step of the set-up, show its last lines if it fails, tell if it went well."""
    done = subprocess.run(
        [str(python), *args],
        cwd=ROOT,
        env=environ(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode:
        print(*done.stdout.splitlines()[-12:], sep="\n", file=sys.stderr)
    return done.returncode == 0


def kind(python: Path | str, module: str) -> str:
    """Return a tag such as cpython-312, or "" if it does not run or lacks `module`."""
    code = f"import sys, {module}; print(sys.implementation.cache_tag)"
    command = [str(python), "-I", "-c", code]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip()
    return ""


def make(home: Path, base: str) -> None:
    """Make an empty environment, in place of whatever is there."""
    if Path(sys.prefix).resolve() == home.resolve():
        sys.exit(f"{home.name} must be made anew: start dev.py with another Python.")
    if os.path.lexists(home):
        why = "it is broken, unfinished, moved or of another Python"
        print(f"Making {home.name} anew: {why}", file=sys.stderr)
        shutil.rmtree(home)
    home.mkdir()
    (home / "dev-stamp").write_text("unfinished\n", encoding="utf-8")
    if not quiet(home, base, "-m", "venv", str(home)):
        sys.exit(
            f"Python's venv could not make {home.name} (see above): "
            "on Debian and Ubuntu run `apt install python3-venv` and try again."
        )


def install(home: Path, *args: str) -> None:
    """Let pip install into an environment, or end with a sentence."""
    options = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    if not quiet(home, home / PYTHON, *options, *args):
        sys.exit(
            "pip could not install what the task needs (see above): "
            "check the network and pip's settings, then try again."
        )


def ready(
    target: str, name: str = ".venv", base: str = sys.executable, pins: str = ""
) -> Path:
    """Return an environment with `target` installed, made or repaired when need be."""
    home = ROOT / name
    stamp = home / "dev-stamp"
    place = f"{kind(base, 'sys')} {ROOT}\n"
    project = (ROOT / "pyproject.toml").read_bytes() + pins.encode()
    digest = hashlib.sha256(project).hexdigest()
    # An environment without stamp is somebody's own: kept as it is, if it works.
    old = stamp.read_text("utf-8", "replace") if stamp.is_file() else place
    whole = old.startswith(place) and kind(home / PYTHON, "pip") == kind(base, "sys")
    if whole and old.startswith(f"{place}{digest}\n{target}"):
        return home
    if not whole:
        make(home, base)
        old = place
    print(
        f"Installing {target} into {name} (once per change of pyproject.toml)",
        file=sys.stderr,
    )
    (home / "dev-pins.txt").write_text(pins, encoding="utf-8")
    stamp.write_text("unfinished\n", encoding="utf-8")
    try:
        install(home, "--constraint", str(home / "dev-pins.txt"), "--editable", target)
    except SystemExit:
        # pip gave up by itself, so what was there before is still there.
        stamp.write_text(old, encoding="utf-8")
        raise
    stamp.write_text(f"{place}{digest}\n{target}\n", encoding="utf-8")
    return home


def demo(*args: str) -> int:
    """Run the example's demo."""
    return run(ready("."), *DEMO, *args)


def serve(*args: str) -> int:
    """Serve the example on this machine."""
    home = ready(".")
    return run(home, *DEMO[:-1], "db", "upgrade") or run(home, *DEMO[:-1], "run", *args)


def test(*args: str) -> int:
    """Run the tests on all cores, or as pytest's arguments say."""
    return run(ready(".[dev]"), "-m", "pytest", *(args or ALL_CORES))


def fuzz(*args: str) -> int:
    """Throw generated requests at the example: how many, and --database."""
    return run(ready(".[dev]"), "-m", "tests.fuzz", *args)


def torture(*args: str) -> int:
    """Run the slow proofs for some minutes, or for as many rounds as given."""
    rounds, *others = args or ("150",)
    options = ("--rounds", rounds, *(others or ALL_CORES))
    return run(ready(".[dev]"), "-m", "pytest", *options)


def test_lowest(*args: str) -> int:
    """Run the tests with the lowest dependencies, on Python 3.10 if there is one."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    needs = project.partition("\ndev = [")[0]
    bounds = re.findall(r'"([\w-]+)(?:\[\w+\])?>=([\d.]+)"', needs)
    pins = "".join(f"{name}=={version}\n" for name, version in bounds)
    oldest = shutil.which("python3.10")
    base = oldest if oldest and kind(oldest, "ensurepip") else sys.executable
    home = ready(".[dev]", ".venv-lowest", base, pins)
    return run(home, "-m", "pytest", *(args or ALL_CORES))


def lint() -> int:
    """Run all static checks and name those that failed."""
    home = ready(".[dev]")
    failed = []
    for name, command in CHECKS.items():
        print(f"-- {name}", flush=True)
        if run(home, *command):
            failed.append(name)
    if failed:
        print("lint failed: " + ", ".join(failed), file=sys.stderr)
    return 1 if failed else 0


def build() -> int:
    """Build wheel and sdist in dist/ and run the demo from nothing else."""
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    code = run(ready(".[dev]"), "-m", "build", "--outdir", str(dist))
    if code:
        return code
    wheel, sdist = next(dist.glob("*.whl")), next(dist.glob("*.tar.gz"))
    print("Running the demo from the wheel alone", file=sys.stderr)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        home, apart = Path(folder, "venv"), Path(folder, "apart")
        make(home, sys.executable)
        install(home, str(wheel))
        shutil.unpack_archive(sdist, folder)
        # Without flask_idempotency beside it, the example finds the wheel's.
        for part in ("example_app", "migrations"):
            source = Path(folder, sdist.name.removesuffix(".tar.gz"), part)
            shutil.copytree(source, apart / part)
        return run(home, *DEMO, cwd=apart)


def clean() -> int:
    """Remove the environments, builds, caches and reports."""
    names = (".venv", ".venv-lowest", ".*_cache", ".hypothesis", "build", "dist")
    for name in (*names, "htmlcov", "*/**/__pycache__", "__pycache__"):
        for folder in list(ROOT.glob(name)):
            shutil.rmtree(folder)
    (ROOT / ".coverage").unlink(missing_ok=True)
    return 0


PASS_ON: dict[str, Callable[..., int]] = {
    "demo": demo,
    "fuzz": fuzz,
    "serve": serve,
    "test": test,
    "test-lowest": test_lowest,
    "torture": torture,
}
TASKS = {**PASS_ON, "lint": lint, "build": build, "clean": clean}


def main(name: str = "--help", *args: str) -> int:
    """Run one task, or list them all."""
    if name in ("-h", "--help"):
        for known, task in TASKS.items():
            print(f"{known:12} {(task.__doc__ or '').strip()}")
        return 0
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, 1, 0)[0]
        print(f"dev.py has no task {name!r}: did you mean {near!r}?", file=sys.stderr)
        return 2
    if args and name not in PASS_ON:
        print(f"The task {name!r} takes no arguments.", file=sys.stderr)
        return 2
    return TASKS[name](*args)


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        sys.exit(f"dev.py could not go on: {error}")
