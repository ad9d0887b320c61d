"""Conversations as inputs of pooling: each becomes the tokens that the model's chat template gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from fastapi import Request
from pydantic import Field, model_validator

from paceline.services.gateway.api.chat_planning import encode_conversation
from paceline.services.gateway.api.pooling.inputs import TextFields, check_count, text_inputs
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.planning.chat_schemas import ChatMessage
from paceline.services.gateway.planning.media.parts import name_places
from paceline.services.gateway.planning.pooling import TextInput
from paceline.services.gateway.planning.schemas import ChatFields, TokenId

Conversation = Annotated[list[ChatMessage], Field(min_length=1)]


class InputOrMessages(TextFields):
    """The fields of requests with `input`, or with conversations in `messages` for models with a chat template."""

    input: str | list[str] | list[TokenId] | list[list[TokenId]] | None = None
    messages: Conversation | list[Conversation] | None = None
    """A conversation, or several. Each is one input: its text by the model's chat template."""
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
        )


async def conversation_inputs(
    model: ModelFleet,
    request: Request,
    conversations: Mapping[str, Sequence[ChatMessage]],
    add_special_tokens: bool = False,
    **fields: Any,
) -> list[TextInput]:
    """Return the tokens of each conversation.

    Args:
        conversations: the conversations by their fields in the body, which errors name.
        fields: further fields of `ChatFields`.

    Raises ApiError if there are too many, if the model has no chat template, or if a conversation has media.
    """
    first = next(iter(conversations), "messages")
    check_count(len(conversations), first.partition("[")[0])
    if not model.tokenizer.chat_template_source:
        raise ApiError(400, "this model has no chat template for messages: send texts in input", param=first)
    inputs = []
    for place, messages in conversations.items():
        name_places(list(messages), place)
        chat = ChatFields(messages=list(messages), **fields)
        prompt = await encode_conversation(model, chat, request, add_special_tokens)
        if prompt.media:
            raise ApiError(400, f"{place}: images, videos and audio are not supported yet in this place", param=place)
        inputs.append(TextInput(prompt.token_ids, place))
    return inputs
