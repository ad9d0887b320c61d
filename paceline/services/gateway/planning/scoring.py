"""Scores a document for a query by a causal model: the prompt with both, and the two tokens that may answer it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.core.types import Token
from paceline.services.gateway.planning.chat_template import ChatTemplate
from paceline.services.gateway.planning.tokenizer import Tokenizer

_TOKENS = "yes,no"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
"""The system message of prompts without a template for scores. Qwen3-Reranker was trained with these words."""
_NO_THINKING: Mapping[str, object] = {"enable_thinking": False}


class Scoring:
    """Prompts for /score and /rerank, and the two tokens whose logprobs give the score.

    Args:
        tokens: the option --score-tokens; "" for the tokens "yes" and "no".
        template: the option --score-template, a path; "" for the model's chat template.

    Raises:
        ConfigError: an option is wrong. If only the defaults do not fit the model, requests raise errors instead.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: str, template: str) -> None:
        self._tokenizer = tokenizer
        self._template = _template(tokenizer, template)
        self._token_ids = _token_ids(tokenizer, tokens or _TOKENS)
        if tokens and self._token_ids is None:
            raise ConfigError(
                f"--score-tokens {tokens} must be two different texts that are single tokens of this model, separated "
                "by a comma"
            )

    @property
    def token_ids(self) -> tuple[int, int]:
        """Ids of the tokens for "the document fits" and for the contrary. Raises InvalidRequestError if unknown."""
        if self._token_ids is None:
            raise InvalidRequestError(
                "this model cannot score: yes and no are no single tokens of it; start the gateway with --score-tokens",
                "model",
            )
        return self._token_ids

    def render(self, query: str, document: str, instruction: str | None) -> str:
        """Return the prompt's text for a query and a document.

        Raises InvalidRequestError if the template refuses the texts, or if there is no template.
        """
        if self._template is not None:
            messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            if instruction is not None:
                messages.insert(0, {"role": "system", "content": instruction})
            return self._template.render(messages, add_generation_prompt=True)
        asked = f"<Instruct>: {instruction or _INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        return self._tokenizer.render_chat(
            [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": asked}],
            add_generation_prompt=True,
            continue_final_message=False,
            template_kwargs=_NO_THINKING,
        )

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self._tokenizer.encode(text, False))

    def cut(self, text: str, limit: int | None) -> str:
        """Return the longest beginning of a text with at most `limit` tokens; the whole text if it is None or 0."""
        if not limit:
            return text
        ids = self._tokenizer.encode(text, False)
        # A character whose tokens are not all there would be a U+FFFD.
        return text if len(ids) <= limit else self._tokenizer.decode(ids[:limit]).rstrip("\ufffd")

    def margin(self, token: Token) -> float:
        """Return the logprob of the token for "fits" minus the logprob of the other token.

        Args:
            token: the generated token, with the logprobs of both.
        """
        logprobs = {entry.token_id: entry.logprob for entry in token.logprobs}
        fits, other = self.token_ids
        return logprobs[fits] - logprobs[other]


@dataclass(frozen=True, slots=True)
class Cut:
    """Limits in tokens to which documents are cut at their ends. None and 0 are no limit."""

    document: int | None
    whole: int | None
    """Limit of the whole prompt. Only the document is cut for it, because the prompt's end asks for the judgement."""

    def prompt(self, scoring: Scoring, query: str, document: str, instruction: str | None, place: str) -> str:
        """Return the prompt's text, with the document cut. Raises InvalidRequestError if no document has room in it.

        Args:
            place: the field of the request that has the document.
        """
        document = scoring.cut(document, self.document)
        prompt = scoring.render(query, document, instruction)
        if self.whole is None:
            return prompt
        while (excess := scoring.count(prompt) - self.whole) > 0:
            if not document:
                message = f"truncate_prompt_tokens: {self.whole} tokens have no room for the query and {place}"
                raise InvalidRequestError(message, "truncate_prompt_tokens")
            left = scoring.count(document) - excess
            document = scoring.cut(document, left) if left > 0 else ""
            prompt = scoring.render(query, document, instruction)
        return prompt


def label_probabilities(token: Token, labels: Sequence[int], apply_softmax: bool) -> dict[str, float]:
    """Return the probability of each label at the place of a generated token, by the label's id as text.

    Args:
        apply_softmax: whether the labels' probabilities sum to 1; otherwise those of all tokens do.
    """
    logprobs = {entry.token_id: entry.logprob for entry in token.logprobs}
    most = max(logprobs[label] for label in labels) if apply_softmax else 0.0
    weights = {label: math.exp(logprobs[label] - most) for label in labels}
    total = sum(weights.values()) if apply_softmax else 1.0
    return {str(label): weight / total for label, weight in weights.items()}


def probability(margin: float) -> float:
    """Return the probability of the first of two tokens, by the softmax over both.

    Args:
        margin: the first token's logprob minus the second one's.
    """
    return 1 / (1 + math.exp(-max(-700.0, margin)))


def _template(tokenizer: Tokenizer, path: str) -> ChatTemplate | None:
    """Return the template with roles for a query and a document; None if there is only an ordinary chat template."""
    source = tokenizer.chat_template_source
    if path:
        try:
            source = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the score template {path}: {error}") from error
    elif not all(re.search(f"""["']{role}["']""", source) for role in ("query", "document")):
        return None
    return tokenizer.template(source)


def _token_ids(tokenizer: Tokenizer, tokens: str) -> tuple[int, int] | None:
    """Return the ids of the two texts' tokens; None if there are not two different texts of one token each.

    Args:
        tokens: the texts, separated by a comma.
    """
    ids = [tokenizer.encode(text.strip(), False) for text in tokens.split(",")]
    if len(ids) != 2 or any(len(each) != 1 for each in ids) or ids[0] == ids[1]:
        return None
    return ids[0][0], ids[1][0]
