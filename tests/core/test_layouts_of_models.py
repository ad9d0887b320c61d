"""The shapes of known models, alone and in any combination, have layouts with little padding and a fine reuse grain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest

from bench.compute.layouts import ITEMSIZE, MODELS, Shapes, padding
from paceline.core.kv_groups import divide_groups, state_groups
from paceline.core.kv_layout import BASE_TOKENS, GroupShape, make_layout

KINDS = sorted(
    {replace(shape, name="kind", layers=tuple(range(len(shape.layers)))) for own in MODELS.values() for shape in own},
    key=repr,
)
KEYS_AND_VALUES = [shape for shape in KINDS if not shape.state]
STATES = [shape for shape in KINDS if shape.state]
QWEN = "Qwen3-Next 80B-A3B"
DRAFTERS = (GroupShape("eagle", (0,), 8, 128), GroupShape("mtp", (0,), 1, 576, planes=1))


def pairs() -> Iterator[Shapes]:
    """Yield every two groups as those of one model: the second one's layers come after the first one's."""
    for first, second in combinations(KEYS_AND_VALUES, 2):
        yield first, replace(second, layers=tuple(len(first.layers) + layer for layer in second.layers))


def check(shapes: Shapes) -> None:
    """Check that blocks fit into the slots, end together, and leave less than half of a slot empty."""
    for itemsize in (2, 4):
        layout = make_layout(shapes, itemsize, "any")
        for group in layout.groups:
            block = group.shape.block_bytes(group.block_tokens, itemsize)
            assert block <= layout.slot_bytes
            assert layout.alignment % group.block_tokens == group.block_tokens % BASE_TOKENS == 0
            if not group.shape.state and group.block_tokens < 256:
                assert 2 * (block + 4096) > layout.slot_bytes


@pytest.mark.parametrize("name", MODELS)
def test_a_model_wastes_little_and_reuses_small_units(name: str) -> None:
    layout = make_layout(MODELS[name], ITEMSIZE, name)
    check(MODELS[name])
    assert padding(layout) < 0.07
    assert layout.alignment <= (512 if any(shape.state for shape in MODELS[name]) else 64)


def test_any_two_groups_are_divided_until_reuse_is_fine() -> None:
    for shapes in pairs():
        divided = divide_groups(shapes)
        check(divided)
        layout = make_layout(divided, ITEMSIZE, "pair")
        assert padding(layout) < 0.25
        sizes = [shape.block_bytes(1, ITEMSIZE) for shape in shapes]
        # There are about sixteen parts at most.
        assert layout.alignment <= 64 or max(sizes) > 16 * 8 * min(sizes)
        assert sorted(layer for shape in divided for layer in shape.layers) == list(
            range(sum(len(shape.layers) for shape in shapes))
        )


def test_any_two_groups_go_with_a_drafter() -> None:
    for shapes in pairs():
        for drafter in DRAFTERS:
            check((*divide_groups(shapes), drafter.of_drafter(200)))


def test_any_group_goes_with_any_states() -> None:
    for first in KEYS_AND_VALUES:
        for state in STATES:
            shapes = (first, *state_groups("state", range(200, 236), state.state, (first,)))
            check(shapes)
            check((*shapes, DRAFTERS[0].of_drafter(300)))


def test_groups_that_are_fine_stay_whole() -> None:
    shapes = (GroupShape("sliding", tuple(range(15)), 1, 256, 512), GroupShape("full", (15, 16, 17), 1, 256))
    assert divide_groups(shapes) == shapes
    assert divide_groups(()) == ()


def test_layers_of_a_divided_group_keep_their_window_and_their_readers() -> None:
    sliding = GroupShape("sliding", tuple(range(40)), 8, 256, 1024, readers=((60, 3), (61, 39)))
    divided = divide_groups((sliding, GroupShape("full", tuple(range(40, 48)), 1, 512)))
    parts = [shape for shape in divided if shape.window]
    assert [shape.name for shape in parts] == [f"sliding-{index}" for index in range(5)]
    assert {shape.window for shape in parts} == {1024}
    assert [shape.readers for shape in parts] == [((60, 3),), (), (), (), ((61, 39),)]


def coded(shapes: Shapes) -> Shapes:
    """Return a model's groups with codes. States are divided again, as when the model is loaded."""
    kv = tuple(shape.coded("int8") for shape in shapes if not shape.state)
    states = [shape for shape in shapes if shape.state]
    layers = [layer for shape in states for layer in shape.layers]
    return kv + (state_groups("state", layers, states[0].state, kv) if states else ())


@pytest.mark.parametrize("name", [name for name in MODELS if "DeepSeek" not in name])
def test_slots_with_codes_are_as_full_and_reuse_as_small_units(name: str) -> None:
    whole, own = (make_layout(shapes, ITEMSIZE, name) for shapes in (MODELS[name], coded(MODELS[name])))
    assert padding(own) < 0.08
    assert own.alignment == whole.alignment
    if not any(shape.state for shape in MODELS[name]):
        assert own.token_bytes < 0.53 * whole.token_bytes


def test_states_are_divided_for_smaller_slots_if_keys_and_values_have_codes() -> None:
    # Otherwise a block of keys and values would fill half of a slot, and no more tokens would fit.
    whole, own = (make_layout(shapes, ITEMSIZE, "any") for shapes in (MODELS[QWEN], coded(MODELS[QWEN])))
    assert own.groups[0].block_tokens == whole.groups[0].block_tokens
    assert own.slot_bytes < 0.51 * whole.slot_bytes


def test_any_two_groups_with_codes_go_with_a_drafter() -> None:
    drafters = (DRAFTERS[0], GroupShape("small", tuple(range(16)), 8, 64))
    for shapes in pairs():
        if any(shape.planes == 1 for shape in shapes):
            continue
        for drafter in drafters:
            groups = (*divide_groups(shapes), drafter.of_drafter(200))
            own_groups = tuple(shape.coded("fp8_e4m3") for shape in groups)
            whole, own = make_layout(groups, 2, "any"), make_layout(own_groups, 2, "any")
            assert [group.block_tokens for group in own.groups] == [group.block_tokens for group in whole.groups]
            assert all(group.shape.block_bytes(group.block_tokens, 2) <= own.slot_bytes for group in own.groups)
            assert own.slot_bytes < whole.slot_bytes * 0.52 + 4096
