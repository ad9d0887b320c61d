"""Options of the planner's service, and options of its decisions, which `paceline serve --planner` also has."""

from __future__ import annotations

from typing import Literal

from paceline.core.config.gateway import GatewayConfig
from paceline.core.config.service import ServiceConfig
from paceline.core.options import Options, Size, option, same_option
from paceline.core.planner.objectives import Latency, Objectives, RoleLimits

GROUP = "planner"
MOST_WORKERS = 4096
"""Largest number of workers of one role that an option accepts."""

PlatformName = Literal["serve", "compose", "kubernetes"]


def _count(default: int, help: str) -> int:
    count: int = option(default, help, GROUP, at_least=0, at_most=MOST_WORKERS)
    return count


class PlannerOptions(Options):
    """The operator's wishes for a fleet that the planner scales."""

    ttft_seconds: float = option(
        2.0,
        "objective of the planner for the time to the first token, in seconds, for all classes of requests that "
        "--classes-file gives none; 0 is no objective",
        GROUP,
        at_least=0,
    )
    itl_seconds: float = option(
        0.1,
        "objective of the planner for the time between tokens, in seconds; 0 is no objective",
        GROUP,
        at_least=0,
    )
    objective_share: float = option(
        0.95,
        "share of the requests that the planner keeps within these times; classes of --classes-file have their own "
        "(percentile)",
        GROUP,
        at_least=0.5,
        at_most=0.999,
    )
    least_prefill: int = _count(1, "least prefill workers that the planner leaves")
    most_prefill: int = _count(8, "most prefill workers that the planner starts")
    least_decode: int = _count(
        1,
        "least decode workers that the planner leaves; with 0, a fleet without requests has none, and the next request "
        "waits until the first one has started",
    )
    most_decode: int = _count(8, "most decode workers that the planner starts")
    least_encode: int = _count(0, "least encode workers that the planner leaves")
    most_encode: int = _count(0, "most encode workers that the planner starts")
    least_pool: int = _count(1, "least pool workers that the planner leaves, for a model that is an encoder of texts")
    most_pool: int = _count(8, "most pool workers that the planner starts")
    prefill_devices: int = _count(1, "devices of the budget that a prefill worker takes")
    decode_devices: int = _count(1, "devices of the budget that a decode worker takes")
    encode_devices: int = _count(1, "devices of the budget that an encode worker takes")
    pool_devices: int = _count(1, "devices of the budget that a pool worker takes")
    budget: int = _count(0, "most devices that all workers take together, those that drain included; 0 is no limit")
    flips: bool = option(True, "the planner may give a running worker another role, if the platform can", GROUP)
    advisory: bool = option(False, "the planner only shows what it would do", GROUP)
    fast_seconds: float = option(
        5.0, "time between two decisions of the planner from measured load, in seconds", GROUP, at_least=0.5
    )
    slow_seconds: float = option(
        60.0,
        "time between two forecasts in seconds; a worker drains only if neither of the last two needs it",
        GROUP,
        at_least=1,
    )
    idle_seconds: float = option(
        300.0, "the last workers of a role leave after this many seconds without a request", GROUP, at_least=1
    )
    stale_seconds: float = option(
        15.0, "the planner takes no worker away while a report is older than this many seconds", GROUP, at_least=2
    )
    record: str = option(
        "", "file to which the planner writes each report and decision, one a line, for --replay", GROUP
    )
    record_size: Size = option(
        "64MiB", "size of the file of --record after which it is renamed to FILE.1; the newest 4 are kept", GROUP
    )

    def objectives(self, classes: dict[str, Latency]) -> Objectives:
        """Return the objectives. Raises ConfigError if they contradict each other.

        Args:
            classes: objectives of classes of requests, from --classes-file.
        """
        made = Objectives(
            classes=classes,
            default=Latency(self.ttft_seconds or None, self.itl_seconds or None, self.objective_share),
            roles={
                "prefill": RoleLimits(self.least_prefill, self.most_prefill, self.prefill_devices),
                "decode": RoleLimits(self.least_decode, self.most_decode, self.decode_devices),
                "encode": RoleLimits(self.least_encode, self.most_encode, self.encode_devices),
                "pool": RoleLimits(self.least_pool, self.most_pool, self.pool_devices),
            },
            budget=self.budget or None,
            advisory=self.advisory,
            flips=self.flips,
            fast_seconds=self.fast_seconds,
            slow_seconds=self.slow_seconds,
            idle_seconds=self.idle_seconds,
            stale_seconds=self.stale_seconds,
        )
        made.check()
        return made


class PlannerConfig(ServiceConfig, PlannerOptions):
    """Options of the planner's service. Its port is for health checks."""

    platform: PlatformName = option(
        "serve",
        "platform that starts and stops the workers. serve: paceline serve --planner, which starts this service. "
        "compose: docker compose, through the docker engine at --docker-socket. kubernetes: the API server",
        GROUP,
    )
    supervisor_socket: str = same_option(GatewayConfig, "supervisor_socket")
    classes_file: str = same_option(GatewayConfig, "classes_file")
    docker_socket: str = option(
        "",
        "Unix socket of the docker engine, such as /var/run/docker.sock, for --platform compose. Whoever may use it is "
        "root on the host",
        GROUP,
    )
    compose_project: str = option(
        "", "name of the compose project whose workers are scaled; default: the one that this service runs in", GROUP
    )
    compose_prefix: str = option(
        "",
        "text before the role in the names of the project's services, such as second- if the workers are "
        "those of second-prefill and second-decode; --cluster names their cluster",
        GROUP,
    )
    replay: str = option(
        "",
        "file of --record: make its decisions again from its reports, print those that differ, and end; nothing is "
        "scaled",
        GROUP,
    )
