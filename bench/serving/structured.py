"""Ask a server for answers under random JSON schemas: count invalid ones, and measure the cost of the constraint.

    python -m bench.serving.structured --url http://127.0.0.1:8000 --count 500

Every schema is used once, at temperature 1. Then the same prompts are sent without a schema, each for as many tokens as
its constrained answer had. The two ways take turns in rounds, so that other work on the machine affects both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema

from bench.serving.load import new_file, table

ROUND = 25
"""Schemas in one round."""
MAX_TOKENS = 1024
REQUEST_SECONDS = 600.0

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    tokens: int
    finish_reason: str
    error: str = ""


def random_schema(rng: random.Random, depth: int = 2) -> Schema:
    """Return a schema of a few properties, nested up to `depth`, whose values all have a bounded length.

    The format date-time is left out, because the fraction of its seconds may have any number of digits.
    """
    kinds = ["string", "integer", "number", "boolean", "enum", "pattern", "format", "nullable"]
    if depth > 0:
        kinds += ["object"] * 4 + ["array"] * 2 + ["anyOf"]
    match rng.choice(kinds) if depth < 2 else "object":
        case "string":
            return {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(4, 24)}
        case "integer":
            low = rng.randint(-1000, 1000)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 10**6)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": rng.randint(1, 1000), "multipleOf": 0.25}
        case "boolean":
            return {"type": "boolean"}
        case "enum":
            return {"enum": rng.sample(["red", "green", 7, -1.5, None, True, 'quo"te', "ключ"], rng.randint(1, 5))}
        case "pattern":
            return {"type": "string", "pattern": rng.choice([r"^[A-Z]{2}-\d{4}$", r"^(a|bc){1,6}$", r"^\w{1,12}$"])}
        case "format":
            return {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])}
        case "nullable":
            return {"type": ["null", "boolean"]}
        case "array":
            return {"type": "array", "items": random_schema(rng, depth - 1), "maxItems": rng.randint(1, 3)}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
        case _:
            names = rng.sample(["id", "name", "size", "when", "tags", "parent", "note", "ключ"], rng.randint(1, 5))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth - 1) for name in names},
                "required": [name for name in names if rng.random() < 0.8],
                "additionalProperties": False,
            }


def complaint(schema: Schema, answer: Answer) -> str:
    """Return the fault of an answer under its schema as a text; "" if there is none."""
    if answer.error:
        return answer.error
    if answer.finish_reason != "stop":
        return f"ended with {answer.finish_reason} after {answer.tokens} tokens"
    try:
        jsonschema.validate(json.loads(answer.text), schema, cls=jsonschema.Draft202012Validator)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{str(error).splitlines()[0]} in {answer.text!r}"
    return ""


class Asker:
    """A client that sends at most `concurrency` requests at a time."""

    def __init__(self, client: httpx.AsyncClient, model: str, concurrency: int, seed: int) -> None:
        self._client = client
        self._model = model
        self._places = asyncio.Semaphore(concurrency)
        self._seed = seed

    async def ask(self, prompts: Sequence[str], bodies: Sequence[dict[str, Any]]) -> tuple[list[Answer], float]:
        """Send all prompts. Return the answers, and the seconds until the last of them."""
        began = time.perf_counter()
        answers = await asyncio.gather(*(self._one(prompt, body) for prompt, body in zip(prompts, bodies)))
        return answers, time.perf_counter() - began

    async def _one(self, prompt: str, more: dict[str, Any]) -> Answer:
        body = {"model": self._model, "prompt": prompt, "temperature": 1.0, "seed": self._seed, **more}
        async with self._places:
            try:
                reply = await self._client.post("/v1/completions", json=body)
            except httpx.HTTPError as error:
                return Answer("", 0, "", repr(error))
        if reply.status_code != 200:
            return Answer("", 0, "", f"status {reply.status_code}: {reply.text[:300]}")
        done = reply.json()
        (choice,) = done["choices"]
        return Answer(choice["text"], done["usage"]["completion_tokens"], choice["finish_reason"])


async def measure(url: str, model: str, count: int, concurrency: int, seed: int) -> dict[str, Any]:
    """Return the figures of both ways to ask, and the list of errors."""
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(count)]
    wrong: list[str] = []
    tokens = {"constrained": 0, "free": 0}
    seconds = {"constrained": 0.0, "free": 0.0}
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_SECONDS, trust_env=False) as client:
        model = model or (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        asker = Asker(client, model, concurrency, seed)
        # Warm-up: afterwards everything is loaded.
        await asker.ask(["{"] * 2, [{"max_tokens": 4}, {"max_tokens": 4, "response_format": {"type": "json_object"}}])
        for first in range(0, count, ROUND):
            chosen = schemas[first : first + ROUND]
            prompts = [f"A JSON document for the schema {json.dumps(schema)}:\n" for schema in chosen]
            # Neither way finds the other's prompts in the cache.
            salt = f"{seed}/{first}"
            bound, took = await asker.ask(
                prompts,
                [
                    {
                        "max_tokens": MAX_TOKENS,
                        "cache_salt": f"{salt}/bound",
                        "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}},
                    }
                    for schema in chosen
                ],
            )
            tokens["constrained"] += sum(answer.tokens for answer in bound)
            seconds["constrained"] += took
            wrong += [text for schema, answer in zip(chosen, bound) if (text := complaint(schema, answer))]
            lengths = [max(1, answer.tokens) for answer in bound]
            free, took = await asker.ask(
                prompts,
                [{"max_tokens": length, "ignore_eos": True, "cache_salt": f"{salt}/free"} for length in lengths],
            )
            tokens["free"] += sum(answer.tokens for answer in free)
            seconds["free"] += took
            wrong += [f"unconstrained: {answer.error}" for answer in free if answer.error]
    rates = {name: tokens[name] / seconds[name] for name in tokens}
    ratio = rates["constrained"] / rates["free"]
    return {"seed": seed, "tokens": tokens, "seconds": seconds, "rates": rates, "ratio": ratio, "wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.serving.structured", description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the server")
    parser.add_argument("--model", default="", help="model name; default: the first one that the server lists")
    parser.add_argument("--count", type=int, default=500, help="number of schemas")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9, help="seed of schemas; default: a new one")
    parser.add_argument("--out", type=new_file, help="JSON file for all figures")
    args = parser.parse_args()
    figures = asyncio.run(measure(args.url, args.model, args.count, args.concurrency, args.seed))
    rows = [
        [name, f"{figures['tokens'][name]}", f"{figures['seconds'][name]:.1f}", f"{figures['rates'][name]:.1f}"]
        for name in ("constrained", "free")
    ]
    print(table(["answers", "tokens", "seconds", "tokens/s"], rows))
    print(f"{args.count} schemas (seed {args.seed}), {len(figures['wrong'])} wrong, ratio {figures['ratio']:.3f}")
    for text in figures["wrong"][:20]:
        print(f"  {text[:400]}")
    if args.out:
        args.out.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if figures["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
