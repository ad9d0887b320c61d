"""Gateways that know the same share a limit without a rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.proto.fleet_pb2 import KeyUse
from paceline.services.gateway.http.access.keys import KeyLimits
from paceline.services.gateway.http.access.limits import LEFT, KeyParts, parts_of, shares_of

LIMITS = KeyLimits(100, 1000, 10)
counts = st.integers(0, 1000)
wishes = st.floats(0, 1000)
uses = st.builds(KeyUse, requests=counts, tokens=counts, wanted_requests=wishes, wanted_running=wishes)
gateways = st.dictionaries(st.sampled_from("abcdef"), uses | st.none(), min_size=1)


def all_parts(
    told: dict[str, KeyUse | None], is_current: bool = True, limits: KeyLimits = LIMITS
) -> dict[str, KeyParts]:
    return {name: parts_of(limits, name, dict(told), is_current) for name in told}


@given(gateways, st.booleans(), st.integers(1, 100))
def test_all_shares_are_the_whole(told: dict[str, KeyUse | None], is_current: bool, most: int) -> None:
    parts = all_parts(told, is_current, KeyLimits(100, 1000, most)).values()
    assert sum(each.requests.share for each in parts) == pytest.approx(1)
    assert sum(each.tokens.share for each in parts) == pytest.approx(1)
    assert sum(each.places or 0 for each in parts) == most
    assert all(each.requests.share > 0 and each.places is not None and each.places >= 0 for each in parts)


@given(gateways)
def test_each_counts_what_the_others_used(told: dict[str, KeyUse | None]) -> None:
    total = sum(use.requests for use in told.values() if use is not None)
    for name, parts in all_parts(told).items():
        own = told[name]
        assert parts.requests.elsewhere == total - (own.requests if own is not None else 0)


@given(st.lists(wishes, min_size=1, max_size=6), st.integers(1, 1000))
def test_nobody_gets_less_than_an_equal_part_of_what_is_left(wanted: list[float], limit: int) -> None:
    shares = shares_of(wanted, limit)
    left = max(LEFT, 1 - sum(wanted) / limit)
    assert min(shares) >= left / len(wanted) - 1e-9
    if sum(wanted) <= limit:
        assert all(share * limit >= (1 - LEFT) * wish - 1e-9 for share, wish in zip(shares, wanted))


def test_beyond_the_limit_shares_follow_what_is_wanted() -> None:
    assert shares_of([300, 100, 0], 100) == pytest.approx([0.735 + LEFT / 3, 0.245 + LEFT / 3, LEFT / 3])
    assert shares_of([0, 0], 100) == shares_of([5, 1], None) == [0.5, 0.5]


def test_without_news_all_share_equally() -> None:
    told: dict[str, KeyUse | None] = {"a": None, "b": KeyUse(wanted_requests=900, wanted_running=50, running=10)}
    stale = all_parts(told, is_current=False)["a"]
    assert (stale.requests.share, stale.requests.elsewhere, stale.places) == (0.5, None, 5)
    assert all_parts(told)["a"].places == 0


def test_a_gateway_that_is_not_listed_yet_counts_itself() -> None:
    assert parts_of(LIMITS, "new", {}, True).requests.share == 1.0
    assert parts_of(LIMITS, "new", {"old": None}, True).requests.share == 0.5
    assert parts_of(KeyLimits(), "new", {}, True).places is None
