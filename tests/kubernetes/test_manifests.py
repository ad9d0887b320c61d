"""The manifests in kubernetes/ fit the schemas of Kubernetes and each other. No cluster is needed."""

from __future__ import annotations

import functools
import json
import re
import tempfile
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from paceline.cli.parser import build_parser
from paceline.cli.services import SERVICES
from paceline.core.config import GatewayConfig, ServiceConfig, model_configs
from paceline.core.config_source import load_config
from paceline.core.options import parse_bytes
from paceline.services.gateway.http.paths import Access, decision_for
from paceline.services.gateway.main import LAST_WORDS_SECONDS
from paceline.services.platforms.kubernetes import PODS
from paceline.services.platforms.kubernetes_pods import ROLE_LABEL
from tests.kubernetes.kustomize import Json, build, containers, has_pods, main_container, pod_of

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "kubernetes"
GUIDE = (ROOT / "docs" / "kubernetes.md").read_text()
OUR_NAMESPACES = {"matchLabels": {"paceline/stack": "true"}}
COMPONENT = "app.kubernetes.io/component"
RELEASES = sorted({tuple(map(int, version.split(".")[:2])) for version in kubernetes_validate.utils.all_versions()})[
    -3:
]
WITHOUT_SCHEMA = {"ServiceMonitor", "PrometheusRule"}
"""Kinds of the Prometheus operator."""

PARTS = {
    "model": build(KUBERNETES / "model"),
    "base": build(KUBERNETES / "base", ("../fleet/encode.yaml",)),
    "gpu": build(KUBERNETES / "gpu"),
    "second": build(KUBERNETES / "second"),
    "pool": build(KUBERNETES / "pool"),
    "monitoring": build(KUBERNETES / "monitoring"),
}
BASE = PARTS["base"]
WORKLOADS = [each for part in ("model", "base", "gpu", "second", "pool") for each in PARTS[part] if has_pods(each)]


def of(kind: str, objects: list[Json] = BASE) -> dict[str, Json]:
    """Return the objects of a kind by name."""
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def labels_of(workload: Json) -> dict[str, str]:
    return dict(workload["spec"]["template"]["metadata"]["labels"])


def matches(selector: Json, labels: dict[str, str]) -> bool:
    """Return whether a label selector selects a pod with these labels."""
    plain = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return plain and all(
        each["operator"] == "In" and labels.get(each["key"]) in each["values"]
        for each in selector.get("matchExpressions", ())
    )


def arguments_of(workload: Json) -> list[str]:
    """Return the arguments of the first container, with its variables replaced."""
    container = main_container(workload)
    values = {"ROLE": labels_of(workload).get(ROLE_LABEL, "")}
    return [re.sub(r"\$\((\w+)\)", lambda found: values.get(found[1], "10.0.0.1"), each) for each in container["args"]]


def config_of(workload: Json, part: str = "", command: str = "") -> ServiceConfig:
    """Return the options with which a service starts, as the command line reads them."""
    part = part or ("pool" if workload["metadata"]["name"] == "pool" else "base")
    first, *rest = arguments_of(workload)
    given = vars(build_parser().parse_args([command or first, *rest]))
    assert str(given.pop("config")) == "/etc/paceline/paceline.toml"
    name = given.pop("command")
    config = load_config(SERVICES[name].config, name, KUBERNETES / part / "paceline.toml", given)
    assert isinstance(config, ServiceConfig)
    return config


OURS = {name: each for kind in ("Deployment", "DaemonSet") for name, each in of(kind).items() if name != "redis"}
"""The workloads that run Paceline, by name."""
POOL = PARTS["pool"]
OURS["pool"] = of("Deployment", POOL)["pool"]
GENERATING = [name for name in OURS if name != "pool"]


def test_the_newest_schemas_are_used() -> None:
    assert len(RELEASES) == 3
    assert RELEASES[-1] >= (1, 37)


def test_manifests_fit_the_schemas_of_the_last_three_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without this, megabytes of schemas are read again for each object.
    utils = kubernetes_validate.utils
    monkeypatch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
    different = {json.dumps(each): each for part in PARTS.values() for each in part}
    for each in different.values():
        for major, minor in RELEASES:
            if each["kind"] not in WITHOUT_SCHEMA:
                kubernetes_validate.validate(each, f"{major}.{minor}", strict=True)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: str(each["metadata"]["name"]))
def test_containers_can_do_no_more_than_they_must(workload: Json) -> None:
    pod = pod_of(workload)
    assert pod["securityContext"].items() >= {"runAsNonRoot": True, "runAsUser": 10001}.items()
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is (workload["metadata"]["name"] == "planner")
    for container in containers(workload):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"]
        assert not context["allowPrivilegeEscalation"]
        assert context["capabilities"]["drop"] == ["ALL"]
        is_root = container["name"] == "own-the-arena"
        assert context.get("runAsUser", 10001) == (0 if is_root else 10001)
        assert context["capabilities"].get("add", []) == (["CHOWN", "FOWNER"] if is_root else [])
        assert "memory" in container["resources"]["limits"]
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
        assert re.fullmatch(r"(paceline-gateway|paceline-worker):local|redis:7-alpine", container["image"])
    on_node = [volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume]
    has_arena = workload["metadata"]["name"] in ("worker", "encode", "kvtransfer")
    assert on_node == ([f"/dev/shm/{workload['metadata']['namespace']}"] if has_arena else [])


@pytest.mark.parametrize(
    ("part", "name"),
    [
        *(
            (part, name)
            for part in ("base", "gpu", "second")
            for name in GENERATING
            if (part, name) != ("second", "gateway")
        ),
        *(("pool", name) for name in ("pool", "planner")),
    ],
)
def test_options_and_arguments_are_valid(name: str, part: str) -> None:
    config = config_of(OURS[name], part)
    assert config.auth_token_file == "/auth/token"
    assert config.redis_password_file == "/auth/redis"
    redis = of("Service")["redis"]
    host = f"redis.{redis['metadata']['namespace']}" if part in ("second", "pool") else "redis"
    assert config.redis == f"redis://{host}:{redis['spec']['ports'][0]['port']}/0"


def models_of(text: str) -> dict[str, GatewayConfig]:
    """Return the models of a models.toml by name."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        return {each.served_model_name: each for each in model_configs(GatewayConfig(models_file=file.name))}


def test_gateways_find_the_fleet_of_each_model() -> None:
    options = of("ConfigMap")["options"]["data"]
    first, *others = models_of(options["models.toml"]).values()
    assert not others
    commented = "".join(line.removeprefix("#   ") for line in options["models.toml"].splitlines(keepends=True))
    second = models_of(commented.replace("# ", "#"))["gemma-3-270m"]
    for model, part in ((first, "base"), (second, "second")):
        worker = config_of(OURS["worker"], part)
        assert (worker.cluster, worker.model) == (model.cluster, model.model)  # type: ignore[attr-defined]
    gateway = config_of(OURS["gateway"])
    assert gateway.models_file == "/etc/paceline/models.toml"  # type: ignore[attr-defined]


def test_the_fleet_of_a_second_model_stands_for_itself() -> None:
    fleet, first = PARTS["second"], [each for each in BASE if each["metadata"]["name"] not in ("gateway", "redis")]
    assert {each["kind"] for each in fleet} - {"Namespace"} <= {each["kind"] for each in first}
    (namespace,) = of("Namespace", fleet)
    assert all(each["metadata"].get("namespace", namespace) == namespace for each in fleet)
    for part in ("model", "second"):
        (own,) = of("Namespace", PARTS[part]).values()
        assert own["metadata"]["labels"]["paceline/stack"] == "true"


@pytest.mark.parametrize("name", OURS)
def test_a_drain_fits_into_the_grace_of_its_pod(name: str) -> None:
    pod = pod_of(OURS[name])
    roles = ["prefill", "decode"] if name == "worker" else [""]
    drain = max(config_of(OURS[name], command=role).drain_seconds for role in roles)
    before = main_container(OURS[name]).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    drain = 0 if name == "planner" else drain  # it has nothing to drain
    assert before + drain + LAST_WORDS_SECONDS + 10 <= pod["terminationGracePeriodSeconds"]
    assert bool(before) is (name == "gateway")


@pytest.mark.parametrize("name", OURS)
def test_probes_ask_what_listens(name: str) -> None:
    container = main_container(OURS[name])
    config = config_of(OURS[name])
    (port,) = container["ports"]
    assert port["containerPort"] == config.port
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        if (probe := container.get(kind)) is None:
            assert (name, kind) == ("planner", "startupProbe")
        elif name == "gateway":
            assert probe["httpGet"] == {"path": "/ping", "port": port["name"]}
            assert decision_for("/ping") is Access.OPEN
        else:
            *program, address, file = probe["exec"]["command"]
            alive = ["--alive"] if kind == "livenessProbe" else []
            assert program == ["python", "-m", "paceline.services.common.healthcheck", *alive]
            assert (address, file) == (f"127.0.0.1:{config.port}", f"{mounts['options']}/paceline.toml")
            assert config.host == "0.0.0.0"


def test_selectors_find_their_pods() -> None:
    pods = [labels_of(each) for each in BASE if has_pods(each)]
    for each in BASE:
        if has_pods(each):
            assert matches(each["spec"]["selector"], labels_of(each))
            assert sum(matches(each["spec"]["selector"], labels) for labels in pods) == 1
        elif each["kind"] in ("PodDisruptionBudget", "Service"):
            selector = each["spec"]["selector"]
            selector = {"matchLabels": selector} if each["kind"] == "Service" else selector
            (found,) = [labels for labels in pods if matches(selector, labels)]
            assert found[COMPONENT] == each["metadata"]["name"]
    for name, service in of("Service").items():
        workload = {**of("Deployment"), **of("DaemonSet")}[name]
        ports = {port["name"]: port["containerPort"] for port in main_container(workload)["ports"]}
        assert [ports[port["targetPort"]] for port in service["spec"]["ports"]] == [
            port["port"] for port in service["spec"]["ports"]
        ]
    assert of("PodDisruptionBudget").keys() == {"gateway", "worker", "encode"}


def test_what_pods_refer_to_exists() -> None:
    maps, claims = of("ConfigMap"), of("PersistentVolumeClaim", PARTS["model"])
    made = dict(re.findall(r"kubectl -n paceline create secret generic (\S+)((?: --from-file=\S+)+)", GUIDE))
    for workload in WORKLOADS:
        pod = pod_of(workload)
        mounted = {mount["name"] for each in containers(workload) for mount in each["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        for volume in pod["volumes"]:
            if "configMap" in volume:
                assert volume["configMap"]["name"] in maps
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
            if "secret" in volume:
                files = made[volume["secret"]["secretName"]]
                assert all(f"--from-file={item['key']}" in files for item in volume["secret"].get("items", ()))
        if "serviceAccountName" in pod:
            assert pod["serviceAccountName"] in of("ServiceAccount")
        if "priorityClassName" in pod:
            assert pod["priorityClassName"] in of("PriorityClass")
    assert made["paceline-auth"] == " --from-file=token --from-file=redis --from-file=keys.toml"


def test_the_network_allows_the_calls_of_the_guide_and_no_others() -> None:
    told = set()
    for line in re.findall(r"^\| [`a-z, ]+ \| `[a-z]+`, port \d+ \|", GUIDE, re.MULTILINE):
        callers, called, port = re.fullmatch(r"\| ([`a-z, ]+) \| `([a-z]+)`, port (\d+) \|", line).groups()  # type: ignore[union-attr]
        told |= {(caller, called, int(port)) for caller in re.findall(r"`([a-z]+)`", callers)}
    pods = {name: labels_of(each) for name, each in {**OURS, "redis": of("Deployment")["redis"]}.items()}
    policies = list(of("NetworkPolicy").values())

    def is_ours(peer: Json) -> bool:
        """Return whether a peer names pods of this namespace, or of all that have Paceline's label."""
        return peer.get("namespaceSelector", OUR_NAMESPACES) == OUR_NAMESPACES and "podSelector" in peer

    def allowed(one: str, direction: str, side: str, other: str, port: int) -> bool:
        """Return whether the policies of a pod let it talk to another one. Blocks of addresses are no pods."""
        return any(
            any(each["port"] == port for each in rule["ports"])
            and (
                side not in rule
                or any(matches(peer["podSelector"], pods[other]) for peer in rule[side] if is_ours(peer))
            )
            for policy in policies
            if matches(policy["spec"]["podSelector"], pods[one])
            for rule in policy["spec"].get(direction, ())
        )

    ports = {6379, 7300, 8000}
    found = {
        (caller, called, port)
        for caller in pods
        for called in pods
        for port in ports
        if allowed(caller, "egress", "to", called, port) and allowed(called, "ingress", "from", caller, port)
    }
    assert found == told
    assert of("NetworkPolicy")["nothing"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_the_arena_is_one_folder_in_memory_that_is_paid_for() -> None:
    for part in ("base", "gpu"):
        objects = PARTS[part]
        kvtransfer = of("DaemonSet", objects)["kvtransfer"]
        config = config_of(kvtransfer, part)
        container = main_container(kvtransfer)
        limit = parse_bytes(container["resources"]["limits"]["memory"] + "B")
        assert limit >= parse_bytes(config.kv_memory) + (1 << 30)  # type: ignore[attr-defined]
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
        for workload in (kvtransfer, of("Deployment", objects)["worker"]):
            (mount,) = [each for each in main_container(workload)["volumeMounts"] if each["name"] == "arena"]
            assert mount["mountPath"] == config.arena_dir  # type: ignore[attr-defined]


def test_the_job_fetches_the_model_that_is_served() -> None:
    job = of("Job", PARTS["model"])["model"]
    command = vars(build_parser().parse_args(arguments_of(job)))
    for part in ("base", "gpu"):
        options = tomllib.loads((KUBERNETES / part / "paceline.toml").read_text())
        assert str(command["link"]) == options["model"]
    assert models_of(of("ConfigMap")["options"]["data"]["models.toml"]).keys() == {command["model"]}


def test_the_images_are_those_that_compose_builds() -> None:
    stack = yaml.safe_load((ROOT / "compose" / "compose.yaml").read_text())
    built = {service["image"].partition(":")[0] for service in stack["services"].values() if "build" in service}
    ours = {each["image"].partition(":")[0] for workload in WORKLOADS for each in containers(workload)}
    assert ours == {*built, "redis"}


def test_prometheus_finds_the_gateways_and_has_the_alerts_of_compose() -> None:
    monitor = of("ServiceMonitor", PARTS["monitoring"])["paceline"]["spec"]
    service = of("Service")["gateway"]
    assert matches(monitor["selector"], service["metadata"]["labels"])
    assert monitor["endpoints"][0]["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "paceline"  # the alerts name this job
    ours = of("PrometheusRule", PARTS["monitoring"])["paceline"]["spec"]
    assert ours == yaml.safe_load((ROOT / "compose" / "prometheus" / "alerts.yaml").read_text())


def test_the_planner_finds_its_objects() -> None:
    assert "roles" in of("ConfigMap")
    worker = of("Deployment")["worker"]
    name, components = re.fullmatch(rf"app.kubernetes.io/name=(\w+),{COMPONENT} in \(([\w,]+)\)", PODS).groups()  # type: ignore[union-attr]
    assert labels_of(worker)["app.kubernetes.io/name"] == name
    assert labels_of(worker)[ROLE_LABEL] == "decode"
    assert {"worker", "encode", "pool"} == set(components.split(","))
    (role,) = [each for each in main_container(worker)["env"] if each["name"] == "ROLE"]
    assert role["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.labels['{ROLE_LABEL}']"
    for name in ("worker", "encode", "pool"):
        assert "replicas" not in OURS[name]["spec"], "kubectl apply would undo what the planner has done"


def test_the_fleet_of_an_encoder_has_pool_workers_and_no_memory_for_keys_and_values() -> None:
    assert {name for kind in ("Deployment", "DaemonSet") for name in of(kind, POOL)} == {"pool", "planner"}
    assert not of("Service", POOL)
    assert not of("PriorityClass", POOL)
    assert of("PodDisruptionBudget", POOL)["pool"]["spec"]["selector"]["matchLabels"] == {COMPONENT: "pool"}
    assert not [volume for volume in pod_of(OURS["pool"])["volumes"] if "hostPath" in volume]
    (namespace,) = of("Namespace", POOL).values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    own = config_of(OURS["pool"])
    commented = "".join(
        line.removeprefix("#   ")
        for line in of("ConfigMap")["options"]["data"]["models.toml"].splitlines(keepends=True)
    )
    told = models_of(commented.replace("# ", "#"))["all-minilm-l6-v2"]
    assert (own.cluster, own.model) == (told.cluster, told.model)  # type: ignore[attr-defined]
    (rule,) = [each for each in of("Role", POOL)["planner"]["rules"] if each["resources"] == ["deployments/scale"]]
    assert "pool" in rule["resourceNames"]
