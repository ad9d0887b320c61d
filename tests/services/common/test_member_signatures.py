"""Members in Redis that no service of the cluster has written, or that have ended, are not taken."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.proto import fleet_pb2 as pb
from paceline.services.common import member_signatures
from paceline.services.common.auth import CLOCK_SECONDS
from paceline.services.common.member_signatures import TTL_SECONDS, UNSIGNED, MemberSignatures, version_of
from paceline.services.common.registry import Member
from paceline.services.common.secret import Secret

SECRET = Secret("the secret of this cluster")
MEMBER = Member("d", "decode", 7, "10.0.0.1:7300", "host").to_bytes()


def signing(
    secret: Secret = SECRET, cluster: str = "c", count_ignored: Callable[[], object] = lambda: None
) -> MemberSignatures:
    return MemberSignatures(secret, cluster, count_ignored)


@given(st.text(min_size=1), st.binary(max_size=200))
def test_what_was_signed_is_taken_as_it_was(name: str, member: bytes) -> None:
    value, beat = signing().sign(name, member)
    reader = signing()
    assert reader.version(name, beat) == version_of(member)
    assert reader.open(name, value) == member


def test_members_are_read_while_the_secret_changes() -> None:
    old, new = "the old secret of us", "the new secret of us"
    steps = [Secret(old), Secret(old, new), Secret(new, old), Secret(new)]
    for writer, reader in itertools.pairwise(steps):
        for one, other in ((writer, reader), (reader, writer)):
            assert signing(other).open("d", signing(one).sign("d", MEMBER)[0]) == MEMBER
    assert signing(steps[3]).open("d", signing(steps[0]).sign("d", MEMBER)[0]) is None


@given(st.data(), st.integers(1, 255))
def test_each_byte_is_covered(data: st.DataObject, change: int) -> None:
    value, beat = signing().sign("d", MEMBER)

    def changed(text: bytes) -> bytes:
        place = data.draw(st.integers(0, len(text) - 1))
        return text[:place] + bytes((text[place] ^ change,)) + text[place + 1 :]

    assert signing().open("d", changed(value)) is None
    assert signing().version("d", changed(beat)) is None


@pytest.mark.parametrize(
    ("secret", "cluster", "name"),
    [(Secret("the secret of another one"), "c", "d"), (SECRET, "another", "d"), (SECRET, "c", "e")],
    ids=["secret", "cluster", "name"],
)
def test_a_signature_is_of_no_use_elsewhere(secret: Secret, cluster: str, name: str) -> None:
    value, beat = signing(secret, cluster).sign("d", MEMBER)
    assert signing().open(name, value) is None
    assert signing().version(name, beat) is None


@pytest.mark.parametrize("value", [b"", MEMBER, b"x" * 300, MEMBER + b"\xe2\x01\x28" + bytes(40)])
def test_what_is_not_signed_is_not_taken(value: bytes) -> None:
    assert signing().open("d", value) is None
    assert signing().version("d", value) is None


def test_without_a_secret_everything_is_taken() -> None:
    signed, beat = signing().sign("d", MEMBER)
    assert UNSIGNED.sign("d", MEMBER) == (MEMBER, version_of(MEMBER))
    assert UNSIGNED.open("d", MEMBER) == MEMBER
    taken = UNSIGNED.open("d", signed)
    assert taken is not None
    assert Member.from_bytes(taken) == Member.from_bytes(MEMBER)
    assert UNSIGNED.version("d", beat) == version_of(MEMBER)


def test_releases_without_signatures_can_read_signed_members() -> None:
    value, _ = signing().sign("d", MEMBER)
    message = pb.Member.FromString(value)
    assert (message.worker_id, len(message.mark)) == ("d", 40)


class Clocks:
    """The module `time` as one service sees it."""

    def __init__(self) -> None:
        self.at = 1000.0
        self.ahead = 0.0

    def monotonic(self) -> float:
        return self.at

    def time_ns(self) -> int:
        return int((1.7e9 + self.at + self.ahead) * 1e9)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(member_signatures, "time", clocks)
    return clocks


def test_a_member_that_has_ended_cannot_be_brought_back(clocks: Clocks) -> None:
    writer, reader = signing(), signing()
    earlier, last = (writer.sign("d", MEMBER) for _ in range(2))
    assert reader.version("d", last[1]) is not None
    assert reader.open("d", last[0]) == MEMBER
    assert reader.open("d", earlier[0]) is None
    clocks.at += TTL_SECONDS - 0.1
    assert reader.open("d", last[0]) == MEMBER  # Redis may still have it
    clocks.at += 0.2
    assert reader.open("d", last[0]) is None
    assert reader.version("d", last[1]) is None
    clocks.at += CLOCK_SECONDS
    assert signing().open("d", last[0]) is None  # nor at a service that has just started
    assert reader.open("d", writer.sign("d", MEMBER)[0]) == MEMBER


@pytest.mark.parametrize("ahead", [-CLOCK_SECONDS, CLOCK_SECONDS])
def test_clocks_may_differ_a_little(ahead: float, clocks: Clocks) -> None:
    clocks.ahead = ahead
    value, _ = signing().sign("d", MEMBER)
    clocks.ahead = 2.2 * ahead
    far, _ = signing().sign("e", MEMBER)
    clocks.ahead = 0.0
    assert signing().open("d", value) == MEMBER
    assert signing().open("e", far) is None


def test_a_clock_that_is_set_back_stops_no_service(clocks: Clocks) -> None:
    writer, reader = signing(), signing()
    assert reader.open("d", writer.sign("d", MEMBER)[0]) == MEMBER
    clocks.ahead = -3.0
    assert reader.open("d", writer.sign("d", MEMBER)[0]) == MEMBER


def test_names_that_are_gone_are_forgotten(clocks: Clocks) -> None:
    writer, reader = signing(), signing()
    for number in range(100):
        clocks.at += 10.0
        assert reader.open(f"d{number}", writer.sign(f"d{number}", MEMBER)[0]) == MEMBER
    assert len(reader._newest) < 20


def test_what_is_ignored_is_counted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    ignored: list[None] = []
    reader = signing(count_ignored=lambda: ignored.append(None))
    forged, _ = signing(Secret("the secret of another one")).sign("d", MEMBER)
    with caplog.at_level(logging.WARNING):
        for value in (MEMBER, forged, MEMBER, forged):
            assert reader.open("d", value) is None
    assert len(ignored) == 4
    unsigned, wrong = caplog.messages
    assert "'d' is ignored, because it is not signed. " in unsigned
    assert "because it is not signed with the secret of this cluster. " in wrong
    assert "--auth-token-file" in wrong
    assert "--redis-password-file" in wrong
