"""Measure what grows in each process during a long run of mixed requests.

    python -m bench.serving.soak --hours 6 --rate 24 [--out soak.json --picture soak.svg]

Hours are counted in requests: one hour is 7,200 of them, two a second. With `--rate 24`, six hours take half an hour.
Requests use every route; some clients leave, some make mistakes, some send media or batches. Workers are added and
removed, and every ten minutes a process is killed. The first twenty minutes of a process are its warm-up. For each
process that lives for at least another hour, private memory, open descriptors and threads are compared between the
beginning and the end of the time after its warm-up. Shorter lives are named and not judged, because the steps of an
allocator would look like growth. `--spare ROLE` keeps the processes of a role from being killed, so that they live long
enough.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import random
import re
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import matplotlib
import psutil
from matplotlib.figure import Figure

from bench.common.services import role_of
from bench.serving.soak_calls import CALLS, WEIGHTS, Results, Soaker
from paceline.services.common.tasks import end_tasks
from tests.services.gateway.planning.media.samples import audio_file, tone, video_file
from tests.stack.media_chats import image_part, images_of, part, write_model
from tests.stack.processes import Stack, serve

PER_HOUR = 7200
"""Requests of an hour at the nominal rate, two a second."""
WARM_HOURS = 1 / 3
"""Time after which a process is expected to grow no more."""
LEAST_HOURS = 1.0
"""Shortest time after the warm-up for which growth is computed, in hours."""
KILL_HOURS = 1 / 6
VICTIMS = ("decode", "prefill", "decode", "prefill", "decode", "gateway", "prefill", "decode", "prefill", "kvtransfer")
MOST_MEGABYTES = 2.0
"""Largest growth of a process in an hour, in MB."""
WINDOWS = 60
"""Number of parts of a run whose times between tokens are compared."""
RUNNING = 48
"""Most requests that run at the same time."""


class Reading(NamedTuple):
    """One reading of a process."""

    hours: float
    """Requests so far, in hours."""
    memory: int
    """Private memory in bytes."""
    descriptors: int
    threads: int
    cpu: float
    """CPU time so far, in seconds."""


@dataclass
class Life:
    """The readings of one process."""

    name: str
    pid: int
    readings: list[Reading] = field(default_factory=list)

    def settled(self) -> list[Reading]:
        """Return the readings after the process has warmed up; none if there are too few to see growth."""
        begin = self.readings[0].hours + WARM_HOURS
        late = [each for each in self.readings if each.hours >= begin]
        return late if len(late) >= 10 and late[-1].hours - late[0].hours >= LEAST_HOURS else []

    def growth(self) -> dict[str, float] | None:
        """Return the growth of memory in MB an hour, and of descriptors and threads between begin and end."""
        late = self.settled()
        if not late:
            return None
        third, fifth = max(1, len(late) // 3), max(1, len(late) // 5)
        # Medians, because a large request takes memory for a moment.
        before, after = (statistics.median(each.memory for each in part) for part in (late[:third], late[-third:]))
        hours = statistics.median(each.hours for each in late[-third:]) - statistics.median(
            each.hours for each in late[:third]
        )
        more = {
            # The least of a while, because connections come and go.
            name: min(getattr(each, name) for each in late[-fifth:]) - min(getattr(each, name) for each in late[:fifth])
            for name in ("descriptors", "threads")
        }
        growth = round((after - before) / 1e6 / hours, 2)
        return {"megabytes_per_hour": growth, "hours": round(late[-1].hours - late[0].hours, 2), **more}


class Watch:
    """Reads the processes of a stack and its folders from time to time."""

    def __init__(self, stack: Stack, folders: Sequence[Path], count_hours: Callable[[], float]) -> None:
        self._stack, self._folders, self._hours = stack, folders, count_hours
        self.lives: dict[int, Life] = {}
        self.files: list[tuple[float, int]] = []

    async def run(self, seconds: float) -> None:
        while True:
            await asyncio.to_thread(self.read)
            await asyncio.sleep(seconds)

    def read(self) -> None:
        now = self._hours()
        names = {int(pid): name for name, pid in re.findall(r"^  (\S+) +pid (\d+)", self._stack.process.text, re.M)}
        for process in self._stack.family():
            with contextlib.suppress(psutil.Error, OSError):  # the process has just ended
                cpu = sum(process.cpu_times()[:2])
                reading = Reading(now, _private(process.pid), process.num_fds(), process.num_threads(), cpu)
                life = self.lives.setdefault(process.pid, Life("", process.pid))
                life.readings.append(reading)
                # Read again each time, because a process that has just been forked has the words of its parent.
                life.name = names.get(process.pid) or _name(process)
        self.files.append((now, sum(1 for folder in self._folders for _ in folder.rglob("*"))))


def _private(pid: int) -> int:
    """Return the private memory of a process in bytes. Raises OSError if it has ended."""
    found = re.search(r"^RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _name(process: psutil.Process) -> str:
    """Return a name for a process that the supervisor has not announced."""
    words = process.cmdline()
    if any("redis" in word or "valkey" in word for word in words[:1]):
        return "redis"
    # `python -m paceline ROLE`
    return words[3] if words[1:3] == ["-m", "paceline"] else "media decoder"


async def disturb(
    stack: Stack,
    http: httpx.AsyncClient,
    count_hours: Callable[[], float],
    draw: random.Random,
    kills: list[str],
    spared: Sequence[str],
) -> None:
    """Kill a process every ten minutes, and add and remove a worker in between."""
    victims = [role for role in VICTIMS if role not in spared]
    turn = 0
    while True:
        turn += 1
        while count_hours() < turn * KILL_HOURS / 2:  # noqa: ASYNC110 (other tasks count)
            await asyncio.sleep(0.5)
        try:
            if turn % 2:
                role = ("decode", "prefill")[turn // 2 % 2]
                await http.post("/fleet/scale", json={role: 3})
                await asyncio.sleep(20)
                await http.post("/fleet/scale", json={role: 2})
            elif victims:
                role = victims[(turn // 2 - 1) % len(victims)]
                if living := stack.living(role):
                    os.kill(draw.choice(living), signal.SIGKILL)
                    kills.append(role)
        except (httpx.HTTPError, ProcessLookupError):
            continue  # the gateway or the process has ended just now


async def soak(
    stack: Stack, client: Callable[[random.Random], Soaker], arguments: argparse.Namespace, folders: Sequence[Path]
) -> dict[str, Any]:
    """Send requests for a while and return all figures.

    Args:
        client: returns a client that draws its requests from a source of its own.
        folders: the folders whose files are counted.
    """
    draw = random.Random(arguments.seed)
    source = client(draw)
    results, http = source.results, source.http
    total = int(arguments.hours * PER_HOUR)
    places, names = asyncio.Semaphore(RUNNING), list(CALLS)
    weights = [WEIGHTS.get(name, 1) for name in names]
    kills: list[str] = []

    def count_hours() -> float:
        return results.sent.total() / PER_HOUR

    async def one(path: str, soaker: Soaker) -> None:
        try:
            await soaker.run(path, CALLS[path])
        finally:
            places.release()

    watch = Watch(stack, folders, count_hours)
    tasks = [
        asyncio.create_task(watch.run(arguments.every)),
        asyncio.create_task(disturb(stack, http, count_hours, random.Random(draw.random()), kills, arguments.spare)),
    ]
    began = time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            while (sent := results.sent.total()) < total:
                await asyncio.sleep(draw.expovariate(arguments.rate))
                await places.acquire()
                (path,) = draw.choices(names, weights)
                group.create_task(one(path, client(random.Random(draw.random()))))
                if arguments.progress and sent % 1000 == 0:
                    print(f"{count_hours():.2f} h, {sent} requests, {len(results.odd)} odd", flush=True)
    finally:
        await end_tasks(*tasks)
    seconds = time.monotonic() - began
    await stack.settled()
    watch.read()
    return report(results, watch, kills, seconds, began)


def report(results: Results, watch: Watch, kills: Sequence[str], seconds: float, began: float) -> dict[str, Any]:
    """Return the figures of a run."""
    lives = [life for life in watch.lives.values() if len(life.readings) > 1]
    growths = {f"{life.name} {life.pid}": found for life in lives if (found := life.growth()) is not None}
    windows = itl_windows([(at - began, gap) for at, gap in results.gaps], seconds)
    warm = windows[WINDOWS // 10 :]
    halves = [statistics.median(half) if half else None for half in (warm[: len(warm) // 2], warm[len(warm) // 2 :])]
    return {
        "requests": results.sent.total(),
        "seconds": round(seconds, 1),
        "by_route": dict(results.sent),
        "busy": results.busy,
        "broken": results.broken,
        "left": results.left,
        "odd": results.odd,
        "kills": list(kills),
        "growth": growths,
        "cpu_ms_per_request": cpu_per_request(lives),
        "itl_p99_ms": windows,
        "itl_p99_ms_first_and_last_half": halves,
        "files": watch.files,
        "lives": [asdict(life) for life in lives],
    }


def cpu_per_request(lives: Sequence[Life]) -> dict[str, list[float]]:
    """Return the CPU time of each role in ms for each request, in tenths of the run. The starts of processes, which are
    the time before the first two readings, do not count.
    """
    end = max(each.readings[-1].hours for each in lives)
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0] * 10)
    for life in lives:
        for before, after in itertools.pairwise(life.readings[1:]):
            tenth = min(9, int(10 * after.hours / end))
            spent[role_of(life.name)][tenth] += 1000 * (after.cpu - before.cpu) / (end / 10 * PER_HOUR)
    return {role: [round(each, 2) for each in tenths] for role, tenths in sorted(spent.items())}


def itl_windows(gaps: Sequence[tuple[float, float]], seconds: float) -> list[float]:
    """Return the p99 of the time between tokens in each of WINDOWS equal parts of a run, in ms.

    A worker that starts after a kill takes the cores for some seconds. So a median of windows shows what lasts, and one
    p99 of everything would show when the kills were.

    Args:
        gaps: for each token after the first of an answer, its time and the time since the token before it, in seconds.
    """
    windows = defaultdict(list)
    for at, gap in gaps:
        windows[min(WINDOWS - 1, int(WINDOWS * at / seconds))].append(gap)
    return [round(1000 * sorted(own)[int(0.99 * len(own))], 2) for _, own in sorted(windows.items())]


def draw_picture(figures: dict[str, Any], path: Path) -> None:
    """Draw the private memory of each process over the hours."""
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "paceline", "font.size": 8})
    roles: dict[str, list[Any]] = defaultdict(list)
    for life in figures["lives"]:
        roles[role_of(life["name"])].append(life)
    figure = Figure(figsize=(4 * min(3, len(roles)), 2.6 * -(-len(roles) // 3)), layout="constrained")
    grid = figure.subplots(-(-len(roles) // 3), min(3, len(roles)), squeeze=False)
    for axes, (role, lives) in zip(grid.flat, sorted(roles.items())):
        for life in lives:
            axes.plot([each[0] for each in life["readings"]], [each[1] / 1e6 for each in life["readings"]], linewidth=1)
        axes.set(title=role, xlabel="hours at two requests a second", ylabel="private memory, MB", ylim=(0, None))
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)


def show(figures: dict[str, Any]) -> bool:
    """Print the figures. Return whether they reach all goals."""
    print(
        f"{figures['requests']} requests in {figures['seconds']:.0f} s; {figures['busy']} told to come back,"
        f" {figures['broken']} broken by {len(figures['kills'])} kills, {figures['left']} left by their clients"
    )
    print(
        "ITL p99, medians of the windows of the first and the last half (ms):",
        *figures["itl_p99_ms_first_and_last_half"],
    )
    print("CPU time for each request, in tenths of the run (ms):")
    for role, tenths in figures["cpu_ms_per_request"].items():
        print(f"  {role}:", *tenths)
    good = not figures["odd"]
    for name, growth in figures["growth"].items():
        fine = growth["megabytes_per_hour"] <= MOST_MEGABYTES and growth["descriptors"] <= 0 and growth["threads"] <= 0
        good &= fine
        print(f"{'  ' if fine else '! '}{name}:", ", ".join(f"{value:g} {key}" for key, value in growth.items()))
    judged = figures["growth"].keys()
    short = [name for life in figures["lives"] if (name := f"{life['name']} {life['pid']}") not in judged]
    print("  too short to be judged:", ", ".join(short) or "none")
    print(
        "files at the beginning, in the middle, at the end:",
        *(figures["files"][at][1] for at in (0, len(figures["files"]) // 2, -1)),
    )
    print(f"odd answers: {len(figures['odd'])}", *figures["odd"][:20], sep="\n")
    return good


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        model, media, media_options = arguments.model, [], {}
        if not model:
            model = str(folder / "model")
            media_options = write_model(Path(model)).options
            media = [
                *map(image_part, images_of(1, 6)),
                part("video", video_file(4, (32, 32))),
                part("audio", audio_file(tone(16_000, 0.5), 16_000)),
            ]
        options = ("--prefill=2", "--decode=2", f"--store={folder / 'store.db'}", f"--kv-memory={arguments.kv_memory}")
        tiny = () if arguments.model else ("--dtype=float32",)
        environment = {"TMPDIR": str(folder / "tmp")}
        with serve(folder / "log", model, *options, *tiny, *arguments.options, environment=environment) as stack:
            limits = httpx.Limits(max_connections=2 * RUNNING, max_keepalive_connections=RUNNING)
            async with httpx.AsyncClient(base_url=stack.url, timeout=None, limits=limits) as http:
                served = (await http.get("/v1/models")).json()["data"][0]["id"]
                client = functools.partial(Soaker, http, served, media, media_options, Results())
                return await soak(stack, client, arguments, (folder / "tmp", Path("/dev/shm")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=1.0, help="hours at two requests a second, 7,200 requests each")
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument(
        "--model", default="", help="name or folder of the model [a tiny random Gemma 4, which takes media]"
    )
    parser.add_argument("--kv-memory", default="64MiB", help="shared KV memory of the host")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two readings of the processes")
    parser.add_argument("--seed", type=int, default=1, help="seed of everything that is random [%(default)s]")
    parser.add_argument(
        "--spare", choices=sorted(set(VICTIMS)), action="append", default=[], help="never kill this role"
    )
    parser.add_argument("--progress", action="store_true", help="print a line every 1,000 requests")
    parser.add_argument("--out", type=Path, help="file for all figures, as JSON")
    parser.add_argument("--picture", type=Path, help="file for a picture of the processes' memory")
    parser.add_argument("options", nargs="*", help="further options of `paceline serve`, after --")
    arguments = parser.parse_args()
    figures = asyncio.run(run(arguments))
    if arguments.out:
        arguments.out.write_text(json.dumps(figures))
    if arguments.picture:
        draw_picture(figures, arguments.picture)
    raise SystemExit(not show(figures))


if __name__ == "__main__":
    main()
