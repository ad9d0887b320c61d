"""Values in Redis that no service of the cluster has written for their key are not taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.common.seals import Seal
from paceline.services.common.secret import Secret

OURS = Secret("the secret of this cluster")
KEY = "paceline:c:planner"


@given(st.text(), st.binary(max_size=100), st.integers(0, 2 * 10**18))
def test_what_was_sealed_is_taken_as_it_was(key: str, value: bytes, after: int) -> None:
    opened = Seal(OURS).open(key, Seal(OURS).close(key, value, after))
    assert opened is not None
    assert opened.value == value
    assert opened.stamp > after


@given(st.data(), st.integers(1, 255))
def test_each_byte_is_covered(data: st.DataObject, change: int) -> None:
    sealed = Seal(OURS).close(KEY, b"12")
    place = data.draw(st.integers(0, len(sealed) - 1))
    changed = sealed[:place] + bytes((sealed[place] ^ change,)) + sealed[place + 1 :]
    assert Seal(OURS).open(KEY, changed) is None


@pytest.mark.parametrize("value", [None, b"", b"12", b"1 2 3", b"1 " + b"9" * 30 + b" -", b"12 1 ", bytes(1000)])
def test_what_is_not_sealed_is_not_taken(value: bytes | None) -> None:
    assert Seal(OURS).open(KEY, value) is None


def test_the_log_says_once_that_others_write(caplog: pytest.LogCaptureFixture) -> None:
    seal = Seal(OURS)
    assert seal.open(KEY, b"12") is seal.open(KEY, b"13") is None
    (told,) = caplog.messages
    assert KEY in told
    assert "--redis-password-file" in told


def test_a_seal_is_of_no_use_elsewhere() -> None:
    sealed = Seal(OURS).close(KEY, b"12")
    assert Seal(OURS).open("paceline:d:planner", sealed) is None
    assert Seal(Secret("the secret of another")).open(KEY, sealed) is None


def test_values_are_read_while_the_secret_changes() -> None:
    old, new = "the old secret of us", "the new secret of us"
    sealed = Seal(Secret(old)).close(KEY, b"12")
    assert Seal(Secret(new, old)).open(KEY, sealed)
    assert Seal(Secret(new)).open(KEY, sealed) is None


def test_without_a_secret_values_with_a_time_are_taken() -> None:
    opened = Seal(Secret()).open(KEY, Seal(Secret()).close(KEY, b"a b"))
    assert opened is not None
    assert opened.value == b"a b"
    assert Seal(Secret()).open(KEY, b"12") is None
