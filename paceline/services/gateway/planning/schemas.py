"""The bodies that clients may send: OpenAI's fields and vLLM's extras. Only this module checks types and ranges."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.planning.answer_format import ContentFields
from paceline.services.gateway.planning.chat_schemas import ChatMessage, ReasoningEffort
from paceline.services.gateway.planning.media.parts import name_places
from paceline.services.gateway.planning.request_body import Body, CacheControl, NamedRequest
from paceline.services.gateway.planning.tool_schemas import (
    AllowedChatTools,
    AnyTool,
    NamedCustomTool,
    NamedTool,
    ToolChoice,
    WantedToolChoice,
)

MAX_CHOICES = 128
MAX_LOGPROB_TOKENS = 128
MAX_BIASES, MAX_STOP_IDS = 1024, 1024
"""Largest number of entries of `logit_bias` and `stop_token_ids`. Each choice sends all of them to its worker."""
MAX_PATTERN_TOKENS = 1024
MAX_SESSION_CHARACTERS = 256

TokenId = Annotated[int, Field(ge=0, le=2**32 - 1)]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RepetitionDetection(Body):
    """vLLM's `repetition_detection`: the answer ends when the same tokens come several times in a row."""

    max_pattern_size: int = Field(0, ge=0, le=MAX_PATTERN_TOKENS)
    """Largest number of tokens of a pattern; 0 turns the detection off."""
    min_pattern_size: int = Field(0, ge=0)
    """Smallest number of tokens of a pattern; 0 counts as 1."""
    min_count: int = Field(0, ge=0)
    """Number of repetitions in a row that end the answer, at least 2."""

    @model_validator(mode="after")
    def _check_sizes(self) -> RepetitionDetection:
        place = "repetition_detection"
        if self.min_pattern_size > self.max_pattern_size:
            raise ApiError(400, f"{place}: min_pattern_size must be at most max_pattern_size", param=place)
        if self.max_pattern_size and self.min_count < 2:
            raise ApiError(400, f"{place}: min_count must be at least 2", param=place)
        return self


class GenerationRequest(NamedRequest, ContentFields):
    """The fields that completions and chat completions share. None means that the client did not send the field."""

    max_tokens: int | None = Field(None, ge=0)
    min_tokens: int = Field(0, ge=0)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    # Logits are divided by this; with a divisor near zero they would not be finite.
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    best_of: int | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool = False
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=256)] | None = None
    prompt_logprobs: int | None = Field(None, ge=-1)
    logprob_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_LOGPROB_TOKENS)] | None = None
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: int | None = Field(None, ge=-1)
    """Largest number of tokens of reasoning; -1 is no limit."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] = "left"
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    """Requests with equal salts may share cached blocks, within one key unless the operator lets keys share."""
    request_id: str | None = None
    session_id: str | None = Field(None, max_length=MAX_SESSION_CHARACTERS)
    """The client's id of the conversation. Traces show it, so that all requests of a conversation can be found."""
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    """Priority of the request, lower is more urgent. Default: the priority of the key."""
    prompt_cache_key: str | None = Field(None, max_length=1024)
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> GenerationRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(400, "best_of must equal n: candidates are not ranked here", param="best_of")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs cannot be streamed; set stream to false", param="prompt_logprobs")
        if self.truncate_prompt_tokens == 0:
            raise ApiError(
                400, "truncate_prompt_tokens must be positive, or -1 for all that fit", param="truncate_prompt_tokens"
            )
        return self

    @property
    def retention(self) -> str | None:
        """The client's wish how long the prompt stays cached, a key of RETENTION_SECONDS; None if it has none."""
        return self.prompt_cache_retention or (None if self.prompt_cache_key is None else "in_memory")

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions, with OpenAI's and vLLM's fields."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: int | None = Field(None, ge=-1)
    echo: bool | None = None
    suffix: str | None = None
    """Text that shall follow the answer, which fills the gap between prompt and suffix."""
    add_special_tokens: bool = True
    return_token_offsets: bool = False
    """Whether a rendered request has the characters of each token. Answers of models ignore this field."""

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens must be at least 1; 0 is for echo alone", param="max_tokens")
        if not self.prompts:
            raise ApiError(400, "prompt must not be empty", param="prompt")
        if self.suffix and (self.echo or not all(isinstance(prompt, str) for prompt in self.prompts)):
            raise ApiError(400, "suffix needs a prompt that is text, and echo must be false", param="suffix")
        if self.logprob_token_ids is not None and self.logprobs is None:
            raise ApiError(400, "logprob_token_ids needs logprobs", param="logprob_token_ids")
        if len(self.prompts) * (self.n or 1) > MAX_CHOICES:
            raise ApiError(400, f"prompts times n must be at most {MAX_CHOICES}", param="prompt")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts of the request, each as text or as token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        ids = [item for item in prompt if isinstance(item, int)]
        return [ids] if ids else [item for item in prompt if not isinstance(item, int)]


class ChatFields(NamedRequest):
    """The fields that say how a conversation becomes a prompt."""

    messages: list[ChatMessage] = Field(default_factory=list)
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the beginning of an answer. Default: the opposite of `continue_final_message`."""
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    """Options of the model's preprocessing of media, such as Gemma 4's `max_soft_tokens`."""
    tools: list[AnyTool] | None = None
    documents: list[dict[str, Any]] | None = None
    """Documents that the answer shall use, for chat templates that show them. They usually have a title and a text."""
    reasoning_effort: ReasoningEffort | None = None
    cache_control: CacheControl | None = None
    """A cache breakpoint at the end of the prompt; None if there is none."""

    @model_validator(mode="after")
    def _name_places(self) -> ChatFields:
        name_places(self.messages, "messages")
        return self


class ChatRequest(ChatFields, GenerationRequest):
    """The body of POST /v1/chat/completions."""

    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=-1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    echo: bool = False
    """Whether the answer begins with the text of the last message, if its role is "assistant"."""
    add_special_tokens: bool = False
    return_token_offsets: bool = False
    """Whether a rendered request has the characters of each token. Answers of models ignore this field."""
    tool_choice: WantedToolChoice | None = None
    """Tools that the model may or must call. Default: auto if there are tools. A choice of some removes the others."""
    parallel_tool_calls: bool = True
    include_reasoning: bool = True

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        if self.logprob_token_ids is not None and not self.logprobs:
            raise ApiError(400, "logprob_token_ids needs logprobs to be true", param="logprob_token_ids")
        if self.tools is not None and not self.tools:
            raise ApiError(400, "tools must not be empty; leave it out if there are none", param="tools")
        names = Counter(tool.function.name for tool in self.tools or ())
        if doubled := next((name for name, count in names.items() if count > 1), None):
            raise ApiError(400, f"tools: there are two functions of the name {doubled!r}", param="tools")
        choice = self.tool_choice
        if choice is not None and choice != "none" and not names:
            raise ApiError(400, "tool_choice needs tools: give the functions that may be called", param="tool_choice")
        chosen = choice.allowed_tools.tools if isinstance(choice, AllowedChatTools) else []
        chosen = [choice] if isinstance(choice, NamedTool | NamedCustomTool) else chosen
        if missing := next((tool.function.name for tool in chosen if tool.function.name not in names), None):
            raise ApiError(400, f"tool_choice: no function of tools has the name {missing!r}", param="tool_choice")
        if isinstance(choice, AllowedChatTools):
            allowed = {tool.function.name for tool in chosen}
            self.tools = [tool for tool in self.tools or () if tool.function.name in allowed]
        return self

    @property
    def choice(self) -> ToolChoice | None:
        """The choice among `tools`, which no longer has tools that are not allowed; None if there is no choice."""
        match self.tool_choice:
            case AllowedChatTools(allowed_tools=allowed):
                return allowed.mode
            case NamedCustomTool(custom=named):
                return NamedTool(function=named)
            case choice:
                return choice


class TokenizeRequest(ChatFields):
    """The body of POST /tokenize: either a text or a conversation."""

    prompt: str | None = None
    add_special_tokens: bool | None = None
    """Whether to add the tokenizer's special tokens. Default: true for a text; false for a conversation, whose chat
    template writes them."""
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_kind(self) -> TokenizeRequest:
        if (self.prompt is None) == (not self.messages):
            raise ApiError(400, "send either prompt, a text, or messages, a conversation", param="prompt")
        return self


class DetokenizeRequest(NamedRequest):
    """The body of POST /detokenize."""

    tokens: list[TokenId]
