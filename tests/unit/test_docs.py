"""What the documents say exists, and what exists is in the documents."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from flask_idempotency import exceptions
from flask_idempotency.config import Config, RouteOptions
from flask_idempotency.exceptions import IdempotencyHTTPException
from flask_idempotency.ops import doctor

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
ERRORS = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
HTTP = (ROOT / "docs/http.md").read_text(encoding="utf-8")
GUARANTEES = (ROOT / "docs/guarantees.md").read_text(encoding="utf-8")


def errors() -> list[Any]:
    """Return the errors that reach clients."""
    return [
        value
        for value in vars(exceptions).values()
        if isinstance(value, type)
        and issubclass(value, IdempotencyHTTPException)
        and hasattr(value, "error_code")
    ]


@pytest.mark.parametrize("error", errors(), ids=lambda error: error.__name__)
def test_code_has_its_section(error: Any) -> None:
    """The fragment of a Problem's type leads to a section for client and developer."""
    anchor = f'<a id="{error.error_code}"></a>\n## {error.error_code}\n'
    assert anchor in ERRORS
    section = ERRORS.split(anchor)[1].split("<a id=")[0]
    for part in (
        f"\n{error.code}",
        "- **When**: ",
        "- **Client**: ",
        "- **Developer**: ",
    ):
        assert part in section
    first = section.strip().splitlines()[0]
    assert ("not retryable" not in first) == error.retryable


def test_no_section_is_left_over() -> None:
    """There is no section for a code that is gone."""
    codes = set(re.findall(r"^## (IDEMPOTENCY_\w+)$", ERRORS, re.MULTILINE))
    assert codes == {error.error_code for error in errors()}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    """Links between the documents name files that exist."""
    text = document.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    missing = [link for link in links if not (document.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_examples_are_python(document: Path) -> None:
    """Python blocks are valid, or decorators on their own."""
    text = document.read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        code = block
        if code.splitlines()[-1].startswith("@"):
            code += "def view(): ..."
        ast.parse(code)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_settings_that_are_named_exist(document: Path) -> None:
    """No document names a configuration key that the code does not know."""
    named = set(re.findall(r"\bIDEMPOTENCY_[A-Z_]+\b", document.read_text("utf-8")))
    codes = {error.error_code for error in errors()}
    tests = {name for name in named if name.startswith("IDEMPOTENCY_TEST_")}
    assert named - codes - tests <= set(Config.keys().values())


def test_findings_of_doctor_are_explained() -> None:
    """The codes that scripts get from ``doctor --json`` stand in a table."""
    source = Path(doctor.__file__).read_text(encoding="utf-8")
    codes = re.findall(r'code="(\w+)"', source)
    assert codes == re.findall(r"^\| `(\w+)` \|", GUARANTEES, re.MULTILINE)


def test_options_are_explained() -> None:
    """Each option is shown on the page that it belongs to."""
    names = {name.removesuffix("_seconds") for name in RouteOptions.__annotations__}
    elsewhere = {"ttl", "lease", "route", "claim", "DEFAULTED", "WITHOUT_CLAIM"}
    elsewhere |= {name for name in names if f"{name}=" in GUARANTEES}
    missing = {name for name in names - elsewhere if f"{name}=" not in HTTP}
    assert missing <= {"release_on"}
    assert "`release_on`" in HTTP
