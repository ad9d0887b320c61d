"""A stack of toy services under the real supervisor: toy_stack.py CONFIG ACTIONS GRACE. CONFIG and ACTIONS are JSON.

Processes that end are restarted sooner than in a real stack, because toys recover quickly.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from paceline.core.config import ServeConfig
from paceline.core.errors import PacelineError
from paceline.services.serve import managed_process, processes, supervisor

SERVICE = Path(__file__).with_name("toy_service.py")


def main() -> int:
    config, actions = ServeConfig(**json.loads(sys.argv[1])), json.loads(sys.argv[2])
    processes.GRACE_SECONDS = float(sys.argv[3])
    managed_process._PAUSES = (0.01, 0.05)

    def command(role: str, *arguments: str) -> list[str]:
        return [sys.executable, str(SERVICE), actions.get(role, "serve"), role, *arguments]

    try:
        asyncio.run(supervisor.Supervisor(config, command).run())
    except PacelineError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
