"""Constraints through real workers: one samples the first token, another the others, and all tokens must match."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from paceline.core.errors import ConstraintError
from paceline.proto import common_pb2 as pb
from tests.services.gateway.toy_model import END, VOCAB_SIZE, write_toy_model
from tests.services.worker.conftest import Host, StartHost
from tests.tiny_checkpoints import SaveTiny

SCHEMA = {"type": "array", "items": {"enum": ["a", 1, None]}, "minItems": 2, "maxItems": 6}


def constraint(kind: int, text: str) -> pb.Constraint:
    return pb.Constraint(kind=kind, text=text, end_token_ids=[END])  # type: ignore[arg-type]


@pytest.fixture
async def host(start_host: StartHost, save_llama: SaveTiny, tmp_path: Path) -> AsyncIterator[Host]:
    write_toy_model(tmp_path)
    save_llama(vocab_size=VOCAB_SIZE)
    # Room for about three requests at a time.
    async with start_host(tmp_path, kv_memory=30 * 12288, max_model_len=256, max_batched_tokens=48) as host:
        yield host


@pytest.mark.slow
async def test_outputs_obey_over_handoffs_and_preemptions(host: Host) -> None:
    compact = {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}
    own = constraint(pb.CONSTRAINT_KIND_JSON_SCHEMA, json.dumps(compact))
    long = constraint(pb.CONSTRAINT_KIND_REGEX, "(?:ab|ba){60}")

    async def one(index: int, aggregated: bool) -> bytes:
        wanted = long if index % 5 else own
        prompt = list(f"request {index} is longer than a block".encode())
        for _ in range(2000):
            try:
                outcome = await host.generate(
                    prompt, 150, aggregated, temperature=1.0, seed=index, constraint=wanted, stop_token_ids=[END]
                )
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                await asyncio.sleep(0.01)
                continue
            assert outcome.tokens[-1] == END
            return bytes(outcome.tokens[:-1])
        raise AssertionError("never admitted")

    found = []
    for aggregated in (False, True):
        found.append(await asyncio.gather(*(one(index, aggregated) for index in range(10))))
    assert found[0] == found[1]
    for index, text in enumerate(found[0]):
        if index % 5:
            assert re.fullmatch(b"(?:ab|ba){60}", text)
        else:
            values = json.loads(text)
            assert 2 <= len(values) <= 6
            assert all(value in ("a", 1, None) for value in values)
    assert host.decode.worker.engine.stats.preemptions > 0
    assert await host.all_blocks_back()


@pytest.mark.parametrize("aggregated", [False, True])
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (constraint(pb.CONSTRAINT_KIND_REGEX, "("), "unclosed"),
        (
            constraint(pb.CONSTRAINT_KIND_GRAMMAR, 'start: <|nobody|> "a"'),
            'this model has no special token "<|nobody|>"',
        ),
        (constraint(99, "a"), "kind 99"),
        # The grammar is accepted at first, but no token of the model may follow "ab".
        (constraint(pb.CONSTRAINT_KIND_GRAMMAR, 'start: "ab" <|end|> "c"'), "cannot go on: nothing may follow"),
    ],
)
async def test_what_cannot_be_followed_fails_its_request_alone(
    host: Host, bad: pb.Constraint, reason: str, aggregated: bool
) -> None:
    prompt = list(b"a prompt")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await host.generate(prompt, 20, aggregated, constraint=bad)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason in str(caught.value.details())
    assert dict(caught.value.trailing_metadata())["paceline-param"] == ConstraintError.PARAM
    good = await host.generate(prompt, 20, aggregated, constraint=constraint(pb.CONSTRAINT_KIND_REGEX, "abc"))
    assert good.tokens == [*b"abc", END]
    assert await host.all_blocks_back()


async def test_allowed_tokens_beside_a_constraint_are_refused(host: Host) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="together"):
        await host.generate([1], 5, constraint=constraint(pb.CONSTRAINT_KIND_REGEX, "a"), allowed_token_ids=[5])
