"""The fields of a request about the form of its answers, as plain data for the process that makes constraints."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, Field

from paceline.core.errors import InvalidRequestError
from paceline.core.grammar_errors import TOO_DEEP
from paceline.services.gateway.planning.answer_format import ContentFields
from paceline.services.gateway.planning.answers.form import ReasoningMarks
from paceline.services.gateway.planning.answers.registry import AnswerForms
from paceline.services.gateway.planning.schemas import ChatRequest, GenerationRequest
from paceline.services.gateway.planning.tool_schemas import Function, NamedTool, ToolChoice

if TYPE_CHECKING:
    from paceline.services.gateway.planning.tokenizer import Tokenizer

BUDGET = "thinking_token_budget"

MAX_BYTES = 4 << 20
"""Largest size of the fields as JSON, in bytes. A grammar that is made from the fields has a lower limit of its own."""
_MESSAGE_CHARACTERS = 500
"""Largest number of characters of the library's reason in an error message."""


@dataclass(frozen=True, slots=True)
class WantedConstraint:
    """The fields of one request, for the process that makes its constraint."""

    fields: bytes
    """`ConstraintFields` as JSON."""
    digest: bytes
    place: str
    """The field of the request that an error names if the fault is not known to be in another field."""


class ConstraintFields(ContentFields):
    """The fields of a request, and facts about its prompt, that say in which form its answers must be."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    allowed_token_ids: list[int] | None = None
    """The request's `allowed_token_ids`; None if it has none. A request cannot have both these and a constraint."""
    functions: list[Function] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    budget: int | None = None
    """Largest number of tokens of reasoning that the answer may have; None if there is no limit."""
    is_chat: bool = False
    """Whether the answer may have tool calls, and reasoning without a budget."""
    is_open: bool = False
    """Whether the answer begins within reasoning."""
    has_header: bool = False
    """Whether the prompt ends with the beginning of a message, so that the answer does not write its header."""

    @property
    def asks_for_content(self) -> bool:
        """Whether a field of the request says which form the content must have."""
        return self._content_place is not None

    @property
    def place(self) -> str:
        """The field to name in errors: a field for the content, else `tools`, else the budget of reasoning."""
        return self._content_place or ("tools" if self.functions else BUDGET)

    @property
    def _content_place(self) -> str | None:
        form, wanted = self.response_format, self.structured_outputs
        if form is not None and form.type != "text":
            return "response_format.json_schema.schema" if form.type == "json_schema" else "response_format"
        if wanted is not None:
            named = ((name, getattr(wanted, f"{name}_" if name == "json" else name)) for name in _STRUCTURED)
            return next((f"structured_outputs.{name}" for name, value in named if value), "structured_outputs")
        return next((name for name in _OF_CONTENT if getattr(self, name) is not None), None)

    def wanted(self) -> WantedConstraint:
        """Return the fields as JSON, with a digest. Raises InvalidRequestError if they are too large or too deep."""
        try:
            text = self.model_dump_json(by_alias=True).encode()
        except ValueError as error:
            reason = str(error).removeprefix("Error serializing to JSON: ")
            reason = TOO_DEEP if "depth" in reason else reason[:_MESSAGE_CHARACTERS]
            raise InvalidRequestError(f"{self.place}: {reason}", self.place) from error
        if len(text) > MAX_BYTES:
            raise InvalidRequestError(f"{self.place}: it is larger than {MAX_BYTES >> 20} MiB; shorten it", self.place)
        return WantedConstraint(text, hashlib.sha256(text).digest(), self.place)


_OF_CONTENT = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
_STRUCTURED = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def chat_fields(request: ChatRequest, forms: AnswerForms, tokenizer: Tokenizer, prompt: str) -> ConstraintFields | None:
    """Return the fields of a chat; None if its answers may have any form.

    Args:
        prompt: the rendered conversation.

    Raises:
        InvalidRequestError: there is a budget, and the model has no reasoning.
    """
    thought, budget = forms.thought, _budget_of(request, forms)
    if budget is not None:
        budget = max(0, budget - _spent(request, tokenizer, thought))
    is_open = begins_in_reasoning(request, thought, prompt)
    fields = _fields(
        request,
        budget,
        functions=[tool.function for tool in request.tools or ()],
        tool_choice=request.choice,
        parallel_tool_calls=request.parallel_tool_calls and not isinstance(request.choice, NamedTool),
        is_chat=True,
        is_open=is_open,
        has_header=request.continue_final_message and not is_open,
    )
    return fields if fields.functions or budget is not None or fields.asks_for_content else None


def completion_fields(
    request: GenerationRequest, forms: AnswerForms, tokenizer: Tokenizer, token_ids: Sequence[int]
) -> ConstraintFields | None:
    """Return the fields of a request whose prompt is no conversation; None if its answers may have any form.

    Args:
        token_ids: the prompt. The answer begins within reasoning that the prompt begins and does not end.

    Raises:
        InvalidRequestError: there is a budget, and the model has no reasoning.
    """
    thought, budget = forms.thought, _budget_of(request, forms)
    begun = None
    if thought is not None and budget is not None:
        begun = _begun(tokenizer.decode(token_ids), thought)
        budget = max(0, budget - len(tokenizer.encode(begun or "", False)))
    fields = _fields(request, budget, is_open=begun is not None)
    return fields if budget is not None or fields.asks_for_content else None


def _fields(request: GenerationRequest, budget: int | None, **others: Any) -> ConstraintFields:
    copied = {name: getattr(request, name) for name in ContentFields.model_fields}
    ids: list[int] | None = None if request.allowed_token_ids is None else []
    return ConstraintFields.model_construct(**copied, allowed_token_ids=ids, budget=budget, **others)


def begins_in_reasoning(request: ChatRequest, thought: ReasoningMarks | None, prompt: str) -> bool:
    """Return whether an answer begins within reasoning.

    Args:
        prompt: the rendered conversation.
    """
    if thought is None:
        return False
    if request.continue_final_message:
        begun = request.messages[-1].text or ""
        return thought.start in begun and begun.rfind(thought.start) > begun.rfind(thought.end)
    end = prompt.rstrip()
    return end.endswith(thought.opening.rstrip()) or (thought.always_open and not end.endswith(thought.end))


def _budget_of(request: GenerationRequest, forms: AnswerForms) -> int | None:
    """Return the largest number of tokens of reasoning; None if there is no limit."""
    budget = request.thinking_token_budget
    if budget is None or budget < 0:
        return None
    if forms.thought is None:
        raise InvalidRequestError(
            f"{BUDGET}: this server knows no markers of reasoning for this model; start it with "
            "--reasoning-parser NAME, or leave the budget out",
            BUDGET,
        )
    return budget


def _begun(text: str, thought: ReasoningMarks) -> str | None:
    """Return the open reasoning at the end of a text; None if there is no reasoning, or if it has ended."""
    _, found, begun = text.rpartition(thought.opening)
    return begun.strip() if found and thought.end not in begun else None


def _spent(request: ChatRequest, tokenizer: Tokenizer, thought: ReasoningMarks | None) -> int:
    """Return the number of tokens of open reasoning at the end of the prompt, in a message that is continued."""
    if thought is None or not request.continue_final_message:
        return 0
    return len(tokenizer.encode(_begun(request.messages[-1].text or "", thought) or "", False))
