"""Images and videos of Qwen 3-VL in requests over HTTP, from the body to the work of the workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.media import MediaKind, MediaSpan
from paceline.services.gateway.planning.media.items import TokenRun
from paceline.services.gateway.planning.media.processors.families import read_processor
from tests.services.gateway.conftest import Stack, StartStack
from tests.services.gateway.planning.media.samples import data_url, image_file, picture, video_file
from tests.services.gateway.planning.media.test_requests import shown, text
from tests.services.gateway.toy_model import (
    IMAGE_PAD,
    USER,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    VISION_TOKENS,
    write_toy_vision_model,
)

PICTURE = picture(70, 50)
IMAGE_URL = data_url(image_file(image=PICTURE))
IMAGE_PART = {"type": "image_url", "image_url": {"url": IMAGE_URL}}
VIDEO_PART = {"type": "video_url", "video_url": {"url": data_url(video_file())}}


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_vision_model(tmp_path_factory.mktemp("models") / "vision")


@pytest.fixture
async def seeing(start_stack: StartStack, vision_model: Path) -> Stack:
    """A stack whose model takes images and videos as Qwen 3-VL does."""
    return await start_stack(model=str(vision_model), limit_mm_per_prompt='{"video": 1}', store="none")


async def chat(stack: Stack, *content: Any, **body: Any) -> Any:
    messages = [{"role": "user", "content": list(content)}]
    return await stack.post("/v1/chat/completions", messages=messages, max_tokens=2, **body)


async def refusal(stack: Stack, *content: Any, **body: Any) -> str:
    answer = await chat(stack, *content, **body)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


async def test_an_image_reaches_the_workers_with_its_grid(seeing: Stack, vision_model: Path) -> None:
    processor = read_processor(vision_model)
    assert processor is not None
    run = processor.with_options({"min_pixels": 1}).image(np.asarray(PICTURE)).pieces[1]
    assert isinstance(run, TokenRun)
    # What a user writes is text, whatever it spells, and moves no span.
    spelled = "".join(VISION_TOKENS)
    parts = (text(spelled), IMAGE_PART, text("<|vision_start|><|image"), text("_pad|><|vision_end|>"))
    answer = await chat(seeing, *parts, mm_processor_kwargs={"min_pixels": 1})
    assert answer.status_code == 200, answer.text
    ids, spans = shown(seeing)
    # 50 x 70 pixels become 2 x 2 squares of 32 x 32.
    assert spans == [MediaSpan(len(spelled) + 2, 4, run.digest, MediaKind.IMAGE, (1, 2, 2))]
    told = [*b"<|vision_start|><|image_pad|><|vision_end|>"]
    assert ids[:-1] == [USER, *spelled.encode(), VISION_START, *[IMAGE_PAD] * 4, VISION_END, *told]
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == len(ids)
    assert usage["prompt_tokens_details"]["image_tokens"] == 4


async def test_a_video_is_pairs_of_frames(seeing: Stack) -> None:
    small = {"videos_kwargs": {"size": {"shortest_edge": 1, "longest_edge": 4096}, "fps": 1.5}, "min_frames": 1}
    answer = await chat(seeing, VIDEO_PART, text("?"), mm_processor_kwargs=small)
    assert answer.status_code == 200, answer.text
    ids, spans = shown(seeing)
    # Three of 20 frames in two seconds: numbers 0, 10 (9.5 is rounded to even) and 19.
    first = [*b"<0.5 seconds>", VISION_START, VIDEO_PAD, VISION_END]
    second = [*b"<1.9 seconds>", VISION_START, VIDEO_PAD, VISION_END]
    assert ids[:-1] == [USER, VISION_START, *first, *second, VISION_END, *b"?"]
    assert [(span.length, span.kind, span.grid) for span in spans] == [(1, MediaKind.VIDEO_FRAME, (1, 1, 1))] * 2
    assert answer.json()["usage"]["prompt_tokens_details"]["video_tokens"] == 2


async def test_a_later_request_names_a_video_by_its_uuid(seeing: Stack) -> None:
    assert (await chat(seeing, {**VIDEO_PART, "uuid": "film"})).status_code == 200
    sent = shown(seeing)
    assert (await chat(seeing, {"type": "video_url", "video_url": None, "uuid": "film"})).status_code == 200
    assert shown(seeing) == sent


async def test_what_is_wrong_is_told(seeing: Stack) -> None:
    long = {"type": "image_url", "image_url": {"url": data_url(image_file(image=picture(402, 2)))}}
    told = await refusal(seeing, IMAGE_PART, long)
    assert told.startswith("messages[0].content[1]: one side is 201.0 times as long as the other")
    assert "at most 1 of the kind video" in await refusal(seeing, VIDEO_PART, VIDEO_PART)
    assert "no option 'max_soft_tokens'" in await refusal(seeing, mm_processor_kwargs={"max_soft_tokens": 70})
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    assert "audio is not supported; this model takes text and image and video" in await refusal(seeing, sound)


async def test_all_routes_see_the_same_image(seeing: Stack) -> None:
    assert (await chat(seeing, IMAGE_PART)).status_code == 200
    wanted = shown(seeing)
    base64 = IMAGE_URL.partition(",")[2]
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64}}
    answer = await seeing.post("/v1/messages", messages=[{"role": "user", "content": [block]}], max_tokens=2)
    assert answer.status_code == 200, answer.text
    assert shown(seeing) == wanted
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE_URL}]}]
    answer = await seeing.post("/v1/responses", input=items, max_output_tokens=2)
    assert answer.status_code == 200, answer.text
    assert shown(seeing) == wanted


async def test_media_that_tools_return_follow_in_a_message_of_the_user(seeing: Stack) -> None:
    content = [IMAGE_PART, VIDEO_PART]
    assert (await chat(seeing, *content)).status_code == 200
    wanted = [(span.digest, span.grid) for span in shown(seeing)[1]]
    call = {"id": "call_a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_a", "content": [text("seen"), *content]},
    ]
    answer = await seeing.post("/v1/chat/completions", messages=messages, max_tokens=2)
    assert answer.status_code == 200, answer.text
    assert [(span.digest, span.grid) for span in shown(seeing)[1]] == wanted
    items = [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "call_a", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "call_a",
            "output": [
                {"type": "input_text", "text": "seen"},
                {"type": "input_image", "image_url": IMAGE_URL},
                VIDEO_PART,
            ],
        },
    ]
    answer = await seeing.post("/v1/responses", input=items, max_output_tokens=2)
    assert answer.status_code == 200, answer.text
    assert [(span.digest, span.grid) for span in shown(seeing)[1]] == wanted
