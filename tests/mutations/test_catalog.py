"""All mutations fit the present source."""

from __future__ import annotations

import functools
from collections import Counter
from types import CodeType

import pytest
import yaml

from tests.mutations.catalog import ROOT, Mutation, load_mutations

MUTATIONS = load_mutations()


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_applies_and_leaves_a_valid_file(mutation: Mutation) -> None:
    source = _source(mutation.file)
    assert _meaning(mutation.file, mutation.apply(source)) != _present_meaning(mutation.file)
    assert all((ROOT / test).exists() for test in mutation.tests), mutation.tests


@functools.cache
def _source(file: str) -> str:
    return (ROOT / file).read_text()


@functools.cache
def _present_meaning(file: str) -> object:
    return _meaning(file, _source(file))


def _meaning(file: str, text: str) -> object:
    """Return what a Python or YAML file means. Raises an error if it is none."""
    return list(yaml.safe_load_all(text)) if file.endswith(".yaml") else _of_code(compile(text, file, "exec"))


def _of_code(code: CodeType) -> object:
    """Return all of a code object except for its lines, so that a comment has no meaning."""
    constants = [_of_code(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    signature = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_name, code.co_names, code.co_varnames, code.co_cellvars, code.co_freevars)
    return (code.co_code, code.co_exceptiontable, signature, names, constants)


def test_a_comment_has_no_meaning() -> None:
    assert _meaning("a.py", "def f():\n    return 1\n") == _meaning("a.py", "# A comment.\ndef f():\n    return 1\n")
    assert _meaning("a.py", "def f():\n    return 1\n") != _meaning("a.py", "def f():\n    return True\n")


def test_there_are_many_and_each_has_a_name_of_its_own() -> None:
    assert len(MUTATIONS) >= 60
    assert [name for name, count in Counter(mutation.name for mutation in MUTATIONS).items() if count > 1] == []


def test_a_text_that_stands_twice_is_refused() -> None:
    twice = Mutation("twice", "file", "", "a", "b", ())
    with pytest.raises(ValueError, match="contains its text 2 times"):
        twice.apply("a a")
