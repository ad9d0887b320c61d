from __future__ import annotations

import json

import pytest

from paceline.services.common.registry import Member

MEMBER = Member("d", "decode", 7, "127.0.0.1:1", "host", stats={"steps": 3, "busy_seconds": 0.5})


def test_what_a_member_wrote_is_read_by_older_and_newer_versions() -> None:
    assert Member.from_json(MEMBER.to_json()) == MEMBER
    assert Member.from_json(json.dumps({**json.loads(MEMBER.to_json()), "news": 1})) == MEMBER


@pytest.mark.parametrize(
    "change",
    [{"epoch": "7"}, {"host_id": None}, {"stats": [1]}, {"stats": {"steps": "many"}}, {"stats": {"steps": None}}],
    ids=["no number", "no text", "no stats", "text in stats", "nothing in stats"],
)
def test_what_a_stranger_wrote_is_nobody(change: dict[str, object]) -> None:
    assert Member.from_json(json.dumps({**json.loads(MEMBER.to_json()), **change})) is None
    assert Member.from_json("no JSON") is None
    assert Member.from_json("[]") is None
