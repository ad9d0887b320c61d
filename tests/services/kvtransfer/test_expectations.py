"""From expectations of contexts to hints about blocks."""

from __future__ import annotations

import pytest

from paceline.core.cache_policy.hints import Hint
from paceline.core.context import Context
from paceline.core.errors import InvalidRequestError
from paceline.core.kv_layout import GroupShape, make_layout
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.kvtransfer.ledger.hints import expectation_from_pb, hinted_blocks

LAYOUT = make_layout((GroupShape("full", (0,), 1, 8), GroupShape("sliding", (1,), 1, 8, window=32)), 4, "m")
LINKS = Context(list(range(160))).links(LAYOUT.fingerprint)


def test_a_prefix_needs_all_blocks_of_full_attention_and_the_window_before_its_end() -> None:
    found = {name for name, _ in hinted_blocks(LAYOUT, LINKS, [Hint(100, 60.0)])}
    assert found == {*((0, link) for link in LINKS[:6]), *((1, link) for link in LINKS[4:6])}


def test_the_nearest_time_counts_and_children_come_first() -> None:
    hints = [Hint(160, 60.0), Hint(32, 3600.0), Hint(64, 5.0)]
    found = [(name[1], hint.seconds) for name, hint in hinted_blocks(LAYOUT, LINKS, hints) if name[0] == 0]
    assert [seconds for link, seconds in found if link in LINKS[:4]] == [5.0] * 4
    assert sorted(LINKS.index(link) for link, _ in found) == list(range(10))
    assert LINKS.index(found[0][0]) > LINKS.index(found[-1][0])


def test_a_context_that_is_shorter_than_its_hint_is_hinted_to_its_end() -> None:
    assert len(dict(hinted_blocks(LAYOUT, LINKS, [Hint(10_000, 60.0)]))) == 10 + 2


def test_messages_are_checked() -> None:
    hint = pb.Hint(tokens=32, within_ms=1500, source=b"me")
    good = pb.Expectation(hashes=b"".join(LINKS[:2]), hints=[hint])
    assert expectation_from_pb(good) == (list(LINKS[:2]), [Hint(32, 1.5, b"me")])
    for bad in (
        pb.Expectation(hashes=b"short", hints=[hint]),
        pb.Expectation(hints=[hint] * 9),
        pb.Expectation(hints=[pb.Hint(source=bytes(17))]),
    ):
        with pytest.raises(InvalidRequestError):
            expectation_from_pb(bad)
