import asyncio
import threading

import pytest

from paceline.core.errors import UnavailableError
from paceline.services.common.tasks import end_tasks, to_the_end

WAIT = 30.0


async def test_a_task_that_loses_its_first_cancellation_ends_too() -> None:
    asked = 0

    async def stubborn() -> None:
        nonlocal asked
        while asked < 3:
            try:
                await asyncio.sleep(WAIT)
            except asyncio.CancelledError:
                asked += 1

    async def meek() -> None:
        await asyncio.sleep(WAIT)

    tasks = [asyncio.create_task(stubborn()), asyncio.create_task(meek())]
    await asyncio.sleep(0)
    async with asyncio.timeout(WAIT):
        await end_tasks(*tasks)
    assert all(task.done() for task in tasks)
    assert asked == 3


async def test_a_task_that_failed_is_nobody_s_trouble_any_more(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise UnavailableError("it went away")

    task = asyncio.create_task(fail())
    await asyncio.sleep(0)
    await end_tasks(task)
    del task
    assert caplog.text == ""


async def test_no_task_is_no_trouble() -> None:
    await end_tasks()


async def test_a_task_that_is_cancelled_ends_after_the_work_of_its_thread() -> None:
    may_end = threading.Event()
    task = asyncio.create_task(to_the_end(asyncio.to_thread(may_end.wait, WAIT)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0.1)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
