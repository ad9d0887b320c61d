from __future__ import annotations

from tests.services.worker.conftest import start_host, torch_threads

__all__ = ["start_host", "torch_threads"]
