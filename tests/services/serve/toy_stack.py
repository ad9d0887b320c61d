"""A stack of toy services under the real supervisor: toy_stack.py CONFIG ACTIONS, both JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from paceline.core.config import ServeConfig
from paceline.core.errors import PacelineError
from paceline.services.serve.supervisor import Supervisor

SERVICE = Path(__file__).with_name("toy_service.py")


def main() -> int:
    config, actions = ServeConfig(**json.loads(sys.argv[1])), json.loads(sys.argv[2])

    def command(role: str, *arguments: str) -> list[str]:
        return [sys.executable, str(SERVICE), actions.get(role, "serve"), role, *arguments]

    try:
        asyncio.run(Supervisor(config, command).run())
    except PacelineError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
