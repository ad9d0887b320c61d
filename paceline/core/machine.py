"""What this machine has."""

from __future__ import annotations

import re
from pathlib import Path


def available_memory() -> int | None:
    """Bytes that can be taken without swapping; None where the system does not tell."""
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None
