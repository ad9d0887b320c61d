"""All mutations fit the present source."""

from __future__ import annotations

import ast
from collections import Counter

import pytest
import yaml

from tests.mutations.catalog import ROOT, Mutation, load_mutations

MUTATIONS = load_mutations()


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_applies_and_leaves_a_valid_file(mutation: Mutation) -> None:
    source = (ROOT / mutation.file).read_text()
    assert _read(mutation.file, mutation.apply(source)) != _read(mutation.file, source)
    assert all((ROOT / test).exists() for test in mutation.tests), mutation.tests


def _read(file: str, text: str) -> object:
    """Return what a Python or YAML file means. Raises an error if it is none."""
    return list(yaml.safe_load_all(text)) if file.endswith(".yaml") else ast.dump(ast.parse(text))


def test_there_are_many_and_each_has_a_name_of_its_own() -> None:
    assert len(MUTATIONS) >= 60
    assert [name for name, count in Counter(mutation.name for mutation in MUTATIONS).items() if count > 1] == []


def test_a_text_that_stands_twice_is_refused() -> None:
    twice = Mutation("twice", "file", "", "a", "b", ())
    with pytest.raises(ValueError, match="contains its text 2 times"):
        twice.apply("a a")
