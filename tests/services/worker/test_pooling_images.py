"""Work of the kind POOL with an image: its encoding is computed as for a chat, and each token has a vector."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc.aio
import numpy as np
import pytest
import torch

from paceline.core.media import MediaInput, MediaKind, MediaSpan
from paceline.proto import common_pb2
from paceline.services.common.wire import media_input_to_pb, span_to_pb
from tests.retriever_folders import DIM, ColPali, ColQwen, ColQwen2, Retriever
from tests.services.worker.conftest import Host, StartHost
from tests.services.worker.media_calls import compute, tell
from tests.services.worker.test_pooling import CLOSE, rows_of, run, same, texts, work


def picture(model: Retriever, seed: int) -> MediaInput:
    rows, columns = model.rows, model.columns
    shape = rows * model.side, columns * model.side, 3
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return MediaInput(MediaKind.IMAGE, rows * columns, "uint8", pixels.shape, pixels.tobytes())


def pixels(own: MediaInput) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(own.data, np.uint8).reshape(own.shape).copy())


def span(model: Retriever, own: MediaInput, start: int) -> common_pb2.MediaSpan:
    grid = (1, model.rows, model.columns) if model.has_grid else None
    return span_to_pb(MediaSpan(start, own.length, own.digest, own.kind, grid))


def page(host: Host, model: Retriever, own: MediaInput, name: str) -> common_pb2.Work:
    """Return work with one input: a page's image between some tokens."""
    tokens = [5, 9, 27, *[model.image_token] * own.length, 28, 17, 4]
    asked = work(host, [tokens], "TOKEN_EMBED", name=name)
    asked.media.append(span(model, own, 3))
    return asked


async def vectors(host: Host, model: Retriever, own: MediaInput, name: str) -> np.ndarray:
    """Run work with an image as a gateway does, and return the rows of its input."""
    asked = page(host, model, own, name)
    call = compute(host, asked)
    events = [await call.read()]
    assert events[0].HasField("opened")
    encode = common_pb2.Work(
        key=asked.key,
        model=host.model,
        kind=common_pb2.WORK_KIND_ENCODE,
        media=[span(model, own, 0)],
        media_input=media_input_to_pb(own),
    )
    encoding = compute(host, encode)
    while not (event := await encoding.read()).HasField("encoded"):
        pass
    await tell(host, asked.key, own, 0, event.encoded.source)
    encoding.cancel()
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return rows_of(events)[0]


MODELS: dict[str, Callable[[Path], Retriever]] = {
    "causal": lambda folder: ColQwen(folder, "causal"),
    "bidirectional": lambda folder: ColQwen(folder, "bidirectional"),
    "no bias": lambda folder: ColQwen(folder, bias=False),
    "colqwen2": ColQwen2,
    "colpali": ColPali,
}


@pytest.mark.parametrize("kind", MODELS)
async def test_pages_and_texts_have_the_vectors_of_transformers(
    start_host: StartHost, tmp_path: Path, kind: str
) -> None:
    model = MODELS[kind](tmp_path)
    async with start_host(tmp_path, max_batched_tokens=8, max_seqs=4) as host:
        await host.prefill.worker.load_for("prefill")
        some = [own for own in texts()[:5] if not {95, 96, 97, 98} & {*own}]
        same(await run(host, work(host, some, "TOKEN_EMBED")), [model.vectors(each) for each in some])
        asked = [picture(model, 1), picture(model, 2), picture(model, 1)]
        found = await asyncio.gather(*(vectors(host, model, own, f"page {index}") for index, own in enumerate(asked)))
        for own, rows in zip(asked, found):
            wanted = model.vectors(list(page(host, model, own, "").pool.inputs[0].token_ids), pixels(own))
            assert rows.shape == (len(wanted), DIM)
            assert np.abs(rows - wanted.numpy()).max() < CLOSE
        assert np.array_equal(found[0], found[2])
        assert await host.all_blocks_back()


async def test_work_with_media_that_no_worker_can_do_is_refused(start_host: StartHost, tmp_path: Path) -> None:
    model = ColQwen(tmp_path)
    async with start_host(tmp_path, max_batched_tokens=8, max_seqs=4) as host:
        two, long = (page(host, model, picture(model, 1), name) for name in ("two", "long"))
        two.pool.inputs.append(common_pb2.PoolInput(token_ids=[3]))
        long.media[0].start = 40
        for asked, why in ((two, "that has media has one input"), (long, "ends after the prompt")):
            with pytest.raises(grpc.aio.AioRpcError, match=why):
                await run(host, asked)
