"""Questions about media, and the answers that `transformers` gives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image

from paceline.core.media import MediaKind, MediaSpan
from paceline.services.gateway.planning.media import video_decoder
from paceline.services.gateway.planning.media.items import Expansion, TokenRun
from paceline.services.gateway.planning.media.processors.base import SAMPLING_RATE, Processor
from paceline.services.gateway.planning.media.processors.families import read_processor
from tests.engine.media_models import MediaModel, Prompt
from tests.models.test_encoders import reference_of_patches, reference_of_qwen3_vl
from tests.services.gateway.planning.media.samples import audio_file, data_url, image_file, tone, video_file
from tests.services.gateway.toy_model import (
    AUDIO,
    END,
    IMAGE,
    IMAGE_PAD,
    VIDEO,
    VIDEO_PAD,
    write_toy_media_model,
    write_toy_vision_model,
)
from tests.stack.chaos_clients import Question
from tests.tiny_checkpoints import write_gemma4_with_media, write_qwen3_vl

TOKENS, MANY_TOKENS = 12, 64
VOCAB = 272
QUESTIONS = ("What is this?", "And this one? " * 6, "Which of both, then, is the older one, and why?")
SHAPES = ((50, 70), (64, 64), (60, 44))


@dataclass(frozen=True)
class Model:
    """A tiny Gemma 4 or Qwen 3-VL in a folder, with its reference."""

    kind: str
    """As in `MediaModel`."""
    folder: Path
    reference: Any
    processor: Processor
    options: dict[str, Any]
    """The options of the processor, which requests send."""

    def expect(self, token_ids: Sequence[int], runs: Sequence[TokenRun], output: Sequence[int]) -> None:
        """Check that the output is what `transformers` generates after a prompt with these media."""
        media, begin = [], 0
        for run in runs:
            begin = list(token_ids).index(run.token_id, begin)
            rows = self._encoding(run)
            assert len(rows) == run.input.length
            kind = MediaKind.IMAGE if run.input.kind is MediaKind.IMAGE else MediaKind.VIDEO_FRAME
            media.append((MediaSpan(begin, len(rows), run.digest, kind, run.grid), rows))
            begin += len(rows)
        # `transformers` takes no encodings of audio. In this model, rows of a frame are read in the same way.
        given = [VIDEO if token == AUDIO and "audio" in self.processor.kinds else token for token in token_ids]
        made = MediaModel(None, self.reference, self.kind)  # type: ignore[arg-type]
        made.check(Prompt(given, media), list(output))

    def _encoding(self, run: TokenRun) -> torch.Tensor:
        own = run.input
        values = torch.from_numpy(np.frombuffer(own.data, dtype=own.dtype).reshape(own.shape).copy())
        if self.kind == "qwen3_vl":
            return reference_of_qwen3_vl(self.reference, values.expand(2, *values.shape[-3:]))
        if own.kind is not MediaKind.AUDIO:
            return reference_of_patches(self.reference, values, 16, padded=0)
        with torch.inference_mode():
            found = self.reference.model.get_audio_features(values[None], torch.ones(1, len(values), dtype=torch.bool))
        return found.pooler_output[0][found.attention_mask[0]]  # type: ignore[no-any-return]


def write_model(folder: Path, kind: str = "edge") -> Model:
    """Write a tiny random Gemma 4 ("edge") or Qwen 3-VL ("qwen3_vl") to a new folder."""
    is_gemma = kind == "edge"
    (write_toy_media_model if is_gemma else write_toy_vision_model)(folder)
    ids = {name: value for name, value in json.loads((folder / "config.json").read_text()).items() if "token" in name}
    sizes = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": END}
    reference = (
        write_gemma4_with_media(folder, "edge", audio_features=128, vocab_size_per_layer_input=VOCAB, **sizes)
        if is_gemma
        else write_qwen3_vl(folder, **sizes)
    )
    for name, value in ids.items():
        setattr(reference.config, name, value)
    with torch.no_grad():  # a placeholder is never the best token, because the reference would take it for an image
        reference.get_output_embeddings().weight[[IMAGE, VIDEO, AUDIO] if is_gemma else [IMAGE_PAD, VIDEO_PAD]] = 0
    reference.save_pretrained(folder)
    processor = read_processor(folder)
    assert processor is not None
    options: dict[str, Any] = {"max_soft_tokens": 70} if is_gemma else {"size": {"longest_edge": 1 << 14}}
    return Model(kind, folder, reference, processor.with_options(options), options)


def images_of(number: int, count: int) -> list[np.ndarray]:
    """Return `count` images uint8 [height, width, 3]. The same number gives the same images."""
    draw = np.random.default_rng(number)
    shapes = [SHAPES[(number + index) % len(SHAPES)] for index in range(count)]
    return [draw.integers(0, 256, (*shape, 3), dtype=np.uint8) for shape in shapes]


def part(kind: str, file: bytes) -> dict[str, Any]:
    """Return the part of a message that has a file of a kind: "image", "video" or "audio"."""
    return {"type": f"{kind}_url", f"{kind}_url": {"url": data_url(file)}}


def image_part(pixels: np.ndarray) -> dict[str, Any]:
    """Return the part of a message that has an image."""
    return part("image", image_file(image=Image.fromarray(pixels)))


def runs_of(expansion: Expansion) -> list[TokenRun]:
    """Return the placeholders of an item."""
    return [piece for piece in expansion.pieces if isinstance(piece, TokenRun)]


def image_runs(model: Model, images: Sequence[np.ndarray]) -> list[TokenRun]:
    """Return the placeholders of images."""
    return [run for pixels in images for run in runs_of(model.processor.image(pixels))]


@dataclass(frozen=True)
class Answer:
    prompt: list[int]
    outputs: list[list[int]]
    """The tokens of each choice."""
    usage: dict[str, Any]


async def send(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """Send a request and read the answer, which may be a stream."""
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        found = answer.json()
        return Answer(found["prompt_token_ids"], [each["token_ids"] for each in found["choices"]], found["usage"])
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    outputs: list[list[int]] = [[] for _ in range(body["n"])]
    for chunk in chunks:
        for choice in chunk["choices"]:
            outputs[choice["index"]] += choice.get("token_ids") or []
    return Answer(chunks[0]["prompt_token_ids"], outputs, chunks[-1]["usage"])


async def ask(
    client: httpx.AsyncClient,
    model: Model,
    messages: Sequence[dict[str, Any]],
    runs: Sequence[TokenRun],
    tokens: int = TOKENS,
    **options: Any,
) -> int:
    """Ask for the next message of a conversation, and check each choice of the answer.

    Args:
        runs: the placeholders of all media in the messages, in order.
        tokens: of the answer.
        options: further fields of the request.

    Returns:
        The number of prompt tokens that were not cached.
    """
    body = {
        "n": 1,
        "stream": False,
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "mm_processor_kwargs": model.options,
        **options,
    }
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    found = await send(client, body)
    assert len(found.outputs) == body["n"]
    for output in found.outputs:
        assert len(output) == tokens
        await asyncio.to_thread(model.expect, found.prompt, runs, output)
    cached = (found.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return int(found.usage["prompt_tokens"] - cached)


class Chat:
    """A question about some images. Every second question wants a stream.

    Args:
        number: number of the question. The same number gives the same images.
        images: number of images.
        choices: number of answers.
        tokens: of each answer.
    """

    def __init__(self, model: Model, number: int, images: int = 1, choices: int = 1, tokens: int = TOKENS) -> None:
        self._model = model
        self._options = {"stream": number % 2 == 1, "n": choices, "tokens": tokens}
        own = images_of(number, images)
        self._runs = image_runs(model, own)
        parts: list[dict[str, Any]] = [{"type": "text", "text": QUESTIONS[number % len(QUESTIONS)]}]
        for pixels in own:
            parts += [image_part(pixels), {"type": "text", "text": f"{number}?"}]
        self._messages = [{"role": "user", "content": parts}]

    async def ask(self, client: httpx.AsyncClient) -> None:
        """Send the question and check the answer."""
        await ask(client, self._model, self._messages, self._runs, **self._options)


async def ask_about_media(url: str, model: Model) -> int:
    """Ask about two equal images, a video, and an audio clip if the model takes it, in one prompt.

    Return the number of different encodings.
    """
    (pixels,), film = images_of(500, 1), video_file(3, (32, 32))
    sampling = asdict(model.processor.sampling)
    facts, frames = video_decoder.decode(memoryview(film), 1 << 24, 1 << 20, max_seconds=60.0, sampling=sampling)
    video = model.processor.video(list(frames), facts["timestamps"])
    runs = [*image_runs(model, [pixels, pixels]), *runs_of(video)]
    parts = [image_part(pixels), image_part(pixels), part("video", film)]
    if "audio" in model.processor.kinds:
        samples = tone(SAMPLING_RATE)
        runs += runs_of(model.processor.audio(samples))
        parts.append(part("audio", audio_file(samples, SAMPLING_RATE)))
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await ask(client, model, [{"role": "user", "content": parts}], runs, MANY_TOKENS)
    return len({run.digest for run in runs})


async def converse(url: str, model: Model, number: int = 1000, disturb: Callable[[], None] | None = None) -> None:
    """Hold a conversation of ten turns over four images. A turn computes hardly more than what is new in it.

    Args:
        number: the same number gives the same images.
        disturb: is called in the middle. Then turns may compute more.
    """
    messages: list[dict[str, Any]] = []
    runs: list[TokenRun] = []
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        for turn in range(10):
            new = images_of(number + turn, 1) if turn % 3 == 0 else []
            runs += image_runs(model, new)
            parts: list[dict[str, Any]] = [image_part(pixels) for pixels in new]
            messages.append({"role": "user", "content": [*parts, {"type": "text", "text": f"Turn {turn}?"}]})
            asked = asyncio.create_task(ask(client, model, messages, runs))
            if turn == 6 and disturb is not None:  # while the third image is encoded or read
                await asyncio.sleep(0.05)
                disturb()
            computed = await asked
            assert turn == 0 or computed < 200 or disturb is not None
            messages.append({"role": "assistant", "content": f"Answer {turn}."})


async def ask_all(url: str, chats: Sequence[Chat]) -> None:
    """Ask all questions at once."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client, asyncio.TaskGroup() as group:
        for chat in chats:
            group.create_task(chat.ask(client))


def questions_about_media(model: Model, count: int) -> tuple[Question, ...]:
    """Return questions about one to three images; every third one also has a video, and every fourth an audio clip."""
    questions = []
    for number in range(count):
        parts = [image_part(pixels) for pixels in images_of(2000 + number, 1 + number % 3)]
        parts += [part("video", video_file(2 + number % 20, (32, 32)))] * (number % 3 == 0)
        parts += [part("audio", audio_file(tone(SAMPLING_RATE, 0.1 + number / 100), SAMPLING_RATE))] * (number % 4 == 0)
        parts.append({"type": "text", "text": QUESTIONS[number % len(QUESTIONS)]})
        fields = {"messages": [{"role": "user", "content": parts}], "mm_processor_kwargs": model.options}
        questions.append(Question(f"question {number} about media", fields, "/v1/chat/completions"))
    return tuple(questions)
