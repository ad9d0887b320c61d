"""The layers whose keys and values are coded, as two options choose them."""

from __future__ import annotations

import pytest

from paceline.core.config import ServeConfig, WorkerConfig
from paceline.core.errors import ConfigError
from paceline.core.kv_coding import KVCoding
from paceline.core.kv_groups import groups_of_layers
from paceline.core.kv_layout import STATE_WINDOW, GroupShape, make_layout

FULL = GroupShape("full", (1, 3, 5), 2, 64, readers=((6, 3), (7, 5)))
SLIDING = GroupShape("sliding", (0, 2, 4), 2, 64, window=32)
STATES = GroupShape("states", (8, 9), 0, 0, STATE_WINDOW, state=((2, 8), (1, 8)))
GROUPS = (FULL, SLIDING)


def coded_layers(shapes: tuple[GroupShape, ...]) -> list[int]:
    return sorted(layer for shape in shapes if shape.code for layer in shape.layers)


@pytest.mark.parametrize(
    ("skip", "coded", "groups"),
    [
        ("", [0, 1, 2, 3, 4, 5], 2),
        ("3", [0, 1, 2, 4, 5], 3),
        ("sliding_window", [1, 3, 5], 2),
        ("5, 1,sliding_window", [3], 3),
        ("0,2,4", [1, 3, 5], 2),
        ("0,1,2,3,4,5", [], 2),
    ],
)
def test_named_layers_keep_their_type_and_a_group_is_divided_only_if_it_must_be(
    skip: str, coded: list[int], groups: int
) -> None:
    found = KVCoding.parse("int8", skip).applied(GROUPS)
    assert coded_layers(found) == coded
    assert len(found) == groups
    assert sorted(layer for shape in found for layer in shape.layers) == [0, 1, 2, 3, 4, 5]
    assert len({shape.name for shape in found}) == groups


def test_a_layer_that_reads_another_one_is_in_the_group_of_that_one() -> None:
    found = KVCoding.parse("int8", "3").applied(GROUPS)
    by_layer = groups_of_layers(found)
    assert by_layer[6] == by_layer[3] != by_layer[5] == by_layer[7]
    assert len(by_layer) == 8


def test_all_choices_have_different_fingerprints_unless_no_layer_is_coded() -> None:
    choices = [("auto", ""), ("int8", ""), ("int8", "1"), ("int8", "3"), ("int8", "sliding_window"), ("fp8_e4m3", "1")]
    prints = [make_layout(KVCoding.parse(*choice).applied(GROUPS), 2, "m").fingerprint for choice in choices]
    assert len(set(prints)) == len(choices)
    none = KVCoding.parse("int8", "1,3,5,sliding_window").applied(GROUPS)
    assert make_layout(none, 2, "m").fingerprint == prints[0]


def test_prefixes_are_reused_in_small_units_although_one_layer_of_many_is_not_coded() -> None:
    whole = (GroupShape("full", tuple(range(32)), 8, 128),)
    layout = make_layout(KVCoding.parse("int8", "0").applied(whole), 2, "m")
    assert layout.alignment <= 64
    assert layout.token_bytes < 0.62 * make_layout(whole, 2, "m").token_bytes


def test_states_stay_beside_layers_that_are_not_coded() -> None:
    found = KVCoding.parse("int8", "1").applied((FULL, STATES))
    assert found[-1] == STATES
    assert coded_layers(found) == [3, 5]
    make_layout(found, 2, "m")


def test_a_layer_that_tiles_cannot_hold_may_be_named() -> None:
    odd = GroupShape("odd", (6,), 1, 20)
    assert coded_layers(KVCoding.parse("int8", "6").applied((SLIDING, odd))) == [0, 2, 4]
    with pytest.raises(ConfigError, match="multiple of 16"):
        KVCoding.parse("int8", "").applied((SLIDING, odd))


@pytest.mark.parametrize("layer", [6, 8, 10])
def test_a_layer_without_a_cache_of_its_own_is_refused(layer: int) -> None:
    with pytest.raises(ConfigError, match=f"layer {layer} has no keys and values of its own .* among 1, 3, 5"):
        KVCoding.parse("int8", str(layer)).applied((FULL, STATES))


def test_numbers_of_layers_are_not_those_of_a_draft_model() -> None:
    chosen = KVCoding.parse("int8", "40,sliding_window").of_drafter()
    assert coded_layers(chosen.applied(GROUPS)) == [1, 3, 5]


@pytest.mark.parametrize(
    ("dtype", "skip", "said"),
    [
        ("auto", "1", "needs --kv-cache-dtype int8 or fp8_e4m3"),
        ("int8", "1,last", "numbers of layers and sliding_window, .* not 'last'"),
        ("int8", "-1", "not '-1'"),
        ("int8", ",".join(map(str, range(100))), "names too many layers"),
    ],
)
@pytest.mark.parametrize("service", [WorkerConfig, ServeConfig])
def test_wrong_options_are_refused_at_once(
    service: type[WorkerConfig] | type[ServeConfig], dtype: str, skip: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        service.model_validate({"kv_cache_dtype": dtype, "kv_cache_dtype_skip_layers": skip})


def test_a_choice_says_both_options() -> None:
    chosen = WorkerConfig(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers="sliding_window,7,3").kv_coding
    assert str(chosen) == "fp8_e4m3 --kv-cache-dtype-skip-layers 3,7,sliding_window"
    assert str(KVCoding.parse("int8", "")) == "int8"
