from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.block_pool import BlockEvent
from paceline.services.common.block_stream import BlockBatch

events = st.builds(
    BlockEvent, st.sampled_from(["stored", "removed"]), st.integers(0, 255), st.binary(min_size=16, max_size=16)
)


def as_redis_gives_it(entry: dict[str, str | int | bytes]) -> dict[bytes, bytes]:
    return {key.encode(): value if isinstance(value, bytes) else str(value).encode() for key, value in entry.items()}


@given(st.text(min_size=1), st.integers(0, 1 << 60), st.lists(events).map(tuple))
def test_what_is_written_is_read(host: str, first: int, events: tuple[BlockEvent, ...]) -> None:
    batch = BlockBatch(host, "pool", first, events)
    assert BlockBatch.from_entry(as_redis_gives_it(batch.to_entry())) == batch


@pytest.mark.parametrize(
    "strange",
    [{}, {b"host": b"h"}, {b"first": b"one"}, {b"events": b"123"}, {b"host": b"\xff"}],
    ids=["nothing", "half", "no number", "cut short", "no text"],
)
def test_what_a_stranger_wrote_is_nothing(strange: dict[bytes, bytes]) -> None:
    ours = as_redis_gives_it(BlockBatch("h", "p", 0, ()).to_entry())
    entry = {**ours, **strange} if len(strange) == 1 and b"host" not in strange else strange
    assert BlockBatch.from_entry(entry) is None
