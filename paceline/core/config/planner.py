"""Options of the planner's service."""

from __future__ import annotations

from typing import Literal

from paceline.core.config.gateway import GatewayConfig
from paceline.core.config.planner_options import GROUP, PlannerOptions
from paceline.core.config.service import ServiceConfig
from paceline.core.options import option, same_option

PlatformName = Literal["serve", "compose", "kubernetes"]


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
