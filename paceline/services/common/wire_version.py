"""The version of the messages between services, which both sides check before they work together.

It covers gRPC messages, messages on Unix sockets, members in Redis, and the page of an arena in which workers take
turns. The layout of KV blocks and numerics have marks of their own. Each release speaks a range of versions, and two
services understand each other if their ranges overlap. A field or a method that the other side may ignore needs no new
version. A change that older releases would misunderstand needs one: raise `newest`, keep speaking the version before
for at least one release, and then raise `oldest`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from paceline.proto import common_pb2

HEADER = "paceline-wire"
"""Key of the metadata of each call with the range of its caller, such as "1-2"."""

_RANGE = re.compile(r"([0-9]{1,6})-([0-9]{1,6})")


class WireVersions(NamedTuple):
    """The versions that a release speaks, both ends included."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        return f"{self.oldest}-{self.newest}"

    def overlaps(self, other: WireVersions) -> bool:
        return self.oldest <= other.newest and other.oldest <= self.newest

    def to_pb(self) -> common_pb2.WireVersions:
        return common_pb2.WireVersions(oldest=self.oldest, newest=self.newest)

    @staticmethod
    def from_pb(message: common_pb2.WireVersions) -> WireVersions:
        return WireVersions(message.oldest, message.newest) if message.newest else UNNAMED

    @staticmethod
    def parse(text: str | bytes | None) -> WireVersions | None:
        """Return the range in a call's metadata; None if the text is no range."""
        if text is None:
            return UNNAMED
        found = _RANGE.fullmatch(text) if isinstance(text, str) else None
        return None if found is None else WireVersions(int(found[1]), int(found[2]))


OURS = WireVersions(1, 1)
"""Versions that this release speaks."""
UNNAMED = WireVersions(1, 1)
"""Versions that a release is assumed to speak if it names none."""


def mismatch(who: str, theirs: WireVersions, ours: WireVersions = OURS) -> str:
    """Return why this service and another one cannot work together, and what to do; "" if they can.

    Args:
        who: the other service, for the text.
    """
    if ours.overlaps(theirs):
        return ""
    older = "this service" if ours.newest < theirs.newest else who
    return (
        f"{who} speaks versions {theirs} of the protocol between services and this service {ours}: update {older}, or "
        "first bring all services to a release in between"
    )
