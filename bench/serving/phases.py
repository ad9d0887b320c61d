"""Split the time that a client waits for each token by the phases of its request.

    python -m bench.serving.phases http://127.0.0.1:8000 --workload eight

Times are counted per request, not per process: a step of 30 ms with eight requests costs each of them 30 ms. The client
measures the whole time. /metrics is read before and after the load and gives the time spent
  - in line: from arrival to admission by a decode worker, which reserves the KV blocks;
  - in prefill: from admission to the first token, either in steps that compute the prompt or waiting for them;
  - in the handoff: from the first token until the decode worker knows of the blocks;
  - in decode: from the handoff to the end, either in steps or waiting. A request waits for the step that runs when it
    arrives, between steps, and for tokens on their way.
"In the model" is the forward pass and the logits. "Beside it" is the rest of a step: inputs, sampling, drafts. Both are
wall time, so other work on the machine makes them longer. "Gateway and client" is the rest of the client's time: HTTP,
templating, tokenising, the network and the client itself. The engines' host threads work during steps. The bubble is
the time in which a step had to wait for them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Mapping

from prometheus_client.parser import text_string_to_metric_families

from bench.common.systems import ServerError
from bench.common.workloads import WORKLOADS, make_workload
from bench.serving.load import Server, add_options, new_file, table, wake

SETTLE_SECONDS = 2.5
"""Time until the gateway has the latest counters, which workers send every second."""

Look = Mapping[str, float]
"""Counters of /metrics, summed over all workers, by name, phase and kind: "name/phase/kind"."""


def parse(text: str) -> Look:
    """Parse metrics in the text format of Prometheus."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            kinds = [sample.labels[name] for name in ("phase", "kind") if name in sample.labels]
            name = "/".join([sample.name.removeprefix("paceline:"), *kinds])
            found[name] = found.get(name, 0.0) + sample.value
    return found


def split(before: Look, after: Look, client_seconds: float, tokens: int) -> dict[str, float]:
    """Return milliseconds per token by phase, in the order of a request's life. Their sum is the client's time.

    Args:
        before, after: the counters before and after the requests.
        client_seconds: total time of all these requests, measured by the client.
        tokens: number of tokens that these requests generated.

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
    """Return milliseconds of the engines' host threads, and of the bubble, per token. `split` does not include them."""
    names = {"plan": "host threads: planning", "output": "host threads: output", "bubble": "bubble"}
    return {
        title: 1000 * _gained(before, after, f"worker_step_seconds_total/{kind}") / tokens
        for kind, title in names.items()
    }


def _gained(before: Look, after: Look, name: str) -> float:
    if name not in after:
        raise ServerError(f"/metrics has no {name}: is this a Paceline gateway of this version?")
    return after[name] - before.get(name, 0.0)


async def profile(server: Server, name: str, seed: int, vocab: int) -> dict[str, dict[str, float]]:
    """Run one workload. Raises ServerError if a request fails, because its time belongs to no phase."""
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
    """Return a table with two columns per workload: milliseconds per token, and the share of the total."""
    header = ["phase", *(text for name in found for text in (f"{name}: ms a token", "share"))]
    totals = [sum(found_figures["phases"].values()) for found_figures in found.values()]

    def row(title: str, value: Callable[[Mapping[str, Mapping[str, float]]], float], shares: bool) -> list[str]:
        cells = [title]
        for workload_figures, total in zip(found.values(), totals):
            cells += [f"{value(workload_figures):.3f}", f"{value(workload_figures) / total:.1%}" if shares else ""]
        return cells

    first = next(iter(found.values()))
    lines = [row(name, lambda figures, n=name: figures["phases"][n], True) for name in first["phases"]]  # type: ignore[misc]
    lines.append(row("all", lambda figures: sum(figures["phases"].values()), True))
    lines += [row(name, lambda figures, n=name: figures["beside"][n], False) for name in first["beside"]]  # type: ignore[misc]
    return table(header, lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.serving.phases", description=__doc__.splitlines()[0])
    parser.add_argument("url", metavar="URL", help="a Paceline gateway without other load")
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
        print(f"bench.serving.phases: {error}", file=sys.stderr)
        return 1
    print(show(found))
    if args.out:
        args.out.write_text(json.dumps({"url": args.url, "seed": args.seed, "workloads": found}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
