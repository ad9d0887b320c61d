"""LiteLLM: its providers for OpenAI, vLLM and Anthropic. It runs in an environment of its own; see the Makefile."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.services.gateway.clients.conftest import CONTEXT, Playhouse, call

PYTHON = Path(sys.prefix) / "litellm" / "bin" / "python"
SCRIPTS = {
    "How is it?": ["Let me see." + call("get_weather", city="Öslo") + call("get_time"), call("get_time"), "Fine."],
    "Report": ['{"city": "Oslo", "degrees": -3}'],
    "Think": ["<think>Hm.</think>So."],
    "x": ["x"],
}
CALLS = [["get_weather", {"city": "Öslo"}], ["get_time", {}], ["get_time", {}]]


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="make test installs litellm")
async def test_every_way_to_ask(playhouse: Playhouse) -> None:
    playhouse.play(SCRIPTS)
    # LiteLLM fetches a list of prices when it is imported, unless it is told to use its own.
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    program = Path(__file__).with_name("litellm_client.py")
    process = await asyncio.create_subprocess_exec(
        PYTHON, program, playhouse.url, str(CONTEXT), env=environment, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    done: dict[str, Any] = json.loads(output.splitlines()[-1])
    chat = {
        "tools": {"calls": CALLS, "text": "Fine.", "end": "stop"},
        "report": {"city": "Oslo", "degrees": -3},
        "thought": ["Hm.", "So."],
        "errors": ["ContextWindowExceededError", "NotFoundError", "BadRequestError"],
    }
    for way in ("whole", "stream"):
        for provider in ("openai", "hosted_vllm", "anthropic"):
            assert done.pop(f"{provider} {way}") == chat
        assert done.pop(f"response {way}") == [["get_weather", "get_time"], ["function_call"]]
    assert not done
