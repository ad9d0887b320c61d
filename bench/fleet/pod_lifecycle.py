"""Streams while all pods are replaced: preStop, SIGTERM, grace and SIGKILL happen to real processes, as in Kubernetes.

    python -m bench.fleet.pod_lifecycle [--streams 1000] [--hurry 1]

Decode workers, prefill workers and gateways are replaced again and again, one pod at a time: a new one starts and
passes its probe, then an old one is deleted. Times, strategy and probes are those of kubernetes/. A deleted gateway
gets new streams until the load balancers know of it. A stream is lost if it breaks, or has another text than without
any of this. No stream is tried again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench.common.namespaces import Host
from bench.common.services import Services, role_of
from tests.services.gateway.toy_model import VOCAB_SIZE, write_toy_model
from tests.tiny_checkpoints import write_tiny

KUBERNETES = Path(__file__).parents[2] / "kubernetes"
TOKENS = 128
PROMPTS = 32
"""Different prompts, each with a known answer."""
ROLES = ("decode", "prefill", "gateway")
PROBES = 20


@dataclass(frozen=True, slots=True)
class PodTimes:
    """The times of the end of a pod in the manifests, in seconds."""

    pre_stop: float
    grace: float
    drain: float
    probe: dict[str, Any]
    """The readiness probe."""

    @classmethod
    def read(cls, role: str) -> PodTimes:
        """Return the times of a role's pods."""
        file = "base/gateway.yaml" if role == "gateway" else "fleet/worker.yaml"
        deployment = next(yaml.safe_load_all((KUBERNETES / file).read_text()))
        assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
        pod = deployment["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        options = tomllib.loads((KUBERNETES / "base" / "paceline.toml").read_text())
        return cls(
            container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0),
            pod["terminationGracePeriodSeconds"],
            options[role]["drain-seconds"],
            container["readinessProbe"],
        )


class Cluster:
    """Processes with the life of pods.

    Args:
        hurry: preStop and the delay of load balancers are divided by this.
    """

    def __init__(self, services: Services, hurry: float = 1.0) -> None:
        self.services = services
        self.times = {role: PodTimes.read(role) for role in ROLES}
        self.endpoints: dict[str, str] = {}
        """URLs of the gateways to which load balancers send new streams, by name."""
        self.ends: Counter[str] = Counter()
        """Number of pods by the way in which they ended."""
        self.drains: list[float] = []
        """Seconds from SIGTERM to the end of each pod."""
        self._hurry = hurry
        self._numbers: Counter[str] = Counter()

    async def start(self, role: str) -> str:
        """Start a pod and wait until its readiness probe passes. Return its name."""
        if role == "gateway":
            name = await asyncio.to_thread(self.services.start_gateway)
            await asyncio.to_thread(self.services.processes[name].wait_for, "serving m at")
            self.endpoints[name] = self.services.url_of(name)
        else:
            name = await asyncio.to_thread(self.services.start_worker, role, self._numbers[role])
            self._numbers[role] += 1
            await asyncio.to_thread(self.services.wait_ready, name)
        for _ in range(PROBES):
            if await self._passes(name):
                return name
            await asyncio.sleep(0.5)
        raise RuntimeError(f"{name} is not ready")

    async def delete(self, name: str, propagation: float) -> None:
        """Let a pod end as the kubelet does, while load balancers learn of it only after `propagation` seconds."""
        times, process = self.times[role_of(name)], self.services.processes[name]
        asyncio.get_running_loop().call_later(propagation / self._hurry, self.endpoints.pop, name, None)
        deadline = time.monotonic() + times.grace
        await asyncio.sleep(times.pre_stop / self._hurry)
        told = time.monotonic()
        process.tell(signal.SIGTERM)
        try:
            code = await asyncio.to_thread(process.popen.wait, deadline - time.monotonic())
            self.ends[f"ended with code {code}"] += 1
        except subprocess.TimeoutExpired:
            process.tell(signal.SIGKILL)
            await asyncio.to_thread(process.popen.wait)
            self.ends["killed after the grace"] += 1
        self.drains.append(time.monotonic() - told)

    async def roll(self, role: str, propagation: float) -> None:
        """Replace all pods of a role, one after another."""
        alive = [name for name, process in self.services.processes.items() if role_of(name) == role and process.alive]
        for name in alive:
            await self.start(role)
            await self.delete(name, propagation)

    async def _passes(self, name: str) -> bool:
        """Return whether a pod's readiness probe passes."""
        probe = self.times[role_of(name)].probe
        if "httpGet" in probe:
            try:
                async with httpx.AsyncClient(timeout=probe["timeoutSeconds"]) as http:
                    return (await http.get(f"{self.services.url_of(name)}{probe['httpGet']['path']}")).is_success
            except httpx.TransportError:
                return False
        address = re.findall(r"serves at ([^ ,]+)", self.services.processes[name].text)[-1]
        _, *command = probe["exec"]["command"][:-2]  # without the address and the file of options
        asked = await asyncio.create_subprocess_exec(sys.executable, *command, address)
        return await asked.wait() == 0


@dataclass
class Outcomes:
    """The results of the clients."""

    good: int = 0
    lost: list[str] = field(default_factory=list)
    """The reason for each lost stream."""

    def __str__(self) -> str:
        return f"{self.good} good streams, {len(self.lost)} lost {dict(Counter(self.lost)) if self.lost else ''}"


async def stream(url: str, number: int) -> str:
    """Send one request over a connection of its own and return its text. Raises RuntimeError if the stream breaks."""
    body = {"model": "m", "prompt": f"{number} to and fro " * 3, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    text, is_done = "", False
    try:
        async with (
            httpx.AsyncClient(timeout=120) as http,
            http.stream("POST", f"{url}/v1/completions", json={**body, "ignore_eos": True}) as answer,
        ):
            if answer.is_error:
                raise RuntimeError(f"status {answer.status_code}: {(await answer.aread())[:200].decode()}")
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(f"error {event['error']['message']}")
                    text += event["choices"][0]["text"]
                is_done |= line == "data: [DONE]"
    except httpx.TransportError as error:
        raise RuntimeError(f"broken: {error!r}") from error
    if not is_done:
        raise RuntimeError("ended early")
    return text


async def clients(
    cluster: Cluster, count: int, outcomes: Outcomes, expected: Sequence[str], rolled: asyncio.Event
) -> None:
    """Keep `count` streams running until pods are no longer rolled."""

    async def client() -> None:
        while not rolled.is_set():
            number = random.randrange(PROMPTS)
            try:
                text = await stream(random.choice(list(cluster.endpoints.values())), number)
            except RuntimeError as error:
                outcomes.lost.append(str(error))
            else:
                if text == expected[number]:
                    outcomes.good += 1
                else:
                    outcomes.lost.append("another text")

    await asyncio.gather(*(client() for _ in range(count)))


async def run(
    folder: Path, streams: int, concurrency: int, hurry: float = 1.0, propagation: float = 5.0, pods: int = 2
) -> tuple[Outcomes, Cluster]:
    """Replace all pods at least once, and until `streams` streams have ended. Return the results of the clients.

    Args:
        concurrency: streams at the same time.
        hurry: see `Cluster`.
        propagation: seconds until load balancers know that a gateway was deleted.
        pods: number of pods of each role.
    """
    model = write_toy_model(folder / "model")
    write_tiny(model, "llama", vocab_size=VOCAB_SIZE, eos_token_id=256, max_position_embeddings=512)
    drains = {role: f"--drain-seconds={PodTimes.read(role).drain}" for role in ROLES}
    options = {
        "prefill": ("--threads=1", drains["prefill"]),
        "decode": ("--threads=1", drains["decode"]),
        "kvtransfer": ("--kv-memory=32MiB",),
        "gateway": ("--served-model-name=m", "--local-prefill-tokens=0", drains["gateway"]),
    }
    outcomes, rolled = Outcomes(), asyncio.Event()
    with Services(folder, str(model), (Host(),), **options) as services:
        services.wait_ready(services.start_kvtransfer(0))
        cluster = Cluster(services, hurry)
        for role in ROLES:
            for _ in range(pods):
                await cluster.start(role)
        url = next(iter(cluster.endpoints.values()))
        expected = [await stream(url, number) for number in range(PROMPTS)]
        load = asyncio.create_task(clients(cluster, concurrency, outcomes, expected, rolled))
        try:
            while not cluster.ends or outcomes.good + len(outcomes.lost) < streams:
                for role in ROLES:
                    await cluster.roll(role, propagation)
                    print(f"all {role} pods are replaced; {outcomes}", flush=True)
        finally:
            rolled.set()
            await load
    return outcomes, cluster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000, help="least number of streams [%(default)s]")
    parser.add_argument("--concurrency", type=int, default=8, help="streams at the same time [%(default)s]")
    parser.add_argument(
        "--propagation",
        type=float,
        default=5.0,
        help="seconds until load balancers know that a gateway was deleted [%(default)s]",
    )
    parser.add_argument("--pods", type=int, default=2, help="pods of each role [%(default)s]")
    parser.add_argument("--hurry", type=float, default=1.0, help="divides preStop and --propagation [%(default)s]")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes, cluster = asyncio.run(
            run(Path(folder), given.streams, given.concurrency, given.hurry, given.propagation, given.pods)
        )
    print(outcomes)
    print(f"pods: {dict(cluster.ends)}; longest drain {max(cluster.drains):.1f} s")
    sys.exit(1 if outcomes.lost else 0)


if __name__ == "__main__":
    main()
