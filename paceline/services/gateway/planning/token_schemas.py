"""The bodies of the routes between token ids and answers: generate, derender and abort, with vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from paceline.core.errors import InvalidRequestError
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.planning.request_body import Body, NamedRequest
from paceline.services.gateway.planning.sampling import check_ids
from paceline.services.gateway.planning.schemas import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
    TokenId,
)

MAX_ABORTED = 10_000
"""Largest number of requests that one POST /abort_requests may end."""
Count = Annotated[int, Field(ge=0, lt=2**63)]
"""A number of tokens in a client's body."""

OutputMode = Literal["tokens", "text"]

OUTSIDE = ("cache_salt", "model", "priority", "request_id", "stream", "stream_options")
"""Fields of the body itself, which are refused inside its `sampling_params`."""
_INTERNAL = frozenset({"detokenize", "flat_logprobs", "output_kind", "skip_clone"})
"""Sampling parameters that vLLM's render route writes for its own engine. They are ignored here."""


class TokenSampling(GenerationRequest):
    """The `sampling_params` of POST /inference/v1/generate. By default, answers may fill the context."""

    max_tokens: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=-1)

    @model_validator(mode="before")
    @classmethod
    def _check_places(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if misplaced := [name for name in OUTSIDE if data.get(name) is not None]:
            name = misplaced[0]
            raise ApiError(400, f"{name} belongs beside sampling_params, not in it", param=f"sampling_params.{name}")
        return {name: value for name, value in data.items() if name not in _INTERNAL}

    @model_validator(mode="after")
    def _check_logprobs(self) -> TokenSampling:
        if self.logprob_token_ids is not None and self.logprobs is None:
            name = "sampling_params.logprob_token_ids"
            raise ApiError(400, f"{name} needs logprobs", param=name)
        return self


class TokensRequest(NamedRequest):
    """The body of POST /inference/v1/generate: a prompt as token ids."""

    request_id: str | None = None
    token_ids: Annotated[list[TokenId], Field(min_length=1)]
    token_offsets: Any = None
    """Ignored; rendered requests have this field."""
    sampling_params: TokenSampling
    output_mode: OutputMode = "tokens"
    """"text" adds the answer's text, and the tokens' texts to logprobs; "tokens" has only ids."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Whether the answer includes the prompt's token ids."""
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    """Requests with equal salts may share cached blocks, within one key unless the operator lets keys share."""
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)

    @model_validator(mode="after")
    def _check_stream(self) -> TokensRequest:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
        if self.stream and self.sampling_params.prompt_logprobs is not None:
            name = "sampling_params.prompt_logprobs"
            raise ApiError(400, f"{name} cannot be streamed; set stream to false", param=name)
        return self


class AbortRequest(Body):
    """The body of POST /abort_requests, which ends requests of this gateway alone; each gateway must be asked."""

    request_ids: Annotated[list[str], Field(max_length=MAX_ABORTED)]


class GivenTokenLogprob(Body):
    """The logprob of a generated token, or of a likely token at its place."""

    token_id: TokenId
    logprob: float
    rank: int | None = None


class ChosenLogprob(GivenTokenLogprob):
    top_logprobs: list[GivenTokenLogprob] = Field(default_factory=list)


class ChoiceLogprobs(Body):
    content: list[ChosenLogprob] | None = None


class GivenTokensChoice(Body):
    """A choice of an answer of POST /inference/v1/generate."""

    index: int = Field(ge=0)
    token_ids: Annotated[list[TokenId], Field(min_length=1)]
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None
    """The stop string or stop token that ended the choice; None if something else did, or it is not known."""
    logprobs: ChoiceLogprobs | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> GivenTokensChoice:
        if self.scores is not None and len(self.scores) != len(self.token_ids):
            message = "logprobs.content must have one entry for each of token_ids: {tokens}, not {scores}"
            counts = {"tokens": len(self.token_ids), "scores": len(self.scores)}
            raise PydanticCustomError("logprobs", message, counts)
        return self

    @property
    def scores(self) -> list[ChosenLogprob] | None:
        """The logprobs of the choice's tokens; None if the choice has no logprobs."""
        return None if self.logprobs is None else self.logprobs.content


class TokensAnswer(Body):
    """An answer of POST /inference/v1/generate with the output mode "tokens"."""

    request_id: str | None = None
    output_mode: Literal["tokens"] = "tokens"
    choices: Annotated[list[GivenTokensChoice], Field(min_length=1, max_length=MAX_CHOICES)]
    prompt_token_ids: list[TokenId] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    """Logprobs of the prompt, which the derendered answer repeats unchanged."""

    def check(self, vocab_size: int, most_tokens: int, place: str) -> None:
        """Raise InvalidRequestError if a token is not in the vocabulary, or a list of tokens is longer than a context.

        Args:
            most_tokens: number of tokens of the longest context; 0 if it is not known.
        """
        _check_tokens(self.prompt_token_ids or [], vocab_size, most_tokens, f"{place}.prompt_token_ids")
        for index, choice in enumerate(self.choices):
            own = f"{place}.choices[{index}]"
            _check_tokens(choice.token_ids, vocab_size, most_tokens, f"{own}.token_ids")
            if (choice.scores is None) != (self.choices[0].scores is None):
                raise InvalidRequestError(f"{own}.logprobs: either all choices have them, or none", f"{own}.logprobs")
            check_ids(_scored_ids(choice.scores or ()), vocab_size, f"{own}.logprobs")


def _scored_ids(scores: Iterable[ChosenLogprob]) -> list[int]:
    """Return the ids of all tokens in logprobs, likely ones included."""
    return [entry.token_id for chosen in scores for entry in (chosen, *chosen.top_logprobs)]


class StreamChoice(GivenTokensChoice):
    """A choice of a streamed event of POST /inference/v1/generate."""

    token_ids: list[TokenId] = Field(default_factory=list)
    finish_reason: str | None = None


class TokensUsage(Body):
    """The `usage` of an event. Further fields of it are kept unchanged."""

    model_config = ConfigDict(extra="allow")

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    total_tokens: Count = 0


class TokensEvent(TokensAnswer):
    """A streamed event of POST /inference/v1/generate with the output mode "tokens": a choice, or the usage alone."""

    choices: Annotated[list[StreamChoice], Field(max_length=1)]  # type: ignore[assignment]
    usage: TokensUsage | None = None


class StreamState(Body):
    """The state after earlier events, which the client copies from the last answer into the next request.

    The names are those of vLLM, whose state has more fields.
    """

    output_token_ids: list[TokenId] = Field(default_factory=list)
    output_chunk_lens: list[Annotated[int, Field(gt=0)]] = Field(default_factory=list)
    """Number of output tokens of each earlier event."""
    pending_logprobs: list[ChosenLogprob] = Field(default_factory=list)
    """Logprobs of the last output tokens, which a later chunk may show."""
    last_tool_call_ids: list[str] = Field(default_factory=list)
    role_sent: bool = False

    @model_validator(mode="after")
    def _check_lengths(self) -> StreamState:
        if sum(self.output_chunk_lens) != len(self.output_token_ids):
            name = "stream_state.output_chunk_lens"
            raise ApiError(400, f"{name} must add up to the number of output_token_ids", param=name)
        if len(self.pending_logprobs) > len(self.output_token_ids):
            name = "stream_state.pending_logprobs"
            raise ApiError(400, f"{name} has more entries than output_token_ids", param=name)
        return self


class DerenderStream(NamedRequest):
    """The fields that both routes for streamed events share."""

    stream: Literal[True]
    generate_chunk: TokensEvent
    stream_state: StreamState | None = None
    """State from the answer to the choice's event before; None with the choice's first event."""
    prompt_tokens: Count | None = None
    """Number of tokens of the prompt. Default: the number in the event's usage."""
    prompt_token_ids: list[TokenId] | None = None

    @property
    def answer_id(self) -> str | None:
        """The id of the generated request that this body derenders; None if it is not known."""
        return self.generate_chunk.request_id

    def check(self, vocab_size: int, most_tokens: int) -> None:
        """Check all token ids of the body. Arguments and errors are those of `TokensAnswer.check`."""
        self.generate_chunk.check(vocab_size, most_tokens, "generate_chunk")
        _check_tokens(self.prompt_token_ids or [], vocab_size, most_tokens, "prompt_token_ids")
        if self.stream_state is not None:
            before = self.stream_state.output_token_ids
            _check_tokens(before, vocab_size, most_tokens, "stream_state.output_token_ids")
            pending = _scored_ids(self.stream_state.pending_logprobs)
            check_ids(pending, vocab_size, "stream_state.pending_logprobs")


class DerenderChatStream(DerenderStream):
    """The body of POST /v1/chat/completions/derender with `stream`: one event of the answer to a chat."""

    chat_request: ChatRequest | None = None
    """The request that was rendered, the same with each event; None reads the answer as nothing but content."""


class DerenderCompletionStream(DerenderStream):
    """The body of POST /v1/completions/derender with `stream`: one event of the answer to a completion."""

    completion_request: CompletionRequest | None = None


class DerenderChatRequest(NamedRequest):
    """The body of POST /v1/chat/completions/derender: the whole answer to a chat."""

    stream: Literal[False] = False
    generate_response: TokensAnswer
    prompt_tokens: Count | None = None
    """Number of tokens of the prompt. Default: the number of prompt ids, or 0 if there are none."""
    prompt_token_ids: list[TokenId] | None = None
    chat_request: ChatRequest | None = None
    """The request that was rendered; None reads the answer as nothing but content."""

    @property
    def answer_id(self) -> str | None:
        """The id of the generated request that this body derenders; None if it is not known."""
        return self.generate_response.request_id

    def check(self, vocab_size: int, most_tokens: int) -> None:
        """Check all token ids of the body. Arguments and errors are those of `TokensAnswer.check`."""
        self.generate_response.check(vocab_size, most_tokens, "generate_response")
        _check_tokens(self.prompt_token_ids or [], vocab_size, most_tokens, "prompt_token_ids")


class DerenderCompletionRequest(NamedRequest):
    """The body of POST /v1/completions/derender: one answer for each prompt."""

    stream: Literal[False] = False
    generate_responses: Annotated[list[TokensAnswer], Field(min_length=1, max_length=MAX_CHOICES)]
    prompt_tokens: list[Count] | None = None
    prompt_token_ids: list[list[TokenId] | None] | None = None
    completion_request: CompletionRequest | None = None

    @model_validator(mode="after")
    def _check_lengths(self) -> DerenderCompletionRequest:
        for name in ("prompt_tokens", "prompt_token_ids"):
            given = getattr(self, name)
            if given is not None and len(given) != len(self.generate_responses):
                raise ApiError(400, f"{name} must have one entry for each of generate_responses", param=name)
        return self

    @property
    def answer_id(self) -> str | None:
        """The id of the generated request that this body derenders; None if it is not known."""
        return self.generate_responses[0].request_id

    def check(self, vocab_size: int, most_tokens: int) -> None:
        """Check all token ids of the body. Arguments and errors are those of `TokensAnswer.check`."""
        first = self.generate_responses[0].choices[0]
        for index, answer in enumerate(self.generate_responses):
            place = f"generate_responses[{index}]"
            answer.check(vocab_size, most_tokens, place)
            if (answer.choices[0].scores is None) != (first.scores is None):
                raise InvalidRequestError(f"{place}: either all answers have logprobs, or none", place)
        for index, ids in enumerate(self.prompt_token_ids or ()):
            _check_tokens(ids or [], vocab_size, most_tokens, f"prompt_token_ids[{index}]")


def _check_tokens(token_ids: list[int], vocab_size: int, most: int, place: str) -> None:
    if 0 < most < len(token_ids):
        message = f"{place}: there are {len(token_ids)} tokens, and the longest context has {most}"
        raise InvalidRequestError(message, place)
    check_ids(token_ids, vocab_size, place)


def _kind_of(body: Any) -> str:
    # A name that no field has, because errors would name that field.
    return "event" if isinstance(body, dict) and body.get("stream") is True else "whole"


DerenderChat = Annotated[
    Annotated[DerenderChatRequest, Tag("whole")] | Annotated[DerenderChatStream, Tag("event")], Discriminator(_kind_of)
]
DerenderCompletion = Annotated[
    Annotated[DerenderCompletionRequest, Tag("whole")] | Annotated[DerenderCompletionStream, Tag("event")],
    Discriminator(_kind_of),
]
