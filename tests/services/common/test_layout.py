"""The layouts of two workers that must not share blocks, and the name of what differs between them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.errors import InvalidRequestError
from paceline.core.kv_layout import GroupShape, KVLayout, make_layout
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.layout import difference, layout_from_pb, layout_to_pb

PARTS = {"dtype": "bfloat16", "config.json": "1" * 64, "model.safetensors": "2" * 64}


def layout(**parts: str) -> KVLayout:
    """Return the layout of a model with these parts, as kvtransfer gets it."""
    made = make_layout((GroupShape("full", (0, 1), kv_heads=2, head_dim=64),), 2, repr(parts))
    return layout_from_pb(layout_to_pb(replace(made, parts=tuple(parts.items()))))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float32"}, "its dtype differs from the arena's (float32 instead of bfloat16)"),
        ({"model.safetensors": "3" * 64}, f"its model.safetensors differs from the arena's ({'3' * 16} instead of"),
        ({"modeling.py": "4"}, "its modeling.py differs from the arena's (4 instead of none)"),
        ({"config.json": "5", "model.safetensors": "6"}, "its config.json differs"),
    ],
)
def test_the_first_part_that_differs_is_named(changes: dict[str, str], said: str) -> None:
    assert difference(layout(**PARTS), layout(**{**PARTS, **changes})).startswith(said)


def test_a_part_that_is_missing_is_named() -> None:
    assert "its dtype differs from the arena's (none instead of" in difference(layout(**PARTS), layout(other="x"))


def test_workers_of_an_earlier_release_name_no_parts() -> None:
    assert difference(layout(**PARTS), layout()).startswith("its fingerprint is ")


def test_parts_do_not_decide_whether_blocks_may_be_shared() -> None:
    ours = layout(**PARTS)
    assert ours == replace(ours, parts=())


@pytest.mark.parametrize("parts", [[pb.LayoutPart(name="x" * 257)], [pb.LayoutPart(name="x")] * 4097])
def test_too_many_or_too_long_parts_are_refused(parts: list[pb.LayoutPart]) -> None:
    message = layout_to_pb(layout(**PARTS))
    message.parts.extend(parts)
    with pytest.raises(InvalidRequestError, match=r"layout\.parts"):
        layout_from_pb(message)
