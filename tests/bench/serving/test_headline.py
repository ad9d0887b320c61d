from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from bench.common.systems import ServerError, System
from bench.serving.headline import WORKLOADS, figures, measure

CLIENT = """\
    #!{python}
    import json, pathlib, sys
    options = dict(argument[2:].split("=", 1) for argument in sys.argv[3:] if "=" in argument)
    assert sys.argv[1:3] == ["bench", "serve"]
    assert options["base-url"] == "http://127.0.0.1:1"
    if options["seed"] == "13":
        sys.exit("no such server")
    result = {{f"p{{percent}}_{{name}}_ms": percent for name in ("ttft", "tpot", "itl") for percent in (50, 90, 99)}}
    result |= dict(completed=int(options["num-prompts"]) - 1, failed=1, duration=2.0)
    result |= dict(output_throughput=int(options["random-output-len"]), total_token_throughput=70)
    pathlib.Path(options["result-dir"], options["result-filename"]).write_text(json.dumps(result))
"""
SYSTEM = System("toy", "http://127.0.0.1:1/")


@pytest.fixture
def client(tmp_path: Path) -> Path:
    file = tmp_path / "vllm"
    file.write_text(textwrap.dedent(CLIENT).format(python=sys.executable))
    file.chmod(0o755)
    return file


def test_figures_of_the_client_get_the_names_of_ours(client: Path, tmp_path: Path) -> None:
    found = measure(client, tmp_path, SYSTEM, WORKLOADS["prompt-heavy"], seed=1)
    assert (found["requests"], found["failures"], found["seconds"]) == (32, 1, 2)
    assert (found["output_tokens_per_s"], found["total_tokens_per_s"]) == (64, 70)
    assert (found["ttft_ms_p50"], found["itl_ms_p99"]) == (50, 99)


def test_a_client_that_fails_is_told_with_its_last_words(client: Path, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="no such server"):
        measure(client, tmp_path, SYSTEM, WORKLOADS["one"], seed=13)
    with pytest.raises(ServerError, match="the client"):
        measure(tmp_path / "missing", tmp_path, SYSTEM, WORKLOADS["one"], seed=1)


def test_results_of_another_release_are_told() -> None:
    with pytest.raises(ServerError, match="duration"):
        figures({"failed": 0, "completed": 1})
