"""Containers of docker compose: copies as compose makes them, drains by worker, and the last one, which is kept."""

from __future__ import annotations

import asyncio
import copy
import itertools
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

import pytest

from paceline.core.errors import UnavailableError
from paceline.services.platforms.compose import NUMBER, ONE_OFF, PROJECT, SERVICE, ComposePlatform, Json, copied_config
from paceline.services.platforms.platform import KnownWorker


class EngineError(Exception):
    pass


class ToyEngine:
    """An engine that keeps containers in memory."""

    def __init__(self, decode: int, service: str = "decode") -> None:
        self._ids = itertools.count(1)
        self.found: dict[str, Json] = {}
        self.graces: list[int] = []
        self.fails = False
        self.removal_seconds = 0.0
        self.drains = threading.Lock()
        """Held by a test while containers that stop shall not end."""
        for number in range(1, decode + 1):
            self.add(service, number)

    def add(self, service: str, number: int) -> str:
        """Start a container as compose does. Return the id of its worker."""
        labels = {PROJECT: "p", SERVICE: service, ONE_OFF: "False", NUMBER: str(number)}
        made = self.create_container_from_config(
            {"Labels": labels, "StopTimeout": 45, "Env": ["A=1"], "HostConfig": {"Binds": ["arena:/arena"]}},
            f"p-{service}-{number}",
        )
        self.found[made["Id"]]["Config"]["Hostname"] = made["Id"][:12]
        self.start(made["Id"])
        return f"{service}-{made['Id'][:12]}-abc123"

    def containers(self, *, all: bool, filters: Mapping[str, Any]) -> list[Json]:
        if self.fails:
            raise EngineError("no such engine")
        wanted = dict(each.split("=") for each in filters["label"])
        return [
            {"Id": each["Id"], "Labels": each["Config"]["Labels"], "State": each["State"]}
            for each in self.found.values()
            if wanted.items() <= each["Config"]["Labels"].items()
        ]

    def inspect_container(self, container: str) -> Json:
        return copy.deepcopy(self.found[container])

    def create_container_from_config(self, config: Json, name: str) -> Json:
        own = f"{next(self._ids):064x}"
        own = own[::-1]
        host = config.pop("HostConfig")
        config.pop("NetworkingConfig", None)
        networks = {"Networks": {"p_default": {}}}
        self.found[own] = {
            "Id": own,
            "Name": name,
            "Config": config,
            "HostConfig": host,
            "NetworkSettings": networks,
            "State": "created",
        }
        return {"Id": own}

    def start(self, container: str) -> None:
        self.found[container]["State"] = "running"

    def stop(self, container: str, timeout: int) -> None:
        self.graces.append(timeout)
        with self.drains:
            self.found[container]["State"] = "exited"

    def remove_container(self, container: str) -> None:
        time.sleep(self.removal_seconds)
        assert self.found[container]["State"] == "exited"
        del self.found[container]

    def close(self) -> None:
        pass


async def settled(platform: ComposePlatform, wanted: int) -> None:
    async with asyncio.timeout(5):
        while True:
            state = (await platform.state()).roles["decode"]
            if (state.wanted, state.draining) == (wanted, 0):
                return
            await asyncio.sleep(0.001)


def compose(
    engine: ToyEngine, roles: Mapping[str, str] | None = None, prefix: str = "", draining: Collection[str] = ()
) -> ComposePlatform:
    """Return a platform whose workers have these roles, by id, and else those of their services.

    Args:
        draining: ids of the workers that drain.
    """

    async def present() -> Mapping[str, KnownWorker]:
        return {name: KnownWorker(role, name in draining) for name, role in (roles or {}).items()}

    return ComposePlatform(engine, "p", present, EngineError, prefix)


async def test_a_new_container_is_a_copy_with_the_next_number() -> None:
    engine = ToyEngine(decode=1)
    platform = compose(engine)
    await platform.scale("decode", 3)
    await platform.scale("decode", 3)
    first, second, third = engine.found.values()
    assert [each["Name"] for each in (second, third)] == ["p-decode-2", "p-decode-3"]
    assert second["HostConfig"] == first["HostConfig"]
    assert second["Config"]["Labels"] == {**first["Config"]["Labels"], NUMBER: "2"}
    assert "Hostname" not in second["Config"]
    await settled(platform, 3)


async def test_a_prefix_tells_the_services_of_one_fleet_from_those_of_others() -> None:
    engine = ToyEngine(1, "second-decode")
    platform = compose(engine, prefix="second-")
    await platform.scale("decode", 2)
    await settled(platform, 2)
    assert [each["Name"] for each in engine.found.values()] == ["p-second-decode-1", "p-second-decode-2"]
    assert "decode" not in (await compose(engine).state()).roles


async def test_the_chosen_worker_ends_after_its_grace_and_then_the_newest() -> None:
    engine = ToyEngine(decode=3)
    first, second, _ = engine.found
    platform = compose(engine)
    await platform.scale("decode", 1, [f"decode-{first[:12]}-abc123", "decode-of-yesterday"])
    await settled(platform, 1)
    assert list(engine.found) == [second]
    assert engine.graces == [45, 45]


async def test_containers_that_do_not_serve_yet_end_first() -> None:
    engine = ToyEngine(decode=3)
    serving, *_ = engine.found
    platform = compose(engine, {f"decode-{serving[:12]}-abc123": "decode"})
    await platform.scale("decode", 1, [f"decode-{serving[:12]}-abc123"])
    await settled(platform, 1)
    assert list(engine.found) == [serving]


async def test_the_last_container_is_kept_and_started_again() -> None:
    engine = ToyEngine(decode=2)
    platform = compose(engine)
    await platform.scale("decode", 0)
    await settled(platform, 0)
    (kept,) = engine.found
    await platform.scale("decode", 2)
    await settled(platform, 2)
    assert kept in engine.found
    assert sorted(each["Config"]["Labels"][NUMBER] for each in engine.found.values()) == ["1", "2"]


async def test_a_worker_counts_in_the_role_that_a_person_has_given_it() -> None:
    engine = ToyEngine(decode=2)
    engine.removal_seconds = 0.02
    roles = dict.fromkeys(engine.found, "decode")
    changed = engine.add("prefill", 1)
    roles[changed] = "decode"
    platform = compose(engine, roles)
    assert {role: own.wanted for role, own in (await platform.state()).roles.items()} == {"prefill": 0, "decode": 3}
    await platform.scale("prefill", 1)
    assert [each["Name"] for each in engine.found.values()][3:] == ["p-prefill-2"]
    await platform.scale("decode", 2, [changed])
    del roles[changed]  # a worker that ends leaves Redis before its container is gone
    await settled(platform, 2)
    assert [each["Name"] for each in engine.found.values()] == ["p-decode-1", "p-decode-2", "p-prefill-2"]


async def test_a_worker_that_redis_has_lost_keeps_the_role_that_it_had() -> None:
    engine = ToyEngine(decode=2)
    roles = {engine.add("prefill", 1): "decode"}
    platform = compose(engine, roles)
    assert (await platform.state()).roles["decode"].wanted == 3
    roles.clear()
    assert (await platform.state()).roles["decode"].wanted == 3


async def test_a_worker_that_starts_again_has_the_role_of_its_service() -> None:
    engine = ToyEngine(decode=2)
    (first, _), again = engine.found, "decode"
    platform = compose(engine, {f"decode-{first[:12]}-before": "prefill", f"decode-{first[:12]}-after": again})
    assert (await platform.state()).roles["decode"].wanted == 2


async def test_a_drain_goes_on_for_the_planner_that_takes_over() -> None:
    engine = ToyEngine(decode=2)
    first, _ = engine.found
    roles = {(worker := f"decode-{first[:12]}-abc123"): "decode"}
    platform = compose(engine, roles, draining=[worker])
    assert (await platform.state()).roles["decode"].wanted == 2  # a person may restart it
    platform.take_over()
    found = (await platform.state()).roles["decode"]
    assert (found.wanted, found.draining) == (1, 1)
    roles.clear()  # a worker that ends leaves Redis before its container ends
    assert (await platform.state()).roles["decode"].wanted == 1
    engine.stop(first, 45)
    await settled(platform, 1)
    await platform.scale("decode", 2)
    assert [each["State"] for each in engine.found.values()] == ["running", "running"]


async def test_a_worker_that_changes_its_role_when_a_planner_takes_over_does_not_leave() -> None:
    engine = ToyEngine(decode=2)
    first, _ = engine.found
    roles = {(worker := f"decode-{first[:12]}-abc123"): "decode"}
    draining = [worker]
    platform = compose(engine, roles, draining=draining)
    platform.take_over()
    assert (await platform.state()).roles["decode"].wanted == 1
    roles[worker] = "prefill"
    draining.clear()
    engine.add("prefill", 1)
    assert {role: own.wanted for role, own in (await platform.state()).roles.items()} == {"prefill": 2, "decode": 1}


async def test_a_name_is_not_used_again_before_its_container_is_gone() -> None:
    engine = ToyEngine(decode=2)
    platform = compose(engine)
    with engine.drains:
        await platform.scale("decode", 1)
        await platform.scale("decode", 2)
        assert [each["Name"] for each in engine.found.values()] == ["p-decode-1", "p-decode-2", "p-decode-3"]
    await settled(platform, 2)


@pytest.mark.parametrize(("state", "draining"), [("removing", 1), ("dead", 0)])
async def test_a_container_that_is_being_removed_is_not_started_again(state: str, draining: int) -> None:
    engine = ToyEngine(decode=2)
    first, _ = engine.found
    engine.found[first]["State"] = state
    platform = compose(engine)
    found = (await platform.state()).roles["decode"]
    assert (found.wanted, found.draining) == (1, draining)
    await platform.scale("decode", 2)
    assert [each["State"] for each in engine.found.values()] == [state, "running", "running"]
    assert [each["Name"] for each in engine.found.values()] == ["p-decode-1", "p-decode-2", "p-decode-3"]


@pytest.mark.parametrize("is_dead", [False, True])
async def test_a_service_without_containers_cannot_be_scaled(is_dead: bool) -> None:
    engine = ToyEngine(decode=1)
    if is_dead:
        engine.add("prefill", 1)
        list(engine.found.values())[-1]["State"] = "dead"
    platform = compose(engine)
    assert list((await platform.state()).roles) == ["decode"]
    with pytest.raises(UnavailableError, match="no container of prefill to copy"):
        await platform.scale("prefill", 1)


async def test_an_engine_that_does_not_answer_is_an_error_of_the_platform() -> None:
    engine = ToyEngine(decode=1)
    engine.fails = True
    with pytest.raises(UnavailableError, match="no such engine"):
        await compose(engine).state()


def test_a_copy_has_the_name_of_its_service_in_the_networks_in_which_the_original_has_it() -> None:
    networks = {"p_default": {"Aliases": ["p-decode-1", "decode"], "IPAddress": "10.0.0.7"}, "none": {"Aliases": None}}
    labels = {SERVICE: "decode", NUMBER: "1", "com.docker.compose.replace": "x"}
    original = {
        "Id": "0123456789abcdef",
        "Config": {"Labels": labels, "Hostname": "chosen"},
        "HostConfig": {"Init": True},
        "NetworkSettings": {"Networks": networks},
    }
    copied = copied_config(original, 4)
    assert copied["NetworkingConfig"] == {"EndpointsConfig": {"p_default": {"Aliases": ["decode"]}, "none": {}}}
    assert copied["Labels"] == {SERVICE: "decode", NUMBER: "4"}
    assert (copied["Hostname"], copied["HostConfig"]) == ("chosen", {"Init": True})
