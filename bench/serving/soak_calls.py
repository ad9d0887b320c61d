"""The mixed requests of a long run: every route, with clients that leave, errors, media and batches."""

from __future__ import annotations

import asyncio
import io
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from paceline.services.gateway.http.paths import DECISIONS

Json = dict[str, Any]

BUSY = frozenset({429, 503})
"""Statuses of a stack that was disturbed a moment ago: no worker or no room. A client would ask again."""
SECONDS = 120.0
"""Longest time until a request has its whole answer, in seconds."""
WORDS = ("time", "river", "stone", "quiet", "market", "seven", "window", "engine", "north", "paper", "garden", "music")
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["a", "b"]}, "ok": {"type": "boolean"}}, "required": ["ok"]}


@dataclass
class Results:
    """The results of all requests so far."""

    sent: Counter[str] = field(default_factory=Counter)
    """Requests by route."""
    busy: int = 0
    broken: int = 0
    """Answers that broke off because a process was killed."""
    left: int = 0
    """Streams that the client left in the middle."""
    odd: list[str] = field(default_factory=list)
    """Answers that no correct server gives."""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """For each token of a stream but the first: its arrival, on time.monotonic(), and the seconds since the previous
    token.
    """


class Soaker:
    """A client that sends one request of any kind at a time.

    Args:
        model: name of the model.
        media: parts of messages with an image, a video or an audio clip. May be empty.
        media_options: the field `mm_processor_kwargs` of chats with media.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        model: str,
        media: Sequence[Json],
        media_options: Json,
        results: Results,
        draw: random.Random,
    ) -> None:
        self.http, self.model, self.draw, self.results = http, model, draw, results
        self.media, self.media_options = media, media_options

    async def run(self, path: str, call: Call) -> None:
        """Send the request of one route, and note its outcome."""
        self.results.sent[path] += 1
        try:
            async with asyncio.timeout(SECONDS):
                await call(self)
        except httpx.TransportError:
            self.results.broken += 1
        except TimeoutError:
            self._odd(path, f"no whole answer after {SECONDS:g} s")
        except OddAnswerError as error:
            self._odd(path, str(error))

    def text(self, most: int = 60) -> str:
        """Return some random words, after a beginning that requests share, so that prefixes are found in the cache."""
        return "You are a helpful assistant. " + " ".join(self.draw.choices(WORDS, k=self.draw.randint(1, most)))

    async def get(self, path: str, *allowed: int, method: str = "GET", body: Any = None, **more: Any) -> httpx.Response:
        """Send a request and return the answer. Raises OddAnswerError if its status is not allowed."""
        answer = await self.http.request(method, path, **({"json": body} if body is not None else {}), **more)
        if answer.status_code in BUSY:
            self.results.busy += 1
        elif answer.status_code not in (allowed or (200,)):
            raise OddAnswerError(f"{answer.status_code}: {answer.text[:300]}")
        return answer

    async def post(self, path: str, body: Json, *allowed: int) -> httpx.Response:
        """As `get`, with a body that names the model."""
        return await self.get(path, *allowed, method="POST", body={"model": self.model, **body})

    async def answer(self, path: str, body: Json) -> None:
        """Ask for an answer: half of the time as a stream, which is sometimes left in the middle."""
        if self.draw.random() < 0.5:
            await self.post(path, body)
            return
        patience = self.draw.randrange(8) if self.draw.random() < 0.15 else None
        last: float | None = None
        body = {"model": self.model, **body, "stream": True}
        async with self.http.stream("POST", path, json=body) as answer:
            if answer.status_code in BUSY:
                self.results.busy += 1
                return
            if answer.status_code != 200:
                raise OddAnswerError(f"{answer.status_code}: {(await answer.aread()).decode()[:300]}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                if '"error"' in line[:40]:
                    self.results.broken += 1
                now = time.monotonic()
                if last is not None:
                    self.results.gaps.append((now, now - last))
                last = now
                if patience is not None and (patience := patience - 1) < 0:
                    self.results.left += 1
                    return

    def _odd(self, path: str, what: str) -> None:
        if len(self.results.odd) < 1000:
            self.results.odd.append(f"{path}: {what}")


class OddAnswerError(Exception):
    """An answer that no correct server gives to this request."""


Call = Callable[[Soaker], Awaitable[object]]


def _messages(soaker: Soaker) -> list[Json]:
    return [{"role": "user", "content": soaker.text()}]


async def _chat(soaker: Soaker) -> None:
    kind = soaker.draw.randrange(8)
    body: Json = {"messages": _messages(soaker), "max_tokens": soaker.draw.randint(1, 48), "ignore_eos": True}
    if kind == 0 and soaker.media:
        parts = [soaker.draw.choice(soaker.media), {"type": "text", "text": soaker.text(9)}]
        body |= {"messages": [{"role": "user", "content": parts}], "mm_processor_kwargs": soaker.media_options}
    elif kind == 1:
        body |= {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
        del body["ignore_eos"]
    elif kind == 2:
        body |= {"n": 3, "logprobs": True, "top_logprobs": 2}
    elif kind == 3:  # a mistake of the client
        await soaker.post("/v1/chat/completions", {**body, "temperature": -1}, 400)
        return
    await soaker.answer("/v1/chat/completions", body)


async def _completion(soaker: Soaker) -> None:
    body = {"prompt": soaker.text(200), "max_tokens": soaker.draw.randint(1, 64), "ignore_eos": True}
    await soaker.answer("/v1/completions", body)


async def _response(soaker: Soaker) -> None:
    """Store a response, go on with it, and remove one of both."""
    first = await soaker.post("/v1/responses", {"input": soaker.text(), "max_output_tokens": 16})
    if first.status_code != 200:
        return
    name = first.json()["id"]
    await soaker.post(
        "/v1/responses", {"input": "more", "previous_response_id": name, "max_output_tokens": 8}, 200, 404
    )
    await soaker.get(f"/v1/responses/{name}")
    await soaker.get(f"/v1/responses/{name}/input_items")
    await soaker.get(f"/v1/responses/{name}/cancel", 400, method="POST")
    await soaker.get(f"/v1/responses/{name}", method="DELETE")


async def _batch(soaker: Soaker) -> None:
    """Upload a file and run it as a batch, to the end or not. Remove the files of batches that have ended."""
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": {"model": soaker.model} | body}
        for number, body in enumerate([{"prompt": soaker.text(), "max_tokens": 8}] * 6)
    ]
    content = io.BytesIO("".join(json.dumps(line) + "\n" for line in lines).encode())
    file = await soaker.get(
        "/v1/files", method="POST", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}
    )
    if file.status_code != 200:
        return
    name = file.json()["id"]
    await soaker.get(f"/v1/files/{name}")
    body = {"input_file_id": name, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = (await soaker.get("/v1/batches", method="POST", body=body)).json()
    for old in (await soaker.get("/v1/batches?limit=100")).json().get("data", ()):
        if old["status"] in ("completed", "cancelled", "failed", "expired"):
            for each in (old["input_file_id"], old["output_file_id"]):
                if each is not None and each != name:
                    await soaker.get(f"/v1/files/{each}/content", 200, 404)
                    await soaker.get(f"/v1/files/{each}", 200, 404, method="DELETE")
    if "id" in batch:
        await soaker.get(f"/v1/batches/{batch['id']}")
        if soaker.draw.random() < 0.3:
            await soaker.get(f"/v1/batches/{batch['id']}/cancel", 200, 400, 409, method="POST")


async def _message_batch(soaker: Soaker) -> None:
    """Begin a message batch, to the end or not. Read and remove the ones that have ended."""
    params = {"model": soaker.model, "max_tokens": 8, "messages": _messages(soaker)}
    requests = [{"custom_id": str(number), "params": params} for number in range(3)]
    path = "/v1/messages/batches"
    batch = (await soaker.get(path, method="POST", body={"requests": requests})).json()
    for old in (await soaker.get(f"{path}?limit=100")).json().get("data", ()):
        if old["processing_status"] == "ended":
            await soaker.get(f"{path}/{old['id']}/results", 200, 404)
            await soaker.get(f"{path}/{old['id']}", 200, 404, method="DELETE")
    if "id" in batch:
        await soaker.get(f"{path}/{batch['id']}", 200, 404)
        if soaker.draw.random() < 0.3:
            await soaker.get(f"{path}/{batch['id']}/cancel", 200, 404, 409, method="POST")


async def _conversation(soaker: Soaker) -> None:
    """Keep a conversation, answer in it, and remove it."""
    item = {"type": "message", "role": "user", "content": soaker.text()}
    made = await soaker.get("/v1/conversations", method="POST", body={"items": [item]})
    if made.status_code != 200:
        return
    path = f"/v1/conversations/{made.json()['id']}"
    await soaker.post("/v1/responses", {"input": "more", "conversation": made.json()["id"], "max_output_tokens": 8})
    await soaker.get(f"{path}/items", method="POST", body={"items": [item]})
    for kept in (await soaker.get(f"{path}/items")).json().get("data", ())[:1]:
        await soaker.get(f"{path}/items/{kept['id']}")
    await soaker.get(path, method="DELETE")


async def _trace(soaker: Soaker) -> None:
    name = f"soak-{soaker.draw.getrandbits(40)}"
    await soaker.http.post(
        "/v1/completions",
        json={"model": soaker.model, "prompt": "x", "max_tokens": 2},
        headers={"X-Request-Id": name},
    )
    await soaker.get(f"/trace/{name}", 200, 404)


async def _derender(soaker: Soaker, path: str) -> None:
    chat = "chat" in path
    prompt = {"messages": _messages(soaker)} if chat else {"prompt": soaker.text()}
    await soaker.post(path.replace("derender", "render"), prompt)
    result = {"choices": [{"index": 0, "token_ids": [65, 66, 67], "finish_reason": "stop"}], "request_id": "x"}
    await soaker.post(path, {"generate_responses": [result], "generate_response": result}, 200, 400)


def _posts(path: str, body: Callable[[Soaker], Json], *allowed: int) -> tuple[str, Call]:
    return path, lambda soaker: soaker.post(path, body(soaker), *allowed)


def _gets(*paths: str) -> list[tuple[str, Call]]:
    return [(path, lambda soaker, path=path: soaker.get(path)) for path in paths]


def _score(soaker: Soaker) -> Json:
    return {"text_1": soaker.text(9), "text_2": [soaker.text(9), soaker.text(9)]}


def _rerank(soaker: Soaker) -> Json:
    return {"query": soaker.text(9), "documents": [soaker.text(9), soaker.text(9)]}


CALLS: Mapping[str, Call] = dict(
    [
        ("/v1/chat/completions", _chat),
        ("/v1/completions", _completion),
        ("/v1/responses", _response),
        ("/v1/batches", _batch),
        ("/v1/messages/batches", _message_batch),
        ("/v1/conversations", _conversation),
        ("/trace/{request_id:path}", _trace),
        (
            "/v1/messages",
            lambda soaker: soaker.answer("/v1/messages", {"messages": _messages(soaker), "max_tokens": 16}),
        ),
        ("/v1/chat/completions/derender", lambda soaker: _derender(soaker, "/v1/chat/completions/derender")),
        ("/v1/completions/derender", lambda soaker: _derender(soaker, "/v1/completions/derender")),
        _posts(
            "/v1/chat/completions/batch",
            lambda soaker: {"messages": [_messages(soaker)] * 2, "max_tokens": 8},
            200,
            400,
        ),
        _posts("/v1/messages/count_tokens", lambda soaker: {"messages": _messages(soaker)}),
        _posts("/v1/responses/input_tokens", lambda soaker: {"input": soaker.text()}),
        _posts("/v1/messages/render", lambda soaker: {"messages": _messages(soaker), "max_tokens": 8}),
        _posts("/v1/responses/render", lambda soaker: {"input": soaker.text()}),
        _posts("/invocations", lambda soaker: {"prompt": soaker.text(), "max_tokens": 8}),
        _posts(
            "/generative_scoring",
            lambda soaker: {"query": soaker.text(9), "items": [soaker.text(9)], "label_token_ids": [65, 66]},
        ),
        _posts("/inference/v1/generate", lambda soaker: {"token_ids": [65] * 40, "sampling_params": {"max_tokens": 8}}),
        _posts("/tokenize", lambda soaker: {"prompt": soaker.text()}),
        _posts("/detokenize", lambda soaker: {"tokens": [65, 66, 67]}),
        *(_posts(path, _score, 200, 400) for path in ("/score", "/v1/score")),
        *(_posts(path, _rerank, 200, 400) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        _posts("/abort_requests", lambda soaker: {"request_ids": ["none"]}, 200, 404),
        *_gets(
            "/health",
            "/ping",
            "/version",
            "/metrics",
            "/openapi.json",
            "/load",
            "/v1/models",
            "/v1/files",
            "/tokenizer_info",
            "/is_sleeping",
        ),
        *_gets("/fleet", "/fleet/scale", "/server_info", "/", "/console/requests"),
        ("/v1/models/{model:path}", lambda soaker: soaker.get(f"/v1/models/{soaker.model}")),
    ]
)
"""A request for each route, by the route's path in the table of access. Some send requests to other routes, too."""

INSIDE = frozenset(
    {
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
        "/v1/responses/{response_id}/input_items",
        "/v1/files/{file_id}",
        "/v1/files/{file_id}/content",
        "/v1/batches/{batch_id}",
        "/v1/messages/batches/{batch_id}",
        "/v1/messages/batches/{batch_id}/cancel",
        "/v1/messages/batches/{batch_id}/results",
        "/v1/conversations/{conversation_id}",
        "/v1/conversations/{conversation_id}/items",
        "/v1/conversations/{conversation_id}/items/{item_id}",
        "/v1/batches/{batch_id}/cancel",
        "/v1/completions/render",
        "/v1/chat/completions/render",
    }
)
"""Routes that requests of other routes in CALLS use."""

OF_ENCODERS = frozenset(
    {
        *("/v1/embeddings", "/embeddings", "/v1/embed", "/v2/embed", "/pooling", "/classify", "/v1/classify"),
        *("/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity", "/info", "/decode"),
    }
)
"""Routes of models for embeddings and labels. The soak has a model that generates."""
OF_ADAPTERS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Routes of adapters. The soak's model has none."""
OF_SLEEP = frozenset({"/sleep", "/wake_up", "/release_memory_occupation", "/resume_memory_occupation"})

LEFT_OUT = (
    OF_ENCODERS | OF_ADAPTERS | OF_SLEEP | {"/console/feed", "/console/{name}", "/fleet/steps", "/reset_prefix_cache"}
)
"""Routes without requests: those of other models and of adapters, those that put the model to sleep, streams without an
end, files, and a route that would empty the cache.
"""

WEIGHTS = {"/v1/chat/completions": 40, "/v1/completions": 30, "/v1/messages": 8, "/v1/responses": 4, "/v1/batches": 1}
"""Relative frequency of the requests of a route; 1 for routes that are not listed."""


def missing_routes() -> set[str]:
    """Return the routes of the gateway that no request uses."""
    return DECISIONS.keys() - CALLS.keys() - INSIDE - LEFT_OUT
