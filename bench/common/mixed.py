"""Random requests of every kind, made from a seed, and a client for them; used by bench/serving/equality.py."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

REQUEST_SECONDS = 600.0
MOST_TRIES = 30

_OPENINGS = (
    "Once upon a time there was a dragon who",
    "The capital of France is",
    "Q: What is the boiling point of water in Celsius?\nA:",
    "def fibonacci(n):\n    ",
    "Dear Sir or Madam,\nI am writing to",
    "Ingredients: flour, water, salt, yeast.\nSteps:\n1.",
    "数学とは",
    "Das Wetter ist heute",
    "x",
)
_LIST = ", ".join(f"item {number}: {name}" for number, name in enumerate(("apple", "bread", "candle", "drum") * 4))
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Request:
    """A body of a streamed request. The client disconnects after `leaves_after` events; with None it does not."""

    body: dict[str, Any]
    leaves_after: int | None = None
    path: str = "/v1/completions"


@dataclass(slots=True)
class Outcome:
    """The output that a client has received for one request."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    """Reasoning and content in their order; tool calls are left out."""
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    reasoning_tokens: int = 0

    def difference(self, other: Outcome) -> str:
        """Describe how two outcomes of one request differ, or return "" if they do not.

        If the client disconnected early, only the tokens that both outcomes have are compared.
        """
        length = min(len(self.tokens), len(other.tokens))
        if (self.finish_reason is None) != (other.finish_reason is None):
            return f"one ended with {self.finish_reason}, the other with {other.finish_reason}"
        if self.finish_reason is not None:
            if self.finish_reason != other.finish_reason or self.text != other.text:
                return f"{self.text!r} ({self.finish_reason}) and {other.text!r} ({other.finish_reason})"
            length = max(len(self.tokens), len(other.tokens))
        if self.tokens[:length] != other.tokens[:length]:
            return f"tokens {self.tokens[:length]} and {other.tokens[:length]}"
        return ""


def requests(count: int, seed: int, vocab_size: int) -> list[Request]:
    """Make requests: greedy and sampled, short and long, with stops, cancellation, penalties and constraints."""
    rng = random.Random(seed)
    return [_request(rng, vocab_size) for _ in range(count)]


def _request(rng: random.Random, vocab_size: int) -> Request:
    body: dict[str, Any] = {"prompt": _prompt(rng), "max_tokens": rng.choice([1, 4, 12, 24, 48])}
    if rng.random() < 0.6:
        body |= {"temperature": rng.choice([0.3, 0.8, 1.0, 1.4]), "seed": rng.randrange(2**31)}
        body |= rng.choice([{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"top_p": 0.8, "top_k": 50}])
    else:
        body["temperature"] = 0
    some = [rng.randrange(3, vocab_size) for _ in range(6)]
    body |= rng.choice(
        [
            {},
            {},
            {"logprobs": rng.choice([0, 3])},
            {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3},
            {"stop": rng.choice([["\n"], [" the", "."], ["item 3"]])},
            {"stop": [" a", "e"], "min_tokens": min(3, body["max_tokens"])},
            {"logit_bias": {str(token): rng.choice([-100, 2, 5]) for token in some}},
            {"ignore_eos": True},
            {"structured_outputs": {"regex": r"[a-z]{1,8}( [a-z]{1,8}){0,4}"}},
            {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
            {"structured_outputs": {"json": _SCHEMA}, "max_tokens": 64},
        ]
    )
    leaves = rng.randint(1, 8) if rng.random() < 0.1 else None
    return Request({**body, "stream": True, "return_token_ids": True}, leaves)


def _prompt(rng: random.Random) -> str:
    opening = rng.choice(_OPENINGS)
    if (kind := rng.random()) < 0.3:
        return f"Repeat this list word for word.\n{_LIST}\n{_LIST[: rng.randrange(1, len(_LIST))]}"
    if kind < 0.5:
        return " ".join(rng.choices(_OPENINGS, k=rng.randint(3, 20)))
    return opening


async def answers(url: str, model: str, asked: Sequence[Request], concurrency: int) -> list[Outcome]:
    """Send all requests, `concurrency` at a time, and return their outcomes.

    Raises httpx.HTTPStatusError if one is refused even after retries.
    """
    places = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_SECONDS, trust_env=False) as client:

        async def one(request: Request) -> Outcome:
            async with places:
                return await _patiently(client, replace(request, body={"model": model, **request.body}))

        return list(await asyncio.gather(*(one(request) for request in asked)))


async def _patiently(client: httpx.AsyncClient, request: Request) -> Outcome:
    """Send a request; retry while the server answers 503, because it has no worker at the moment."""
    for _ in range(MOST_TRIES - 1):
        try:
            return await ask(client, request)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                raise
            await asyncio.sleep(float(error.response.headers["Retry-After"]))
    return await ask(client, request)


async def ask(client: httpx.AsyncClient, request: Request) -> Outcome:
    """Send one request, whose body names the model, and return its outcome.

    Raises httpx.HTTPStatusError if it is refused, httpx.RemoteProtocolError if its stream has an error.
    """
    outcome, events, body = Outcome(), 0, request.body
    async with client.stream("POST", request.path, json=body) as response:
        if response.is_error:
            await response.aread()
            raise httpx.HTTPStatusError(f"{response.text} for {body}", request=response.request, response=response)
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise httpx.RemoteProtocolError(f"{event['error']} for {body}")
            if usage := event.get("usage"):
                outcome.reasoning_tokens = usage["completion_tokens_details"]["reasoning_tokens"]
            for choice in event["choices"]:
                delta = choice.get("delta", {})
                outcome.tokens += choice.get("token_ids") or []
                outcome.text += choice.get("text") or delta.get("reasoning") or delta.get("content") or ""
                outcome.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
                outcome.finish_reason = choice["finish_reason"] or outcome.finish_reason
            events += 1
            if events == request.leaves_after and outcome.finish_reason is None:
                break
    return outcome if request.leaves_after is None else _cut_short(outcome)


def _cut_short(outcome: Outcome) -> Outcome:
    """Remove the finish reason: it is chance whether a client that disconnects early still sees it."""
    outcome.finish_reason = None
    return outcome
