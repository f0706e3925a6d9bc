"""What the README says is what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flask
import flask_sqlalchemy
from sqlalchemy import String
from sqlalchemy.orm import Mapped, mapped_column

import flask_idempotency
from flask_idempotency.config import Config, RouteOptions

if TYPE_CHECKING:
    import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_configuration_table_lists_every_key_with_its_default() -> None:
    """The table and the settings cannot drift apart."""
    rows = dict(
        re.findall(r"^\| `(IDEMPOTENCY_\w+)` \| ([^|]+) \|", README, re.MULTILINE)
    )
    shown = {key: value.strip().strip("`") for key, value in rows.items()}
    defaults = Config()
    expected = {
        key: _as_text(getattr(defaults, name)) for name, key in Config.keys().items()
    }
    assert shown == expected


def _as_text(value: object) -> str:
    if isinstance(value, frozenset):
        return ", ".join(map(str, sorted(value)))
    return str(int(value)) if isinstance(value, float) else str(value)


def test_every_option_of_a_route_is_named() -> None:
    """The README names each keyword of @idempotent."""
    listed = README[README.index("Options of `@idempotent`") :]
    names = {name.removesuffix("_seconds") for name in RouteOptions.__annotations__}
    missing = {n for n in names if f"`{n}`" not in listed and n.islower()}
    assert missing == set()


def test_readme_stays_short() -> None:
    """A newcomer reads it in one sitting."""
    assert len(README.splitlines()) <= 120


def test_first_example_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first Python block is a working application."""
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {
        "__name__": "readme",
        "Flask": lambda name: flask.Flask(name, instance_path=str(tmp_path)),
        "SQLAlchemy": flask_sqlalchemy.SQLAlchemy,
        "Idempotency": flask_idempotency.Idempotency,
        "idempotent": flask_idempotency.idempotent,
        "request": flask.request,
    }
    exec(code[1], names)  # noqa: S102 - our own README
    app, db = names["app"], names["db"]

    class Account(db.Model):  # type: ignore[misc, name-defined]
        id: Mapped[int] = mapped_column(primary_key=True)
        name: Mapped[str] = mapped_column(String(50))

    names["Account"] = Account
    with app.app_context():
        db.create_all()
    headers = {"X-User": "u1", "Idempotency-Key": "k-1"}
    answers = [
        app.test_client().post("/accounts", json={"name": "first"}, headers=headers)
        for _ in range(2)
    ]
    assert [a.status_code for a in answers] == [201, 201]
    assert answers[0].json == answers[1].json == {"id": 1}
    with app.app_context():
        db.session.remove()
        db.engine.dispose()
        names["idempotency"].store.close()
