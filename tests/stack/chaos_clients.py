"""Clients of a stack whose processes are killed, and the results that they count."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx


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
    gateways_ended: int = 0
    """Kills of the gateway whose process has ended, which may take a moment on a busy machine."""
    cuts: list[float] = field(default_factory=list)
    """Seconds that each cut lasted."""
    ended: int = 0
    left: int = 0
    asked_again: int = 0
    """How often a client asked again, because no worker (429 or 503) or no gateway was available."""
    lost: int = 0
    """Streams that broke because their gateway was killed."""
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
            f" {len(self.wrong)} wrong, {self.lost} lost with a gateway, in {self.attempts:.0f} attempts with"
            f" {self.encodings} encodings; {self.left} clients left, {self.asked_again} times a client asked again;"
            f" no block leased {self.settled_seconds:.1f} s after the last stream; {left_behind} left behind"
        )


class Client:
    """A client that streams answers and compares their tokens with the undisturbed stack's.

    Args:
        tokens: how many tokens each request generates.
        leaves: probability that it disconnects before its request has ended.
    """

    def __init__(
        self, http: httpx.AsyncClient, questions: Sequence[Question], tokens: int, report: Report, leaves: float = 0.0
    ) -> None:
        self._http = http
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

    async def run(self, draw: random.Random, over: asyncio.Event) -> None:
        """Send one request after another until `over` is set."""
        while not over.is_set():
            question = draw.choice(self._questions)
            patience = draw.randrange(self._tokens) if draw.random() < self._leaves else None
            await self._ask(question, patience, draw)

    async def _ask(self, question: Question, patience: int | None, draw: random.Random) -> None:
        """Send a request and count its outcome. The client leaves after `patience` tokens; None stays to the end."""
        expected, tokens = self.expected[question], list[int]()
        ended_before = self._report.gateways_ended
        outcome = "ended" if patience is None else "left"
        async with contextlib.aclosing(self.stream(question)) as stream:
            try:
                async for token in stream:
                    tokens.append(token)
                    if len(tokens) == patience:
                        break
            except (NoWorkerError, httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError) as error:
                outcome = self._outcome(error, ended_before)
                if not outcome:
                    self._report.wrong.append(f"{question.name} after {len(tokens)} tokens: {error!r}")
                    return
                await asyncio.sleep(draw.uniform(0.5, 1.5))
            except (BrokenError, httpx.HTTPError) as error:
                self._report.wrong.append(f"{question.name} after {len(tokens)} tokens: {error!r}")
                return
        is_whole = outcome != "ended" or len(tokens) == len(expected)
        if tokens != expected[: len(tokens)] or not is_whole:
            self._report.wrong.append(f"{question.name}: {tokens} instead of {expected}")
        else:
            setattr(self._report, outcome, getattr(self._report, outcome) + 1)

    def _outcome(self, error: Exception, ended_before: int) -> str:
        """Return how a request is counted that this error ended; "" if the error may not happen.

        Args:
            ended_before: killed gateways that had ended when the request began.
        """
        gateways = self._report.kills["gateway"]
        if isinstance(error, NoWorkerError) or (gateways and isinstance(error, httpx.ConnectError)):
            return "asked_again"
        return "lost" if gateways > ended_before else ""

    async def stream(self, question: Question) -> AsyncIterator[int]:
        """Yield the tokens of the answer to a question. Raises NoWorkerError, BrokenError and the errors of httpx."""
        body = {
            **question.fields,
            "max_tokens": self._tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        async with self._http.stream("POST", question.path, json=body) as response:
            if response.status_code in (429, 503):
                raise NoWorkerError
            if response.status_code != 200:
                raise BrokenError((await response.aread()).decode())
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise BrokenError(line)
                    for token in event["choices"][0].get("token_ids") or ():
                        yield token


class NoWorkerError(Exception):
    """The stack has answered 429 or 503 before any token: the client may ask again later."""


class BrokenError(Exception):
    """The stream ended with an error instead of its tokens."""


async def attempts(http: httpx.AsyncClient) -> float:
    """Return how many attempts workers have admitted, over all requests that have ended so far."""
    metrics = (await http.get("/metrics")).text
    (value,) = re.findall(r"^paceline:request_attempts_total\S* (\S+)", metrics, re.MULTILINE)
    return float(value)


async def encodings(http: httpx.AsyncClient) -> int:
    """Return how many encodings the workers have computed since they were started."""
    workers = (await http.get("/fleet")).json()["workers"]
    return sum(worker["stats"].get("encodings_computed", 0) for worker in workers)
