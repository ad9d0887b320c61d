"""Work of the kind POOL on workers with a decoder: the vectors of many inputs in one call."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
import torch

from paceline.proto import common_pb2, worker_pb2, worker_pb2_grpc
from tests.pooling_folders import write_modules
from tests.services.worker.conftest import Host, StartHost
from tests.tiny_checkpoints import write_tiny

CLOSE = 2e-5
LENGTHS = (1, 3, 17, 40, 90, 33, 64, 16, 130)


def texts(seed: int = 1) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(3, 100) for _ in range(length)] for length in LENGTHS]


def work(
    host: Host, inputs: Sequence[Sequence[int]], task: str = "EMBED", name: str = "pool", prompt: int = 0, **wish: Any
) -> common_pb2.Work:
    own = [common_pb2.PoolInput(token_ids=tokens, prompt_tokens=prompt) for tokens in inputs]
    pool = common_pb2.PoolWork(task=common_pb2.PoolTask.Value(f"POOL_TASK_{task}"), inputs=own, **wish)
    key = common_pb2.Key(request_id=name, attempt=1, generation=1)
    return common_pb2.Work(key=key, model=host.model, kind=common_pb2.WORK_KIND_POOL, pool=pool)


async def run(host: Host, asked: common_pb2.Work, role: int = 0) -> Mapping[int, np.ndarray]:
    """Return the rows of each input from the prefill (0) or decode (1) worker."""
    stub = worker_pb2_grpc.ComputeStub(host.channels[role])
    events = [event async for event in stub.Run(asked, timeout=60)]
    assert events[0].HasField("opened")
    assert events[-1].HasField("computed")
    return rows_of(events)


def rows_of(events: Sequence[worker_pb2.ComputeEvent]) -> Mapping[int, np.ndarray]:
    found: dict[int, np.ndarray] = {}
    for event in events:
        pooled, at = event.pooled, 0
        values = np.frombuffer(pooled.data, "<f4").reshape(-1, max(1, pooled.dim))
        for index, count in enumerate(pooled.rows, pooled.first):
            assert index not in found
            found[index] = values[at : at + count]
            at += count
        assert at == len(values)
    return found


def states(reference: Any, tokens: Sequence[int]) -> torch.Tensor:
    decoder = getattr(reference, "model", reference)
    with torch.no_grad():
        states: torch.Tensor = decoder(torch.tensor([list(tokens)])).last_hidden_state[0]
    return states


def same(found: Mapping[int, np.ndarray], wanted: Sequence[torch.Tensor]) -> None:
    assert sorted(found) == list(range(len(wanted)))
    for index, rows in enumerate(wanted):
        assert found[index].shape == tuple(rows.shape)
        assert np.abs(found[index] - rows.numpy()).max() < CLOSE


async def test_vectors_of_the_last_token_are_the_same_alone_together_and_from_the_cache(
    start_host: StartHost, tmp_path: Path
) -> None:
    reference = write_tiny(tmp_path, "qwen3", head="Model")
    write_modules(tmp_path, "lasttoken", normalize=True)
    wanted = [torch.nn.functional.normalize(states(reference, tokens)[-1:]) for tokens in texts()]
    async with start_host(tmp_path, max_batched_tokens=48, max_seqs=4) as host:
        together = await run(host, work(host, texts()))
        same(together, wanted)
        again = await run(host, work(host, texts(), name="again"))
        swapped = await run(host, work(host, texts()[::-1], name="swapped"), role=1)
        for index, rows in together.items():
            alone = await run(host, work(host, [texts()[index]], name=f"alone {index}"))
            assert all(np.array_equal(rows, other) for other in (alone[0], again[index], swapped[8 - index]))
        assert await host.all_blocks_back()
        figures = {sample.figure: sample.value for sample in host.prefill.worker.samples()}
        # All inputs together, again, and each alone.
        assert (figures["pooled_inputs"], figures["pooled_tokens"]) == (3 * len(LENGTHS), 3 * sum(LENGTHS))
        stats = host.prefill.worker.engine.stats
        # Of the second and later times, whole blocks of 16 tokens come from the cache.
        assert stats.prompt_tokens < 2 * sum(LENGTHS)


@pytest.mark.parametrize("mode", ["mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean"])
async def test_vectors_of_all_tokens_do_not_read_the_cache_and_leave_out_the_prompt(
    start_host: StartHost, tmp_path: Path, mode: str
) -> None:
    reference = write_tiny(tmp_path, "qwen3", head="Model")
    write_modules(tmp_path, mode, include_prompt=mode != "mean")
    prompt = 5 if mode == "mean" else 0
    asked = [tokens for tokens in texts() if len(tokens) > 5]

    def pooled(rows: torch.Tensor) -> torch.Tensor:
        weights = torch.arange(1, len(rows) + 1)[:, None]
        return {
            "mean": rows.mean(0),
            "cls": rows[0],
            "max": rows.amax(0),
            "mean_sqrt_len_tokens": rows.sum(0) / len(rows) ** 0.5,
            "weightedmean": (rows * weights).sum(0) / weights.sum(),
        }[mode][None]

    async with start_host(tmp_path, max_batched_tokens=48, max_seqs=4) as host:
        together = await run(host, work(host, asked, prompt=prompt))
        same(together, [pooled(states(reference, tokens)[prompt:]) for tokens in asked])
        for index, rows in together.items():
            alone = await run(host, work(host, [asked[index]], name=f"alone {index}", prompt=prompt))
            assert np.array_equal(rows, alone[0])


async def test_tokens_windows_and_dense_layers_of_a_bidirectional_gemma(start_host: StartHost, tmp_path: Path) -> None:
    reference = write_tiny(tmp_path, "gemma3", head="Model", use_bidirectional_attention=True, sliding_window=14)
    dense = write_modules(tmp_path, "mean", dense=(40, 56), normalize=True, matryoshka_dimensions=[24])
    rows = [states(reference, tokens) for tokens in texts()]
    async with start_host(tmp_path, max_batched_tokens=48, max_seqs=4) as host:
        vectors = [torch.nn.functional.normalize(dense(own.mean(0)[None])) for own in rows]
        same(await run(host, work(host, texts())), vectors)
        same(await run(host, work(host, texts(), "TOKEN_EMBED", name="tokens")), rows)
        cut = [torch.nn.functional.normalize(dense(own.mean(0)[None])[:, :24]) for own in rows]
        same(await run(host, work(host, texts(), name="cut", dimensions=24)), cut)
        bare = [dense(own.mean(0)[None]) for own in rows]
        same(await run(host, work(host, texts(), name="bare", normalize=False)), bare)
        asked = host.work("text", texts()[3])
        asked.kind = common_pb2.WORK_KIND_SCORE
        with pytest.raises(grpc.aio.AioRpcError, match="vectors or labels, and no text"):
            await run(host, asked)


@pytest.mark.parametrize(
    ("family", "head", "task", "labels"),
    [
        ("qwen3", "ForSequenceClassification", "CLASSIFY", 3),
        ("llama", "ForSequenceClassification", "SCORE", 1),
        ("qwen2", "ForTokenClassification", "TOKEN_CLASSIFY", 4),
    ],
)
async def test_labels(start_host: StartHost, tmp_path: Path, family: str, head: str, task: str, labels: int) -> None:
    reference = write_tiny(tmp_path, family, head=head, num_labels=labels, pad_token_id=0)
    with torch.no_grad():
        logits = [reference(torch.tensor([tokens])).logits.reshape(-1, labels) for tokens in texts()]
    async with start_host(tmp_path, max_batched_tokens=48, max_seqs=4) as host:
        found = await run(host, work(host, texts(), task))
        same(found, [own.sigmoid() if labels == 1 else own.softmax(-1) for own in logits])
        same(await run(host, work(host, texts(), task, name="raw", activation=False)), logits)
        alone = await run(host, work(host, texts()[4:5], task, name="alone"))
        assert np.array_equal(alone[0], found[4])
        with pytest.raises(grpc.aio.AioRpcError, match="does not compute embed"):
            await run(host, work(host, texts(), name="embed"))


@pytest.mark.parametrize("tied", [False, True])
async def test_a_score_is_the_difference_of_two_logits_after_the_last_token(
    start_host: StartHost, tmp_path: Path, tied: bool
) -> None:
    reference = write_tiny(tmp_path, "qwen3", tie_word_embeddings=tied)
    write_modules(tmp_path, score_tokens=(17, 23))
    with torch.no_grad():
        logits = [reference(torch.tensor([tokens])).logits[0, -1:] for tokens in texts()]
    async with start_host(tmp_path, max_batched_tokens=48, max_seqs=4) as host:
        raw = [(own[:, 17] - own[:, 23])[None] for own in logits]
        same(await run(host, work(host, texts(), "SCORE", activation=False)), raw)
        same(await run(host, work(host, texts(), "SCORE", name="again")), [own.sigmoid() for own in raw])


async def test_inputs_wait_for_blocks_of_others_and_work_that_is_cancelled_leaves_none(
    start_host: StartHost, tmp_path: Path
) -> None:
    write_tiny(tmp_path, "qwen3", head="Model")
    write_modules(tmp_path, "lasttoken")
    generator = random.Random(2)
    asked = [[generator.randrange(3, 100) for _ in range(200)] for _ in range(12)]
    async with start_host(tmp_path, kv_memory=1 << 20, max_batched_tokens=16, max_seqs=16) as host:
        first, second = await asyncio.gather(*(run(host, work(host, asked, name=name)) for name in ("one", "two")))
        assert all(np.array_equal(first[index], second[index]) for index in range(12))
        call = worker_pb2_grpc.ComputeStub(host.channels[0]).Run(work(host, asked, name="gone"))
        async for event in call:
            if event.HasField("pooled"):
                break
        call.cancel()
        assert await host.all_blocks_back()


REFUSED: list[tuple[list[list[int]], str]] = [
    ([], "at least one input"),
    ([[3], []], "an input has 0 tokens"),
    ([[3] * 65], "has 65 tokens"),
    ([[400]], "below the vocabulary's size"),
]


async def test_work_that_no_worker_can_do_is_refused(start_host: StartHost, tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen3", head="Model")
    write_modules(tmp_path, "lasttoken")
    async with start_host(tmp_path, max_batched_tokens=16, max_model_len=64) as host:
        for inputs, why in REFUSED:
            with pytest.raises(grpc.aio.AioRpcError, match=why) as error:
                await run(host, work(host, inputs))
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert len(await run(host, work(host, [[3] * 64], name="longest"))) == 1
