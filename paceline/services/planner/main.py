"""The process of a planner: plans for one cluster until SIGTERM, or replays a record."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from pathlib import Path

from paceline.core.config import PlannerConfig
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.options import parse_bytes
from paceline.core.planner.objectives import class_latencies
from paceline.core.planner.planner import Planner
from paceline.core.request_classes import read_classes
from paceline.services.common.credentials import read_credentials
from paceline.services.common.lifecycle import announce_ready, reachable_address, stop_on_signals, unique_name
from paceline.services.common.member_signatures import MemberSignatures
from paceline.services.common.process_samples import ProcessSamples
from paceline.services.common.registry import Member, Registrar, connect, metrics_to_pb
from paceline.services.common.rpc import RpcServer
from paceline.services.common.seals import Seal
from paceline.services.planner.recording import RecordFile, replay_file
from paceline.services.planner.role_teller import RoleTeller
from paceline.services.planner.service import PlannerService
from paceline.services.platforms.platform import Platform

log = logging.getLogger(__name__)


async def run(config: PlannerConfig) -> None:
    """Plan until SIGTERM, or replay a record. Raises PacelineError."""
    if config.replay:
        _replay(Path(config.replay))
        return
    stop = stop_on_signals()
    latencies = class_latencies(read_classes(config.classes_file), config.objective_share)
    planner = Planner(config.objectives(latencies))
    record = RecordFile(Path(config.record), parse_bytes(config.record_size), planner) if config.record else None
    name = unique_name("planner")
    async with AsyncExitStack() as undo:
        client = connect(config.redis)
        undo.push_async_callback(client.aclose)
        credentials = read_credentials(config)
        signatures = MemberSignatures(credentials.secret, config.cluster)
        platform = await make_platform(config, RoleTeller(client, config.cluster, credentials, signatures))
        undo.push_async_callback(platform.close)
        server = RpcServer(config.host, config.port, credentials, name)
        undo.push_async_callback(server.close, 0)
        address = server.known_as(reachable_address(config, server.bind()))
        await server.start()
        service = PlannerService(
            planner,
            platform,
            client,
            config.cluster,
            signatures,
            Seal(credentials.secret),
            name,
            config.drain_seconds,
            record,
            on_decision=lambda: registrar.announce(),  # it is made below, because it tells what the service reports
        )
        epoch, process = time.time_ns(), ProcessSamples()

        def describe() -> Member:
            metrics = metrics_to_pb([*service.metrics.samples(), *process])
            return Member(name, "planner", epoch, address, "", plan=service.report(), metrics=metrics)

        registrar = Registrar(config.redis, config.cluster, describe, signatures)
        undo.push_async_callback(registrar.stop)
        await registrar.start()
        await server.set_ready(True)
        announce_ready(config, address)
        log.info("planner %s scales the fleet of %s", name, platform.name)
        await service.run(stop)


async def make_platform(config: PlannerConfig, teller: RoleTeller) -> Platform:
    """Return the platform that the options name. Raises ConfigError if an option is missing."""
    # Each platform has packages of its own.
    if config.platform == "kubernetes":
        from paceline.services.platforms.kubernetes import KubernetesPlatform
        from paceline.services.platforms.kubernetes_api import KubernetesApi

        return KubernetesPlatform(KubernetesApi.in_cluster(), teller.tell)
    if config.platform == "compose":
        from paceline.services.platforms.compose import open_compose

        project, prefix = config.compose_project, config.compose_prefix
        return await asyncio.to_thread(open_compose, config.docker_socket, project, teller.workers, prefix)
    from paceline.services.platforms.serve import ServePlatform

    if not config.supervisor_socket:
        raise ConfigError(
            "paceline serve --planner starts this service for its own workers; for others give --platform compose or "
            "kubernetes"
        )
    return ServePlatform(config.supervisor_socket)


def _replay(path: Path) -> None:
    """Print the decisions of a record that this release makes differently. Raises PacelineError if there are any."""
    decisions = differing = 0
    for each in replay_file(path):
        decisions += 1
        if not each.same:
            differing += 1
            print(f"line {each.line}: recorded: {each.recorded.line}\n{'':>10}now: {each.decided.line}")
    if differing:
        raise PacelineError(f"{differing} of {decisions} decisions differ from the record")
    print(f"all {decisions} decisions are as recorded")
