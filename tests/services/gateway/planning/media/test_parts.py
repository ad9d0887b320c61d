"""Parts of messages in all the forms that clients send."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from paceline.services.gateway.api.responses.schemas import ResponsesRequest
from paceline.services.gateway.planning.chat_schemas import ChatMessage
from paceline.services.gateway.planning.media.items import MediaItem
from paceline.services.gateway.planning.media.parts import MediaPart

URL = "https://example.com/a"


@pytest.mark.parametrize(
    ("part", "kind", "url", "uuid"),
    [
        ({"type": "image_url", "image_url": {"url": URL, "detail": "low"}}, "image", URL, None),
        ({"type": "image_url", "image_url": URL, "uuid": "a"}, "image", URL, "a"),
        ({"type": "image_url", "image_url": None, "uuid": "a"}, "image", None, "a"),
        ({"type": "image_url", "image_url": {"url": None}, "uuid": "a"}, "image", None, "a"),
        ({"type": "input_image", "image_url": URL, "detail": "auto"}, "image", URL, None),
        ({"type": "video_url", "video_url": {"url": URL}}, "video", URL, None),
        ({"type": "audio_url", "audio_url": {"url": URL}}, "audio", URL, None),
        (
            {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}},
            "audio",
            "data:audio/wav;base64,QUJD",
            None,
        ),
        ({"type": "input_audio", "uuid": "b"}, "audio", None, "b"),
    ],
)
def test_forms(part: dict[str, Any], kind: Any, url: str | None, uuid: str | None) -> None:
    made = MediaPart.model_validate(part)
    assert made.item == MediaItem(kind, url, uuid)
    assert MediaPart.model_validate(made.model_dump()).item == made.item


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"type": "image_url"}, "image_url is missing"),
        ({"type": "image_url", "image_url": {"url": ""}}, "image_url is missing or empty"),
        (
            {"type": "image_url", "image_url": {"url": URL, "detail": "best"}},
            "detail must be one of auto, low",
        ),
        ({"type": "input_image", "image_url": URL, "detail": 1}, "detail must be one of"),
        ({"type": "image_url", "image_url": 7}, "image_url must be an object with a url"),
        ({"type": "video_url", "video_url": {"url": ["a"]}}, "video_url must be an object with a url"),
        ({"type": "input_image", "file_id": "f"}, "file_id is not supported"),
        ({"type": "input_audio", "input_audio": {"data": "QUJD"}}, "input_audio must be an object with data"),
        ({"type": "input_audio", "input_audio": {"data": "QUJD", "format": "a,b"}}, "format, such as wav"),
        ({"type": "image_url", "image_url": URL, "uuid": ""}, "uuid must be a text of 1 to 256 characters"),
        ({"type": "image_url", "image_url": URL, "uuid": 5}, "uuid must be a text"),
    ],
)
def test_wrong_forms_are_told(part: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        ChatMessage.model_validate({"role": "user", "content": [part]})


def test_parts_know_their_places() -> None:
    image = {"type": "input_image", "image_url": URL}
    body = ResponsesRequest.model_validate(
        {
            "input": [
                {"role": "user", "content": "a"},
                {"role": "user", "content": [{"type": "input_text", "text": "a"}, image]},
                {"type": "function_call_output", "call_id": "c", "output": [image]},
            ]
        }
    )
    _, message, result = body.input_items
    assert message.content[1].item.place == "input[1].content[1]"  # type: ignore[union-attr]
    assert result.output[0].item.place == "input[2].output[0]"  # type: ignore[union-attr]
    # Places are no part of what items are.
    assert message.content[1].item == result.output[0].item  # type: ignore[union-attr]


def test_audio_is_stored_as_it_was_sent() -> None:
    sent = {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}, "uuid": "a"}
    assert MediaPart.model_validate(sent).stored() == sent
    whole = {"type": "input_audio", "input_audio": {"data": "DATA:audio/x-wav;base64,QUJD", "format": "wav"}}
    part = MediaPart.model_validate(whole)
    assert (part.url, part.stored()) == ("DATA:audio/x-wav;base64,QUJD", whole)
