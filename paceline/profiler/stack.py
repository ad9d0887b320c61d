"""A running stack as the profiler sees it: its facts, its steps, and requests to it."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.client import GatewayClient
from paceline.core.errors import InvalidRequestError, UnavailableError
from paceline.core.step_record import StepRecord

FETCH_SECONDS = 30.0
"""Deadline of a question about the stack, in seconds. A busy machine answers late."""
REQUEST_SECONDS = 120.0
"""Deadline of the first token, and of each further one, in seconds."""
REPORT_SECONDS = 10.0
"""Longest wait until a new host has reported to the gateway, in seconds."""
_IDS = range(20, 250)
"""Token ids of prompts. Every model has more tokens than this, and no prompt finds another one's blocks cached."""


class ProfiledAnswer(NamedTuple):
    """One answered request, with the time of each token as the client saw it."""

    request_id: str
    prompt_tokens: int
    token_times: tuple[float, ...]
    """Instant of each piece of the answer, in seconds from sending the request."""
    sent: float
    """Instant of sending the request, on time.perf_counter()."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a stack that do not change while it is profiled."""

    model: str
    version: str
    max_model_len: int
    numerics: str
    workers: dict[str, int]
    """Number of ready workers by role."""
    max_seqs: int
    """Sequences that every decode worker can run at the same time: the smallest limit of all decode workers."""
    max_batched_tokens: int
    takes_turns: bool
    itl_target_seconds: float
    token_bytes: float
    host_tokens: int
    """Tokens that the arena of one host holds."""


class ProfiledStack:
    """A running stack that has no other requests than the profiler's."""

    def __init__(self, gateway: GatewayClient) -> None:
        self._gateway = gateway
        self._seen: dict[tuple[str, int], int] = {}
        """Number of the newest known step of each worker, by its name and epoch."""
        self._ids = itertools.count()
        self._source = random.Random(time.time_ns())
        self.model = gateway.model or str(self._fetch("/v1/models")["data"][0]["id"])

    def _fetch(self, path: str) -> dict[str, Any]:
        return self._gateway.fetch(path, seconds=FETCH_SECONDS)

    def _fetch_fleet(self, path: str) -> dict[str, Any]:
        return self._gateway.fetch_fleet(path, seconds=FETCH_SECONDS)

    def facts(self) -> Facts:
        """Return the stack's facts. Raises UnavailableError if the stack has other work, or lacks a worker."""
        fleet, steps = self._fetch_fleet("/fleet"), self._fetch_fleet("/fleet/steps?most=1")
        workers = [
            each for each in fleet["workers"] if each["role"] in ("prefill", "decode") and each["state"] == "ready"
        ]
        decoding = [each for each in workers if each["role"] == "decode"]
        hosts = [each for each in fleet["hosts"] if "total" in each]
        if not decoding or not hosts:
            raise UnavailableError("there is nothing to profile: the stack needs a ready decode worker and its host")
        if busy := [each["worker_id"] for each in workers if each["running"] or each["waiting"]]:
            raise UnavailableError(f"{', '.join(busy)} has other requests; profile a stack that does nothing else")
        token_bytes = self._token_bytes()
        options = steps["workers"]
        return Facts(
            model=self.model,
            version=str(self._fetch("/version")["version"]),
            max_model_len=min(each["max_model_len"] for each in decoding),
            numerics=str(decoding[0]["numerics"] or ""),
            workers={role: sum(each["role"] == role for each in workers) for role in ("prefill", "decode")},
            max_seqs=min(each["max_seqs"] for each in decoding),
            max_batched_tokens=min(each["max_batched_tokens"] for each in options),
            takes_turns=any(each["takes_turns"] for each in options),
            itl_target_seconds=max(each["itl_target_seconds"] for each in options),
            token_bytes=token_bytes,
            host_tokens=int(min(each["total"] * each["slot_bytes"] for each in hosts) / token_bytes),
        )

    def _token_bytes(self) -> float:
        """Return the number of bytes of KV of one token. A gateway learns it about a second after a host's first
        worker.

        Raises UnavailableError if no host has reported this number in time.
        """
        end = time.monotonic() + REPORT_SECONDS
        while True:
            hosts = self._fetch_fleet("/fleet/steps?most=1")["hosts"]
            if found := max((float(each["token_bytes"]) for each in hosts), default=0.0):
                return found
            if time.monotonic() > end:
                raise UnavailableError("no host has told the size of a token's KV; look at the log of kvtransfer")
            time.sleep(0.2)

    def new_steps(self) -> dict[str, list[StepRecord]]:
        """Return the steps of all workers since the last call, by role, in the order of their ends."""
        found: dict[str, list[StepRecord]] = {"prefill": [], "decode": []}
        for worker in self._fetch_fleet("/fleet/steps?most=4096")["workers"]:
            name = worker["worker_id"], worker["epoch"]
            rows = [StepRecord(*row) for row in worker["steps"]]
            found[worker["role"]] += [row for row in rows if row.number > self._seen.get(name, -1)]
            if rows:
                self._seen[name] = rows[-1].number
        return found

    def fetched(self) -> tuple[int, float]:
        """Return the number of bytes that hosts have fetched from other hosts, and the seconds that these transfers
        took.
        """
        hosts = self._fetch_fleet("/fleet/steps?most=1")["hosts"]
        return sum(each["fetched_bytes"] for each in hosts), sum(each["fetch_seconds"] for each in hosts)

    def trace(self, answer: ProfiledAnswer) -> dict[str, Any]:
        """Return the gateway's trace of an answered request, as its JSON object."""
        return self._fetch(f"/trace/{answer.request_id}")

    def prompt(self, tokens: int) -> list[int]:
        """Return a prompt of `tokens` tokens, none of whose blocks is cached."""
        return self._source.choices(_IDS, k=tokens)

    def ask(self, prompt: list[int] | str, tokens: int) -> ProfiledAnswer:
        """Send a prompt and return its answer of `tokens` tokens. Raises the errors of `GatewayClient.send`."""
        name = f"profile-{self._source.getrandbits(48):x}-{next(self._ids)}"
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "request_id": name,
        }
        sent, times, usage = time.perf_counter(), list[float](), dict[str, int]()
        for line in self._gateway.stream("/v1/completions", body, REQUEST_SECONDS):
            came = time.perf_counter()
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise InvalidRequestError(f"a request of the profile failed: {event['error']}")
                usage = event.get("usage") or usage
                if any(choice.get("token_ids") for choice in event["choices"]):
                    times.append(came - sent)
        return ProfiledAnswer(name, usage["prompt_tokens"], tuple(times), sent)

    def ask_together(self, prompts: Sequence[list[int]], tokens: int) -> list[ProfiledAnswer]:
        """Send requests at the same time and wait for all answers."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, tokens), prompts))

    def scale(self, targets: dict[str, int] | None = None) -> dict[str, Any]:
        """Set the number of workers of each role in `targets`, if given, and return the state of all roles."""
        return self._gateway.fetch_fleet("/fleet/scale", targets, seconds=60.0)
