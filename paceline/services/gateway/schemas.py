"""What clients may send: OpenAI's fields and vLLM's extras. Types and ranges are checked here, and nowhere else.

What cannot be honoured yet is refused by name, because a dropped `tools` is worse than an error. Fields that nobody
knows are accepted with a warning, as clients of other servers expect.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from paceline.services.gateway.errors import ApiError

MAX_CHOICES = 128
MAX_LOGPROBS = 20

log = logging.getLogger(__name__)

TokenId = Annotated[int, Field(ge=0, le=2**32 - 1)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]

_SERVED_ANYWAY = frozenset(
    {"metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "safety_identifier", "service_tier", "store"}
)
"""Known fields that change nothing here."""

_REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "logit_processors": ([],),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none",),
    "tools": ([],),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields that are not supported yet, with the values that ask for nothing."""


class _Body(BaseModel):
    # Strict: "5" is no number and true is no token.
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(_Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(_Body):
    """What both ways to generate share. None everywhere means: not said."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0)
    min_tokens: int = Field(0, ge=0)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    best_of: int | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    request_id: str | None = None
    priority: int = 0
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, value in data.items():
            if name.startswith("guided_") or name in _REFUSED:
                if value is not None and value not in _REFUSED.get(name, ()):
                    raise ApiError(400, f"{name} is not supported by this server; leave it out", param=name)
            elif name not in cls.model_fields and name not in _SERVED_ANYWAY:
                log.warning("a request holds the unknown field %.100r; it is ignored", name)
        return data

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
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens must be at least 1; 0 is for echo alone", param="max_tokens")
        if not self.prompts:
            raise ApiError(400, "prompt must not be empty", param="prompt")
        if len(self.prompts) * (self.n or 1) > MAX_CHOICES:
            raise ApiError(400, f"prompts times n must be at most {MAX_CHOICES}", param="prompt")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several prompts, each as text or as token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        ids = [item for item in prompt if isinstance(item, int)]
        return [ids] if ids else [item for item in prompt if not isinstance(item, int)]


class TextPart(_Body):
    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """Whatever else a message holds is passed to the template."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    role: str = Field(min_length=1)
    content: str | list[TextPart] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_kinds(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("role") in ("tool", "function") or any(
            data.get(k) for k in ("tool_calls", "function_call", "audio")
        ):
            raise ApiError(400, "messages of tools and audio are not supported by this server", param="messages")
        content = data.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") != "text":
                message = f"messages: content of type {part.get('type')!r} is not supported; this model takes text"
                raise ApiError(400, message, param="messages")
        return data

    def for_template(self) -> dict[str, Any]:
        """The message with its content as one text."""
        content = self.content
        text = "\n".join(part.text for part in content) if isinstance(content, list) else content
        return {"role": self.role, "content": text, **(self.model_extra or {})}


class ChatFields(_Body):
    """How a conversation becomes a prompt."""

    messages: list[ChatMessage] = Field(min_length=1)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(ChatFields, GenerationRequest):
    """POST /v1/chat/completions."""

    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    echo: Literal[False] | None = None
    add_special_tokens: bool = False

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        return self


class TokenizePromptRequest(_Body):
    """POST /tokenize with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatFields):
    """POST /tokenize with a conversation."""

    model: str | None = None
    add_special_tokens: bool = False
    return_token_strs: bool | None = None


class DetokenizeRequest(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
