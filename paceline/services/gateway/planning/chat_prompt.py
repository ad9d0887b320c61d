"""The prompt that the model sees for a conversation, with its tools and its media."""

from __future__ import annotations

import datetime
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import InvalidRequestError
from paceline.core.media import MediaInput, MediaKind, MediaSpan
from paceline.services.gateway.http.bounds import check_written
from paceline.services.gateway.planning.answers.form import ToolForm
from paceline.services.gateway.planning.answers.registry import AnswerForms
from paceline.services.gateway.planning.chat_schemas import ChatMessage, ContentPart, TextPart
from paceline.services.gateway.planning.media.items import Expansions, ItemKind, MediaItem, Piece, TokenRun
from paceline.services.gateway.planning.schemas import ChatFields
from paceline.services.gateway.planning.tokenizer import Tokenizer

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as workers compute it: token ids, and the media that stand at placeholder tokens."""

    token_ids: list[int]
    media: tuple[MediaSpan, ...] = ()
    inputs: tuple[MediaInput, ...] = ()
    """The encoder's input for each of `media`."""


def encode_prompt(pieces: Iterable[Piece], tokenizer: Tokenizer, add_special_tokens: bool, param: str) -> Prompt:
    """Return the prompt that consists of pieces. The whole prompt is tokenized as one text, as in the model's training.

    Raises:
        InvalidRequestError: a text is not valid Unicode; the error names `param`.
    """
    texts, runs = [], []
    for piece in pieces:
        if isinstance(piece, TokenRun):
            runs.append(piece)
        token_id = piece.token_id if isinstance(piece, TokenRun) else piece
        texts.append(token_id if isinstance(token_id, str) else tokenizer.reserved_texts[token_id])
    places = {run.token_id for run in runs}
    left = iter(runs)
    token_ids: list[int] = []
    spans, inputs = [], []
    for token_id in tokenizer.encode("".join(texts), add_special_tokens, param):
        if token_id not in places:
            token_ids.append(token_id)
            continue
        run = next(left)
        own = run.input
        spans.append(MediaSpan(len(token_ids), own.length, run.digest, own.kind, run.grid))
        inputs.append(own)
        token_ids += [token_id] * own.length
    return Prompt(token_ids, tuple(spans), tuple(inputs))


_COUNTS = {
    MediaKind.IMAGE: "image_tokens",
    MediaKind.VIDEO_FRAME: "video_tokens",
    MediaKind.AUDIO: "audio_tokens",
}


def media_tokens(spans: Sequence[MediaSpan]) -> dict[str, int]:
    """Return the number of placeholder tokens of each kind of media, by the kind's name in `prompt_tokens_details`."""
    counts: Counter[str] = Counter()
    for span in spans:
        counts[_COUNTS[span.kind]] += span.length
    return dict(counts)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as the chat template writes it."""

    text: str
    """The text with the template's markers in the places of media."""
    texts: Sequence[str]
    """The texts before, between and after the media."""
    items: Sequence[MediaItem]
    """The media in the order of their places in the text."""
    markers: Sequence[str]
    """The template's marker for each of `items`."""

    def pieces(self, media: Expansions, start: int = 0, end: int | None = None) -> list[Piece]:
        """Return the parts of the prompt from character `start` of `text` up to character `end`.

        Args:
            end: index of the first character that is left out; None for the end of `text`.
            media: the tokens that stand in the prompt for each item.
        """
        end = len(self.text) if end is None else end
        found: list[Piece] = []
        position = 0
        for index, text in enumerate(self.texts):
            found.append(text[max(0, start - position) : max(0, end - position)])
            position += len(text)
            if index < len(self.items) and start <= position < end:
                found += media[self.items[index]].pieces
            position += len(self.markers[index]) if index < len(self.items) else 0
        return found

    def encode(self, media: Expansions, tokenizer: Tokenizer, add_special_tokens: bool) -> Prompt:
        """Return the prompt of the conversation with its media.

        Args:
            media: the tokens that stand in the prompt for each item.

        Raises InvalidRequestError if a text is not valid Unicode.
        """
        return encode_prompt(self.pieces(media), tokenizer, add_special_tokens, "messages")


def media_of(messages: Sequence[ChatMessage], tokenizer: Tokenizer) -> list[MediaItem]:
    """Return the media that the model will see, in the order of the conversation."""
    return [part.item for message in _arranged(messages, tokenizer.media_kinds) for part in message.media]


def render_chat(
    request: ChatFields, tokenizer: Tokenizer, forms: AnswerForms, now: datetime.datetime | None = None
) -> RenderedChat:
    """Return a conversation as the chat template writes it.

    Args:
        now: local time that the template sees; None is the present.

    Raises InvalidRequestError if the template rejects the conversation or has no place for its media, if arguments of
    calls hold too much JSON, or if there are tools and this server knows no form of tool calls for the model.
    """
    arranged = list(_arranged(request.messages, tokenizer.media_kinds))
    check_written((text for message in arranged for text in message.written_arguments), "messages")
    tools = [tool.for_template() for tool in request.tools or ()]
    if tools and forms.tools is None:
        raise InvalidRequestError(
            "tools: this server knows no form of tool calls for this model; start it with --tool-call-parser NAME",
            "tools",
        )
    writes_tools = not forms.template_has_tools and forms.tools is not None
    messages, with_parts = [], tokenizer.roles_with_parts(bool(tools))
    for message in arranged:
        role = "system" if message.role == "developer" else message.role
        # Tools and their calls are added to these texts.
        grows = writes_tools and (role == "system" or bool(message.tool_calls))
        takes_parts = role in with_parts or tokenizer.names_fields(message.part_fields, bool(tools))
        messages.append(message.for_template(takes_parts and not grows))
    if writes_tools and forms.tools is not None:
        messages = _with_tools(messages, tools, forms.tools)
    generation_prompt = request.add_generation_prompt
    rendered = tokenizer.render_chat(
        messages,
        add_generation_prompt=not request.continue_final_message if generation_prompt is None else generation_prompt,
        continue_final_message=request.continue_final_message,
        template_kwargs=_template_kwargs(request),
        tools=tools,
        documents=_documents(request, tokenizer),
        now=now,
    )
    texts, kinds = tokenizer.marks.split(rendered)
    items = _in_places([part.item for message in arranged for part in message.media], kinds)
    markers = [tokenizer.marks.marker(kind) for kind in kinds]
    return RenderedChat(tokenizer.marks.show_markers(rendered), texts, items, markers)


def dropped_tokens(request: ChatFields, token_ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """Return the number of tokens at a prompt's end that the prompts of later turns do not repeat.

    The chat template drops these tokens; see `Tokenizer.dropped_end`.

    Args:
        token_ids: the prompt.
    """
    if request.continue_final_message or request.add_generation_prompt is False:
        return 0
    end = tokenizer.dropped_end(_template_kwargs(request), bool(request.tools))
    return len(end) if end and list(token_ids[-len(end) :]) == end else 0


def _documents(request: ChatFields, tokenizer: Tokenizer) -> list[Json] | None:
    """Return the documents of a request. Raises InvalidRequestError if the chat template does not show them."""
    if request.documents and not tokenizer.names_documents(bool(request.tools)):
        message = "documents: the model's chat template does not show them; write them into a message"
        raise InvalidRequestError(message, "documents")
    return request.documents or None


def _in_places(items: Sequence[MediaItem], kinds: Sequence[ItemKind]) -> list[MediaItem]:
    """Return the items in the order of their places in the rendered text.

    Args:
        kinds: the kind of item at each place.

    Raises InvalidRequestError if the places do not fit the items.
    """
    left: dict[str, Iterator[MediaItem]] = {
        kind: iter([item for item in items if item.kind == kind]) for kind in ("image", "video", "audio")
    }
    placed = [item for kind in kinds if (item := next(left[kind], None)) is not None]
    if len(placed) != len(items) or len(kinds) != len(items):
        raise InvalidRequestError(
            "messages: the model's chat template has no place for some of the images, videos or audio; put them into "
            "messages of the user, or start the gateway with another --chat-template",
            "messages",
        )
    return placed


def _arranged(messages: Iterable[ChatMessage], kinds: frozenset[ItemKind]) -> Iterator[ChatMessage]:
    """Yield the messages with all media in messages of the user, because chat templates have no other place for media.

    Media in a tool's result move to a message of the user after the result. Media that the model does not take become
    a note in the result, because an agent cannot know what its tools return.

    Raises InvalidRequestError if another message has media that its role cannot have or the model does not take.
    """
    held: list[ContentPart] = []
    for message in itertools.chain(messages, [None]):
        if message is not None and message.role == "tool":
            held += [part for part in message.media if part.kind in kinds]
            yield _with_notes(message, kinds)
            continue
        if held and (message is None or message.role != "user"):
            yield ChatMessage(role="user", content=held)
            held = []
        if message is None:
            return
        _check_media(message, kinds)
        if held:
            content = message.content if message.content is not None else ""
            own = [TextPart(type="text", text=content)] if isinstance(content, str) else content
            message, held = message.model_copy(update={"content": [*held, *own]}), []
        yield message


def _with_notes(message: ChatMessage, kinds: frozenset[ItemKind]) -> ChatMessage:
    """Return a tool's result without media. A note replaces each item of media that the model does not take."""
    if not message.media or not isinstance(message.content, list):
        return message
    texts = [
        part.text if isinstance(part, TextPart) else f"[{part.kind}: this model takes {_named(kinds)}]"
        for part in message.content
        if isinstance(part, TextPart) or part.kind not in kinds
    ]
    return message.model_copy(update={"content": "\n".join(texts)})


def _named(kinds: frozenset[ItemKind]) -> str:
    return " and ".join(["text", *sorted(kinds)]) if kinds else "text alone"


def _check_media(message: ChatMessage, kinds: frozenset[ItemKind]) -> None:
    for part in message.media:
        place = part.place or "messages"
        if part.kind not in kinds:
            told = f"{part.kind} is not supported; this model takes {_named(kinds)}"
            raise InvalidRequestError(f"{place}: {told}", place)
        if message.role in ("system", "developer", "assistant"):
            told = f"a message of the role {message.role!r} cannot have {part.kind}; put it into a message of the user"
            raise InvalidRequestError(f"{place}: {told}", place)


def _template_kwargs(request: ChatFields) -> Json:
    """Return the further names for the chat template: the client's, and names that switch reasoning on or off."""
    effort = request.reasoning_effort
    if effort is None:
        return request.chat_template_kwargs or {}
    thinks = effort != "none"
    switches = {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
    return {**switches, **(request.chat_template_kwargs or {})}


def _with_tools(messages: list[Json], tools: list[Json], form: ToolForm) -> list[Json]:
    """Return messages for a template that knows no tools: the tools and their calls become text of messages."""
    rewritten = [_with_text(message, form) for message in messages]
    if not tools:
        return rewritten
    system = [message for message in rewritten[:1] if message["role"] in ("system", "developer")]
    texts = [message["content"] for message in system if message["content"]]
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = form.write("NAME", '{"PARAMETER": "VALUE"}')
    texts.append(
        f"You can call these functions:\n<tools>\n{listed}\n</tools>\n"
        f"To call a function, answer with its name and its arguments in this form:\n{example}"
    )
    return [{"role": "system", "content": "\n\n".join(texts)}, *rewritten[len(system) :]]


def _with_text(message: Json, form: ToolForm) -> Json:
    calls = message.get("tool_calls") or ()
    if not calls:
        return message
    written = form.write_all([(call["function"]["name"], str(call["function"]["arguments"])) for call in calls])
    return {**message, "content": f"{message.get('content') or ''}\n{written}".strip("\n")}
