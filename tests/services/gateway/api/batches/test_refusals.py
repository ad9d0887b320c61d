"""Lines that the limits of their key refuse."""

from __future__ import annotations

import asyncio

from paceline.services.gateway.api.batches.refusals import RefusedLines

LONG = 1000.0


async def test_a_line_is_tried_again_after_its_time() -> None:
    refused = RefusedLines()
    await refused.wait(1, 0.01)
    refused.note_end(1)
    await refused.wait_for_none()


async def test_each_line_that_ends_lets_one_try_again() -> None:
    refused = RefusedLines()
    lines = [asyncio.create_task(refused.wait(number, LONG)) for number in (1, 2, 3)]
    await asyncio.sleep(0)
    lines[0].cancel()
    refused.note_end(9)
    await lines[1]
    assert not lines[2].done()
    refused.note_end(1)
    await lines[2]


async def test_no_line_is_read_until_the_last_one_that_was_refused_has_ended() -> None:
    refused = RefusedLines()
    line = asyncio.create_task(refused.wait(1, LONG))
    await asyncio.sleep(0)
    reader = asyncio.create_task(refused.wait_for_none())
    refused.note_end(2)
    await line
    assert not reader.done()
    refused.note_end(1)
    await reader
