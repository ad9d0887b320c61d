"""A whole stack on one machine: `paceline serve`."""

from __future__ import annotations

from paceline.core.config import ServeConfig
from paceline.core.env import child_command
from paceline.services.serve.supervisor import Supervisor


async def run(config: ServeConfig) -> None:
    """Run a stack until Ctrl-C or SIGTERM. Raises PacelineError if it cannot start or go on."""
    await Supervisor(config, child_command).run()
