"""Measure the KV path between two hosts in a real stack: the rate at which blocks come, and the part of this time that
prefill hides.

    python -m bench.transfer.hosts ~/.cache/paceline/smollm2-135m-instruct --prompt-tokens 2000 --requests 12
    python -m bench.transfer.hosts … --transport grpc --mbit 800

Needs root. The hosts are two network namespaces joined by a veth pair. One has kvtransfer and a prefill worker, the
other has Redis, kvtransfer, a decode worker and the gateway. Prompts are random and sent one after the other. The part
of a read that prefill does not hide is the time from the end of the prompt on one host to the adoption of its blocks on
the other. --mbit limits the link in both directions.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from bench.common.namespaces import Host, two_hosts
from bench.common.services import Services
from bench.serving.load import table

START_SECONDS = 180.0
READER, SOURCE = 0, 1


@contextlib.contextmanager
def serving(folder: Path, hosts: Sequence[Host], model: str, transport: str) -> Iterator[Services]:
    """Run the services of both hosts."""
    with Services(folder, model, hosts, kvtransfer=(f"--transport={transport}",)) as services:
        for host in (READER, SOURCE):
            services.start_kvtransfer(host)
        services.start_worker("prefill", 0, SOURCE)
        services.start_worker("decode", 0, READER)
        services.start_gateway()
        try:
            yield services
        except RuntimeError as error:
            raise RuntimeError("\n".join([str(error), *services.last_words()])) from error


def measure(services: Services, prompt_tokens: int, requests: int) -> dict[str, float]:
    """Send the prompts and return the services' figures for them. Raises RuntimeError if the workers do not start."""
    deadline = time.monotonic() + START_SECONDS
    with httpx.Client(base_url=services.url, headers=services.admin, timeout=120, trust_env=False) as http:
        while not _complete(http):
            if time.monotonic() > deadline:
                raise RuntimeError("the two workers did not become ready")
            time.sleep(0.2)
        seconds: list[float] = []
        handoffs: list[float] = []
        # The first two requests are the warm-up: the services connect, and kernels are compiled.
        for number in range(requests + 2):
            if number == 2:
                before = _transfers(http)
                seconds.clear()
                handoffs.clear()
            prompt = [random.randrange(100, 20_000) for _ in range(prompt_tokens)]
            began = time.perf_counter()
            answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, "temperature": 0})
            seconds.append(time.perf_counter() - began)
            (part,) = http.get(f"/trace/{answer.raise_for_status().json()['id']}").json()["parts"]
            handoffs.append(part["attempts"][-1]["handoff"]["ms"] / 1000)
        after = _transfers(http)
    figures = {name: after[name] - before.get(name, 0) for name in after}
    return {"request_seconds": statistics.median(seconds), "handoff_seconds": statistics.mean(handoffs), **figures}


def _complete(http: httpx.Client) -> bool:
    try:
        workers = http.get("/fleet").json()["workers"]
    except httpx.TransportError:
        return False
    return {worker["role"] for worker in workers if worker["state"] == "ready"} >= {"prefill", "decode", "kvtransfer"}


def _transfers(http: httpx.Client) -> dict[str, float]:
    """Return the transfer counters of the reading host."""
    time.sleep(2.5)  # until the gateway has read the next heartbeat
    (reader,) = (worker for worker in http.get("/fleet").json()["workers"] if worker["worker_id"] == f"host-{READER}")
    return {name: value for name, value in reader["stats"].items() if name.startswith("transfer")}


@contextlib.contextmanager
def limited(hosts: Sequence[Host], mbit: int) -> Iterator[None]:
    for host in hosts if mbit else ():
        shape = ("root", "tbf", "rate", f"{mbit}mbit", "burst", "512kb", "latency", "50ms")
        subprocess.run([*host.command(), "tc", "qdisc", "add", "dev", "eth0", *shape], check=True)
    yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--prompt-tokens", type=int, default=2000, help="tokens of a prompt [%(default)s]")
    parser.add_argument("--requests", type=int, default=12, help="requests of the measurement [%(default)s]")
    parser.add_argument(
        "--transport", default="auto", choices=["auto", "ucx", "grpc"], help="transport between the hosts [%(default)s]"
    )
    parser.add_argument("--mbit", type=int, default=0, help="bandwidth of the link; 0 does not limit it")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    try:
        with (
            two_hosts() as hosts,
            limited(hosts, options.mbit),
            tempfile.TemporaryDirectory() as folder,
            serving(Path(folder), hosts, options.model, options.transport) as services,
            hosts[READER].inside(),
        ):
            found = measure(services, options.prompt_tokens, options.requests)
    except RuntimeError as error:
        print(f"bench.transfer.hosts: {error}", file=sys.stderr)
        return 1
    read, handoff = found["transfer_read_seconds"] / options.requests, found["handoff_seconds"]
    paths = {name.removeprefix("transfers_"): count for name, count in found.items() if name.startswith("transfers_")}
    rows = [
        ["transfers, by path", ", ".join(f"{count:g} {path}" for path, count in paths.items() if count)],
        ["failures", f"{found['transfer_failures']:g}"],
        ["MB each", f"{found['transfer_bytes'] / 1e6 / options.requests:.1f}"],
        ["GB/s while reading", f"{found['transfer_bytes'] / options.requests / read / 1e9:.2f}"],
        ["reading each, ms", f"{read * 1e3:.0f}"],
        ["from filled to adopted, ms", f"{handoff * 1e3:.0f}"],
        ["hidden", f"{1 - handoff / read:.0%}"],
        ["request of 4 tokens, median ms", f"{found['request_seconds'] * 1e3:.0f}"],
    ]
    print(table(["figure", f"{options.prompt_tokens} tokens, {options.mbit or 'unlimited'} Mbit/s"], rows))
    if options.json:
        options.json.write_text(json.dumps({**vars(options), "json": None, **found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
