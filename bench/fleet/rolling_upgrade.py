"""Roll a cluster from the previous release to this one under load, and count the streams that its clients lose.

    python -m bench.fleet.rolling_upgrade ~/.cache/paceline/smollm2-135m-instruct --streams 1000

Two hosts on this machine, which share no memory, have a prefill and a decode worker each. Two gateways share the
clients, which stream greedy answers and compare their tokens with those of the undisturbed cluster. Then each host is
upgraded as an orchestrator upgrades a node: its workers drain, its kvtransfer ends, and all of them start again with
the new release. The gateways follow one by one. A client whose gateway leaves continues its stream at the other one, if
its gateway is of a release that knows how.

The release before runs from a git worktree of its own in this process's virtual environment, so its packages must be
those of this release. It is the newest tag, or what --before names.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from bench.common.namespaces import Host
from bench.common.services import Services
from bench.common.systems import ending_on_sigterm
from tests.stack.chaos_clients import Client, Report, completions
from tests.stack.reference import PROMPTS

HERE = Path(__file__).resolve().parents[2]
NATIVE = Path("paceline", "kernels", "native")
SETTLE_SECONDS = 3.0
"""Pause after each step of the upgrade, while the load continues, in seconds."""


def newest_tag() -> str:
    """Return the newest tag before this commit; "" if there is none."""
    command = ["git", "-C", str(HERE), "describe", "--tags", "--abbrev=0", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def release(ref: str) -> Iterator[Path]:
    """Yield a folder with the code of a release, whose kernels have been built."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "release")
        subprocess.run(["git", "-C", HERE, "worktree", "add", "--quiet", "--detach", tree, ref], check=True)
        try:
            same = subprocess.run(["git", "-C", HERE, "diff", "--quiet", ref, "--", NATIVE / "src"]).returncode == 0
            built = list((HERE / NATIVE).glob("_library*.so"))
            if same and built:
                shutil.copy(built[0], tree / NATIVE)
            else:
                subprocess.run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=tree, check=True)
            yield tree
        finally:
            subprocess.run(["git", "-C", HERE, "worktree", "remove", "--force", tree], check=True)


class Upgrade:
    """The processes of a cluster, and their way to the new release."""

    def __init__(self, services: Services, before: Path) -> None:
        self._services = services
        self._before = before
        self._names: dict[int, list[str]] = {0: [], 1: []}
        """Names of each host's processes; the first is its kvtransfer."""

    def start(self) -> list[str]:
        """Start everything with the previous release. Return the names of the gateways."""
        services = self._services
        roles = ("prefill", "decode")
        names = ["kvtransfer-0", "kvtransfer-1", *(f"{role}-{host}" for host in (0, 1) for role in roles)]
        services.releases |= dict.fromkeys([*names, "gateway", "gateway-1"], self._before)
        for host in (0, 1):
            self._names[host] = [services.start_kvtransfer(host)]
            self._names[host] += [services.start_worker(role, host, host) for role in roles]
        gateways = [services.start_gateway(), services.start_gateway()]
        services.wait_ready(*self._names[0], *self._names[1])
        return gateways

    async def host(self, host: int) -> None:
        """Upgrade a host: drain its workers, end its kvtransfer, and start all of them again."""
        kvtransfer, *workers = self._names[host]
        for name in (*workers, kvtransfer):
            await asyncio.to_thread(self._services.processes[name].stop)
        for name in (kvtransfer, *workers):
            await self.begin(name)

    async def gateway(self, name: str, url: str) -> None:
        """Upgrade a gateway. It first ends its streams, or tells its clients to continue at another gateway."""
        await asyncio.to_thread(self._services.processes[name].stop)
        self._services.releases.pop(name)
        self._services.start_again(name)
        await answers(url)

    async def begin(self, name: str) -> None:
        """Start a process with the new release, and wait until it is ready."""
        self._services.releases.pop(name)
        self._services.start_again(name)
        await asyncio.to_thread(self._services.wait_ready, name)


async def answers(url: str) -> None:
    """Wait until a gateway is ready."""
    async with asyncio.timeout(120), httpx.AsyncClient(base_url=url) as http:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await http.get("/health")).status_code == 200:
                    return
            await asyncio.sleep(0.1)


async def ended(report: Report, streams: int) -> None:
    """Wait until `streams` streams have ended, or one has failed."""
    while True:
        if report.ended >= streams or report.wrong:
            return
        await asyncio.sleep(0.5)


async def roll(services: Services, before: Path, arguments: argparse.Namespace) -> Report:
    """Start the cluster, load it, upgrade it, and return the results of the clients."""
    upgrade, report = Upgrade(services, before), Report()
    names = await asyncio.to_thread(upgrade.start)
    urls = [services.url_of(name) for name in names]
    await asyncio.gather(*map(answers, urls))
    async with contextlib.AsyncExitStack() as stack:
        https = [await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=180)) for url in urls]
        questions = completions(PROMPTS)

        def client(first: int) -> Client:
            ordered = [*https[first:], *https[:first]]
            return Client(ordered[0], questions, arguments.tokens, report, gateways_end=True, others=ordered[1:])

        clients = [client(number % len(https)) for number in range(arguments.clients)]
        await clients[0].learn(arguments.clients)
        for each in clients[1:]:
            each.expected = clients[0].expected
        began, over = time.monotonic(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number, each in enumerate(clients):
                group.create_task(each.run(random.Random(number), over))
            for host in (0, 1):
                await asyncio.sleep(SETTLE_SECONDS)
                await upgrade.host(host)
                print(f"host {host} is upgraded; {report.ended} streams have ended", flush=True)
            for name, url in zip(names, urls, strict=True):
                await asyncio.sleep(SETTLE_SECONDS)
                await upgrade.gateway(name, url)
                print(f"{name} is upgraded; {report.ended} streams have ended", flush=True)
            await ended(report, arguments.streams)
            over.set()
        report.seconds = time.monotonic() - began
    return report


def main() -> None:
    ending_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument(
        "--before", default=newest_tag(), help="commit, branch or tag of the release before [%(default)s]"
    )
    parser.add_argument("--streams", type=int, default=1000, help="least number of streams [%(default)s]")
    parser.add_argument("--clients", type=int, default=8, help="streams at a time [%(default)s]")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer [%(default)s]")
    arguments = parser.parse_args()
    if not arguments.before:
        parser.error("this repository has no tag: name the release before with --before")
    with release(arguments.before) as before, tempfile.TemporaryDirectory() as folder:
        options = {
            "prefill": ("--threads=1",),
            "decode": ("--threads=1",),
            "kvtransfer": ("--kv-memory=256MiB",),
            "gateway": ("--served-model-name=m", "--local-prefill-tokens=0"),
        }
        with Services(
            Path(folder), str(arguments.model.expanduser().resolve()), (Host(), Host()), **options
        ) as services:
            report = asyncio.run(roll(services, before, arguments))
    print(f"from {arguments.before} to this release: {report}", *report.wrong, sep="\n")
    sys.exit(bool(report.wrong))


if __name__ == "__main__":
    main()
