"""The plan of a request: prompts as token ids, every sampling parameter resolved, and what its headers say.

Headers say how a request runs: deadlines, priority, session.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from fastapi import Request

from paceline.core.adapters import Adapter
from paceline.core.media import MediaInput, MediaSpan
from paceline.core.request_classes import DEFAULT
from paceline.core.types import SamplingParams
from paceline.proto import common_pb2
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.http.request_scope import scope_of
from paceline.services.gateway.planning.answers.answer import Answer, new_call_id
from paceline.services.gateway.planning.answers.expressions import ToolSpelling
from paceline.services.gateway.planning.answers.form import ChannelForm
from paceline.services.gateway.planning.answers.parser import read_answer
from paceline.services.gateway.planning.answers.reader import Steps
from paceline.services.gateway.planning.answers.registry import AnswerForms
from paceline.services.gateway.planning.cache_hints import Learnt, Mark
from paceline.services.gateway.planning.constraints.fields import WantedConstraint, begins_in_reasoning
from paceline.services.gateway.planning.pool_bundle import PoolBundle
from paceline.services.gateway.planning.sampling import LogprobRules, derived_seed
from paceline.services.gateway.planning.schemas import MAX_SESSION_CHARACTERS, ChatRequest, RepetitionDetection
from paceline.services.gateway.planning.sharing import SharedPrompts
from paceline.services.gateway.planning.tokenizer import Tokenizer

Kind: TypeAlias = common_pb2.WorkKind.ValueType


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as planning sees it: its tokenizer and forms, and the limits of its workers and of this server."""

    tokenizer: Tokenizer
    max_model_len: int
    """Longest context, in tokens, of any worker that can run the request; 0 if there is no worker."""
    forms: AnswerForms = AnswerForms()
    """How the model writes reasoning and tool calls."""
    rules: LogprobRules = LogprobRules()
    now: datetime.datetime | None = None
    """Local time that chat templates see; None is the present."""
    shared_prompts: SharedPrompts | None = None
    """Beginnings of prompts whose blocks all owners share; None if there are none."""


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """One prompt of a request, and the parameters of the answers to it."""

    text: str | None
    """The prompt's text; None if the client sent token ids, or if the prompt was truncated."""
    token_ids: list[int]
    sampling: SamplingParams
    answer: AnswerPlan | None = None
    """How the text of answers is read; None if answers have only content, without reasoning and tool calls."""
    media: tuple[MediaSpan, ...] = ()
    """Runs of placeholder tokens in the prompt, in order."""
    inputs: tuple[MediaInput, ...] = ()
    """The encoder's input for each of `media`."""
    offsets: list[tuple[int, int]] | None = None
    """For each token, the characters (begin, end) of the client's text or of the rendered chat; None if not wanted."""
    marks: tuple[Mark, ...] = ()
    """Cache breakpoints that the client has set in the prompt."""
    dropped_tokens: int = 0
    """Number of tokens at the prompt's end that prompts of later turns do not repeat; see `Tokenizer.dropped_end`."""
    shared_tokens: int = 0
    """Number of tokens at the prompt's front whose blocks all owners share; see `SharedPrompts`."""
    wanted: WantedConstraint | None = None
    """The request's fields from which the answers' constraint will be made; None if answers may have any form."""
    pool: PoolBundle | None = None
    """Inputs that are pooled, whose tokens together are `token_ids`; None for other kinds of work."""

    @property
    def context_tokens(self) -> int:
        """Number of tokens of the prompt and its longest allowed answer together; of the longest input of a pool."""
        if self.pool is not None:
            return max(len(each.token_ids) for each in self.pool.inputs)
        return len(self.token_ids) + self.sampling.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole request, with `n` choices for each prompt."""

    prompts: list[PromptPlan]
    n: int
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    cache_salt: str
    """Salt of the cached blocks: at first the client's `cache_salt` or "", later the salt that `CacheSalts` derives."""
    adapter: Adapter | None = None
    """The adapter with which the model computes the request; None for the model alone."""
    wanted_priority: int | None = None
    """The priority in the request's body, lower is more urgent; None if it has none."""
    priority: int = 0
    """The priority with which the request runs, which depends on the caller; lower is more urgent."""
    request_class: str = DEFAULT
    """Request class of the caller's key; "background" for lines of batches."""
    seconds: float | None = None
    """Client's limit for the whole request, in seconds from arrival; None if there is none."""
    waited: float = 0.0
    """Seconds that the request waited for a ready worker before planning. They count towards `--queue-seconds`."""
    ttft_seconds: float | None = None
    """Client's limit for the time to first token, in seconds from arrival; None if there is none."""
    background: bool = False
    """Whether the request is a line of a batch, which may use only idle places of workers."""
    kind: Kind = common_pb2.WORK_KIND_GENERATE
    """Kind of work for workers: SCORE if only the prompt is scored (`echo` with `max_tokens` 0), POOL if prompts are
    bundles of inputs, else GENERATE."""
    repetition: RepetitionDetection | None = None
    """When to end an answer that repeats itself; None never ends it for that."""
    logprobs_as_ids: bool = False
    """Whether logprobs name a token by its id instead of its text."""
    session_id: str = ""
    """The client's id of the conversation, for traces; "" if there is none."""
    retention: str | None = None
    """The client's `prompt_cache_retention`, a key of RETENTION_SECONDS; None if there is none."""
    cache_key: str = ""
    """The client's `prompt_cache_key`, equal for prompts with a common beginning; "" if there is none."""
    learnt: Learnt | None = None
    """The gateway's own expectation about the next use of the contexts; None if it has none."""
    owner: str = ""
    """Digest of the client's key."""
    has_seed: bool = False
    """Whether the client gave a seed. If not, `seeded` sets one."""

    rendered_at: datetime.datetime | None = None
    """Local time that the chat template saw; None if there was no template."""

    @property
    def adapter_digest(self) -> bytes:
        """Digest of the adapter's content; empty for the model alone."""
        return b"" if self.adapter is None else self.adapter.digest

    def prompt_of(self, index: int) -> PromptPlan:
        """Return the prompt of the choice with this index, and the choice's seed in its sampling parameters.

        Choices `i * n` to `i * n + n - 1` belong to prompt i. A prompt's seeds do not depend on its place in the list.
        """
        which, sibling = divmod(index, self.n)
        prompt = self.prompts[which]
        if self.n == 1:
            return prompt
        return dataclasses.replace(
            prompt,
            sampling=dataclasses.replace(prompt.sampling, seed=(prompt.sampling.seed + sibling) % 2**64),
            # The last token of a prompt is always computed, so another choice begins before it.
            dropped_tokens=max(prompt.dropped_tokens, 1),
        )

    def kept_tokens(self, prompt: PromptPlan) -> int:
        """Return the number of tokens at a prompt's front that later prompts probably repeat; 0 if none."""
        if self.background or self.kind != common_pb2.WORK_KIND_GENERATE:
            return 0
        return len(prompt.token_ids) - prompt.dropped_tokens

    def seeded(self, seed: int) -> Plan:
        """Return the plan with prompts' seeds derived from `seed` (64 bits); unchanged if the client gave a seed."""
        if self.has_seed:
            return self
        seeds = (derived_seed(seed, index) for index in range(len(self.prompts)))
        prompts = [
            dataclasses.replace(prompt, sampling=dataclasses.replace(prompt.sampling, seed=seed))
            for prompt, seed in zip(self.prompts, seeds)
        ]
        return dataclasses.replace(self, prompts=prompts)


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How the answers of a request are read into content, reasoning and tool calls."""

    read: Callable[[Answer], Steps[None]]
    """The generator function that reads one answer."""
    kept_token_ids: frozenset[int]
    """Ids of special tokens that stay in the text, because the parser needs them."""
    new_call_id: Callable[[], str] = new_call_id
    """Function that returns a new id for a tool call."""


def plan_answer(request: ChatRequest, forms: AnswerForms, tokenizer: Tokenizer, prompt: str) -> AnswerPlan | None:
    """Return how the answers to a chat are read; None if they have only content, without reasoning and tool calls.

    Args:
        prompt: the rendered conversation.
    """
    thought, form = forms.thought, forms.tools if request.tools or isinstance(forms.tools, ChannelForm) else None
    if form is None and thought is None:
        return None
    functions = [tool.function for tool in request.tools or ()]
    given = [ToolSpelling(function.name, function.parameters or {}) for function in functions]
    tools = form.argument_types(given) if form is not None else {}
    markers = [*(form.markers if form is not None else ()), *((thought.start, thought.end) if thought else ())]
    is_open = begins_in_reasoning(request, thought, prompt)
    read = functools.partial(read_answer, thought=thought, form=form, is_open=is_open, tools=tools)
    kept = tokenizer.vocabulary.spelling.tokens("".join(markers))
    return AnswerPlan(read, kept, form.new_call_id if form is not None else new_call_id)


_PRIORITY = "X-Vllm-Priority"
_SESSION = "X-Session-ID"
_TIMEOUT = "X-Request-Timeout"
_TTFT = "X-SLO-TTFT-MS"


def timeout_of(request: Request) -> float | None:
    """Return the client's limit for a request, in seconds from arrival; None if the request has no such header.

    Raises ApiError if the header X-Request-Timeout is not valid.
    """
    return _positive(request, _TIMEOUT, "seconds")


def with_headers(plan: Plan, request: Request) -> Plan:
    """Return the plan with the request's owner and class, its headers' values, and a priority that the key allows.

    As in vLLM, the header's priority replaces the body's. X-Request-Timeout is the client's limit for the request in
    seconds. X-SLO-TTFT-MS, which llm-d also reads, is its limit for the time to first token in milliseconds.

    Raises ApiError if a header is not valid.
    """
    session_id = plan.session_id or request.headers.get(_SESSION, "")
    if len(session_id) > MAX_SESSION_CHARACTERS:
        message = f"{_SESSION} must have at most {MAX_SESSION_CHARACTERS} characters"
        raise ApiError(400, message, param=_SESSION)
    scope = scope_of(request)
    ttft = _positive(request, _TTFT, "milliseconds")
    return dataclasses.replace(
        plan,
        session_id=session_id,
        priority=scope.caller.priority_for(_priority(plan, request)),
        request_class=scope.request_class,
        seconds=timeout_of(request),
        waited=scope.waited,
        ttft_seconds=None if ttft is None else ttft / 1000,
        background=scope.is_background,
        owner=scope.owner,
    )


def _priority(plan: Plan, request: Request) -> int | None:
    header = request.headers.get(_PRIORITY)
    if header is None:
        return plan.wanted_priority
    if re.fullmatch(r"-?[0-9]{1,10}", header) is None or not -(2**31) <= int(header) < 2**31:
        message = f"{_PRIORITY} must be an integer of 32 bits; lower is more urgent"
        raise ApiError(400, message, param=_PRIORITY)
    return int(header)


def _positive(request: Request, name: str, unit: str) -> float | None:
    """Return the positive number in a header; None if the request has no such header. Raises ApiError if it is wrong.

    Args:
        unit: unit of the number, for the error.
    """
    header = request.headers.get(name)
    if header is None:
        return None
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", header) is None or float(header) == 0:
        raise ApiError(400, f"{name} must be a number of {unit} above 0, such as 30", param=name)
    return float(header)
