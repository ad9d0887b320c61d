"""A compiler of constraints with its process, as tests use it."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

from paceline.core.config import GatewayConfig
from paceline.core.types import Constraint
from paceline.services.gateway.planning.answers.registry import choose_forms
from paceline.services.gateway.planning.constraints.compiler import ConstraintCompiler
from paceline.services.gateway.planning.constraints.fields import chat_fields
from paceline.services.gateway.planning.schemas import ChatRequest
from paceline.services.gateway.planning.tokenizer import Tokenizer


class Desk:
    """A compiler with one model, and requests to it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.tokenizer = Tokenizer(folder)
        config = GatewayConfig(model=str(folder), tool_call_parser="hermes", **options)
        self.compiler = ConstraintCompiler(config, [(config, self.tokenizer)])
        self.give(seconds=60.0)  # the machine may be busy with other tests
        self._forms = choose_forms("hermes", "auto", "", {})

    def give(self, seconds: float) -> None:
        """Set the time that a trial may take by the clock. Call this before the process starts."""
        self.compiler._limits = dataclasses.replace(self.compiler._limits, seconds=seconds)

    async def make(self, owner: str = "", **fields: Any) -> Constraint | None:
        request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})
        found = chat_fields(request, self._forms, self.tokenizer, "")
        assert found is not None
        return await self.compiler.make(0, found.wanted(), owner)


def object_schema(properties: int) -> dict[str, Any]:
    names = [str(index) for index in range(properties)]
    schema = {"type": "object", "properties": dict.fromkeys(names, True), "required": names[::500]}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


def children(pid: int) -> list[int]:
    """Return the ids of a process's children."""
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
