"""Where a token's time goes: what a client waits for each token it gets, split by what its request did meanwhile.

    python -m bench.phases http://127.0.0.1:8000 --workload eight

All is of requests, not of processes: a step that takes 30 ms with eight requests in it costs each of them 30 ms. The
client measures the whole; /metrics is read before and behind the load and says how much of it was spent
  - in line: from arrival to admission by a decode worker, which reserves the KV blocks;
  - in prefill: from there to the first token; in steps that compute the prompt, or waiting for them;
  - in the handoff: from the first token until the decode worker knows of the blocks;
  - in decode: from there to the end; in steps, or waiting: for the step that is under way when a request comes, between
    steps, and for tokens on their way.
"In the model" is the forward pass and the logits, "beside it" what else a step does: forming inputs, sampling, drafts;
both by the clock, so that a core which others take makes them longer. What is left of the client's time is HTTP,
templating, tokenising, the network and the client. The host threads of the engines work beside steps; where a step had
to wait for them, that is the bubble.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Mapping

from prometheus_client.parser import text_string_to_metric_families

from bench.load import Server, add_options, new_file, table, wake
from bench.systems import ServerError
from bench.workloads import WORKLOADS, make_workload

SETTLE_SECONDS = 2.5
"""Workers tell the gateway their counters every second."""

Look = Mapping[str, float]
"""Counters of /metrics by name, with what tells kinds and phases apart; of all workers together."""


def parse(text: str) -> Look:
    """The text format of Prometheus."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            kinds = [sample.labels[name] for name in ("phase", "kind") if name in sample.labels]
            name = "/".join([sample.name.removeprefix("paceline:"), *kinds])
            found[name] = found.get(name, 0.0) + sample.value
    return found


def split(before: Look, after: Look, client_seconds: float, tokens: int) -> dict[str, float]:
    """Milliseconds for each of `tokens`, by phase, in the order of a request's life; together they are the client's.

    Args:
        client_seconds: what all requests between the two looks took, as the client has seen it.

    Raises:
        ServerError: a metric is missing.
    """

    def spent(name: str) -> float:
        return 1000 * _gained(before, after, name) / tokens

    def of_requests(name: str) -> float:
        return spent(f"{name}_seconds_sum")

    def in_steps(phase: str, kind: str) -> float:
        return spent(f"worker_request_step_seconds_total/{phase}/{kind}")

    handoff = of_requests("request_handoff_time")
    figures = {
        "gateway and client": 1000 * client_seconds / tokens - of_requests("e2e_request_latency"),
        "in line": of_requests("request_queue_time"),
    }
    whole = {"prefill": of_requests("request_prefill_time"), "decode": of_requests("request_decode_time") - handoff}
    for phase, seconds in whole.items():
        steps = {f"{phase}: in the model": in_steps(phase, "model"), f"{phase}: beside it": in_steps(phase, "other")}
        figures |= steps | {f"{phase}: waiting": seconds - sum(steps.values())}
        if phase == "prefill":
            figures["handoff"] = handoff
    return figures


def beside(before: Look, after: Look, tokens: int) -> dict[str, float]:
    """Milliseconds of the engines' threads for each token; no part of what `split` gives."""
    names = {"plan": "host threads: planning", "output": "host threads: output", "bubble": "bubble"}
    return {
        title: 1000 * _gained(before, after, f"worker_step_seconds_total/{kind}") / tokens
        for kind, title in names.items()
    }


def _gained(before: Look, after: Look, name: str) -> float:
    if name not in after:
        raise ServerError(f"/metrics has no {name}: is this the gateway of a Paceline of this version?")
    return after[name] - before.get(name, 0.0)


async def profile(server: Server, name: str, seed: int, vocab: int) -> dict[str, dict[str, float]]:
    """Runs one workload. Raises ServerError where a request fails: its time belongs to no phase."""
    await asyncio.sleep(SETTLE_SECONDS)
    before = parse(await server.metrics())
    outcomes = await server.run(make_workload(name, seed, vocab))
    await asyncio.sleep(SETTLE_SECONDS)
    after = parse(await server.metrics())
    for outcome in outcomes:
        if outcome.error:
            raise ServerError(f"{name}: {outcome.error}")
    tokens = sum(outcome.completion_tokens for outcome in outcomes)
    seconds = sum(outcome.ended - outcome.sent for outcome in outcomes)
    return {"phases": split(before, after, seconds, tokens), "beside": beside(before, after, tokens)}


def show(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """A table with two columns for each workload: milliseconds a token, and the share of the whole."""
    header = ["phase", *(text for name in found for text in (f"{name}: ms a token", "share"))]
    totals = [sum(own["phases"].values()) for own in found.values()]

    def row(title: str, value: Callable[[Mapping[str, Mapping[str, float]]], float], shares: bool) -> list[str]:
        cells = [title]
        for own, total in zip(found.values(), totals):
            cells += [f"{value(own):.3f}", f"{value(own) / total:.1%}" if shares else ""]
        return cells

    first = next(iter(found.values()))
    lines = [row(name, lambda own, n=name: own["phases"][n], True) for name in first["phases"]]  # type: ignore[misc]
    lines.append(row("all", lambda own: sum(own["phases"].values()), True))
    lines += [row(name, lambda own, n=name: own["beside"][n], False) for name in first["beside"]]  # type: ignore[misc]
    return table(header, lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.phases", description=__doc__.splitlines()[0])
    parser.add_argument("url", metavar="URL", help="a Paceline gateway, with nobody else's requests")
    parser.add_argument("--out", type=new_file, help="JSON file for all figures")
    add_options(parser)
    args = parser.parse_args()

    async def run() -> dict[str, dict[str, dict[str, float]]]:
        async with Server(args.url, api_key=args.api_key) as server:
            await wake(server, args.seed, args.vocab)
            names = args.workload or list(WORKLOADS)
            return {name: await profile(server, name, args.seed, args.vocab) for name in names}

    try:
        found = asyncio.run(run())
    except ServerError as error:
        print(f"bench.phases: {error}", file=sys.stderr)
        return 1
    print(show(found))
    if args.out:
        args.out.write_text(json.dumps({"url": args.url, "seed": args.seed, "workloads": found}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
