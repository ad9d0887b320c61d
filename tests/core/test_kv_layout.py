"""Any combination of groups has a layout that wastes little memory and has common block boundaries."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.core.kv_groups import state_groups
from paceline.core.kv_layout import BASE_TOKENS, GroupShape, KVGroup, KVLayout, make_layout

Shapes = st.lists(
    st.builds(
        GroupShape,
        name=st.sampled_from(["full", "sliding", "small"]),
        layers=st.integers(1, 48).map(lambda n: tuple(range(n))),
        kv_heads=st.integers(1, 16),
        head_dim=st.sampled_from([24, 64, 96, 128, 256, 512]),
        window=st.sampled_from([0, 20, 512, 1024]),
    ),
    min_size=1,
    max_size=5,
).map(tuple)
Itemsizes = st.sampled_from([1, 2, 4])

States = st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3).map(tuple)


def shape(layers: int, kv_heads: int = 1, head_dim: int = 256, window: int = 0) -> GroupShape:
    return GroupShape("full", tuple(range(layers)), kv_heads, head_dim, window)


def block_bytes(group: KVGroup, itemsize: int) -> int:
    return group.shape.elements_per_token * group.block_tokens * itemsize


def test_gemma_3_270m() -> None:
    layout = make_layout((shape(15, window=512), shape(3)), 2, "gemma")
    assert [group.block_tokens for group in layout.groups] == [16, 64]
    assert layout.slot_bytes == 15 * 2 * 256 * 16 * 2 == 245_760
    assert layout.alignment == 64
    assert layout.slots_for(65) == 5 + 2


@given(Shapes, Itemsizes)
def test_every_block_fits_into_a_slot_and_the_largest_fills_it(shapes: tuple[GroupShape, ...], itemsize: int) -> None:
    layout = make_layout(shapes, itemsize, "m")
    sizes = [block_bytes(group, itemsize) for group in layout.groups]
    assert max(sizes) <= layout.slot_bytes
    assert layout.slot_bytes % 4096 == 0
    largest = max(shape.elements_per_token for shape in shapes) * BASE_TOKENS * itemsize
    assert layout.slot_bytes - largest < 4096
    # Every block is larger than half of the largest one, unless it has the largest number of tokens.
    for group, size in zip(layout.groups, sizes):
        assert 2 * size > largest or group.block_tokens == 16 * BASE_TOKENS


@given(Shapes, Itemsizes)
def test_block_boundaries_of_all_groups_meet(shapes: tuple[GroupShape, ...], itemsize: int) -> None:
    layout = make_layout(shapes, itemsize, "m")
    assert all(layout.alignment % group.block_tokens == 0 for group in layout.groups)
    assert all(group.block_tokens % BASE_TOKENS == 0 for group in layout.groups)
    assert tuple(group.shape for group in layout.groups) == shapes


@given(Shapes, st.integers(0, 10_000))
def test_slots_are_enough_and_not_one_too_many(shapes: tuple[GroupShape, ...], tokens: int) -> None:
    layout = make_layout(shapes, 2, "m")
    blocks = [group.blocks_for(tokens) for group in layout.groups]
    assert layout.slots_for(tokens) == sum(blocks)
    for group, count in zip(layout.groups, blocks):
        assert (count - 1) * group.block_tokens < tokens <= count * group.block_tokens or tokens == count == 0


@given(st.lists(Shapes, max_size=1), st.integers(1, 200), States, Itemsizes, st.booleans())
def test_states_go_with_any_other_groups(
    others: list[tuple[GroupShape, ...]], layers: int, state: tuple[tuple[int, ...], ...], itemsize: int, drafts: bool
) -> None:
    kv = others[0] if others else ()
    shapes = kv + state_groups("state", range(layers), state, kv)
    if drafts:
        shapes += tuple(shape.of_drafter(layers) for shape in kv)
    layout = make_layout(shapes, itemsize, "m")
    states = [group for group in layout.groups if group.shape.state]
    assert [layer for group in states for layer in group.shape.layers] == list(range(layers))
    assert len(states) <= 32
    assert max(group.shape.block_bytes(group.block_tokens, itemsize) for group in layout.groups) <= layout.slot_bytes
    assert layout.alignment <= 512
    assert layout.alignment == states[0].block_tokens  # states are kept only at positions where a prefix may end
    assert all(layout.alignment % group.block_tokens == 0 for group in layout.groups)


@given(st.integers(0, 5000), st.sampled_from([16, 64, 512]))
def test_of_states_only_that_behind_the_token_before_is_needed(position: int, block_tokens: int) -> None:
    (state,) = state_groups("state", [0], ((3, 4),), ())
    assert KVGroup(state, block_tokens).first_needed_block(position) == max(0, position - 1) // block_tokens


def test_granite_4_h_350m() -> None:
    # Each layer has a state of 815 KB, and 15 KB for each draft. Keys and values take 4 KB per token.
    full = (GroupShape("full", tuple(range(4)), 4, 64),)
    shapes = full + state_groups("mamba", range(28), ((48, 32, 128), (1, 1840), (3, 1792)), full)
    for drafts, slot_bytes in ((0, 1_634_304), (4, 1_748_992)):
        layout = make_layout(shapes, 2, "granite", drafts)
        assert [group.block_tokens for group in layout.groups] == [256] + [512] * 14
        assert layout.slot_bytes == slot_bytes
        assert layout.slots_for(1000) == 4 + 2 * 14
    assert make_layout(full, 2, "granite", 4) == make_layout(full, 2, "granite")


@given(st.integers(0, 5000), st.integers(0, 600), st.sampled_from([16, 32, 64]))
def test_the_first_needed_block_holds_the_oldest_key_in_sight(position: int, window: int, block_tokens: int) -> None:
    group = KVGroup(shape(1, window=window), block_tokens)
    oldest = max(0, position - window + 1) if window else 0
    first = group.first_needed_block(position)
    assert first * block_tokens <= oldest < (first + 1) * block_tokens


def test_the_fingerprint_follows_all_that_blocks_depend_on() -> None:
    shapes = (shape(4), shape(2, window=20))
    layouts: list[KVLayout] = [
        make_layout(shapes, 2, "m"),
        make_layout(shapes, 4, "m"),
        make_layout(shapes, 2, "other"),
        make_layout(shapes[::-1], 2, "m"),
        make_layout((shape(4), shape(2, window=21)), 2, "m"),
        make_layout((dataclasses.replace(shapes[0], layers=(0, 1, 2, 4)), shapes[1]), 2, "m"),
    ]
    assert len({layout.fingerprint for layout in layouts}) == len(layouts)
    assert make_layout(shapes, 2, "m") == layouts[0]


@given(Shapes, Itemsizes, st.integers(1, 20_000))
def test_encodings_fill_slots_of_their_own(shapes: tuple[GroupShape, ...], itemsize: int, size: int) -> None:
    layout = make_layout(shapes, itemsize, "m", encoding_size=size)
    assert layout.encodings is not None
    (group,) = layout.encodings.groups
    assert (layout.encodings.slot_bytes, layout.encodings.fingerprint) == (layout.slot_bytes, layout.fingerprint)
    assert layout.encodings.first_group == len(layout.groups)
    assert layout.all_groups == (*layout.groups, group)
    assert group.block_tokens >= BASE_TOKENS
    assert group.block_tokens % BASE_TOKENS == 0
    link = BASE_TOKENS * size * itemsize
    assert block_bytes(group, itemsize) <= layout.slot_bytes < block_bytes(group, itemsize) + link
    assert layout.arena_slots_for(1000) == layout.slots_for(1000) + group.blocks_for(1000)
    # The KV is laid out as before, unless a row is so large that slots had to grow.
    plain = make_layout(shapes, itemsize, "m")
    assert (layout.groups, layout.slot_bytes) == (plain.groups, plain.slot_bytes) or plain.slot_bytes < link
    assert layout.fingerprint != plain.fingerprint


@pytest.mark.parametrize(("layers", "kv_heads", "head_dim"), [(30, 3, 64), (16, 8, 64), (24, 32, 64), (32, 8, 128)])
def test_almost_twice_as_many_coded_blocks_fit(layers: int, kv_heads: int, head_dim: int) -> None:
    whole = GroupShape("full", tuple(range(layers)), kv_heads, head_dim)
    coded = whole.coded("int8")
    assert coded.row_bytes(2) == head_dim + 2
    assert make_layout((whole,), 2, "m").token_bytes >= 1.9 * make_layout((coded,), 2, "m").token_bytes


def test_codes_change_the_fingerprint() -> None:
    groups = [tuple(each.coded(code) for each in (shape(4), shape(2, window=20))) for code in ("", "int8", "fp8_e4m3")]
    assert len({make_layout(each, 2, "m").fingerprint for each in groups}) == 3


def test_states_have_no_code() -> None:
    (state,) = state_groups("state", [0], ((3, 4),), ())
    assert state.coded("int8") == state


@pytest.mark.parametrize(
    ("group", "said"),
    [
        (GroupShape("latent", (0,), 1, 576, planes=1), "is not available for latent vectors"),
        (GroupShape("full", (0,), 1, 72), "needs heads of a multiple of 16 numbers, and this model's have 72"),
    ],
)
def test_groups_that_tiles_cannot_hold_are_refused(group: GroupShape, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        group.coded("int8")


def test_the_fingerprint_of_a_model_without_encoders_stays() -> None:
    # Cached blocks outlive a release of Paceline.
    llama = GroupShape("full", tuple(range(32)), 8, 128)
    known = "8696a0dd56f86a2a0342844a27aa413eff19f34b4dd04ce12437d6c61bcd589c"
    assert make_layout((llama,), 2, "x").fingerprint == known


def test_a_layout_has_encodings_only_if_the_model_has_encoders() -> None:
    layout = make_layout((shape(4),), 2, "m", encoding_size=64)
    assert layout.part(encoding=False) is layout
    assert layout.part(encoding=True) is layout.encodings
    with pytest.raises(InvalidRequestError, match="no encoders"):
        make_layout((shape(4),), 2, "m").part(encoding=True)


def test_a_model_without_groups_is_a_bug() -> None:
    with pytest.raises(ValueError, match="at least one KV group"):
        make_layout((), 2, "m")
