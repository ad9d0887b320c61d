"""Conversations as inputs of pooling, perhaps with images: each becomes the tokens of the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from fastapi import Request
from pydantic import Field, model_validator

from paceline.services.gateway.api.chat_planning import encode_conversation, with_media
from paceline.services.gateway.api.pooling.inputs import TextFields, check_count, text_inputs
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.planning.chat_prompt import Prompt, encode_prompt, media_of
from paceline.services.gateway.planning.chat_schemas import ChatMessage
from paceline.services.gateway.planning.media.items import Expansions
from paceline.services.gateway.planning.media.parts import name_places
from paceline.services.gateway.planning.pooling import TextInput
from paceline.services.gateway.planning.schemas import ChatFields, TokenId

Conversation = Annotated[list[ChatMessage], Field(min_length=1)]


class InputOrMessages(TextFields):
    """The fields of requests with `input`, or with conversations in `messages` for models with a chat template."""

    input: str | list[str] | list[TokenId] | list[list[TokenId]] | None = None
    messages: Conversation | list[Conversation] | None = None
    """A conversation, or several, with images if the model takes them. Each is one input, by the model's chat
    template."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens to texts. Default: to `input`, and not to `messages`."""
    add_generation_prompt: bool = False
    """Whether the text of a conversation ends with the beginning of an answer."""
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_forms(self) -> Self:
        if (self.input is None) == (self.messages is None):
            raise ApiError(400, "send either input or messages", param="input")
        return self

    async def inputs(self, model: ModelFleet, request: Request) -> list[TextInput]:
        """Return the inputs. Raises ApiError if there are none or too many, and the errors of `conversation_inputs`."""
        if self.input is not None:
            return text_inputs(self.input, "input")
        given: Any = self.messages or []
        is_list = not given or isinstance(given[0], list)
        conversations = (
            {f"messages[{index}]": each for index, each in enumerate(given)} if is_list else {"messages": given}
        )
        return await conversation_inputs(
            model,
            request,
            conversations,
            add_special_tokens=self.add_special_tokens is True,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
            mm_processor_kwargs=self.mm_processor_kwargs,
        )


async def conversation_inputs(
    model: ModelFleet,
    request: Request,
    conversations: Mapping[str, Sequence[ChatMessage]],
    add_special_tokens: bool = False,
    **fields: Any,
) -> list[TextInput]:
    """Return the tokens of each conversation, with its media.

    Args:
        conversations: the conversations by their fields in the body, which errors name.
        fields: further fields of `ChatFields`.

    Raises ApiError if there are too many, or if the model has no chat template, and the errors of
    `encode_conversation`.
    """
    first = next(iter(conversations), "messages")
    check_count(len(conversations), first.partition("[")[0])
    inputs = []
    for place, messages in conversations.items():
        name_places(list(messages), place)
        chat = ChatFields(messages=list(messages), **fields)
        if model.pooling is not None and model.pooling.image_prompt and _is_image(messages):
            prompt = await _image_prompt(model, chat, request, model.pooling.image_prompt)
        elif not model.tokenizer.chat_template_source:
            raise ApiError(400, "this model has no chat template for messages: send texts in input", param=first)
        else:
            prompt = await encode_conversation(model, chat, request, add_special_tokens)
        inputs.append(TextInput(prompt.token_ids, place, prompt.media, prompt.inputs))
    return inputs


def _is_image(messages: Sequence[ChatMessage]) -> bool:
    """Return whether a conversation is an image alone."""
    content = messages[0].content
    is_one = len(messages) == 1 and isinstance(content, list) and len(content) == 1
    return is_one and [part.kind for part in messages[0].media] == ["image"]


async def _image_prompt(model: ModelFleet, chat: ChatFields, request: Request, text: str) -> Prompt:
    """Return the prompt that the checkpoint has for an image alone."""
    tokenizer = model.tokenizer
    texts, kinds = tokenizer.marks.split(tokenizer.marks.hide_markers(text))
    if kinds != ["image"]:
        raise ApiError(500, "the model's visual_prompt_prefix has no place for an image", type="server_error")
    (item,) = media_of(chat.messages, tokenizer)

    def encode(media: Expansions) -> Prompt:
        return encode_prompt([texts[0], *media[item].pieces, texts[1]], tokenizer, False, "messages")

    return await with_media(model, [chat], request, encode)
