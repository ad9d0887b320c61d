from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.block_pool import BlockEvent
from paceline.services.common.secret import Secret
from paceline.services.common.streams import BlockBatch, block_keys

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


@given(st.sampled_from([b"host", b"pool", b"first", b"events", b"mac"]), st.data())
def test_a_batch_that_others_have_changed_is_nothing(field: bytes, data: st.DataObject) -> None:
    secret = Secret("the secret of this cluster")
    batch = BlockBatch("a1", "b2", 34, (BlockEvent("stored", 0, b"x" * 16),))
    (key,) = block_keys(secret, "c")
    entry = as_redis_gives_it(batch.to_entry(key))
    assert (
        BlockBatch.from_entry(entry, block_keys(Secret("a new one of the cluster", "the secret of this cluster"), "c"))
        == batch
    )
    assert BlockBatch.from_entry(entry, block_keys(secret, "another cluster")) is None
    assert BlockBatch.from_entry(as_redis_gives_it(batch.to_entry()), (key,)) is None
    place = data.draw(st.integers(0, len(entry[field]) - 1))
    changed = entry[field][:place] + b"7" + entry[field][place + 1 :]
    assert BlockBatch.from_entry({**entry, field: changed}, (key,)) == (batch if changed == entry[field] else None)


def test_the_ends_of_names_are_covered() -> None:
    (key,) = block_keys(Secret("the secret of this cluster"), "c")
    hashes = {BlockBatch(host, pool, 0, ()).to_entry(key)["mac"] for host, pool in (("ab", "c"), ("a", "bc"))}
    assert len(hashes) == 2
