"""`paceline embed` with a gateway and toy workers."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import numpy as np
import pytest

from paceline.client import GatewayClient
from paceline.core.errors import ConfigError, InvalidRequestError, UnavailableError
from paceline.embed import EmbedOptions, KeptVectors, embed
from tests.services.gateway.conftest import Stack, StartStack
from tests.services.gateway.toy_pooling import DIM, PROMPTS, write_toy_encoder


@pytest.fixture
async def embedder(start_stack: StartStack, tmp_path: Path) -> Stack:
    model = write_toy_encoder(tmp_path / "toy", prompts=PROMPTS)
    return await start_stack(prefill=0, decode=0, pool=1, model=str(model))


async def run(stack: Stack, source: Path, target: Path, **options: object) -> np.ndarray:
    await asyncio.to_thread(embed, source, target, GatewayClient(stack.url), EmbedOptions(**options))  # type: ignore[arg-type]
    vectors: np.ndarray = np.load(target)
    return vectors


async def test_a_row_for_each_line(embedder: Stack, tmp_path: Path) -> None:
    source, target = tmp_path / "texts.jsonl", tmp_path / "out" / "vectors.npy"
    letters = "abcdefghijkl"
    lines = [json.dumps(letter if letter < "f" else {"text": letter}) for letter in letters]
    source.write_text("\n\n".join(lines) + "\n")
    vectors = await run(embedder, source, target, batch_size=5, concurrency=3)
    assert (vectors.shape, vectors.dtype) == ((12, DIM), np.float32)
    assert vectors.argmax(axis=1).tolist() == [ord(letter) % DIM for letter in letters]
    assert sorted(path.name for path in target.parent.iterdir()) == ["vectors.npy"]
    short = await run(embedder, source, target, dimensions=8, prompt_name="query", model="toy")
    assert short.shape == (12, 8)
    assert bytes(embedder.workers["pool-0"].calls[-1].work.pool.inputs[0].token_ids[:3]) == b"q: "


async def test_a_refused_text_is_named_and_what_is_done_is_kept(embedder: Stack, tmp_path: Path) -> None:
    source, target = tmp_path / "texts.jsonl", tmp_path / "vectors.npy"
    source.write_text("\n".join(map(json.dumps, ["a", "b", "c", "", "d" * 100])).replace('""', ""))
    with pytest.raises(InvalidRequestError, match=r"line 5 has 101 tokens .*--truncate.*; 2 of 4 texts are done"):
        await run(embedder, source, target, batch_size=2, concurrency=1)
    calls = len(embedder.workers["pool-0"].calls)
    with pytest.raises(InvalidRequestError, match="line 5"):
        await run(embedder, source, target, batch_size=1, concurrency=1)
    assert len(embedder.workers["pool-0"].calls) == calls + 1  # "c" alone: "a" and "b" are kept
    assert (await run(embedder, source, target, truncate=True)).shape == (4, DIM)


async def test_a_busy_server_is_asked_again(embedder: Stack, tmp_path: Path) -> None:
    source = tmp_path / "texts.jsonl"
    source.write_text('"a"\n')
    worker = embedder.workers["pool-0"]
    worker.fail_after = 0
    running = asyncio.create_task(run(embedder, source, tmp_path / "vectors.npy"))
    while len(worker.calls) < 6:  # all attempts of the first request have failed
        await asyncio.sleep(0.02)
    worker.fail_after = None
    assert (await running).shape == (1, DIM)


def test_vectors_of_another_run_are_not_used(tmp_path: Path) -> None:
    target = tmp_path / "vectors.npy"
    with KeptVectors(target, "one", 3) as kept:
        kept.add(np.ones((2, 4), np.float32))
    with (tmp_path / ".vectors.npy.paceline" / "vectors").open("ab") as part:
        part.write(b"half")
    with KeptVectors(target, "one", 3) as kept:
        assert (kept.count, kept.dim) == (2, 4)
        kept.add(np.zeros((1, 4), np.float32))
        with pytest.raises(InvalidRequestError, match="numbers"):
            kept.add(np.zeros((1, 5), np.float32))
        kept.finish()
    assert np.load(target).tolist() == [[1] * 4, [1] * 4, [0] * 4]
    with KeptVectors(target, "one", 3) as kept:
        kept.add(np.ones((1, 4), np.float32))
    with KeptVectors(target, "another", 3) as kept:
        assert (kept.count, kept.dim) == (0, 0)


def test_nobody_else_reads_the_vectors_or_chooses_where_they_are_kept(tmp_path: Path) -> None:
    target, folder = tmp_path / "vectors.npy", tmp_path / ".vectors.npy.paceline"
    with KeptVectors(target, "one", 1) as kept:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        kept.add(np.ones((1, 4), np.float32))
        kept.finish()
    assert not folder.exists()
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    target.chmod(0o640)
    with KeptVectors(target, "one", 1) as kept:
        kept.add(np.ones((1, 4), np.float32))
        kept.finish()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="only you can read"):
        KeptVectors(target, "one", 1)
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "has no lines"), ("a text", "line 1 is not JSON"), ('"a"\n5', "line 2 has no text"), ('""', "no text")],
)
def test_files_that_have_no_texts(tmp_path: Path, content: str, message: str) -> None:
    source = tmp_path / "texts.jsonl"
    source.write_text(content)
    with pytest.raises(ConfigError, match=message):
        embed(source, tmp_path / "vectors.npy", GatewayClient("http://127.0.0.1:1"), EmbedOptions())
    source.write_text('"a"')
    with pytest.raises(UnavailableError, match="--url"):
        embed(source, tmp_path / "vectors.npy", GatewayClient("http://127.0.0.1:1"), EmbedOptions())
