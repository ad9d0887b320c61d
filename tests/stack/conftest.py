from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stack.processes import Stack, serve

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack with one worker of each role and the bundled instruct model, shared by a module.

    In fp32, so that tokens do not depend on what else runs in the same step.
    """
    log = tmp_path_factory.mktemp("stack") / "log"
    with serve(log, MODEL, "--dtype=float32", "--kv-memory=512MiB", "--log-level=info", "--log-format=json") as running:
        yield running
