"""Every measuring command that the documents name is tried by `make bench-smoke`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.smoke import COMMANDS

ROOT = Path(__file__).parents[2]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
RESULTS = [ROOT / "docs" / "results.md", *sorted((ROOT / "docs" / "results").glob("*.md"))]
_COMMAND = re.compile(r"`(bench(?:\.[a-z_0-9]+)+)`|python -m ((?:bench|tests)(?:\.[a-z_0-9]+)+)")
_NO_MEASUREMENTS = {"tests.mutations.run", "bench.smoke"}


@pytest.mark.parametrize("pages", [[CONTRIBUTING], RESULTS], ids=["contributing", "results"])
def test_every_named_command_is_tried(pages: list[Path]) -> None:
    text = "\n".join(page.read_text() for page in pages)
    named = {quoted or run for quoted, run in _COMMAND.findall(text)}
    assert len(named) > 20
    assert named - _NO_MEASUREMENTS - COMMANDS.keys() == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_exists(name: str) -> None:
    path = ROOT / name.replace(".", "/")
    assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
