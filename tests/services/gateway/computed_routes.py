"""A body for each route whose answer workers compute."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def bodies(text: str) -> dict[str, Json]:
    """Return for each of ID_PREFIXES a body with a text in its prompt, whose answer is short.

    Routes for scores need the option `--score-tokens y,n` with the toy model.
    """
    chat = [{"role": "user", "content": text}]
    few = {"max_tokens": 2}
    pair, ranked = {"text_1": text, "text_2": "a"}, {"query": text, "documents": ["a"]}
    return {
        "/v1/completions": {"prompt": text, **few},
        "/v1/chat/completions": {"messages": chat, **few},
        "/v1/chat/completions/batch": {"messages": [chat], **few},
        "/v1/messages": {"messages": chat, **few},
        "/v1/responses": {"input": text, "max_output_tokens": 2},
        "/inference/v1/generate": {"token_ids": list(text.encode()), "sampling_params": few},
        "/score": pair,
        "/v1/score": pair,
        "/generative_scoring": {"query": text, "items": ["a"], "label_token_ids": [1, 2]},
        "/invocations": {"prompt": text, **few},
        "/rerank": ranked,
        "/v1/rerank": ranked,
        "/v2/rerank": ranked,
    }
