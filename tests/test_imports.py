"""Imports inside functions, and modules that commands name, exist: nobody notices otherwise until the command runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("bench", "paceline", "tests")
COMMAND = re.compile(r"python -m ((?:bench|tests)(?:\.\w+)+)")


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if name.split(".")[0] in ROOMS}


@pytest.mark.parametrize("room", ROOMS)
def test_all_modules_that_are_imported_exist(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))

    missing = {f"{path.relative_to(ROOT)}: {name}" for path in files for name in _imports(path) if not _is_module(name)}

    assert files
    assert not missing


def test_all_commands_that_texts_name_exist() -> None:
    texts = [path for room in (*ROOMS, "docs", "compose", "kubernetes") for path in (ROOT / room).rglob("*.*")]
    texts = [
        path
        for path in (*texts, *ROOT.glob("*.md"), ROOT / "Makefile")
        if path.suffix in {".py", ".md", ".csv", ".sh", ""}
    ]

    named = {(path.relative_to(ROOT), name) for path in texts for name in COMMAND.findall(path.read_text())}

    assert named
    assert not {f"{path}: {name}" for path, name in named if not _is_module(name)}
