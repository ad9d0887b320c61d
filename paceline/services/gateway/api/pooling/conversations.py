"""Inputs of pooling that are conversations, perhaps with images, and texts or token ids in their place."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Request
from pydantic import Field, model_validator

from paceline.core.pooling import PoolRole
from paceline.services.gateway.api.chat_planning import encode_conversation, with_media
from paceline.services.gateway.api.pooling.inputs import InputFields, check_count, text_inputs
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.planning.chat_prompt import Prompt, encode_prompt, media_of
from paceline.services.gateway.planning.chat_schemas import ChatMessage
from paceline.services.gateway.planning.media.items import Expansions
from paceline.services.gateway.planning.pooling import TextInput
from paceline.services.gateway.planning.schemas import ChatFields, TokenId

Conversation = Annotated[list[ChatMessage], Field(min_length=1)]


class ConversationFields(InputFields):
    """The fields of requests whose inputs are texts, token ids, or conversations for models with a chat template."""

    input: str | list[str] | list[TokenId] | list[list[TokenId]] | None = None  # type: ignore[assignment]
    messages: Conversation | list[Conversation] | None = None
    """A conversation, or several, with images if the model takes them. Each is one input, by the model's chat
    template."""
    prompt_name: str | None = None
    """Name of the model's prompt that stands before each text. Default: the model's default prompt, if it has one."""
    add_special_tokens: bool | None = None  # type: ignore[assignment]
    """Whether the tokenizer adds its special tokens to texts. Default: to `input`, and not to `messages`."""
    add_generation_prompt: bool = False
    """Whether the text of a conversation ends with the beginning of an answer."""
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_forms(self) -> ConversationFields:
        if (self.input is None) == (self.messages is None):
            raise ApiError(400, "send either input or messages", param="input")
        return self

    @property
    def conversations(self) -> list[Conversation]:
        """The conversations, if the request has any."""
        if not self.messages:
            return []
        if isinstance(self.messages[0], list):
            return self.messages
        return [self.messages]

    @property
    def role(self) -> PoolRole | None:
        """What the inputs are, by the name of their prompt."""
        return "query" if self.prompt_name == "query" else None

    async def all_inputs(self, model: ModelFleet, request: Request) -> list[TextInput]:
        """Return the inputs, after their media have been loaded.

        Raises ApiError if there are none or too many, and the errors of `encode_conversation`.
        """
        if self.input is not None:
            return text_inputs(self.input, "input")
        conversations = self.conversations
        check_count(len(conversations), "messages")
        inputs = []
        for index, messages in enumerate(conversations):
            place = f"messages[{index}]" if self.messages is not messages else "messages"
            prompt = await self._prompt(model, request, messages)
            inputs.append(TextInput(prompt.token_ids, place, prompt.media, prompt.inputs))
        return inputs

    async def _prompt(self, model: ModelFleet, request: Request, messages: Conversation) -> Prompt:
        chat = ChatFields(
            messages=messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
            mm_processor_kwargs=self.mm_processor_kwargs,
        )
        if model.pooling is not None and model.pooling.image_prompt and _is_image(messages):
            return await _image_prompt(model, chat, request, model.pooling.image_prompt)
        if not model.tokenizer.chat_template_source:
            raise ApiError(400, "this model has no chat template for messages: send texts in input", param="messages")
        return await encode_conversation(model, chat, request, self.add_special_tokens is True)


def _is_image(messages: Conversation) -> bool:
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
