"""A body for each route whose answer workers compute: models that generate have some of the routes, encoders others."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def bodies(text: str) -> dict[str, Json]:
    """Return for each route of a model that generates a body with a text in its prompt, whose answer is short.

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


def encoder_bodies(text: str) -> dict[str, Json]:
    """Return for each route that only models for vectors or labels have a body with a text."""
    inputs, texts, one = {"inputs": text}, {"texts": [text]}, {"input": text}
    return {
        "/v1/embeddings": one,
        "/embeddings": one,
        "/v1/embed": texts,
        "/v2/embed": texts,
        "/pooling": one,
        "/classify": one,
        "/v1/classify": one,
        "/embed": inputs,
        "/embed_all": inputs,
        "/embed_sparse": inputs,
        "/predict": inputs,
        "/similarity": {"inputs": {"source_sentence": text, "sentences": [text]}},
    }
