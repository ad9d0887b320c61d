"""What clients write never becomes a place of media, nor moves one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.services.gateway.planning.chat_template import ChatTemplate
from paceline.services.gateway.planning.media.marks import MediaMarks
from tests.services.gateway.toy_model import MEDIA_TEMPLATE

MARKERS = {"image": "<|image|>", "video": "<|video|>", "audio": "<|audio|>"}
PIECES = ["<|image|>", "<|ima", "ge|>", "<|video|>", "<|", "image", "|>", "<|audio|>", "media", "hello", " "]

texts = st.lists(st.sampled_from(PIECES), max_size=4).map("".join).map(lambda text: {"type": "text", "text": text})
media = st.sampled_from(list(MARKERS)).map(lambda kind: {"type": kind})
messages = st.lists(
    st.builds(lambda parts: {"role": "user", "content": parts}, st.lists(texts | media, max_size=6)), min_size=1
)


@given(messages)
def test_only_the_template_makes_places(conversation: list[dict[str, object]]) -> None:
    marks = MediaMarks(MARKERS)  # type: ignore[arg-type]
    rendered = ChatTemplate(marks.hide_markers(MEDIA_TEMPLATE), {}).render(conversation)
    between, kinds = marks.split(rendered)
    parts = [part for message in conversation for part in message["content"]]  # type: ignore[attr-defined]
    assert kinds == [part["type"] for part in parts if part["type"] in MARKERS]
    assert len(between) == len(kinds) + 1
    assert marks.show_markers(rendered) == ChatTemplate(MEDIA_TEMPLATE, {}).render(conversation)
    shown = "".join(between).replace("<|user|>", "").replace("<|assistant|>", "")
    assert shown == "".join(part["text"].strip() for part in parts if part["type"] == "text")


def test_two_servers_have_different_marks() -> None:
    first, second = (MediaMarks({"image": "#"}).hide_markers("#") for _ in range(2))
    assert first != second


def test_a_model_without_media_has_no_places() -> None:
    marks = MediaMarks({})
    assert marks.split("<|image|>") == (["<|image|>"], [])
    assert marks.hide_markers("x") == marks.show_markers("x") == "x"
