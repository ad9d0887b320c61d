"""Comparisons of two systems in turns (A B A B ...): rounds of figures, medians, spread, ratios, and their report.

Because of the turns, other work on the machine affects both systems alike. A ratio is A / B. Below 1 is good for A if
the figure is a time, above 1 if it is tokens per second.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence

from bench.common.rounds import Rounds, figures_of, values_of
from bench.common.systems import READY_SECONDS, ServerError, System, ending_on_sigterm, running
from bench.serving.load import Round, new_file, table


def take_turns(
    systems: Sequence[System], rounds: int, ready_seconds: float, measure: Callable[[System, int], Round]
) -> Rounds:
    """Measure all rounds of each system. A system with a command runs during its own turns only.

    Args:
        measure: called with a system that is up and the number of the round.

    Raises:
        ServerError: a system does not run.
    """
    found: dict[str, list[Round]] = {system.name: [] for system in systems}
    for number in range(rounds):
        for system in systems:
            print(f"round {number + 1} of {rounds}: {system.name}", file=sys.stderr, flush=True)
            with running(system, ready_seconds):
                found[system.name].append(measure(system, number))
    return found


def compare(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    systems: Sequence[System],
    measure: Callable[[System, int], Round],
) -> int:
    """Measure the systems in turns and report. Return 1 if a system or a request failed, else 0."""
    ending_on_sigterm()
    try:
        rounds = take_turns(systems, args.rounds, args.ready_seconds, measure)
    except ServerError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return report(args, args.seed, rounds)


def rows(rounds: Rounds) -> list[list[str]]:
    """Return the table's rows: workload, group, figure, A, B, A / B. Values are medians, with minimum and maximum if
    there are several rounds."""
    lines = []
    for place in figures_of(rounds):
        a, b = (values_of(system_rounds, *place) for system_rounds in rounds.values())
        middle_a, middle_b = statistics.median(a), statistics.median(b)
        ratio = f"{middle_a / middle_b:.2f}" if middle_b else "-"
        lines.append([*place, _with_spread(a), _with_spread(b), ratio])
    return lines


def _with_spread(values: Sequence[float]) -> str:
    middle = f"{statistics.median(values):.1f}"
    return f"{middle} ({min(values):.1f}–{max(values):.1f})" if len(values) > 1 else middle


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=_named_url, metavar="NAME=URL")
    parser.add_argument("b", type=_named_url, metavar="NAME=URL")
    parser.add_argument(
        "--start",
        type=_named,
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="command that starts this system for each of its turns, without a shell; may be repeated",
    )
    parser.add_argument(
        "--ready-seconds", type=float, default=READY_SECONDS, help="time for a system to start [%(default)g]"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=new_file, help="JSON file for all figures of all rounds")
    parser.add_argument("--picture", type=new_file, help="file for a picture, such as compare.svg")


def systems_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[System]:
    """Return the two systems that the options name. End the program with an error if the options are inconsistent."""
    commands = {name: tuple(shlex.split(command)) for name, command in args.start}
    systems = [System(name, url, commands.pop(name, ())) for name, url in (args.a, args.b)]
    if systems[0].name == systems[1].name or args.rounds < 1:
        parser.error("give the two systems different names, and at least one round")
    if commands:
        parser.error(f"--start names {', '.join(commands)}, which is neither of the systems")
    if args.picture and importlib.util.find_spec("matplotlib") is None:
        parser.error("--picture needs matplotlib: pip install matplotlib")
    return systems


def _named(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=...")
    return name, value


def _named_url(text: str) -> tuple[str, str]:
    name, url = _named(text)
    if not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=URL")
    return name, url


def report(args: argparse.Namespace, seed: int, rounds: Rounds) -> int:
    """Print the table and write the files that the options ask for. Return 1 if a request failed, else 0."""
    name_a, name_b = rounds
    print(table(["workload", "group", "figure", name_a, name_b, f"{name_a} / {name_b}"], rows(rounds)))
    if args.out:
        systems = {name: {"url": url, "command": dict(args.start).get(name, "")} for name, url in (args.a, args.b)}
        args.out.write_text(json.dumps({"systems": systems, "seed": seed, "rounds": rounds}, indent=2) + "\n")
    if args.picture:
        from bench.common.picture import side_by_side  # matplotlib is not installed everywhere

        side_by_side(rounds, args.picture)
    failures = [
        p for p in figures_of(rounds) if p[2] == "failures" and any(any(values_of(r, *p)) for r in rounds.values())
    ]
    return 1 if failures else 0
