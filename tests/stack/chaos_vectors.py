"""The part of chaos that asks an encoder for vectors, beside chats: `python -m tests.stack.chaos --vectors`.

Each answer must have the bits that the undisturbed stack gave. Pool workers are killed, added and drained meanwhile.
"""

from __future__ import annotations

import asyncio
import base64
import random
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

from tests.services.pool.tiny_bert import WORDS, write_tiny_bert
from tests.stack.chaos_clients import RECONNECT_SECONDS, NoWorkerError, Report

CHAT, VECTORS = "chat", "vectors"
TEXTS = [" ".join((2 * WORDS)[index % 7 :][: 1 + index % 45]) for index in range(300)]


def write_models(folder: Path, chat: str) -> Path:
    """Write a tiny encoder into a folder, and the file of two models: the encoder, and one that chats."""
    encoder = folder / "encoder"
    encoder.mkdir(parents=True)
    write_tiny_bert(encoder)
    file = folder / "models.toml"
    # Steps of few tokens, so that each request takes many.
    file.write_text(
        f'[{CHAT}]\nmodel = "{chat}"\n\n[{VECTORS}]\nmodel = "{encoder}"\nmax-batched-tokens = 64\nmax-seqs = 32\n'
    )
    return file


class VectorClients:
    """Clients that ask for the vectors of many texts and compare their bits with the undisturbed stack's.

    Args:
        count: number of clients; with 0, nothing is asked and nothing scaled.
        gateways_end: whether gateways may end during a request.
    """

    def __init__(self, http: httpx.AsyncClient, count: int, report: Report, gateways_end: bool) -> None:
        self._http = http
        self._count = count
        self._report = report
        self._gateways_end = gateways_end
        self._expected: list[bytes] = []

    async def learn(self) -> None:
        """Record the vectors from the undisturbed stack."""
        self._expected = await self._ask(TEXTS) if self._count else []

    def start(
        self, group: asyncio.TaskGroup, draw: random.Random, pause: tuple[float, float], over: asyncio.Event
    ) -> None:
        """Start the clients, and a task that adds and drains pool workers, until `over` is set."""
        for _ in range(self._count):
            group.create_task(self._run(random.Random(draw.random()), over))
        if self._count:
            group.create_task(_rescale(self._http, random.Random(draw.random()), pause, over))

    async def _run(self, draw: random.Random, over: asyncio.Event) -> None:
        """Ask for parts of the texts, one request after another, until `over` is set."""
        while not over.is_set():
            begin, count = draw.randrange(len(TEXTS)), draw.choice((1, 5, 40, 200))
            try:
                vectors = await self._ask(TEXTS[begin : begin + count])
            except NoWorkerError as error:
                self._report.refusals[str(error)] += 1
                self._report.asked_again += 1
                await asyncio.sleep(draw.uniform(0.5, 1.5))
            except (httpx.HTTPError, TimeoutError, WrongAnswerError) as error:
                self._report.wrong.append(f"vectors of {count} texts from {begin} on: {error!r}")
            else:
                if vectors == self._expected[begin : begin + count]:
                    self._report.ended += 1
                else:
                    self._report.wrong.append(f"other vectors for {count} texts from {begin} on")

    async def _ask(self, texts: list[str]) -> list[bytes]:
        """Return the vectors of texts. A request that breaks with its gateway is sent again, if gateways may end.

        Raises NoWorkerError, WrongAnswerError, the errors of httpx, and TimeoutError if no gateway answers in time.
        """
        body = {"model": VECTORS, "input": texts, "encoding_format": "base64"}
        deadline = time.monotonic() + RECONNECT_SECONDS
        while True:
            try:
                answer = await self._http.post("/v1/embeddings", json=body)
                break
            except httpx.TransportError:
                if not self._gateways_end or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.2)
        if answer.status_code in (429, 503):
            raise NoWorkerError(answer.text)
        if answer.status_code != 200:
            raise WrongAnswerError(answer.text)
        return [base64.b64decode(each["embedding"]) for each in answer.json()["data"]]


class WrongAnswerError(Exception):
    """The stack has refused a valid request."""


async def _rescale(
    http: httpx.AsyncClient, draw: random.Random, pause: tuple[float, float], over: asyncio.Event
) -> None:
    """Change the number of pool workers now and then until `over` is set. At the end there are two."""
    while not over.is_set():
        await asyncio.sleep(draw.uniform(*pause))
        await _scale(http, {"pool": draw.randint(1, 3)})
    await _scale(http, {"pool": 2})


async def _scale(http: httpx.AsyncClient, wanted: Mapping[str, int]) -> None:
    """Ask until a gateway answers, because it may have been killed a moment ago."""
    async with asyncio.timeout(RECONNECT_SECONDS):
        while True:
            try:
                answer = await http.post("/fleet/scale", json={"model": VECTORS, **wanted})
            except httpx.TransportError:
                await asyncio.sleep(0.2)
                continue
            if answer.status_code == 200:
                return
            await asyncio.sleep(0.2)  # its supervisor may be busy with the change before
