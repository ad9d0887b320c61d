"""With the planner's account, nobody can change more of a pod than its role and its cost."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from paceline.services.platforms.kubernetes_pods import COST, ROLE_LABEL
from tests.kubernetes.admission import BINDING, PLANNER, POLICY, Json, is_matched, refusals
from tests.kubernetes.test_manifests import BASE, OUR_NAMESPACES, OURS, labels_of, of, pod_of

Change = Callable[[Json], object]

POD: Json = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "worker-0",
        "namespace": "paceline",
        "labels": {**labels_of(OURS["worker"]), "pod-template-hash": "5d4f"},
        "annotations": {"example.com/note": "text"},
        "ownerReferences": [{"kind": "ReplicaSet", "name": "worker-5d4f", "controller": True}],
        "resourceVersion": "7",
    },
    "spec": pod_of(OURS["worker"]),
    "status": {"phase": "Running"},
}
BARE: Json = {"metadata": {"name": "worker-0"}, "spec": {"containers": []}}


def changed(pod: Json, change: Change) -> Json:
    new = copy.deepcopy(pod)
    change(new)
    return new


@pytest.mark.parametrize(
    "change",
    [
        lambda pod: pod["metadata"]["labels"].update({ROLE_LABEL: "prefill"}),
        lambda pod: pod["metadata"]["labels"].update({ROLE_LABEL: "decode"}),
        lambda pod: pod["metadata"]["annotations"].update({COST: "-100"}),
        lambda pod: pod["metadata"].update(resourceVersion="8", managedFields=[{"manager": "planner"}]),
        lambda pod: pod.update(status={"phase": "Failed"}),
    ],
)
def test_the_planner_may_change_roles_and_costs(change: Change) -> None:
    assert refusals(POD, changed(POD, change)) == []


def test_the_planner_may_give_a_first_annotation_and_take_the_last_one_away() -> None:
    costly = changed(BARE, lambda pod: pod["metadata"].update(annotations={COST: "1"}))
    assert refusals(BARE, costly) == refusals(costly, BARE) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda pod: pod["spec"]["containers"][0].update(image="evil"), "no spec"),
        (lambda pod: pod["spec"].update(activeDeadlineSeconds=1), "no spec"),
        (lambda pod: pod["spec"].update(tolerations=[{"operator": "Exists"}]), "no spec"),
        (lambda pod: pod["metadata"]["labels"].update({"app.kubernetes.io/component": "gateway"}), "no label"),
        (lambda pod: pod["metadata"]["labels"].update({"new": "label"}), "no label"),
        (lambda pod: pod["metadata"]["labels"].pop("pod-template-hash"), "no label"),
        (lambda pod: pod["metadata"]["labels"].pop(ROLE_LABEL), "no label"),
        (lambda pod: pod["metadata"].pop("labels"), "no label"),
        (lambda pod: pod["metadata"]["labels"].update({ROLE_LABEL: "gateway"}), "is prefill, decode or encode"),
        (lambda pod: pod["metadata"]["annotations"].update({"new": "note"}), "no annotation"),
        (lambda pod: pod["metadata"]["annotations"].update({"example.com/note": "another"}), "no annotation"),
        (lambda pod: pod["metadata"].pop("annotations"), "no annotation"),
        (lambda pod: pod["metadata"].pop("ownerReferences"), "no owner"),
        (lambda pod: pod["metadata"]["ownerReferences"][0].update(name="other"), "no owner"),
        (lambda pod: pod["metadata"].update(finalizers=["example.com/never"]), "no finalizer"),
    ],
)
def test_the_planner_may_change_nothing_else(change: Change, reason: str) -> None:
    (why,) = refusals(POD, changed(POD, change))
    assert reason in why


@pytest.mark.parametrize(
    ("username", "namespace", "matched"),
    [
        (PLANNER, "paceline", True),
        (PLANNER.replace(":paceline:", ":paceline-second:"), "paceline-second", True),
        (PLANNER, "paceline-second", False),  # another namespace has another planner; its Role does not reach there
        ("system:node:node-1", "paceline", False),
        ("system:serviceaccount:kube-system:replicaset-controller", "paceline", False),
    ],
)
def test_the_policy_is_for_planners_alone(username: str, namespace: str, matched: bool) -> None:
    assert is_matched(username, namespace) is matched


def test_the_policy_holds_where_a_planner_may_patch_pods() -> None:
    account = of("RoleBinding")["planner"]["subjects"]
    assert account == [{"kind": "ServiceAccount", "name": "planner", "namespace": "paceline"}]
    (rules,) = (role["rules"] for role in of("Role").values())
    patched = {resource for rule in rules if "patch" in rule["verbs"] for resource in rule["resources"]}
    assert patched == {"deployments/scale", "configmaps", "pods"}
    (watched,) = POLICY["spec"]["matchConstraints"]["resourceRules"]
    assert (watched["operations"], watched["resources"]) == (["UPDATE"], ["pods"])
    assert POLICY["spec"]["failurePolicy"] == "Fail"
    assert BINDING["spec"]["policyName"] == POLICY["metadata"]["name"]
    assert BINDING["spec"]["validationActions"] == ["Deny"]
    assert BINDING["spec"]["matchResources"] == {"namespaceSelector": OUR_NAMESPACES}
    assert {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"} <= {each["kind"] for each in BASE}
