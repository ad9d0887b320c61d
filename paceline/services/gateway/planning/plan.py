"""The plan of a request: prompts as token ids, and every sampling parameter resolved."""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from paceline.core.media import MediaInput, MediaSpan
from paceline.core.request_classes import DEFAULT
from paceline.core.types import SamplingParams
from paceline.proto import common_pb2
from paceline.services.gateway.planning.answers.answer import Answer, new_call_id
from paceline.services.gateway.planning.answers.expressions import ToolSpelling
from paceline.services.gateway.planning.answers.form import ChannelForm
from paceline.services.gateway.planning.answers.parser import read_answer
from paceline.services.gateway.planning.answers.reader import Steps
from paceline.services.gateway.planning.answers.registry import AnswerForms
from paceline.services.gateway.planning.cache_hints import Learnt, Mark
from paceline.services.gateway.planning.constraints.fields import WantedConstraint, begins_in_reasoning
from paceline.services.gateway.planning.sampling import LogprobRules, derived_seed
from paceline.services.gateway.planning.schemas import ChatRequest, RepetitionDetection
from paceline.services.gateway.planning.sharing import SharedPrompts
from paceline.services.gateway.planning.tokenizer import Tokenizer

Kind: TypeAlias = common_pb2.WorkKind.ValueType


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model, with the limits of its workers and of this server."""

    tokenizer: Tokenizer
    max_model_len: int
    """Longest context of any worker that can run the request, in tokens; 0 if there is no worker."""
    forms: AnswerForms = AnswerForms()
    """How the model writes reasoning and tool calls."""
    rules: LogprobRules = LogprobRules()
    now: datetime.datetime | None = None
    """Local time that chat templates see; None is the present."""
    shared_prompts: SharedPrompts | None = None
    """Beginnings of prompts whose blocks all owners share; None if there are none."""


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """One prompt and the parameters of its continuation."""

    text: str | None
    """None if the client sent token ids, or if the prompt was truncated."""
    token_ids: list[int]
    sampling: SamplingParams
    answer: AnswerPlan | None = None
    """How answers are read; None if they are nothing but content."""
    media: tuple[MediaSpan, ...] = ()
    """Runs of placeholder tokens, in order."""
    inputs: tuple[MediaInput, ...] = ()
    """The encoder's input for each of `media`."""
    offsets: list[tuple[int, int]] | None = None
    """The characters of the client's text, or of the rendered chat, for which each token stands; None if not wanted."""
    marks: tuple[Mark, ...] = ()
    """The client's cache breakpoints."""
    dropped_tokens: int = 0
    """Number of last tokens that the prompts of later turns do not have; see `Tokenizer.dropped_end`."""
    shared_tokens: int = 0
    """Tokens at the front whose blocks all owners share; see `SharedPrompts`."""
    wanted: WantedConstraint | None = None
    """The constraint of the answers, before it has been made; None if they may have any form."""

    @property
    def context_tokens(self) -> int:
        """Tokens of the prompt and the longest answer together."""
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
    """The salt that the client has chosen. In a request that runs, the one that `CacheSalts` has derived from it."""
    wanted_priority: int | None = None
    """The priority that the client wants; None if it does not say."""
    priority: int = 0
    """The priority with which the request runs, which depends on the caller; lower is more urgent."""
    request_class: str = DEFAULT
    """Class of the caller's key; "background" for lines of batches."""
    seconds: float | None = None
    """Time after which the client gives up; None if it did not say."""
    waited: float = 0.0
    """Seconds of `--queue-seconds` that the request has used up before it was planned, because no worker was ready."""
    ttft_seconds: float | None = None
    """Time within which the client wants the first token; None if it did not say."""
    background: bool = False
    """Whether nobody waits for the answer, so that it may only use what is idle."""
    kind: Kind = common_pb2.WORK_KIND_GENERATE
    """SCORE if nothing is to be generated (max_tokens 0 with echo)."""
    repetition: RepetitionDetection | None = None
    """When answers that repeat themselves end; None if they go on."""
    logprobs_as_ids: bool = False
    """Whether logprobs name tokens by their ids."""
    session_id: str = ""
    """The client's name of the conversation; "" if there is none."""
    retention: str | None = None
    """How long the client wants the prompt to be cached, a key of RETENTION_SECONDS; None if it does not say."""
    cache_key: str = ""
    """The client's `prompt_cache_key`, which its prompts with a common beginning share; "" if there is none."""
    learnt: Learnt | None = None
    """An expectation of the gateway's own about the next use of the contexts."""
    owner: str = ""
    """Digest of the client's key."""
    has_seed: bool = False
    """Whether the client gave a seed."""

    rendered_at: datetime.datetime | None = None
    """Local time that the chat template saw; None if there was no template."""

    def prompt_of(self, index: int) -> PromptPlan:
        """Return the prompt of the choice with this index, with the seed of the choice.

        The choices of a prompt are next to each other. Each prompt of a list gets the tokens that it would get alone.
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
        """Return how many tokens of a prompt later prompts probably begin with; 0 if none are expected."""
        if self.background or self.kind != common_pb2.WORK_KIND_GENERATE:
            return 0
        return len(prompt.token_ids) - prompt.dropped_tokens

    def seeded(self, seed: int) -> Plan:
        """Return the plan with seeds that follow from a number of 64 bits, if the client gave no seed."""
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
    """The way in which the answers of a request are read."""

    read: Callable[[Answer], Steps[None]]
    """The computation that reads one answer."""
    kept_token_ids: frozenset[int]
    """Special tokens whose text the parser needs."""
    new_call_id: Callable[[], str] = new_call_id
    """Returns an id for a tool call."""


def plan_answer(request: ChatRequest, forms: AnswerForms, tokenizer: Tokenizer, prompt: str) -> AnswerPlan | None:
    """Return how the answers of a request are read; None if they are nothing but content.

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
