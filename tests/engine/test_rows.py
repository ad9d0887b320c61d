"""Inputs of a step are made from the present rows and do not depend on earlier inputs."""

from __future__ import annotations

import torch

from paceline.core.kv_layout import GroupShape, make_layout
from paceline.core.types import Key, SamplingParams
from paceline.engine.rows import Rows
from paceline.engine.step import Chunk, RowAssigned, RowExtended


def test_tables_and_slots_are_those_of_the_newest_updates() -> None:
    layout = make_layout((GroupShape("all", (0,), 1, 16), GroupShape("near", (1,), 1, 16, 20)), 4, "test")
    rows = Rows(2, 64, 0, layout, torch.device("cpu"))
    blocks = [group.blocks_for(64) for group in layout.groups]

    def tables(first: int) -> list[list[int]]:
        return [list(range(first + 100 * index, first + 100 * index + count)) for index, count in enumerate(blocks)]

    def check(token: int, first: int) -> None:
        inputs = rows.span([(1, 60, 64)])
        assert inputs.token_ids.tolist() == [token] * 4
        assert inputs.positions.tolist() == [60, 61, 62, 63]
        for group, own in zip(inputs.batch.groups, tables(first)):
            assert group.tables.tolist() == [own]
            assert group.write_slots.tolist() == [own[p // group.block_tokens] for p in range(60, 64)]
            assert group.write_offsets.tolist() == [p % group.block_tokens for p in range(60, 64)]

    rows.update([RowAssigned(1, [7] * 64, 64, 0, SamplingParams(), 64, tables(0), 64)])
    check(7, 0)
    rows.span([(0, 0, 4)])  # the same size, so the same vectors are used
    check(7, 0)
    rows.update([RowExtended(1, tables(20), 64)])
    check(7, 20)
    rows.update([RowAssigned(1, [8] * 64, 64, 0, SamplingParams(), 64, tables(50), 64)])
    check(8, 50)


def one_row(length: int, limit: int, capacity: int) -> Rows:
    """Return a row with this many tokens and room for eight drafts."""
    layout = make_layout((GroupShape("all", (0,), 1, 16),), 1, "test")
    rows = Rows(1, 64, 8, layout, torch.device("cpu"))
    table = [list(range(layout.groups[0].blocks_for(64)))]
    rows.update([RowAssigned(0, [7] * length, length, 0, SamplingParams(), limit, table, capacity)])
    return rows


def test_drafts_need_room_in_the_blocks_and_below_the_limit() -> None:
    assert one_row(10, limit=64, capacity=16).room_for_drafts(0) == 6
    assert one_row(10, limit=13, capacity=64).room_for_drafts(0) == 2  # a sampled token follows them
    assert one_row(10, limit=10, capacity=64).room_for_drafts(0) == 0


def test_a_row_that_has_ended_has_no_tokens_in_later_steps() -> None:
    rows = one_row(10, limit=64, capacity=64)
    following = [Chunk(Key("a", 0, 0), 0, 0, 1, follows=True, samples=True, prefills=False)]
    rows.append(0, [8], ended=False)
    assert rows.form(following).positions.tolist() == [10]
    rows.append(0, [9], ended=True)
    assert rows.has_ended(0)
    assert rows.form(following).positions.tolist() == []
