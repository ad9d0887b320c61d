"""A small part of Kustomize, as much as kubernetes/ uses. Anything else in a kustomization is an error, so that a test
cannot pass on manifests that were only half read."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonpatch
import yaml

Json = dict[str, Any]

_KEYS = {"apiVersion", "kind", "namespace", "labels", "resources", "configMapGenerator", "images", "patches"}
_OF_THE_CLUSTER = {"Namespace", "PriorityClass", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
_TEMPLATES = {"Deployment", "DaemonSet", "Job"}


def build(folder: Path, more: tuple[str, ...] = ()) -> list[Json]:
    """Return the objects that `kubectl kustomize FOLDER` prints. Names of generated ConfigMaps get no hash.

    Args:
        more: resources besides those in the kustomization.
    """
    plan = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(plan) <= _KEYS, f"tests/kubernetes/kustomize.py knows nothing of {set(plan) - _KEYS}"
    objects: list[Json] = []
    for name in (*plan.get("resources", ()), *more):
        path = folder / name
        objects += build(path) if path.is_dir() else [each for each in yaml.safe_load_all(path.read_text()) if each]
    for each in plan.get("configMapGenerator", ()):
        _generate(objects, folder, each)
    for patch in plan.get("patches", ()):
        _patch(objects, patch)
    for each in objects:
        if "namespace" in plan and each["kind"] not in _OF_THE_CLUSTER:
            each["metadata"]["namespace"] = plan["namespace"]
            for subject in each.get("subjects", ()):
                subject["namespace"] = plan["namespace"]
        for label in plan.get("labels", ()):
            assert set(label) == {"pairs", "includeTemplates"}
            for metadata in _metadata(each):
                metadata["labels"] = {**metadata.get("labels", {}), **label["pairs"]}
        for container in containers(each):
            for image in plan.get("images", ()):
                assert set(image) <= {"name", "newName", "newTag"}
                if container["image"] == image["name"]:
                    container["image"] = f"{image.get('newName', image['name'])}:{image['newTag']}"
    return objects


def has_pods(found: Json) -> bool:
    return found["kind"] in _TEMPLATES


def pod_of(found: Json) -> Json:
    """Return the specification of an object's pods."""
    pod = found["spec"]["template"]["spec"]
    assert isinstance(pod, dict)
    return pod


def containers(found: Json) -> list[Json]:
    """Return the containers of an object's pods, those that run before the others included."""
    pod = pod_of(found) if has_pods(found) else {"containers": []}
    return [*pod.get("initContainers", ()), *pod["containers"]]


def main_container(found: Json) -> Json:
    """Return the container of an object's pods that serves."""
    (container,) = pod_of(found)["containers"]
    assert isinstance(container, dict)
    return container


def _metadata(found: Json) -> Iterator[Json]:
    yield found["metadata"]
    if has_pods(found):
        yield found["spec"]["template"]["metadata"]


def _generate(objects: list[Json], folder: Path, plan: Json) -> None:
    assert set(plan) <= {"name", "files", "behavior"}
    data = {Path(name).name: (folder / name).read_text() for name in plan["files"]}
    if plan.get("behavior", "create") == "create":
        metadata = {"name": plan["name"]}
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
        return
    assert plan["behavior"] == "merge"
    (found,) = [each for each in objects if each["kind"] == "ConfigMap" and each["metadata"]["name"] == plan["name"]]
    found["data"].update(data)


def _patch(objects: list[Json], plan: Json) -> None:
    """Apply a JSON patch (RFC 6902) to the objects that its target names, or leave out the object that it deletes."""
    if "target" not in plan:
        gone = yaml.safe_load(plan["patch"])
        assert (set(gone), gone["$patch"]) == ({"$patch", "apiVersion", "kind", "metadata"}, "delete")
        (own,) = [each for each in objects if _name(each) == _name(gone)]
        objects.remove(own)
        return
    assert set(plan) == {"target", "patch"}
    assert set(plan["target"]) == {"kind", "name"}
    found = [
        each
        for each in objects
        if each["kind"] == plan["target"]["kind"] and re.fullmatch(plan["target"]["name"], each["metadata"]["name"])
    ]
    assert found, f"no object is the target of the patch {plan['target']}"
    for each in found:
        new = jsonpatch.apply_patch(copy.deepcopy(each), yaml.safe_load(plan["patch"]))
        each.clear()
        each.update(new)


def _name(found: Json) -> tuple[str, str, str]:
    return found["apiVersion"], found["kind"], found["metadata"]["name"]
