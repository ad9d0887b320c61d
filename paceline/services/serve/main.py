"""A whole stack on one machine: `paceline serve`."""

from __future__ import annotations

import sys

from paceline.core.config import ServeConfig
from paceline.services.serve.supervisor import Supervisor


async def run(config: ServeConfig) -> None:
    """Run a stack until Ctrl-C or SIGTERM. Raises PacelineError if it cannot start or go on."""
    await Supervisor(config, lambda role, *flags: [sys.executable, "-m", "paceline", role, *flags]).run()
