"""Gateways that know the same share a limit without a rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.proto.fleet_pb2 import KeyUse
from paceline.services.gateway.access.shares import IDLE_SHARE, KeyParts, parts_of

uses = st.builds(KeyUse, name=st.just("alice"), demand=st.floats(0, 1000), requests=st.integers(0, 1000))
gateways = st.dictionaries(st.sampled_from("abcdef"), st.lists(uses, max_size=1), min_size=1)


def all_parts(told: dict[str, list[KeyUse]], is_current: bool = True) -> dict[str, KeyParts]:
    return {name: parts_of("alice", name, told, is_current) for name in told}


@given(gateways, st.booleans(), st.integers(1, 100))
def test_all_shares_are_the_whole(told: dict[str, list[KeyUse]], is_current: bool, most: int) -> None:
    parts = all_parts(told, is_current)
    assert abs(sum(each.requests.share for each in parts.values()) - 1) < 1e-9
    assert sum(each.places(most) for each in parts.values()) == most
    assert all(each.places(most) >= 0 and each.requests.share > 0 for each in parts.values())


@given(gateways)
def test_each_counts_what_the_others_used(told: dict[str, list[KeyUse]]) -> None:
    total = sum(use.requests for known in told.values() for use in known)
    for name, parts in all_parts(told).items():
        assert parts.requests.elsewhere == total - sum(use.requests for use in told[name])


def test_shares_follow_the_demand() -> None:
    told = {"a": [KeyUse(name="alice", demand=30)], "b": [KeyUse(name="alice", demand=10)], "c": []}
    shares = {name: parts.tokens.share for name, parts in all_parts(told).items()}
    kept = IDLE_SHARE / 3
    expected = {"a": (1 - IDLE_SHARE) * 0.75 + kept, "b": (1 - IDLE_SHARE) * 0.25 + kept, "c": kept}
    assert shares == pytest.approx(expected)


def test_without_demand_or_news_all_share_equally() -> None:
    told: dict[str, list[KeyUse]] = {"a": [KeyUse(name="bob", demand=5)], "b": []}
    assert [parts.requests.share for parts in all_parts(told).values()] == [0.5, 0.5]
    told["b"] = [KeyUse(name="alice", demand=9)]
    stale = all_parts(told, is_current=False)["a"]
    assert (stale.requests.share, stale.requests.elsewhere) == (0.5, None)


def test_a_gateway_that_is_not_listed_yet_counts_itself() -> None:
    assert parts_of("alice", "new", {}, True).requests.share == 1.0
    assert parts_of("alice", "new", {"old": []}, True).requests.share == 0.5
