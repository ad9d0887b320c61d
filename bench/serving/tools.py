"""Make a server call random tools: count invalid calls, and measure the cost of the constraint.

    python -m bench.serving.tools --url http://127.0.0.1:8000 --count 500

Each set of tools is used once, in a streamed chat with `tool_choice` required, at temperature 1. Then the same prompts
are sent as token ids without tools, each for as many tokens as its call had. The two ways take turns in rounds, so that
other work on the machine affects both. Answers that max_tokens has cut off count apart: they must say `length`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import string
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import jsonschema

from bench.serving.load import new_file, table

ROUND = 25
"""Sets of tools in one round."""
REQUEST_SECONDS = 600.0

Json = dict[str, Any]

_WORDS = ("weather", "mail", "order", "ticket", "invoice", "route", "file", "user", "calendar", "stock")
_DESCRIPTIONS = (
    "Find what is near a place",
    "Sucht Bücher nach Titel und Größe",
    "Отправить письмо коллеге",
    "指定した都市の天気を調べる",
    "Réserver une table – « ce soir » 🍽",
    'Answers with "yes" or "no" \\ nothing else',
)
_PROPERTIES = ("id", "name", "city", "when", "tags", "amount", "options", "größe", "ключ", "note")
_NAME_CHARACTERS = string.ascii_letters + string.digits + "_-"


@dataclass(slots=True)
class Call:
    """A tool call, joined from its fragments."""

    name: str = ""
    arguments: str = ""
    heads: int = 0
    """Fragments with an id and a name; there should be one, and it should be the first."""


@dataclass(slots=True)
class Answer:
    """One streamed answer."""

    calls: dict[int, Call] = field(default_factory=dict)
    """Calls by index."""
    content: str = ""
    finish_reason: str = ""
    tokens: int = 0
    error: str = ""

    def add(self, event: Json) -> None:
        """Add an event of the stream."""
        if event.get("usage"):
            self.tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            self.content += choice.get("text") or choice.get("delta", {}).get("content") or ""
            for piece in choice.get("delta", {}).get("tool_calls", ()):
                call = self.calls.setdefault(piece["index"], Call())
                call.heads += "id" in piece
                call.name += piece["function"].get("name", "")
                call.arguments += piece["function"]["arguments"]


def random_tools(rng: random.Random) -> list[Json]:
    """Return one to five tools with different names."""
    names: set[str] = set()
    for _ in range(rng.randint(1, 5)):
        made = "".join(rng.choices(_NAME_CHARACTERS, k=rng.randint(1, 20)))
        names.add(rng.choice([f"{rng.choice(('get', 'find', 'send'))}_{rng.choice(_WORDS)}", made]))
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": rng.choice(_DESCRIPTIONS),
                "parameters": _random_object(rng, depth=2),
            },
        }
        for name in sorted(names)
    ]


def _random_object(rng: random.Random, depth: int) -> Json:
    names = rng.sample(_PROPERTIES, rng.randint(1, 4))
    schema: Json = {
        "type": "object",
        "properties": {name: _random_schema(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
    }
    return schema | ({"additionalProperties": False} if rng.random() < 0.5 else {})


def _random_schema(rng: random.Random, depth: int) -> Json:
    """Return a schema as tools have them: most texts, lists and numbers have no limit."""
    kinds = ["string", "text", "integer", "range", "number", "boolean", "enum", "nullable"]
    if depth > 0:
        kinds += ["object"] * 2 + ["array"] * 2 + ["anyOf"]
    schema: Json
    match rng.choice(kinds):
        case "text":
            schema = {"type": "string", "maxLength": rng.randint(4, 40)}
        case "range":
            low = rng.randint(-1000, 1000)
            schema = {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 10**6)}
        case "enum":
            schema = {"type": "string", "enum": rng.sample(["red", "grün", "celsius", 'quo"te', "город", ""], 3)}
        case "nullable":
            schema = {"type": ["string", "null"]}
        case "array":
            schema = {"type": "array", "items": _random_schema(rng, depth - 1)}
            schema |= {"maxItems": rng.randint(1, 3)} if rng.random() < 0.5 else {}
        case "anyOf":
            schema = {"anyOf": [_random_schema(rng, depth - 1) for _ in range(2)]}
        case "object":
            schema = _random_object(rng, depth - 1)
        case kind:
            schema = {"type": kind}
    return schema | ({"description": rng.choice(_DESCRIPTIONS)} if rng.random() < 0.3 else {})


def complaint(tools: Sequence[Json], answer: Answer) -> str:
    """Return the fault of an answer that must call one of the tools as a text; "" if there is none.

    An answer that says `length` may end anywhere.
    """
    if answer.error:
        return answer.error
    if answer.finish_reason not in ("tool_calls", "length"):
        return f"ended with {answer.finish_reason}"
    if answer.content:
        return f"content {answer.content!r}"
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    for call in answer.calls.values():
        if call.heads != 1 or call.name not in schemas:
            return f"no tool has the name {call.name!r}, which came in {call.heads} pieces"
    if answer.finish_reason == "length":
        return ""
    if not answer.calls:
        return "no call"
    for call in answer.calls.values():
        try:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name], cls=jsonschema.Draft202012Validator)
        except (ValueError, jsonschema.ValidationError) as error:
            return f"{str(error).splitlines()[0]} in {call.arguments!r}"
    return ""


class Asker:
    """A client that streams at most `concurrency` answers at a time."""

    def __init__(self, client: httpx.AsyncClient, model: str, concurrency: int, seed: int) -> None:
        self._client = client
        self._common = {
            "model": model,
            "temperature": 1.0,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self._places = asyncio.Semaphore(concurrency)

    async def ask_both_ways(self, chats: Sequence[Json], salt: str) -> dict[str, tuple[list[Answer], float]]:
        """Send chats with tools, and then their prompts without. Neither way finds the other's prompts in the cache.

        Returns for each way the answers, and the seconds from the first request to the end of the last answer.
        """
        prompts = [await self._prompt(chat) for chat in chats]
        bound = await self.ask("/v1/chat/completions", [{**chat, "cache_salt": f"{salt}/bound"} for chat in chats])
        lengths = [max(1, answer.tokens) for answer in bound[0]]
        plain = [
            {"prompt": prompt, "max_tokens": length, "ignore_eos": True, "cache_salt": f"{salt}/free"}
            for prompt, length in zip(prompts, lengths)
        ]
        return {"constrained": bound, "free": await self.ask("/v1/completions", plain)}

    async def ask(self, path: str, bodies: Sequence[Json]) -> tuple[list[Answer], float]:
        """Send all requests. Return their answers, and the seconds until the end of the last one."""
        began = time.perf_counter()
        answers = await asyncio.gather(*(self._one(path, body) for body in bodies))
        return answers, time.perf_counter() - began

    async def _prompt(self, chat: Json) -> list[int]:
        """Return the token ids of a chat's prompt."""
        reply = await self._client.post("/tokenize", json={name: chat[name] for name in ("messages", "tools")})
        return list(reply.raise_for_status().json()["tokens"])

    async def _one(self, path: str, body: Json) -> Answer:
        answer, done = Answer(), False
        async with self._places:
            try:
                async with self._client.stream("POST", path, json={**self._common, **body}) as reply:
                    if reply.status_code != 200:
                        return Answer(error=f"status {reply.status_code}: {(await reply.aread())[:300]!r}")
                    async for line in reply.aiter_lines():
                        if line.startswith("data: {"):
                            answer.add(json.loads(line.removeprefix("data: ")))
                        done |= line == "data: [DONE]"
            except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
                return Answer(error=repr(error))
        return answer if done else Answer(error="the stream ended without [DONE]")


async def measure(url: str, model: str, count: int, concurrency: int, max_tokens: int, seed: int) -> Json:
    """Return the figures of both ways to ask, and the list of errors."""
    rng = random.Random(seed)
    sets = [random_tools(rng) for _ in range(count)]
    wrong: list[str] = []
    cut_off = 0
    tokens = {"constrained": 0, "free": 0}
    rates: dict[str, list[float]] = {"constrained": [], "free": []}
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_SECONDS, trust_env=False) as client:
        model = model or (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        asker = Asker(client, model, concurrency, seed)
        await asker.ask_both_ways([make_chat(rng, random_tools(rng), 16)], f"{seed}/warm-up")
        for first in range(0, count, ROUND):
            chosen = sets[first : first + ROUND]
            ways = await asker.ask_both_ways([make_chat(rng, tools, max_tokens) for tools in chosen], f"{seed}/{first}")
            bound, free = (answers for answers, _ in ways.values())
            wrong += [text for tools, answer in zip(chosen, bound) if (text := complaint(tools, answer))]
            wrong += [f"unconstrained: {answer.error}" for answer in free if answer.error]
            cut_off += sum(answer.finish_reason == "length" for answer in bound)
            for name, (answers, seconds) in ways.items():
                came = sum(answer.tokens for answer in answers)
                tokens[name] += came
                rates[name].append(came / seconds)
    medians = {name: statistics.median(way_rates) for name, way_rates in rates.items()}
    ratio = medians["constrained"] / medians["free"]
    figures = {"tokens": tokens, "rates": rates, "medians": medians, "ratio": ratio}
    return {"seed": seed, **figures, "cut_off": cut_off, "wrong": wrong}


def make_chat(rng: random.Random, tools: list[Json], max_tokens: int) -> Json:
    """Return the fields of a chat that must call one of the tools."""
    wish = rng.choice(tools)["function"]["description"]
    return {
        "messages": [{"role": "user", "content": f"{wish}: {rng.choice(_WORDS)} {rng.randint(1, 99)}."}],
        "tools": tools,
        "tool_choice": "required",
        "max_tokens": max_tokens,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.serving.tools", description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the server")
    parser.add_argument("--model", default="", help="model name; default: the first one that the server lists")
    parser.add_argument("--count", type=int, default=500, help="sets of tools")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time")
    parser.add_argument("--max-tokens", type=int, default=512, help="longest answer [%(default)s]")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9, help="seed of tools; default: a new one")
    parser.add_argument("--out", type=new_file, help="JSON file for all figures")
    args = parser.parse_args()
    figures = asyncio.run(measure(args.url, args.model, args.count, args.concurrency, args.max_tokens, args.seed))
    rows = [[name, f"{figures['tokens'][name]}", f"{figures['medians'][name]:.1f}"] for name in figures["tokens"]]
    print(table(["answers", "tokens", "median tokens/s"], rows))
    print(
        f"{args.count} sets of tools (seed {args.seed}), {len(figures['wrong'])} wrong, "
        f"{figures['cut_off']} cut off, ratio {figures['ratio']:.3f}"
    )
    for text in figures["wrong"][:20]:
        print(f"  {text[:400]}")
    if args.out:
        args.out.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n")
    return 1 if figures["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
