"""Bodies of answers of the OpenAI API, as `/openapi.json` shows them.

The routes send plain JSON. A test compares it with these classes.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from paceline.services.gateway.api.api_schema import AnswerBody

Json = dict[str, Any]

FinishReason = Literal["stop", "length", "repetition"]
ChatFinishReason = Literal["stop", "length", "tool_calls", "repetition"]


class ModelCard(AnswerBody):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    tasks: list[str]
    """What the model can do, such as "generate" and "embed"."""
    permission: list[Json]
    embedding_dimensions: int | None
    """Number of elements of an embedding; None if the model does not embed."""
    prompts: list[str]
    """Names of the texts that the model puts before inputs for a purpose."""


class ModelList(AnswerBody):
    object: Literal["list"]
    data: list[ModelCard]


class PromptTokensDetails(AnswerBody):
    """Numbers of tokens of the prompt. The numbers for a kind of media are missing if the prompt has no such media."""

    cached_tokens: int
    cache_creation_tokens: int = 0
    """Number of tokens before the last cache breakpoint that were not cached. Missing if the request has no
    breakpoints."""
    image_tokens: int = 0
    video_tokens: int = 0
    audio_tokens: int = 0


class CompletionTokensDetails(AnswerBody):
    reasoning_tokens: int


class Usage(AnswerBody):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class PromptLogprob(AnswerBody):
    logprob: float
    rank: int
    decoded_token: str


class AboutPrompt(AnswerBody):
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None
    prompt_token_ids: list[int] | None


class CompletionLogprobs(AnswerBody):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class Head(AnswerBody):
    id: str
    created: int
    model: str
    system_fingerprint: str | None


class CompletionChoice(AboutPrompt):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None


class Completion(Head):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(AnswerBody):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []


class CompletionChunk(Head):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None


class CalledFunction(AnswerBody):
    name: str
    arguments: str
    """The arguments of the call as JSON text."""


class CalledTool(AnswerBody):
    id: str
    type: Literal["function"]
    function: CalledFunction


class CustomInputText(AnswerBody):
    name: str
    input: str


class CalledCustomTool(AnswerBody):
    id: str
    type: Literal["custom"]
    custom: CustomInputText


class Message(AnswerBody):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning: str = ""
    reasoning_content: str = ""
    tool_calls: list[CalledTool | CalledCustomTool] = []


class TopLogprob(AnswerBody):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(AnswerBody):
    content: list[TokenLogprob]
    refusal: None


class ChatChoice(AnswerBody):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None


class ChatCompletion(Head, AboutPrompt):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(AnswerBody):
    name: str = ""
    arguments: str


class ToolDelta(AnswerBody):
    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class CustomInputDelta(AnswerBody):
    name: str = ""
    input: str


class CustomToolDelta(AnswerBody):
    index: int
    id: str = ""
    type: Literal["custom"] = "custom"
    custom: CustomInputDelta


class MessageDelta(AnswerBody):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolDelta | CustomToolDelta] = []


class ChatChunkChoice(AnswerBody):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] = []


class ChatChunk(Head):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] = []


class Tokens(AnswerBody):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenizerInfo(AnswerBody):
    """The values of the model's tokenizer_config.json, with the chat template in use."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    chat_template: str = ""


class Text(AnswerBody):
    prompt: str


class BatchChoice(ChatChoice, AboutPrompt):
    """The answer to one conversation of a batch, with the fields about its prompt."""


class ChatBatch(Head):
    object: Literal["chat.completion"]
    choices: list[BatchChoice]
    usage: Usage
