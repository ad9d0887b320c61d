"""Images in requests over HTTP, from the body to the work of the workers."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paceline.core.media import MediaSpan
from paceline.proto import common_pb2
from paceline.services.common.wire import spans_from_pb
from paceline.services.gateway.planning.media.items import TokenRun
from paceline.services.gateway.planning.media.processors.base import Processor
from tests.services.gateway.conftest import PATIENCE, Stack, StartStack
from tests.services.gateway.toy_model import BOI, EOI, IMAGE, USER

PIXELS = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
SMALL = {"mm_processor_kwargs": {"max_soft_tokens": 70}}
Json = dict[str, Any]
DEAD = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/cat.png"}}


def png(pixels: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


PNG = png(PIXELS)
URL = f"data:image/png;base64,{PNG}"
PART = {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


@pytest.fixture
async def seeing(start_stack: StartStack, media_model: Path) -> Stack:
    """A stack whose model takes images."""
    return await start_stack(model=str(media_model), limit_mm_per_prompt='{"image": 2}', store="none")


@pytest.fixture
def picture(processor: Processor) -> TokenRun:
    """What stands for PIXELS in a prompt."""
    run = processor.with_options({"max_soft_tokens": 70}).image(PIXELS).pieces[1]
    assert isinstance(run, TokenRun)
    return run


def work(stack: Stack) -> common_pb2.Work:
    """Return what a prefill worker was asked to compute last."""
    calls = [call.work for call in stack.workers["prefill-0"].calls]
    return [own for own in calls if own.kind != common_pb2.WORK_KIND_ENCODE][-1]


def shown(stack: Stack) -> tuple[list[int], list[MediaSpan]]:
    return list(work(stack).token_ids), list(spans_from_pb(work(stack).media))


async def chat(stack: Stack, *content: Any, **body: Any) -> Any:
    messages = [{"role": "user", "content": list(content)}]
    return await stack.post("/v1/chat/completions", messages=messages, max_tokens=2, **{**SMALL, **body})


async def test_an_image_of_a_chat_reaches_the_workers(seeing: Stack, picture: TokenRun) -> None:
    length = picture.input.length
    # What a user writes is text, whatever it spells, and moves no span.
    answer = await chat(seeing, text("<|image|>"), PART, text("<|ima"), text("ge|>"))
    assert answer.status_code == 200, answer.text
    ids, spans = shown(seeing)
    assert spans == [MediaSpan(len("<|image|>") + 2, length, picture.digest, picture.input.kind)]
    assert ids[:1] == [USER]
    spelled = [*b"<|image|>"]
    assert ids[1:-1] == [*spelled, BOI, *[IMAGE] * length, EOI, *spelled]
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == len(ids)
    assert usage["prompt_tokens_details"]["image_tokens"] == length


async def test_a_later_request_names_an_image_by_its_uuid(seeing: Stack, picture: TokenRun) -> None:
    named = {"type": "image_url", "image_url": None, "uuid": "cat"}
    unknown = await chat(seeing, named)
    assert unknown.status_code == 400
    assert "no image with the uuid 'cat' is kept here" in unknown.json()["error"]["message"]
    assert (await chat(seeing, {**PART, "uuid": "cat"})).status_code == 200
    assert (await chat(seeing, named)).status_code == 200
    assert [span.digest for span in shown(seeing)[1]] == [picture.digest]
    # It was preprocessed with these options.
    assert (await chat(seeing, named, mm_processor_kwargs={"max_soft_tokens": 140})).status_code == 400


async def test_routes_that_count_tokens_count_those_of_images(seeing: Stack) -> None:
    messages = [{"role": "user", "content": [text("a"), PART]}]
    counted = (await seeing.post("/tokenize", messages=messages, **SMALL)).json()
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    same = [{"role": "user", "content": [text("a"), block]}]
    answer = await seeing.post("/v1/messages/count_tokens", messages=same, **SMALL)
    assert answer.json() == {"input_tokens": counted["count"]}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": URL}]}
    ]
    answer = await seeing.post("/v1/responses/input_tokens", input=items, **SMALL)
    assert answer.json()["input_tokens"] == counted["count"]


async def test_images_in_results_of_tools_follow_them(seeing: Stack, picture: TokenRun) -> None:
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text("seen"), block]}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, text("so?")]},
    ]
    answer = await seeing.post("/v1/messages", messages=messages, max_tokens=2, **SMALL)
    assert answer.status_code == 200, answer.text
    ids, spans = shown(seeing)
    assert [span.digest for span in spans] == [picture.digest]
    (span,) = spans
    assert bytes(ids[span.end + 1 : span.end + 4]) == b"so?"
    assert ids[span.start - 2] == USER
    assert bytes(ids[span.start - 6 : span.start - 2]) == b"seen"


@pytest.mark.parametrize("kind", ["computer_call", "function_call"])
async def test_a_screenshot_is_seen_and_kept_as_it_was_sent(
    start_stack: StartStack, media_model: Path, picture: TokenRun, tmp_path: Path, kind: str
) -> None:
    stack = await start_stack(model=str(media_model), store=str(tmp_path / "responses.db"))
    call: Json = {"type": kind, "call_id": "a"}
    call |= {"action": {"type": "screenshot"}} if kind == "computer_call" else {"name": "look", "arguments": "{}"}
    output = {"type": f"{kind}_output", "call_id": "a", "output": {"type": "computer_screenshot", "image_url": URL}}
    items = [{"role": "user", "content": "look"}, call, output]
    answer = await stack.post("/v1/responses", input=items, max_output_tokens=2, **SMALL)
    assert answer.status_code == 200, answer.text
    assert [span.digest for span in shown(stack)[1]] == [picture.digest]
    listed = (await stack.http.get(f"/v1/responses/{answer.json()['id']}/input_items")).json()["data"]
    (stored,) = [item["output"] for item in listed if item["type"] == f"{kind}_output"]
    if kind == "computer_call":
        assert (stored["type"], stored["image_url"]) == ("computer_screenshot", URL)
    else:
        assert [(part["type"], part["image_url"]) for part in stored] == [("input_image", URL)]


async def test_a_conversation_of_responses_keeps_its_images(
    start_stack: StartStack, media_model: Path, picture: TokenRun, tmp_path: Path
) -> None:
    stack = await start_stack(model=str(media_model), store=str(tmp_path / "responses.db"))
    common = {"max_output_tokens": 2, **SMALL}
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]
    first = await stack.post("/v1/responses", input=items, **common)
    assert first.status_code == 200, first.text
    listed = (await stack.http.get(f"/v1/responses/{first.json()['id']}/input_items")).json()
    assert listed["data"][0]["content"] == [{"type": "input_image", "image_url": URL, "detail": "auto"}]
    later = await stack.post("/v1/responses", input="and?", previous_response_id=first.json()["id"], **common)
    assert later.status_code == 200, later.text
    assert [span.digest for span in shown(stack)[1]] == [picture.digest]
    document = [{"role": "user", "content": [{"type": "input_file", "file_data": "data:application/pdf;base64,AA=="}]}]
    refused = await stack.post("/v1/responses", input=document)
    assert refused.status_code == 400
    assert "'input_file' is not supported" in refused.json()["error"]["message"]


async def test_a_stored_uuid_keeps_its_meaning(start_stack: StartStack, media_model: Path, tmp_path: Path) -> None:
    stack = await start_stack(model=str(media_model), store=str(tmp_path / "responses.db"))

    async def respond(*content: Json, **body: Any) -> Any:
        items = [{"role": "user", "content": list(content)}]
        return await stack.post("/v1/responses", input=items, max_output_tokens=2, **SMALL, **body)

    assert (await chat(stack, {**PART, "uuid": "cat"})).status_code == 200
    first = (await respond({"type": "input_image", "uuid": "cat"})).json()
    later = {"type": "input_text", "text": "and?"}
    assert (await respond(later, previous_response_id=first["id"])).status_code == 200
    other = {"type": "image_url", "image_url": f"data:image/png;base64,{png(PIXELS[:20])}", "uuid": "cat"}
    assert (await chat(stack, other)).status_code == 200
    refused = await respond(later, previous_response_id=first["id"])
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "previous_response_id[0].content[0]"
    assert "means another image now" in refused.json()["error"]["message"]


async def test_truncation_keeps_the_newest_images(seeing: Stack, picture: TokenRun) -> None:
    looks = [
        {"type": kind, "call_id": str(index), **fields}
        for index, url in enumerate(["http://127.0.0.1:1/a.png", "http://127.0.0.1:1/b.png", URL, URL])
        for kind, fields in (
            ("computer_call", {"action": {"type": "screenshot"}}),
            ("computer_call_output", {"output": {"type": "computer_screenshot", "image_url": url}}),
        )
    ]
    items = [{"role": "user", "content": "look"}, *looks]
    body = {"input": items, "max_output_tokens": 2, **SMALL}
    answer = await seeing.post("/v1/responses", truncation="auto", **body)
    assert answer.status_code == 200, answer.text
    # The gateway takes two images of a request.
    assert [span.digest for span in shown(seeing)[1]] == [picture.digest] * 2
    refused = await seeing.post("/v1/responses", **body)
    assert (refused.status_code, "at most 2 of the kind image" in refused.text) == (400, True)


@pytest.mark.parametrize("role", ["user", "system", "developer", "assistant"])
async def test_texts_are_parts_for_a_template_that_reads_parts(seeing: Stack, role: str) -> None:
    asked = [] if role == "user" else [{"role": "user", "content": "c"}]
    seen = []
    for kind, path, field in (("text", "chat/completions", "messages"), ("text", "responses", "input")):
        for texts in (["a", "b"], ["ab"]):
            content = [{"type": kind, "text": text} for text in texts]
            turns = [*(asked if role == "assistant" else []), {"role": role, "content": content}, *asked]
            answer = await seeing.post(f"/v1/{path}", **{field: turns})
            assert answer.status_code == 200, answer.text
            seen.append(shown(seeing)[0])
    assert all(ids == seen[0] for ids in seen)


async def test_errors_name_the_part_in_each_api(seeing: Stack) -> None:
    broken = "data:image/png;base64,AAAA"
    image = {"type": "input_image", "image_url": broken}
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text("x"), block]}
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    output = {"type": "function_call_output", "call_id": "a", "output": [image]}
    for path, field, messages, place in (
        ("/v1/responses", "input", [{"role": "user", "content": [image]}], "input[0].content[0]"),
        ("/v1/responses", "input", [{"role": "user", "content": "a"}, output], "input[1].output[0]"),
        ("/v1/messages", "messages", [{"role": "user", "content": [text("a"), block]}], "messages[0].content[1]"),
        (
            "/v1/messages",
            "messages",
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result]},
            ],
            "messages[2].content[0].content[1]",
        ),
    ):
        limit = {"max_tokens": 2} if path == "/v1/messages" else {}
        answer = await seeing.post(path, **{field: messages}, **limit)
        error = answer.json()["error"]
        assert (answer.status_code, error["message"].startswith(f"{place}: ")) == (400, True), answer.text
        assert error.get("param", place) == place


async def test_what_is_wrong_is_told(seeing: Stack) -> None:
    async def refusal(*content: Any, **body: Any) -> str:
        answer = await chat(seeing, *content, **body)
        assert answer.status_code == 400
        return str(answer.json()["error"]["message"])

    assert "at most 2 of the kind image (--limit-mm-per-prompt)" in await refusal(PART, PART, PART)
    assert "no option 'size'" in await refusal(PART, mm_processor_kwargs={"size": 3})
    assert "messages[0].content[0]: " in await refusal({"type": "image_url", "image_url": "data:image/png;base64,AAAA"})
    assert "cannot be truncated" in await refusal(PART, truncate_prompt_tokens=5)
    # The URL would fail, too, but a prompt that cannot be computed costs no fetch.
    assert "maximum context length" in await refusal(DEAD, text("a" * 600))
    assert (
        "message of the user"
        in (await seeing.post("/v1/chat/completions", messages=[{"role": "system", "content": [PART]}])).text
    )
    rendered = await seeing.post("/v1/chat/completions/render", messages=[{"role": "user", "content": [PART]}])
    assert (rendered.status_code, "token ids" in rendered.text) == (400, True)
    tokens = await seeing.post("/inference/v1/generate", token_ids=[1, IMAGE], sampling_params={})
    assert (tokens.status_code, f"[{IMAGE}]" in tokens.text or str(IMAGE) in tokens.text) == (400, True)


async def test_a_model_without_encoders_takes_text_alone(stack: Stack) -> None:
    answer = await chat(stack, PART, mm_processor_kwargs=None)
    assert answer.status_code == 400
    assert "image is not supported; this model takes text alone" in answer.json()["error"]["message"]
    answer = await stack.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], **SMALL)
    assert answer.status_code == 400


async def test_loading_ends_if_the_client_leaves(start_stack: StartStack, media_model: Path) -> None:
    asked, gone = asyncio.Event(), asyncio.Event()

    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        gone.set()
        writer.close()

    server = await asyncio.start_server(stall, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    stack = await start_stack(
        model=str(media_model), allow_private_media=True, image_fetch_seconds=PATIENCE * 10, store="none"
    )
    slow = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{port}/cat.png"}}
    asking = asyncio.create_task(chat(stack, slow))
    async with asyncio.timeout(PATIENCE), server:
        await asked.wait()
        asking.cancel()
        await gone.wait()


async def test_inputs_of_running_requests_count_as_memory_of_media(start_stack: StartStack, media_model: Path) -> None:
    stack = await start_stack(model=str(media_model), media_memory="256KiB", store="none")
    for stream in (False, True):
        answer = await chat(stack, PART, stream=stream)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_media")
        assert "it takes too much memory (--media-memory)" in answer.json()["error"]["message"]
    assert (await chat(stack, text("hi"))).status_code == 200


async def test_an_input_counts_once_however_often_it_appears_and_until_the_request_ends(
    start_stack: StartStack, media_model: Path, picture: TokenRun
) -> None:
    size = len(picture.input.data)
    # A request may use half of the memory, and an item half of that.
    stack = await start_stack(model=str(media_model), media_memory=f"{4 * size}", store="none")
    wrong = {"X-Vllm-Priority": "high"}
    for _ in range(4):
        assert (await chat(stack, PART, text("again"), PART, PART, **SMALL)).status_code == 200
        # These end after their media have been loaded, and without a generation.
        body = {"messages": [{"role": "user", "content": [PART]}], **SMALL}
        assert (await stack.http.post("/tokenize", json=body)).status_code == 200
        refused = await stack.http.post("/v1/chat/completions", json=body, headers=wrong)
        assert refused.json()["error"]["param"] == "X-Vllm-Priority"
