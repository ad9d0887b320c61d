"""The containers are small, unprivileged, and share one memory."""

from __future__ import annotations

import pytest

from .conftest import Stack

pytestmark = pytest.mark.compose

OURS = ("gateway", "prefill", "decode", "kvtransfer")


def test_gateway_image_holds_no_torch(stack: Stack) -> None:
    find = "import importlib.util as i; print(*(name for name in ('torch', 'transformers') if i.find_spec(name)))"
    assert stack.python("gateway", find) == ""
    assert stack.python("decode", find) == "torch transformers"


@pytest.mark.parametrize("service", [*OURS, "redis"])
def test_nothing_runs_as_root_or_may_write_to_its_image(stack: Stack, service: str) -> None:
    for container in stack.containers(service):
        facts = stack.inspect(container)
        assert stack.docker("exec", container, "id", "-u").strip() == "10001"
        assert facts["HostConfig"]["ReadonlyRootfs"]
        assert facts["HostConfig"]["CapDrop"] == ["ALL"]
        assert facts["HostConfig"]["CapAdd"] is None


def test_only_the_gateway_is_published_and_only_on_this_machine(stack: Stack) -> None:
    for service in (*OURS, "redis"):
        for container in stack.containers(service):
            ports = stack.inspect(container)["NetworkSettings"]["Ports"]
            published = {port: [each["HostIp"] for each in hosts] for port, hosts in ports.items() if hosts}
            assert published == ({"8000/tcp": ["127.0.0.1"]} if service == "gateway" else {})


def test_workers_and_kvtransfer_share_one_private_arena(stack: Stack) -> None:
    look = "import os; print([(f.name, f.inode(), oct(f.stat().st_mode)) for f in os.scandir('/arena')])"
    seen = {stack.python(service, look) for service in ("kvtransfer", "prefill", "decode")}
    assert len(seen) == 1
    assert "0o100600" in seen.pop()


def test_services_ask_each_other_for_a_secret_that_is_theirs_alone(stack: Stack) -> None:
    look = "import os; f = os.stat('/auth/token'); print(oct(f.st_mode), f.st_uid, open('/auth/token').read())"
    seen = {stack.python(service, look) for service in OURS}
    assert len(seen) == 1
    assert seen.pop().startswith("0o100600 10001 ")
    ask = (
        "import subprocess, sys; print([subprocess.run([sys.executable, '-m', 'paceline.services.common.healthcheck', "
        "'127.0.0.1:7300', *config]).returncode for config in ([], ['/etc/paceline.toml'])])"
    )
    for service in ("kvtransfer", "prefill", "decode"):
        assert stack.python(service, ask) == "[2, 0]"


def test_redis_wants_the_password_that_the_services_have(stack: Stack) -> None:
    (redis,) = stack.containers("redis")
    assert "NOAUTH" in stack.docker("exec", redis, "redis-cli", "ping")
    password = stack.docker("exec", redis, "cat", "/auth/redis").strip()
    assert len(password) >= 43
    assert password not in stack.docker("top", redis, "-eo", "pid,args")


def test_models_cannot_be_changed_by_those_who_read_them(stack: Stack) -> None:
    write = "try: open('/models/x', 'w')\nexcept OSError as error: print(error.strerror)"
    for service in ("gateway", "prefill", "decode"):
        assert stack.python(service, write) == "Read-only file system"


def test_all_containers_are_healthy(stack: Stack) -> None:
    def unhealthy() -> list[str]:
        ids = [container for service in (*OURS, "redis") for container in stack.containers(service)]
        return [container for container in ids if stack.inspect(container)["State"]["Health"]["Status"] != "healthy"]

    stack.wait("healthy containers", lambda: not unhealthy())
