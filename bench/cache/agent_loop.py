"""Measure how much of an agent's context is computed again while other requests flood the cache.

    python -m bench.cache.agent_loop http://127.0.0.1:8000 --calls 20 --flood-tokens 20000

An agent calls a tool again and again. Each request has the whole conversation so far. Between two requests others come,
each with a prompt that nobody sent before, of `--flood-tokens` tokens in all. Choose more than the KV memory holds:
`paceline_kv_blocks` and /fleet say how much that is. For each API the ratio is printed of prompt tokens that the server
computed to tokens that were new in the agent's prompts. It is 1 if nothing is computed twice, and more than 1 if blocks
of the agent were evicted.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx

from bench.serving.load import table

Json = dict[str, Any]

SCHEMA = {"type": "object", "properties": {}, "additionalProperties": False}
DIRECTIONS = "Call the tool `look` until you have seen everything. "
FLOOD_REQUEST_TOKENS = 1000
WORDS = [
    "amber",
    "basalt",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "heron",
    "inlet",
    "juniper",
    "kelp",
    "lagoon",
    "marsh",
    "nectar",
    "opal",
    "prairie",
]


class Used(NamedTuple):
    """Tokens of one prompt."""

    prompt: int
    cached: int


class Form(NamedTuple):
    """One API: how an agent uses it."""

    path: str
    body: Callable[[list[Any]], Json]
    begin: Callable[[str], list[Any]]
    grow: Callable[[Json, str], list[Any]]
    """Returns what the next request adds: the answer, and the result of its call."""
    used: Callable[[Json], Used]


def _chat_growth(answer: Json, result: str) -> list[Json]:
    message = answer["choices"][0]["message"]
    calls = message["tool_calls"]
    return [
        {"role": "assistant", "content": message["content"] or "", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": call["id"], "content": result} for call in calls),
    ]


def _message_growth(answer: Json, result: str) -> list[Json]:
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": result} for call in calls]
    return [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]


def _response_growth(answer: Json, result: str) -> list[Json]:
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": call["call_id"], "output": result} for call in calls]
    return [*answer["output"], *outputs]


def _message_used(answer: Json) -> Used:
    usage = answer["usage"]
    cached = usage["cache_read_input_tokens"]
    return Used(usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached, cached)


def _user(text: str) -> list[Json]:
    return [{"role": "user", "content": text}]


_FUNCTION = {"name": "look", "description": "Look around.", "parameters": SCHEMA}


def _ids(text: str) -> list[Any]:
    """Return token ids that stand for a text, one for each word: any tokenizer has them."""
    return [30 + sum(word.encode()) % 200 for word in text.split()]


FORMS = {
    "chat completions": Form(
        "/v1/chat/completions",
        lambda messages: {
            "messages": messages,
            "tools": [{"type": "function", "function": _FUNCTION}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_tokens": 100,
        },
        _user,
        _chat_growth,
        lambda answer: Used(
            answer["usage"]["prompt_tokens"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        ),
    ),
    "messages": Form(
        "/v1/messages",
        lambda messages: {
            "messages": messages,
            "tools": [{"name": "look", "description": "Look around.", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "max_tokens": 100,
        },
        _user,
        _message_growth,
        _message_used,
    ),
    "responses": Form(
        "/v1/responses",
        lambda items: {
            "input": items,
            "tools": [{"type": "function", **_FUNCTION}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_output_tokens": 100,
            "store": False,
        },
        _user,
        _response_growth,
        lambda answer: Used(answer["usage"]["input_tokens"], answer["usage"]["input_tokens_details"]["cached_tokens"]),
    ),
    "completions": Form(
        "/v1/completions",
        lambda ids: {"prompt": ids, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True},
        _ids,
        lambda answer, result: [*answer["choices"][0]["token_ids"], *_ids(result)],
        lambda answer: Used(
            answer["usage"]["prompt_tokens"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        ),
    ),
}


async def agent_loop(
    client: httpx.AsyncClient, form: Form, calls: int, flood_tokens: int, result_words: int = 100, seed: int = 0
) -> list[Used]:
    """Run an agent of so many tool calls, with a flood before each request but the first. Return each prompt's tokens.

    Args:
        flood_tokens: tokens of each flood.
        result_words: words in the result of each call.

    Raises RuntimeError if a request is refused.
    """
    draw = random.Random(f"{form.path}/{seed}")
    history = form.begin(f"Agent {draw.getrandbits(64):x}. " + DIRECTIONS * 4)
    found = []
    for index in range(calls):
        if index:
            await flood(client, draw, flood_tokens)
        answer = await _post(client, form.path, {**form.body(history), "temperature": 0})
        found.append(form.used(answer))
        history += form.grow(answer, " ".join(draw.choices(WORDS, k=result_words)))
    return found


async def flood(client: httpx.AsyncClient, draw: random.Random, tokens: int) -> None:
    """Send prompts of random token ids, one after the other."""
    for _ in range(0, tokens, FLOOD_REQUEST_TOKENS):
        prompt = draw.choices(range(30, 250), k=FLOOD_REQUEST_TOKENS)
        await _post(client, "/v1/completions", {"prompt": prompt, "max_tokens": 1})


def ratio(found: list[Used]) -> float:
    """Return the computed tokens of all prompts after the first one, relative to the tokens that were new in them."""
    computed = sum(one.prompt - one.cached for one in found[1:])
    return computed / (found[-1].prompt - found[0].prompt)


async def _post(client: httpx.AsyncClient, path: str, body: Json) -> Json:
    response = await client.post(path, json=body)
    if response.is_error:
        raise RuntimeError(f"{path} answers {response.status_code}: {response.text[:500]}")
    return dict(response.json())


async def _run(options: argparse.Namespace) -> None:
    rows = []
    async with httpx.AsyncClient(base_url=options.url, timeout=600) as client:
        for name in options.forms:
            found = await agent_loop(
                client, FORMS[name], options.calls, options.flood_tokens, options.result_words, options.seed
            )
            computed = sum(one.prompt - one.cached for one in found[1:])
            rows.append([name, str(found[-1].prompt - found[0].prompt), str(computed), f"{ratio(found):.2f}"])
    print(table(["API", "new tokens", "computed", "ratio"], rows))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cache.agent_loop", description=__doc__.splitlines()[0])
    parser.add_argument("url", help="URL of a running gateway")
    parser.add_argument("--calls", type=int, default=20, help="requests of each agent [%(default)s]")
    parser.add_argument("--flood-tokens", type=int, default=20_000, help="tokens between two requests [%(default)s]")
    parser.add_argument("--result-words", type=int, default=100, help="words in the result of a call [%(default)s]")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="APIs to measure [all]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the texts [%(default)s]")
    options = parser.parse_args()
    try:
        asyncio.run(_run(options))
    except RuntimeError as error:
        print(f"bench.cache.agent_loop: {error}", file=sys.stderr)
        return 1
    except httpx.HTTPError as error:
        print(f"bench.cache.agent_loop: {options.url} does not answer: {error!r}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
