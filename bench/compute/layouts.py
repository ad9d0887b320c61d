"""Print the division of the KV cache of known models into blocks, in bf16, as a table in Markdown.

    python -m bench.compute.layouts

The shapes are those of the models' configurations. Padding is the part of the slots' memory that holds nothing. The
last column is the unit of reused prefixes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from bench.serving.load import table
from paceline.core.kv_groups import divide_groups, state_groups
from paceline.core.kv_layout import GroupShape, KVLayout, make_layout

ITEMSIZE = 2

Shapes = tuple[GroupShape, ...]


def full(layers: Sequence[int], kv_heads: int, head_dim: int) -> GroupShape:
    return GroupShape("full", tuple(layers), kv_heads, head_dim)


def mixed(layers: int, every: int, sliding: tuple[int, int], whole: tuple[int, int], window: int) -> Shapes:
    """Return the groups of a model in which every `every`-th layer attends to the whole context, others to a window.

    Args:
        layers: number of layers with a cache of their own.
        sliding, whole: KV heads and head size of each type of layer.
    """
    numbers = [[layer for layer in range(layers) if ((layer + 1) % every == 0) == last] for last in (False, True)]
    return divide_groups((GroupShape("sliding", tuple(numbers[0]), *sliding, window), full(numbers[1], *whole)))


def hybrid(attention: GroupShape, layers: int, state: tuple[tuple[int, ...], ...]) -> Shapes:
    """Return the groups of a model of `layers` layers, which are recurrent if they are not among `attention`.

    Args:
        state: shapes of the state, of the inputs of one token, and of the last inputs of the convolution.
    """
    recurrent = [layer for layer in range(layers) if layer not in attention.layers]
    return (attention, *state_groups("state", recurrent, state, (attention,)))


MODELS: Mapping[str, Shapes] = {
    "Gemma 4 E2B": mixed(15, 5, (1, 256), (1, 512), 512),
    "Gemma 4 E4B": mixed(24, 6, (2, 256), (2, 512), 512),
    "Gemma 4 12B": mixed(48, 6, (8, 256), (1, 512), 1024),
    "Gemma 4 26B-A4B": mixed(30, 6, (8, 256), (2, 512), 1024),
    "Gemma 4 31B": mixed(60, 6, (16, 256), (4, 512), 1024),
    "Gemma 3 270M": mixed(18, 6, (1, 256), (1, 256), 512),
    "Gemma 3 27B": mixed(62, 6, (16, 128), (16, 128), 1024),
    "GPT-OSS 20B": mixed(24, 2, (8, 64), (8, 64), 128),
    "GPT-OSS 120B": mixed(36, 2, (8, 64), (8, 64), 128),
    "Llama 3.1 8B": (full(range(32), 8, 128),),
    "Mistral 7B": (full(range(32), 8, 128),),
    "Qwen3 8B": (full(range(36), 8, 128),),
    "Qwen3 30B-A3B": (full(range(48), 4, 128),),
    "Qwen3-Next 80B-A3B": hybrid(full(range(3, 48, 4), 2, 256), 48, ((32, 128, 128), (1, 8256), (3, 8192))),
    "Granite 4 H 350M": hybrid(full((10, 13, 17, 27), 4, 64), 32, ((48, 32, 128), (1, 1840), (3, 1792))),
    "Granite 4 H Small": hybrid(full((5, 15, 25, 35), 8, 128), 40, ((128, 64, 128), (1, 8576), (3, 8448))),
    "DeepSeek V2 Lite": (GroupShape("latent", tuple(range(27)), 1, 576, planes=1),),
    "DeepSeek V3": (GroupShape("latent", tuple(range(61)), 1, 576, planes=1),),
}
"""The KV groups of each model."""


def padding(layout: KVLayout) -> float:
    """Return the unused share of the slots' memory, in contexts whose blocks are all kept."""
    groups = layout.groups
    used = sum(group.shape.block_bytes(group.block_tokens, layout.itemsize) / group.block_tokens for group in groups)
    return 1 - used / layout.token_bytes


def describe(layout: KVLayout) -> str:
    """Return the layers and the tokens of a block of each group; groups of one kind in one phrase."""
    kinds = [(group.shape.name.partition("-")[0], group) for group in layout.groups]
    phrases = []
    for name, members in groupby(kinds, key=lambda kind: kind[0]):
        groups = [group for _, group in members]
        sizes = sorted({len(group.shape.layers) for group in groups})
        count = f"{len(groups)} × " if len(groups) > 1 else ""
        layers = " or ".join(map(str, sizes))
        phrases.append(f"{count}{name}, {layers} layers: {groups[0].block_tokens} tokens")
    return "; ".join(phrases)


def main() -> None:
    rows = []
    for name, shapes in MODELS.items():
        layout = make_layout(shapes, ITEMSIZE, name)
        slot = f"{layout.slot_bytes / 1024:,.0f}"
        rows.append((name, describe(layout), slot, f"{padding(layout):.1%}", str(layout.alignment)))
    print(table(("model", "groups and their blocks", "slot, KiB", "padding", "reuse, tokens"), rows))


if __name__ == "__main__":
    main()
