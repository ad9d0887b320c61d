"""The processes that a stack starts and waits for."""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.core.config import ServeConfig
from paceline.services.serve.processes import Processes
from tests.services.gateway.toy_model import VOCAB_SIZE, write_toy_model
from tests.tiny_checkpoints import write_tiny

LOOK = """
import atexit, sys
from paceline.cli import main
atexit.register(lambda: open({file!r}, "w").write(str("torch" in sys.modules)))
sys.exit(main(sys.argv[1:]))
"""
"""The command line, which writes to a file whether torch was imported."""


async def test_a_start_imports_no_torch_to_prepare_its_model(tmp_path: Path) -> None:
    model = write_toy_model(tmp_path / "model")
    write_tiny(model, "llama", vocab_size=VOCAB_SIZE)
    seen = tmp_path / "seen"
    program = LOOK.format(file=str(seen))
    processes = Processes(lambda *arguments: (sys.executable, "-c", program, *arguments), drain_seconds=0)
    assert await processes.prepare("prepare", ServeConfig(model=str(model))) == model
    assert seen.read_text() == "False"
