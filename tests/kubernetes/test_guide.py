"""What the guides to Kubernetes tell people to type exists, as far as this can be known without a cluster."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from paceline.cli.parser import build_parser
from paceline.simulator.described_load import read_load
from tests.kubernetes.kustomize import build, main_container, pod_of
from tests.kubernetes.test_manifests import KUBERNETES, RELEASES, ROOT, config_of, of

GUIDE = "\n".join((ROOT / "docs" / page).read_text() for page in ("kubernetes.md", "autoscaling.md"))
BLOCKS = re.findall(r"(?:^(?: {4}.*)?\n)+", GUIDE, re.MULTILINE)
RECIPES: list[dict[str, Any]] = [
    each
    for block in BLOCKS
    if block.strip().startswith("apiVersion:")
    for each in yaml.safe_load_all("\n".join(line[4:] for line in block.splitlines()))
]
WORDS = re.findall(r"`(paceline [a-z-]+ [^`]+)`", GUIDE) + [
    line.strip() for block in BLOCKS for line in block.splitlines() if line.strip().startswith("paceline ")
]
"""The commands of paceline, in the text and in blocks."""


def test_each_kustomization_exists() -> None:
    named = set(re.findall(r"kubectl apply -k (\S+?)[`;\n]", GUIDE))
    assert named == {f"kubernetes/{name}" for name in ("model", "base", "gpu", "second", "monitoring")}
    assert all(build(ROOT / name) for name in named)


@pytest.mark.parametrize("command", WORDS)
def test_each_command_is_understood(command: str) -> None:
    build_parser().parse_args(shlex.split(command, comments=True)[1:])


def test_recipes_scale_what_exists() -> None:
    assert [each["kind"] for each in RECIPES] == ["HorizontalPodAutoscaler", "ScaledObject", "ScaledObject"]
    for major, minor in RELEASES:
        kubernetes_validate.validate(RECIPES[0], f"{major}.{minor}", strict=True)
    targets = [each["spec"]["scaleTargetRef"]["name"] for each in RECIPES]
    assert targets == ["gateway", "worker", "prefill"]  # the guide says how to make the last one
    assert {"gateway", "worker"} <= of("Deployment").keys()


def test_recipes_ask_for_metrics_that_gateways_have() -> None:
    reference = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    known = set(re.findall(r"^\| `(paceline:\w+)`", reference, re.MULTILINE))
    named = {re.sub(r"_(bucket|count|sum|total)$", "", name) for name in re.findall(r"paceline:[a-z_]+", GUIDE)}
    assert len(named) >= 3
    assert named <= known


@pytest.mark.parametrize("name", ["gateway", "worker", "kvtransfer"])
def test_the_table_of_ends_has_the_times_of_the_manifests(name: str) -> None:
    (row,) = re.findall(rf"^\| `{name}`[^|]*\|([^|]*)\|([^|]*)\| (\d+) s \|$", GUIDE, re.MULTILINE)
    workload = {**of("Deployment"), **of("DaemonSet")}[name]
    pod = pod_of(workload)
    before, drain, grace = row
    lifecycle = main_container(workload).get("lifecycle")
    assert int(grace) == pod["terminationGracePeriodSeconds"]
    assert [int(n) for n in re.findall(r"(\d+) s", before)] == (
        [lifecycle["preStop"]["sleep"]["seconds"]] if lifecycle else []
    )
    if told := re.findall(r"(\d+) s", drain):
        assert int(told[0]) == config_of(workload).drain_seconds


def test_files_that_the_guide_names_exist() -> None:
    for name in re.findall(r"`((?:kubernetes|bench|compose|tests)/[\w./-]+)`", GUIDE):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`(\w+\.yaml)`", GUIDE):
        assert list(KUBERNETES.glob(f"*/{name}")), name


def test_the_described_load_is_read(tmp_path: Path) -> None:
    (load,) = [block for block in BLOCKS if "[arrivals]" in block]
    file = tmp_path / "load.toml"
    file.write_text("\n".join(line[4:] for line in load.splitlines()))
    assert sum(1 for _ in itertools.islice(read_load(file).trace(), 100)) == 100
