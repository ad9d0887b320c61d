"""How a causal model judges a document: the prompt of a query and a document, and the two tokens that may follow it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.core.types import Token
from paceline.services.gateway.chat_template import ChatTemplate
from paceline.services.gateway.tokenizer import Tokenizer

_TOKENS = "yes,no"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
"""Qwen3-Reranker was trained with these words."""
_NO_THINKING: Mapping[str, object] = {"enable_thinking": False}


class Scoring:
    """The prompts and tokens of /score and /rerank.

    Args:
        tokens: the option --score-tokens.
        template: the option --score-template, a path.

    Raises:
        ConfigError: an option is wrong. Defaults that do not fit the model are errors of the first request instead.
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
        """Ids of the token for a document that fits and of the other one. Raises InvalidRequestError if unknown."""
        if self._token_ids is None:
            raise InvalidRequestError(
                "this model cannot score: yes and no are no single tokens of it; start the gateway with --score-tokens",
                "model",
            )
        return self._token_ids

    def render(self, query: str, document: str, instruction: str | None) -> str:
        """Return the prompt. Raises InvalidRequestError if a template refuses the texts or there is none."""
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

    def margin(self, token: Token) -> float:
        """Return how much more likely the first token is than the other one: the difference of their logprobs."""
        logprobs = {entry.token_id: entry.logprob for entry in token.logprobs}
        fits, other = self.token_ids
        return logprobs[fits] - logprobs[other]


def probability(margin: float) -> float:
    """Return the softmax over two tokens, whose logprobs differ by `margin`, for the first one."""
    return 1 / (1 + math.exp(-max(-700.0, margin)))


def _template(tokenizer: Tokenizer, path: str) -> ChatTemplate | None:
    """Return the template that has a query and a document; None if the chat template has to do."""
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
    """Return the ids of the two tokens; None if there are not two texts, or if one of them is no single token."""
    ids = [tokenizer.encode(text.strip(), False) for text in tokens.split(",")]
    if len(ids) != 2 or any(len(each) != 1 for each in ids) or ids[0] == ids[1]:
        return None
    return ids[0][0], ids[1][0]
