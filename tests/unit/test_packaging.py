"""What a wheel will hold, told by pyproject.toml."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_package_is_named() -> None:
    """Named one by one, so that a new folder would silently be left out of the wheel."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    folders = {path.parent for path in (ROOT / "bullet_graph").rglob("__init__.py")}
    assert set(named) == {".".join(folder.relative_to(ROOT).parts) for folder in folders} | {"bullet_graph._capture"}
