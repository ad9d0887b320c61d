"""Chats whose reasoning has a budget, made from a seed, and the check of their answers, for bench.serving.equality."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common.mixed import Outcome, Request
from paceline.services.gateway.planning.tokenizer import Tokenizer

BUDGETS = (0, 1, 7, 64)
START, END = "<think>", "</think>"

OPTIONS = ("--reasoning-parser=think", "--local-prefill-tokens=0", "--kv-memory=24MiB")
"""Options of a stack that hands every sequence over, and that has to preempt some of eight."""

_ANSWER_TOKENS = 40
"""Longest content after the reasoning. Some answers are cut off."""
_STARTS = ("", "Let me see. ", "The user asks for a list, so")
"""Beginnings of the reasoning at the end of the prompt. Their tokens count towards the budget."""
_LIST = ", ".join(f"item {number}: {name}" for number, name in enumerate(("apple", "bread", "candle", "drum") * 3))
_QUESTIONS = (
    "What is the capital of France?",
    f"Repeat this list: {_LIST}",
    "数学とは何ですか?",
    "Tell me a story. 🐉",
)
_CALL = "<tool_call>"
"""The marker with which a call begins in the stacks that get these requests."""
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
_TOOL = {"type": "function", "function": {"name": "find", "parameters": {**_SCHEMA, "additionalProperties": False}}}


def thinking_requests(count: int, seed: int) -> list[Request]:
    """Make chats that begin within reasoning, with every budget in turn: greedy and sampled, with tools and schemas."""
    rng = random.Random(seed)
    return [_request(rng, budget) for budget in itertools.islice(itertools.cycle(BUDGETS), count)]


def _request(rng: random.Random, budget: int) -> Request:
    start = rng.choice(_STARTS)
    body: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": rng.choice(_QUESTIONS)},
            {"role": "assistant", "content": f"{START}\n{start}"},
        ],
        "continue_final_message": True,
        "thinking_token_budget": budget,
        "max_tokens": budget + 20 + _ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if rng.random() < 0.6:
        body |= {"temperature": rng.choice([0.8, 1.3]), "seed": rng.randrange(2**31)}
    body |= rng.choice(
        [
            {},
            {},
            {"tools": [_TOOL]},
            {"tools": [_TOOL], "tool_choice": "required"},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": _SCHEMA}}},
        ]
    )
    return Request(body, path="/v1/chat/completions")


def complaint(request: Request, outcome: Outcome, tokenizer: Tokenizer) -> str:
    """Return how the length of an answer's reasoning differs from its budget, as a text; "" if it does not."""
    spent = request.body["messages"][-1]["content"].removeprefix(START).strip()
    wanted = max(0, request.body["thinking_token_budget"] - len(tokenizer.encode(spent, False)))
    found = thinking_tokens(outcome.tokens, tokenizer)
    if found == outcome.reasoning_tokens == wanted:
        return ""
    # A model may end its answer, or call tools, while it thinks. Then it has spent at most its budget. Calls may go on
    # until the answer has its greatest length.
    ends = outcome.finish_reason in ("stop", "tool_calls") or _CALL in tokenizer.decode(outcome.tokens)
    if found is None and ends and outcome.reasoning_tokens <= wanted:
        return ""
    told = "no end of the reasoning" if found is None else f"{found} tokens of reasoning"
    return f"{told}, usage says {outcome.reasoning_tokens}, the budget leaves {wanted}: {outcome.text!r}"


def complaints(asked: Sequence[Request], found: Sequence[Outcome], tokenizer: Tokenizer) -> list[str]:
    """Return the complaints about all answers."""
    return [text for request, outcome in zip(asked, found) if (text := complaint(request, outcome, tokenizer))]


def thinking_tokens(tokens: Sequence[int], tokenizer: Tokenizer) -> int | None:
    """Return the number of tokens that begin before the marker at the end of the reasoning; None without a marker."""
    pieces = [tokenizer.vocabulary.token_bytes(token) for token in tokens]
    end = b"".join(pieces).find(END.encode())
    if end < 0:
        return None
    starts = itertools.accumulate((len(piece) for piece in pieces[:-1]), initial=0)
    return sum(start < end for start in starts)


def add_markers(folder: Path, target: Path) -> None:
    """Write a checkpoint like another one in which two tokens that the model never writes are the markers.

    The other one must have special tokens besides those of its chats, as SmolLM2 has.
    """
    target.mkdir()
    for file in folder.iterdir():
        if file.suffix == ".safetensors":
            (target / file.name).symlink_to(file)
        else:
            shutil.copy(file, target)
    path = target / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for added, marker in zip(tokenizer["added_tokens"][-2:], (START, END), strict=True):
        if added["content"] in vocabulary:
            vocabulary[marker] = vocabulary.pop(added["content"])
        added |= {"content": marker, "special": False}
    path.write_text(json.dumps(tokenizer, ensure_ascii=False))
