"""The platform Kubernetes against a mock API server that breaks watches, answers 409 and 410, and sends old news."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import kmock as mock
import pytest
import yaml

from paceline.core.errors import UnavailableError
from paceline.core.planner.reports import Role
from paceline.services.platforms.kubernetes import KubernetesPlatform
from paceline.services.platforms.kubernetes_api import KubernetesApi
from paceline.services.platforms.platform import PlatformRole
from tests.kubernetes.admission import refusals
from tests.services.platforms.toy_cluster import CONFIG_MAPS, DEPLOYMENTS, NAMESPACE, PODS, ToyCluster

PATIENCE = 20.0


class Fleet:
    """A toy cluster and the platform under test."""

    def __init__(self, cluster: ToyCluster, platform: KubernetesPlatform, told: dict[str, Role]) -> None:
        self.cluster = cluster
        self.platform = platform
        self.told = told
        """The role that each worker was told last."""

    def roles(self) -> dict[str, str]:
        """Return the role of each pod that was not told to end."""
        alive = [pod["metadata"] for pod in self.cluster.pods() if "deletionTimestamp" not in pod["metadata"]]
        return {each["name"]: each["labels"].get("paceline/role", "encode") for each in alive}

    def replicas(self) -> int:
        return int(self.cluster.raw(DEPLOYMENTS, "worker")["spec"]["replicas"])

    async def counts(self) -> dict[Role, PlatformRole]:
        return dict((await self.platform.state()).roles)

    async def seen(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await asyncio.sleep(0.01)

    async def running(self, prefill: int, decode: int) -> None:
        """Let the cluster work until so many workers of each role run, and the platform knows it."""
        async with asyncio.timeout(PATIENCE):
            while True:
                await self.cluster.control()
                await asyncio.sleep(0.05)
                await self.cluster.start()
                await self.cluster.end()
                roles = await self.counts()
                if (roles["prefill"].running, roles["decode"].running) == (prefill, decode):
                    return


VERBS = {"list": "list", "watch": "watch", "fetch": "get", "update": "patch"}
"""The verbs of Kubernetes' rights for kmock's actions."""
RULES = next(
    each["rules"]
    for each in yaml.safe_load_all((Path(__file__).parents[3] / "kubernetes" / "fleet" / "planner.yaml").read_text())
    if each["kind"] == "Role"
)


def calls(cluster: ToyCluster) -> set[tuple[str, str, str, str]]:
    """Return the verb, group, resource and name of each call that the API server got."""
    return {
        (
            VERBS[call.action.value.lower()],
            call.resource.group,
            f"{call.resource.plural}/{call.subresource}" if call.subresource else call.resource.plural,
            call.name or "",
        )
        for call in cluster
    }


def is_allowed(verb: str, group: str, resource: str, name: str) -> bool:
    """Return whether the planner's Role in kubernetes/base allows a call."""
    return any(
        verb in rule["verbs"]
        and group in rule["apiGroups"]
        and resource in rule["resources"]
        and name in rule.get("resourceNames", (name,))
        for rule in RULES
    )


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    """A cluster with three workers that decode."""
    told: dict[str, Role] = {}

    async def tell(worker_id: str, role: Role) -> None:
        told[worker_id] = role

    async with ToyCluster() as cluster, mock.Server(cluster):
        cluster.deployment("worker", 3)
        cluster.add(CONFIG_MAPS, "roles")
        await cluster.control()
        await cluster.start()
        platform = KubernetesPlatform(KubernetesApi(str(cluster.url), NAMESPACE), tell)
        yield Fleet(cluster, platform, told)
        await platform.close()
        assert {call for call in calls(cluster) if not is_allowed(*call)} == set()
        assert [reason for change in cluster.changes for reason in refusals(*change)] == []


async def test_a_new_cluster_decodes_and_has_no_encode_workers(fleet: Fleet) -> None:
    assert await fleet.counts() == {"prefill": PlatformRole(0, 0), "decode": PlatformRole(3, 3)}


async def test_a_new_pod_gets_its_role_before_its_container_starts(fleet: Fleet) -> None:
    await fleet.platform.scale("prefill", 1)
    assert fleet.replicas() == 4
    assert (await fleet.counts())["prefill"] == PlatformRole(1, 0)
    await fleet.cluster.control()
    await fleet.seen(lambda: fleet.roles()["worker-3"] == "prefill")
    await fleet.cluster.start("worker-3")
    await fleet.seen(lambda: fleet.told.get("worker-3") == "prefill")
    assert fleet.roles() == {"worker-0": "decode", "worker-1": "decode", "worker-2": "decode", "worker-3": "prefill"}
    assert await fleet.counts() == {"prefill": PlatformRole(1, 1), "decode": PlatformRole(3, 3)}


async def test_the_chosen_worker_ends_and_no_other(fleet: Fleet) -> None:
    await fleet.platform.scale("decode", 2, ["gone", "worker-1"])
    await fleet.cluster.control()
    assert set(fleet.roles()) == {"worker-0", "worker-2"}
    await fleet.seen(lambda: any("deletionTimestamp" in pod["metadata"] for pod in fleet.cluster.pods()))
    async with asyncio.timeout(PATIENCE):
        while (await fleet.counts())["decode"] != PlatformRole(2, 2, draining=1):
            await asyncio.sleep(0.01)


async def test_a_repeated_call_changes_nothing(fleet: Fleet) -> None:
    for _ in range(3):
        await fleet.platform.scale("prefill", 2)
        await fleet.platform.scale("decode", 1, ["worker-0"])
    await fleet.running(prefill=2, decode=1)
    assert fleet.replicas() == 3


async def test_a_flip_changes_the_label_and_tells_the_worker(fleet: Fleet) -> None:
    for _ in range(2):
        await fleet.platform.flip("worker-1", "prefill")
        assert fleet.told["worker-1"] == "prefill"
    assert fleet.roles() == {"worker-0": "decode", "worker-1": "prefill", "worker-2": "decode"}
    assert (await fleet.counts())["prefill"].wanted == 1
    await fleet.platform.flip("worker-1", "decode")
    assert set(fleet.roles().values()) == {"decode"}
    with pytest.raises(UnavailableError, match="no worker worker-9"):
        await fleet.platform.flip("worker-9", "prefill")


async def test_a_person_scales_the_deployment(fleet: Fleet) -> None:
    await fleet.platform.scale("prefill", 1)
    await fleet.running(prefill=1, decode=3)
    fleet.cluster.objects[DEPLOYMENTS, NAMESPACE, "worker"].patch({"spec": {"replicas": 2}})
    counts = await fleet.counts()
    assert (counts["prefill"].wanted, counts["decode"].wanted) == (1, 1)


async def test_conflicts_are_tried_again(fleet: Fleet) -> None:
    fleet.cluster.conflicts = 2
    await fleet.platform.scale("decode", 5)
    assert fleet.replicas() == 5
    fleet.cluster.conflicts = 1000
    with pytest.raises(UnavailableError, match="others keep changing"):
        await fleet.platform.scale("decode", 6)


async def test_an_interrupted_change_is_finished(fleet: Fleet) -> None:
    roles = {"data": {"prefill": "1", "decode": "3", "before": "3"}}
    fleet.cluster.objects[CONFIG_MAPS, NAMESPACE, "roles"].patch(roles)
    assert (await fleet.counts())["prefill"].wanted == 1
    await fleet.seen(lambda: fleet.replicas() == 4)
    await fleet.running(prefill=1, decode=3)
    assert "before" not in fleet.cluster.raw(CONFIG_MAPS, "roles")["data"]


async def test_broken_and_outdated_watches_lose_nothing(fleet: Fleet) -> None:
    await fleet.counts()
    for number in range(3):
        await fleet.seen(lambda: fleet.cluster.watches > number)  # noqa: B023
        await fleet.cluster.cut_watches()
        await fleet.cluster.make_pod("worker")  # while nobody watches
        fleet.cluster.oldest = fleet.cluster.events[-1][0] + (number % 2)  # every second time the watch gets 410
        await fleet.cluster.start()
    async with asyncio.timeout(PATIENCE):
        while (await fleet.counts())["decode"].running != 6:
            await asyncio.sleep(0.01)


async def test_news_out_of_order_do_not_bring_a_pod_back(fleet: Fleet) -> None:
    await fleet.counts()
    await fleet.seen(lambda: fleet.cluster.watches == 1)
    pod = fleet.cluster.raw(PODS, "worker-1")
    fleet.cluster.disorder = [1, 0, 3, 2]
    await fleet.cluster.cut_watches()
    await fleet.cluster.note("MODIFIED", pod)
    await fleet.cluster.note("DELETED", pod)
    await fleet.cluster.make_pod("worker")
    await fleet.cluster.start("worker-3")
    await fleet.seen(lambda: fleet.cluster.watches == 2 and not fleet.cluster.disorder)
    async with asyncio.timeout(PATIENCE):
        while (await fleet.counts())["decode"].running != 3:
            await asyncio.sleep(0.01)


async def test_pods_that_cannot_run_are_reported_and_end_first(fleet: Fleet) -> None:
    await fleet.platform.scale("decode", 4)
    await fleet.cluster.control()
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    await fleet.cluster.set_status("worker-3", conditions=[unschedulable])
    async with asyncio.timeout(PATIENCE):
        while not (problems := (await fleet.platform.state()).problems):
            await asyncio.sleep(0.01)
    assert problems == {"decode": "1 of its pods cannot run: no node has room: 0/3 nodes"}
    await fleet.platform.scale("decode", 3, ["worker-0"])
    await fleet.cluster.control()
    assert set(fleet.roles()) == {"worker-0", "worker-1", "worker-2"}


async def test_no_worker_of_another_role_ends_instead(fleet: Fleet) -> None:
    await fleet.platform.scale("prefill", 1)
    await fleet.cluster.control()
    await fleet.seen(lambda: fleet.roles()["worker-3"] == "prefill")
    with pytest.raises(UnavailableError, match="Kubernetes would end the prefill pod worker-3 first"):
        await fleet.platform.scale("decode", 2, ["worker-0"])
    assert fleet.replicas() == 4


async def test_without_news_the_planner_gets_no_state(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    await fleet.counts()
    monkeypatch.setattr("paceline.services.platforms.kubernetes.BLIND_SECONDS", 0.2)
    fleet.cluster.is_down = True
    await fleet.cluster.cut_watches()
    with pytest.raises(UnavailableError, match="503"):
        await fleet.platform.state()
    await asyncio.sleep(0.3)
    with pytest.raises(UnavailableError, match="says nothing about pods"):
        await fleet.platform.state()
    monkeypatch.undo()
    await fleet.cluster.make_pod("worker")
    await fleet.cluster.start("worker-3")
    fleet.cluster.is_down = False
    async with asyncio.timeout(PATIENCE):
        while (await fleet.counts())["decode"].running != 4:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("role", ["encode", "pool"])
async def test_encode_and_pool_workers_have_a_deployment_of_their_own(role: Role, fleet: Fleet) -> None:
    if role == "pool":  # a model that is an encoder has no other workers
        del fleet.cluster.objects[DEPLOYMENTS, NAMESPACE, "worker"]
    fleet.cluster.deployment(role, 0)
    await fleet.platform.scale(role, 2)
    await fleet.cluster.control(role)
    await fleet.cluster.start()
    async with asyncio.timeout(PATIENCE):
        while (counts := await fleet.counts())[role] != PlatformRole(2, 2):
            await asyncio.sleep(0.01)
    assert counts.keys() == ({"pool"} if role == "pool" else {"prefill", "decode", "encode"})
    name = next(name for name in fleet.roles() if name.startswith(role))
    with pytest.raises(UnavailableError, match="no worker"):
        await fleet.platform.flip(name, "decode")


async def test_two_planners_that_act_at_once_do_no_harm(fleet: Fleet) -> None:
    async def tell(worker_id: str, role: Role) -> None:
        fleet.told[worker_id] = role

    other = KubernetesPlatform(KubernetesApi(str(fleet.cluster.url), NAMESPACE), tell)
    try:
        await asyncio.gather(
            *(platform.scale("prefill", 2) for platform in (fleet.platform, other)), return_exceptions=True
        )
        await fleet.running(prefill=2, decode=3)
        assert fleet.replicas() == 5
    finally:
        await other.close()
