from __future__ import annotations

import pytest

from paceline.core.errors import UnavailableError
from paceline.services.serve import managed_process
from paceline.services.serve.child import Child
from paceline.services.serve.managed_process import MOST_FAILURES, ManagedProcess

PROGRAMS = {"fails": "exit 3", "serves": "echo ready"}


async def test_only_ends_in_a_row_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has served settles at once here, so its end is no failure, however soon it comes."""
    monkeypatch.setattr(managed_process, "SETTLED_SECONDS", 0.0)
    monkeypatch.setattr(managed_process, "_PAUSES", (0.0, 0.0))
    starts = ["fails"] * (MOST_FAILURES - 1) + ["serves"] + ["fails"] * MOST_FAILURES
    left = iter(starts)
    told: list[str] = []

    async def launch(address: str) -> Child:
        return await Child.start("toy", ["/bin/sh", "-c", PROGRAMS[next(left)]], "stdout", print)

    process = ManagedProcess(launch, lambda child: child.answer(60.0), told.append)
    await process.start()
    await process.ready_or_stopped()
    with pytest.raises(UnavailableError, match="5 times in a row now"):
        await process.supervise(lambda: True)
    assert list(left) == []
    assert len(told) == len(starts) - 1
