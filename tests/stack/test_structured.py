"""Structured output from a real stack through the `openai` SDK, with speculative decoding."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict, Field

from tests.stack.processes import Stack
from tests.stack.stacks import SMOLLM as MODEL
from tests.stack.stacks import on

pytestmark = [pytest.mark.model, pytest.mark.stack, on("float32")]

ASKED: list[Any] = [{"role": "user", "content": "Name a city, its country, and how many people live there."}]


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")  # otherwise the model may add properties without end

    name: str = Field(max_length=30)
    country: Literal["France", "Japan", "Brazil"]
    people: int = Field(ge=0, le=100_000_000)
    sights: list[Annotated[str, Field(max_length=20)]] = Field(max_length=2)


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


async def test_the_sdk_parses_what_it_asked_for(client: AsyncOpenAI) -> None:
    done = await client.chat.completions.parse(
        model=MODEL, messages=ASKED, response_format=City, max_tokens=400, temperature=0.7, seed=3
    )
    city = done.choices[0].message.parsed
    assert isinstance(city, City)
    assert done.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_every_kind_side_by_side(client: AsyncOpenAI, temperature: float) -> None:
    digits = re.compile(r"\d{3}-\d{4}")
    sums = re.compile(r"[0-9]+(?: [+-] [0-9]+){1,3}")
    grammar = 'root ::= number (" " ("+" | "-") " " number){1,3}\nnumber ::= [0-9]{1,3}'
    wanted: list[tuple[dict[str, Any], Any]] = [
        ({"structured_outputs": {"regex": digits.pattern}}, digits.fullmatch),
        ({"structured_outputs": {"choice": ["yes, surely", "not at all"]}}, {"yes, surely", "not at all"}.__contains__),
        ({"structured_outputs": {"grammar": grammar}}, sums.fullmatch),
        ({"structured_outputs": {"json": City.model_json_schema()}}, City.model_validate_json),
        ({"guided_regex": digits.pattern, "ignore_eos": True}, digits.fullmatch),
    ]

    async def one(extra: dict[str, Any], seed: int) -> list[str]:
        done = await client.chat.completions.create(
            model=MODEL, messages=ASKED, max_tokens=400, temperature=temperature, seed=seed, n=2, extra_body=extra
        )
        assert [choice.finish_reason for choice in done.choices] == ["stop", "stop"]
        return [str(choice.message.content) for choice in done.choices]

    texts = await asyncio.gather(*(one(extra, seed) for seed, (extra, _) in enumerate(wanted)))
    for (extra, accepts), own in zip(wanted, texts):
        assert all(accepts(text) for text in own), (extra, own)


async def test_a_stream_of_json(client: AsyncOpenAI) -> None:
    schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 5, "maxItems": 9}
    chunks = await client.completions.create(
        model=MODEL,
        prompt="Count: [1, 2, 3, 4, 5, 6]\nCount: ",
        max_tokens=200,
        temperature=0,
        stream=True,
        extra_body={"response_format": {"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema}}},
    )
    received = [chunk.choices[0] async for chunk in chunks if chunk.choices]
    assert 5 <= len(json.loads("".join(choice.text for choice in received))) <= 9
    assert received[-1].finish_reason == "stop"


async def test_a_special_token_that_the_model_lacks_is_refused_by_its_workers(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no special token"):
        await client.chat.completions.create(
            model=MODEL, messages=ASKED, extra_body={"structured_outputs": {"grammar": "start: <|nobody|>"}}
        )
    free = await client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=5)
    assert free.choices[0].message.content
