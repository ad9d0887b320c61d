"""POST /reset_prefix_cache, with toy hosts and workers."""

from __future__ import annotations

from tests.services.gateway.conftest import Stack, eventually

PATH = "/reset_prefix_cache"


async def test_all_hosts_and_workers_are_asked(stack: Stack) -> None:
    for host in ("kv-0", "kv-1"):
        await stack.add("kvtransfer", host)
    await eventually(stack.sees_all)
    answer = await stack.http.post(PATH)
    assert answer.status_code == 200
    assert answer.json() == {"blocks": 10, "disk_blocks": 4, "device_blocks": 6}
    assert [worker.resets for worker in stack.workers.values()] == [1] * 4


async def test_a_host_that_does_not_forget_is_an_error(stack: Stack) -> None:
    for host in ("kv-0", "kv-1"):
        await stack.add("kvtransfer", host)
    stack.workers["kv-0"].pause_after = 0
    await eventually(stack.sees_all)
    answer = await stack.http.post(PATH)
    assert answer.status_code == 503
    assert "kvtransfer worker kv-0" in answer.json()["error"]["message"]
    assert [worker.resets for worker in stack.workers.values()] == [0, 0, 1, 1]


async def test_running_requests_are_never_reset(stack: Stack) -> None:
    assert (await stack.http.post(PATH, params={"reset_running_requests": True})).status_code == 400
    assert (await stack.http.post(PATH, params={"reset_running_requests": "perhaps"})).status_code == 400
    assert not any(worker.resets for worker in stack.workers.values())
