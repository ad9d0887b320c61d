"""Clients of a stack whose processes are killed, and the results that they count."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

RECONNECT_SECONDS = 120.0
"""Longest time until a gateway answers again, in seconds."""


@dataclass(frozen=True, eq=False)
class Question:
    """A request whose greedy answer is the same each time."""

    name: str
    fields: Mapping[str, Any]
    path: str = "/v1/completions"


def completions(prompts: Iterable[str]) -> tuple[Question, ...]:
    """Return questions that are prompts of text."""
    return tuple(Question(repr(prompt[:30]), {"prompt": prompt}) for prompt in prompts)


@dataclass
class Report:
    """The results of one run."""

    kills: Counter[str] = field(default_factory=Counter)
    cuts: list[float] = field(default_factory=list)
    """Seconds that each cut lasted."""
    ended: int = 0
    left: int = 0
    asked_again: int = 0
    """How often a client asked again, because no worker (429 or 503) or no gateway was available."""
    refusals: Counter[str] = field(default_factory=Counter)
    """What the answers with 429 and 503 said."""
    reconnected: int = 0
    """How often a stream broke with its gateway and went on at one that answered."""
    attempts: float = 0
    """Attempts that workers admitted, over all requests since the gateway was started."""
    encodings: int = 0
    """Encodings that workers computed since they were started."""
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    settled_seconds: float = 0.0
    """Seconds from the end of the last stream until no block was leased or in flight."""
    leftovers: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kills = ", ".join(f"{count} {role}" for role, count in sorted(self.kills.items()))
        left_behind = ", ".join(self.leftovers) or "nothing"
        return (
            f"{self.kills.total()} kills ({kills}), {len(self.cuts)} cuts of the link ({sum(self.cuts):.0f} s,"
            f" at most {max(self.cuts, default=0):.0f} s) in {self.seconds:.0f} s; {self.ended} streams ended right,"
            f" {len(self.wrong)} wrong, {self.reconnected} times a stream went on at another gateway, in"
            f" {self.attempts:.0f} attempts with {self.encodings} encodings; {self.left} clients left,"
            f" {self.asked_again} times a client asked again ({dict(self.refusals)});"
            f" no block leased {self.settled_seconds:.1f} s after the last stream; {left_behind} left behind"
        )


class Client:
    """A client that streams answers and compares their tokens with the undisturbed stack's.

    Args:
        tokens: how many tokens each request generates.
        leaves: probability that it disconnects before its request has ended.
        gateways_end: whether gateways may end while a stream runs.
        others: connections to further gateways of the stack.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        questions: Sequence[Question],
        tokens: int,
        report: Report,
        leaves: float = 0.0,
        gateways_end: bool = False,
        others: Sequence[httpx.AsyncClient] = (),
    ) -> None:
        self.gateways_end = gateways_end
        self._gateways = [http, *others]
        self._turn = 0
        """Number of the gateway that is asked next."""
        self._questions = questions
        self._tokens = tokens
        self._report = report
        self._leaves = leaves
        self.expected: dict[Question, list[int]] = {}
        """For each question, the tokens of the undisturbed stack."""

    async def learn(self, concurrency: int) -> None:
        """Record the answer to each question from the undisturbed stack."""
        places = asyncio.Semaphore(concurrency)

        async def one(question: Question) -> None:
            async with places:
                self.expected[question] = [token async for token in self.stream(question)]

        await asyncio.gather(*(one(question) for question in self._questions))

    async def read_all(self, disturb: Callable[[], object]) -> dict[Question, list[int]]:
        """Stream the answers to all questions at once, and return their tokens.

        Args:
            disturb: called when five tokens of each answer have come.
        """
        begun = asyncio.Semaphore(0)

        async def read(question: Question) -> list[int]:
            tokens = []
            async for token in self.stream(question):
                tokens.append(token)
                if len(tokens) == 5:
                    begun.release()
            return tokens

        async with asyncio.TaskGroup() as group:
            reading = {question: group.create_task(read(question)) for question in self._questions}
            for _ in reading:
                await begun.acquire()
            disturb()
        return {question: task.result() for question, task in reading.items()}

    async def run(self, draw: random.Random, over: asyncio.Event) -> None:
        """Send one request after another until `over` is set."""
        while not over.is_set():
            question = draw.choice(self._questions)
            patience = draw.randrange(self._tokens) if draw.random() < self._leaves else None
            await self._ask(question, patience, draw)

    async def _ask(self, question: Question, patience: int | None, draw: random.Random) -> None:
        """Send a request and count its outcome. The client leaves after `patience` tokens; None stays to the end."""
        expected, tokens = self.expected[question], list[int]()
        outcome = "ended" if patience is None else "left"
        async with contextlib.aclosing(self.stream(question)) as stream:
            try:
                async for token in stream:
                    tokens.append(token)
                    if len(tokens) == patience:
                        break
            except NoWorkerError as error:
                self._report.refusals[str(error)] += 1
                outcome = "asked_again"
                await asyncio.sleep(draw.uniform(0.5, 1.5))
            except (BrokenError, httpx.HTTPError, TimeoutError) as error:
                self._report.wrong.append(f"{question.name} after {len(tokens)} tokens: {error!r}")
                return
        is_whole = outcome != "ended" or len(tokens) == len(expected)
        if tokens != expected[: len(tokens)] or not is_whole:
            self._report.wrong.append(f"{question.name}: {tokens} instead of {expected}")
        else:
            setattr(self._report, outcome, getattr(self._report, outcome) + 1)

    async def stream(self, question: Question) -> AsyncIterator[int]:
        """Yield the tokens of the answer to a question.

        A stream that breaks with its gateway goes on at a gateway that answers, if gateways may end in this run. Raises
        NoWorkerError, BrokenError and the errors of httpx, and TimeoutError if no gateway answers in time.
        """
        place = Place(f"chaos-{uuid.uuid4().hex}")
        deadline = math.inf
        while True:
            try:
                async with contextlib.aclosing(self._read(question, place)) as tokens:
                    async for token in tokens:
                        deadline = math.inf
                        yield token
                return
            except (
                httpx.ConnectError,
                httpx.ReadError,
                httpx.RemoteProtocolError,
                LeavingError,
                NoWorkerError,
            ) as error:
                if not self.gateways_end or (isinstance(error, NoWorkerError) and not place.event_id):
                    raise
                deadline = min(deadline, time.monotonic() + RECONNECT_SECONDS)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no gateway answered within {RECONNECT_SECONDS:g} s") from error
                self._report.reconnected += not isinstance(error, NoWorkerError | httpx.ConnectError)
            await asyncio.sleep(0.2)
            self._turn += 1

    async def _read(self, question: Question, place: Place) -> AsyncIterator[int]:
        """Yield the next tokens of an answer, from the place on where the client is. Keeps the place up to date."""
        body = {
            **question.fields,
            "max_tokens": self._tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        gateway = self._gateways[self._turn % len(self._gateways)]
        async with gateway.stream("POST", question.path, json=body, headers=place.headers()) as response:
            if response.status_code in (429, 503):
                raise NoWorkerError((await response.aread()).decode())
            if response.status_code != 200:
                raise BrokenError((await response.aread()).decode())
            event_id = ""
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    event_id = line.removeprefix("id: ")
                elif line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        leaving = event["error"].get("code") == "gateway_shutting_down"
                        raise LeavingError if leaving else BrokenError(line)
                    place.event_id = event_id
                    for token in event["choices"][0].get("token_ids") or ():
                        yield token


@dataclass
class Place:
    """Where a client is in a stream that it may continue."""

    request_id: str
    event_id: str = ""
    """Id of the last event that came; "" before the first one."""

    def headers(self) -> dict[str, str]:
        again = {"Last-Event-ID": self.event_id} if self.event_id else {"X-Event-IDs": "true"}
        return {"X-Request-Id": self.request_id, **again}


class LeavingError(Exception):
    """The gateway shuts down and asks its clients to go elsewhere."""


class NoWorkerError(Exception):
    """The stack has answered 429 or 503 before any token: the client may ask again later."""


class BrokenError(Exception):
    """The stream ended with an error instead of its tokens."""


async def attempts(http: httpx.AsyncClient) -> float:
    """Return how many attempts workers were asked for, over all requests that have ended so far."""
    metrics = (await _get(http, "/metrics")).text
    return sum(map(float, re.findall(r"^paceline:request_attempts_total\S* (\S+)", metrics, re.MULTILINE)))


async def encodings(http: httpx.AsyncClient) -> int:
    """Return how many encodings the workers have computed since they were started."""
    workers = (await _get(http, "/fleet")).json()["workers"]
    return sum(worker["stats"].get("encodings_computed", 0) for worker in workers)


async def _get(http: httpx.AsyncClient, path: str) -> httpx.Response:
    """Ask a gateway that may have been killed a moment ago, and starts again."""
    async with asyncio.timeout(http.timeout.read):
        while True:
            try:
                return await http.get(path)
            except httpx.TransportError:
                await asyncio.sleep(0.2)
