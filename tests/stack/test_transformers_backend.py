"""A family without a file here in real stacks: handoff, reused prefixes and drafts, on one host and on two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from bench.common.namespaces import ONE_HOST
from bench.compute.tiny_architectures import save_tiny
from paceline.core.media import MediaKind, MediaSpan
from paceline.services.gateway.planning.media.processors.families import read_processor
from tests.engine.media_models import MediaModel, Prompt
from tests.services.gateway.toy_model import IMAGE, VOCAB_SIZE, write_toy_media_model, write_toy_model
from tests.stack.cluster import Cluster
from tests.stack.media_chats import VOCAB, image_part, images_of, runs_of, send
from tests.stack.processes import serve
from tests.stack.reference import PROMPTS
from tests.stack.test_hybrid import complete_all, generated
from tests.tiny_checkpoints import write_llava

pytestmark = pytest.mark.stack

ASKED = PROMPTS[:10]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_toy_model(tmp_path / "olmo3")


@pytest.fixture
def reference(model: Path) -> Any:
    """Write weights of Olmo 3, which has layers with a window and layers without, and return the model."""
    return save_tiny("olmo3", model, vocab_size=VOCAB_SIZE, eos_token_id=256, max_position_embeddings=2048)


async def test_tokens_are_those_of_transformers(model: Path, reference: Any, tmp_path: Path) -> None:
    expected = [generated(reference, prompt) for prompt in ASKED]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
    # The folder has no code, so the trust changes nothing.
    options = ("--trust-remote-code", "--threads=1", "--max-batched-tokens=64", "--max-seqs=32", "--kv-memory=64MiB")
    with serve(tmp_path / "log", str(model), *options, f"--speculative-config={json.dumps(drafts)}") as stack:
        assert [tokens for tokens, _ in await complete_all(stack.url, ASKED)] == expected
        ((tokens, cached),) = await complete_all(stack.url, ASKED[7:8])
        assert tokens == expected[7]
        assert cached == 512  # of 540 tokens


@pytest.mark.thorough
async def test_images_are_read_as_in_transformers(tmp_path: Path) -> None:
    folder = write_toy_media_model(tmp_path / "llava")
    sizes = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": 256, "max_position_embeddings": 2048}
    reference = write_llava(folder, image_token=IMAGE, **sizes)
    with torch.no_grad():  # a placeholder is never the best token, because the reference would take it for an image
        reference.lm_head.weight[IMAGE] = 0
    reference.save_pretrained(folder)
    processor = read_processor(folder)
    assert processor is not None
    images = images_of(1, 3)
    runs = [run for pixels in images for run in runs_of(processor.image(pixels))]
    parts = [image_part(images[0]), {"type": "text", "text": "and"}, *map(image_part, images[1:])]
    body = {
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What are these?"}]}],
        "max_tokens": 64,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "n": 1,
        "stream": False,
    }
    with serve(tmp_path / "log", str(folder), "--threads=1", "--max-batched-tokens=64", "--kv-memory=16MiB") as stack:
        async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:
            answers = [await send(client, body) for _ in range(2)]  # the second one from the cache
        await stack.settled()
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    made = CLIPImageProcessorPil(**settings)([Image.fromarray(pixels) for pixels in images], return_tensors="pt")
    with torch.inference_mode():
        encodings = reference.model.get_image_features(made["pixel_values"], return_dict=True).pooler_output
    for answer in answers:
        media, begin = [], 0
        for run, rows in zip(runs, encodings, strict=True):
            begin = answer.prompt.index(IMAGE, begin)
            media.append((MediaSpan(begin, len(rows), run.digest, MediaKind.IMAGE), rows))
            begin += len(rows)
        assert answer.prompt.count(IMAGE) == 3 * 16
        assert len(answer.outputs[0]) == 64
        MediaModel(None, reference, "llava").check(Prompt(answer.prompt, media), answer.outputs[0])  # type: ignore[arg-type]


@pytest.mark.thorough
async def test_a_prompt_computed_on_another_host_gives_the_same_tokens(
    model: Path, reference: Any, tmp_path: Path
) -> None:
    first, other = list(PROMPTS[7].encode()), list(PROMPTS[5].encode())
    answer = generated(reference, first)
    turns = [first, [*first, *answer, *other], other]
    expected = [answer, *(generated(reference, turn) for turn in turns[1:])]
    with Cluster(tmp_path, model, ONE_HOST) as cluster:
        names = [cluster.start_worker("prefill", 0, host=0), cluster.start_worker("decode", 0, host=1)]
        cluster.start_gateway("--router-mode=round-robin")
        cluster.wait_ready(*names)
        await cluster.wait_workers(2)
        for turn, wanted in zip(turns, expected):
            ((tokens, _),) = await complete_all(cluster.url, [turn])
            assert tokens == wanted
        numerics = {worker["numerics"] for worker in (await cluster.fleet())["workers"] if worker["numerics"]}
        assert all("transformers" in each for each in numerics)
        await cluster.settled()
