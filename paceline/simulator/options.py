"""The options of `paceline simulate`. This module imports no other part of the simulator, so that help texts come
fast.
"""

from __future__ import annotations

import argparse
from pathlib import Path

DESCRIPTION = """\
Predict what a fleet does under a load, before the fleet exists. `paceline profile` measures a running stack. This
command takes its times, a load, and a number of workers, and prints times to the first token and between tokens, good
requests per second, devices and cost. How many of each: --find. Which cache size: --cache-tokens with several numbers.
What if a third fails: --fail 0.33@600. What would the planner do: --planner. Whether disaggregation pays is said for
each fleet with prefill workers. For example: paceline simulate --profile a100.json --trace day.jsonl --find --ttft 1
--itl 0.05"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline simulate` to its parser."""
    load = parser.add_argument_group("load (one of --trace and --load)")
    load.add_argument(
        "--trace", type=Path, metavar="FILE", help="requests that a gateway recorded with --record-trace, or Mooncake's"
    )
    load.add_argument("--load", type=Path, metavar="FILE", help="TOML or JSON file that describes a load")
    load.add_argument(
        "--speed", type=float, default=1.0, metavar="FACTOR", help="factor by which requests come faster [%(default)s]"
    )
    load.add_argument("--requests", type=int, default=0, metavar="N", help="only the first N requests; 0 for all")
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument(
        "--profile", type=Path, required=True, metavar="FILE", help="times of a stack, from paceline profile"
    )
    fleet.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill workers [%(default)s]")
    fleet.add_argument("--decode", type=int, default=1, metavar="N", help="decode workers [%(default)s]")
    fleet.add_argument(
        "--aggregated", action="store_true", help="let each of these workers both compute prompts and decode"
    )
    fleet.add_argument(
        "--find", action="store_true", help="find the fewest workers that meet the objectives, beginning with these"
    )
    fleet.add_argument(
        "--no-compare",
        action="store_true",
        help="do not say whether disaggregation pays, which needs one more simulation, of workers that do both",
    )
    fleet.add_argument(
        "--per-host",
        type=int,
        metavar="N",
        help="workers of one host [8]. If the workers of the profile share cores, each host has one of each role",
    )
    fleet.add_argument(
        "--cache-tokens",
        type=_numbers,
        default=(0,),
        metavar="N[,N…]",
        help="tokens of KV that a host holds; 0 for the profile's. Several numbers are compared",
    )
    fleet.add_argument(
        "--max-cpu-loras", type=int, default=32, metavar="N", help="most adapters in a worker's memory [%(default)s]"
    )
    fleet.add_argument(
        "--adapter-seconds",
        type=float,
        default=0.1,
        metavar="SECONDS",
        help="time in which a worker reads an adapter; paceline:lora_load_seconds of a fleet tells it [%(default)s]",
    )
    fleet.add_argument("--cache-policy", default="adaptive", metavar="NAME", help="cache policy [%(default)s]")
    fleet.add_argument(
        "--fail",
        action="append",
        default=[],
        metavar="SHARE@SECONDS",
        help="end this share of the workers at this second, such as 0.33@600; they start again. May be repeated",
    )
    fleet.add_argument("--no-restart", action="store_true", help="do not start workers again that have failed")
    fleet.add_argument(
        "--planner", action="store_true", help="let the planner scale the fleet, beginning with these workers"
    )
    fleet.add_argument(
        "--budget", type=int, default=0, metavar="DEVICES", help="most devices for the planner; 0 for no limit"
    )
    goals = parser.add_argument_group("objectives")
    goals.add_argument("--ttft", type=float, default=2.0, metavar="SECONDS", help="time to first token [%(default)s]")
    goals.add_argument(
        "--itl", type=float, default=0.1, metavar="SECONDS", help="mean time between tokens of a request [%(default)s]"
    )
    goals.add_argument(
        "--share", type=float, default=0.95, metavar="SHARE", help="share of requests that must meet both [%(default)s]"
    )
    goals.add_argument(
        "--queue-seconds", type=float, default=60.0, metavar="SECONDS", help="longest wait for a worker [%(default)s]"
    )
    goals.add_argument(
        "--classes-file",
        type=Path,
        metavar="FILE",
        help="the gateway's file of classes: objectives, which replace those above, and weights. Requests that would "
        "miss an objective while they wait are refused, as the gateway does",
    )
    goals.add_argument("--max-waiting", type=int, default=256, metavar="N", help="most waiting requests [%(default)s]")
    goals.add_argument(
        "--retries",
        type=int,
        default=0,
        metavar="N",
        help="times that a client comes back after a refusal, when it was told to [%(default)s]",
    )
    goals.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all that is random [%(default)s]")
    results = parser.add_argument_group("results")
    results.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    results.add_argument("--html", type=Path, metavar="FILE", help="write a page with charts")


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as 500000,1000000. Raises argparse.ArgumentTypeError."""
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers, such as 500000,1000000") from None
