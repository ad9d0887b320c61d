"""The cached prefix of a context, with one group and with two groups of different block sizes and windows."""

from __future__ import annotations

import pytest

from paceline.core.context import Tail
from paceline.core.kv_layout import NO_SLOT, KVLayout
from paceline.core.prefix import match_prefix
from tests.services.kvtransfer.kv_toolkit import chain, make_layout


def blocks_of(layout: KVLayout, context: str) -> dict[tuple[int, bytes], int]:
    """Return the slots of all blocks of a context, by their names. Block b of group g has slot 100 * g + b."""
    blocks = {}
    for index, group in enumerate(layout.groups):
        stride = group.block_tokens // 16
        for block, digest in enumerate(chain(context)[stride - 1 :: stride]):
            blocks[index, digest] = 100 * index + block
    return blocks


def match(layout: KVLayout, cached: dict[tuple[int, bytes], int], context: str, limit: int = 1 << 20):
    return match_prefix(layout, lambda group, digest: cached.get((group, digest)), chain(context), limit)


def without(blocks: dict[tuple[int, bytes], int], *slots: int) -> dict[tuple[int, bytes], int]:
    return {name: slot for name, slot in blocks.items() if slot not in slots}


FULL = make_layout((16, 0))
MIXED = make_layout((64, 0), (16, 40))
"""A layout with full attention in blocks of 64 tokens, and a window of 40 tokens in blocks of 16."""


@pytest.mark.parametrize(
    ("cached", "context", "limit", "length"),
    [
        pytest.param("abcd", "abcd", 64, 64, id="all"),
        pytest.param("abcd", "abcd", 63, 48, id="never beyond the limit"),
        pytest.param("abcd", "abcd", 0, 0, id="limit of nothing"),
        pytest.param("abcd", "abxy", 64, 32, id="until the contexts part"),
        pytest.param("abcd", "xbcd", 64, 0, id="equal tokens after another beginning are other content"),
        pytest.param("abcd", "ab", 64, 32, id="shorter context"),
        pytest.param("", "abcd", 64, 0, id="nothing cached"),
        pytest.param("abcd", "", 64, 0, id="nothing asked"),
    ],
)
def test_one_group(cached: str, context: str, limit: int, length: int) -> None:
    found, tables = match(FULL, blocks_of(FULL, cached), context, limit)
    assert found == length
    assert tables == [list(range(length // 16))]


def test_a_hole_ends_the_prefix_of_full_attention() -> None:
    assert match(FULL, without(blocks_of(FULL, "abcd"), 2), "abcd") == (32, [[0, 1]])


@pytest.mark.parametrize(
    ("missing", "length"),
    [
        pytest.param((), 128, id="all there"),
        # A query at 128 reads keys of (88, 128): blocks 5, 6, 7 of the windowed group.
        pytest.param((100, 101, 102, 103, 104), 128, id="what the window left behind is not needed"),
        pytest.param((105,), 64, id="first block of the window is gone"),
        pytest.param((107,), 64, id="last block of the window is gone"),
        # A query at 64 reads (24, 64): blocks 1, 2, 3.
        pytest.param((107, 100), 64, id="shorter prefix with its own window"),
        pytest.param((107, 101), 0, id="no prefix has its window"),
        pytest.param((1,), 64, id="full attention bounds all groups"),
        pytest.param((0,), 0, id="first block of full attention is gone"),
    ],
)
def test_two_groups(missing: tuple[int, ...], length: int) -> None:
    context = "abcdefgh"
    found, tables = match(MIXED, without(blocks_of(MIXED, context), *missing), context)
    assert found == length
    first_needed = {128: 5, 64: 1, 0: 0}[length]
    assert tables[0] == list(range(length // 64))
    assert tables[1] == [NO_SLOT] * first_needed + [100 + block for block in range(first_needed, length // 16)]


def test_prefix_ends_on_a_block_of_every_group() -> None:
    found, tables = match(MIXED, blocks_of(MIXED, "abcdefgh"), "abcdefgh", limit=127)
    assert found == 64
    assert [len(table) for table in tables] == [1, 4]


def test_windowed_groups_alone_need_no_beginning() -> None:
    layout = make_layout((16, 20))
    found, tables = match(layout, without(blocks_of(layout, "abcdef"), 0, 1, 2, 3), "abcdef")
    assert (found, tables) == (96, [[NO_SLOT] * 4 + [4, 5]])


STATES = make_layout((32, 0), (128, 2))
"""A layout with full attention in blocks of 32 tokens, and states in blocks of 128."""
TAILS = [Tail(40, b"forty"), Tail(137, b"137"), Tail(160, chain("abcdefghij")[-1])]


@pytest.mark.parametrize(
    ("missing", "limit", "length", "tables"),
    [
        pytest.param((), 999, 160, [[0, 1, 2, 3, 4], [NO_SLOT, 1160]], id="the longest tail, which fills a block"),
        pytest.param((1160,), 999, 137, [[0, 1, 2, 3, 137], [NO_SLOT, 1137]], id="another tail"),
        pytest.param((), 159, 137, [[0, 1, 2, 3, 137], [NO_SLOT, 1137]], id="never beyond the limit"),
        pytest.param((1160, 137), 999, 128, [[0, 1, 2, 3], [100]], id="a tail without a block is none"),
        pytest.param((1160, 137, 100), 999, 40, [[0, 40], [1040]], id="a short tail, if no longer prefix is whole"),
        pytest.param((2,), 999, 40, [[0, 40], [1040]], id="full attention needs the blocks before a tail"),
        pytest.param((0,), 999, 0, [[], []], id="nothing is left"),
    ],
)
def test_a_prefix_may_end_at_a_tail(missing: tuple[int, ...], limit: int, length: int, tables: list[list[int]]) -> None:
    context = "abcdefghijkl"
    cached = blocks_of(STATES, context)
    for tail in TAILS:
        cached |= {(0, tail.name): tail.length, (1, tail.name): 1000 + tail.length} if tail.length != 160 else {}
    cached |= {(1, TAILS[2].name): 1160}
    cached = without(cached, *missing)
    found = match_prefix(STATES, lambda *name: cached.get(name), chain(context), limit, TAILS)
    assert found == (length, tables)
