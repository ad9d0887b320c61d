"""Constraints as the gateway's other process makes them, without the process."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.types import Constraint
from paceline.services.gateway.planning.answers.registry import AnswerForms
from paceline.services.gateway.planning.constraints.answer import AnswerWriting, make_constraint
from paceline.services.gateway.planning.constraints.fields import ConstraintFields, chat_fields, completion_fields
from paceline.services.gateway.planning.schemas import ChatRequest, CompletionRequest
from paceline.services.gateway.planning.tokenizer import Tokenizer


def writing_of(forms: AnswerForms, tokenizer: Tokenizer) -> AnswerWriting:
    spelling = tokenizer.vocabulary.spelling
    return AnswerWriting(forms, spelling, spelling, tokenizer.eos_token_ids)


def chat_constraint(request: ChatRequest, forms: AnswerForms, tokenizer: Tokenizer, prompt: str) -> Constraint | None:
    return _made(chat_fields(request, forms, tokenizer, prompt), forms, tokenizer)


def completion_constraint(
    request: CompletionRequest, forms: AnswerForms, tokenizer: Tokenizer, token_ids: Sequence[int]
) -> Constraint | None:
    return _made(completion_fields(request, forms, tokenizer, token_ids), forms, tokenizer)


def _made(fields: ConstraintFields | None, forms: AnswerForms, tokenizer: Tokenizer) -> Constraint | None:
    return None if fields is None else make_constraint(fields, writing_of(forms, tokenizer))
