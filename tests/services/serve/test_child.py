from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest
import uvloop

from paceline.core.errors import ConfigError, UnavailableError
from paceline.services.serve.child import Child

WAIT = 60.0


async def start(program: str, heard: list[str]) -> Child:
    return await Child.start("toy", [sys.executable, "-c", program], "stdout", heard.append)


async def test_answers_and_passes_on_what_it_writes() -> None:
    heard: list[str] = []
    child = await start("import sys; print('working', file=sys.stderr); print('/a folder')", heard)
    assert await child.answer(WAIT) == "/a folder"
    assert await child.exited == 0
    assert heard == ["working"]


async def test_its_last_words_are_kept_for_the_failure_alone() -> None:
    heard: list[str] = []
    child = await start("import sys; print('a', file=sys.stderr); sys.exit('paceline: no room')", heard)
    with pytest.raises(UnavailableError, match=r"^toy failed: no room$"):
        await child.answer(WAIT)
    assert heard == ["a"]


async def test_a_mistake_of_the_user_in_the_child_is_one_here() -> None:
    child = await start("import sys; print('paceline: bad flag', file=sys.stderr); sys.exit(2)", [])
    with pytest.raises(ConfigError, match=r"^toy failed: bad flag$"):
        await child.answer(WAIT)


async def test_an_endless_line_and_broken_text_do_no_harm() -> None:
    heard: list[str] = []
    write = "import sys; w = sys.stderr.buffer.write; w(b'x' * (3 << 20) + b'\\n'); w(b'\\xff!\\n'); sys.exit(3)"
    child = await start(write, heard)
    with pytest.raises(UnavailableError, match=r"toy failed: \ufffd!"):
        await child.answer(WAIT)
    assert heard[-1] == "\ufffd!"


async def test_a_silent_child_is_given_up() -> None:
    child = await start("import time; time.sleep(60)", [])
    with pytest.raises(UnavailableError, match=r"not ready after 0.1 s"):
        await child.answer(0.1)
    await child.stop(WAIT, asyncio.Event())
    assert child.exited.done()


async def test_a_program_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"cannot start toy"):
        await Child.start("toy", ["/no/such/program"], "nothing", print)


def test_a_child_that_has_ended_leaves_no_descriptor() -> None:
    """Uses uvloop, as `paceline serve` does, because asyncio's own loop closes such pipes by itself."""

    async def count_left() -> int:
        async def one() -> None:
            child = await start("import time; print('ready', flush=True); time.sleep(60)", [])
            await child.answer(WAIT)
            os.kill(child.pid, signal.SIGKILL)
            await child.exited

        await one()  # the loop opens descriptors of its own
        before = len(os.listdir("/proc/self/fd"))
        await one()
        await one()
        with pytest.raises(ConfigError, match="cannot start toy"):
            await Child.start("toy", ["/no/such/program"], "nothing", print)
        await asyncio.sleep(0)
        return len(os.listdir("/proc/self/fd")) - before

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(count_left()) == 0
