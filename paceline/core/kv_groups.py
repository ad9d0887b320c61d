"""The choice of a model's KV groups: which layers share blocks. Pure arithmetic, no tensors."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.kv_layout import BASE_TOKENS, MOST_STATE_TOKENS, STATE_WINDOW, GroupShape, make_layout

_MOST_STATE_GROUPS = 32

_ITEMSIZE = 2
"""Bytes of a cached element that the division into groups assumes, because the true size is not known yet. The
assumption matters little, because only the ratio between the sizes of groups counts.
"""

_MOST_PARTS = 16
"""Largest number of parts, approximately, into which a group is divided."""

_GROUP_PRICE = 1 / 200
"""Share of the cache's memory that one more group must save, because it has block tables and block names of its own."""

_FINE_TOKENS = 64
"""Groups are divided only if prefixes would be reused in units of more tokens than this."""


def groups_of_layers(shapes: Sequence[GroupShape]) -> tuple[int, ...]:
    """Return the group of each layer of a model, as an index into its groups."""
    group_of = {layer: index for index, shape in enumerate(shapes) for layer in (*shape.layers, *dict(shape.readers))}
    return tuple(group_of[layer] for layer in sorted(group_of))


def divide_groups(shapes: tuple[GroupShape, ...]) -> tuple[GroupShape, ...]:
    """Return groups with keys and values for the same layers, so that prefixes can be reused in small units.

    If the unit of reuse is at most _FINE_TOKENS, the groups stay as they are. Otherwise the cheapest division is chosen
    whose unit is at most _FINE_TOKENS; if there is none, the one with the smallest unit.
    """
    if not shapes or make_layout(shapes, _ITEMSIZE, "").alignment <= _FINE_TOKENS:
        return shapes
    largest = max(shapes, key=lambda shape: shape.block_bytes(BASE_TOKENS, _ITEMSIZE))
    layers = len(largest.layers)
    layer_bytes = largest.block_bytes(BASE_TOKENS, _ITEMSIZE) // layers
    sizes = range(max(1, layers // _MOST_PARTS), layers + 1)
    choices = {_divided(shapes, size * layer_bytes): None for size in sizes}
    return min(
        choices, key=lambda groups: (max(_FINE_TOKENS, make_layout(groups, _ITEMSIZE, "").alignment), _price(groups))
    )


def _divided(shapes: tuple[GroupShape, ...], room: int) -> tuple[GroupShape, ...]:
    """Divide each group so that a block of BASE_TOKENS tokens has at most `room` bytes, or one layer."""
    divided: list[GroupShape] = []
    for shape in shapes:
        fit = max(1, room * len(shape.layers) // shape.block_bytes(BASE_TOKENS, _ITEMSIZE))
        divided += shape.divided(-(-len(shape.layers) // fit))
    return tuple(divided)


def state_groups(
    name: str, layers: Sequence[int], state: tuple[tuple[int, ...], ...], others: Sequence[GroupShape]
) -> tuple[GroupShape, ...]:
    """Return state groups for recurrent layers. Each group has so few layers that blocks of `others` can fill slots of
    its size.

    Args:
        state: shapes of the parts of one layer's state.
        others: the same model's groups with keys and values.
    """
    whole, total = GroupShape(name, tuple(layers), 0, 0, STATE_WINDOW, state=state), len(layers)
    if not others:
        return (whole,)
    room = max(shape.block_bytes(MOST_STATE_TOKENS, _ITEMSIZE) for shape in others)
    fewest = -(-total // _MOST_STATE_GROUPS)
    fit = max(fewest, min(total, room * total // whole.state_bytes))
    # With one layer more, the longest blocks of `others` no longer fill a slot, but sometimes states fill their slots
    # better.
    choices = [whole.divided(-(-total // size)) for size in (fit, fit + 1)]
    return min(choices, key=lambda groups: _price((*others, *groups)))


def _price(shapes: tuple[GroupShape, ...]) -> float:
    """Return the memory that a token takes, with a surcharge for each group."""
    return make_layout(shapes, _ITEMSIZE, "").token_bytes * (1 + _GROUP_PRICE * len(shapes))
