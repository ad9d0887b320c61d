"""Fixtures for the compose stack, which compose/test.sh has started."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[2]
ADMIN = {"Authorization": f"Bearer {os.environ.get('PACELINE_ADMIN_KEY', '')}"}


class Stack:
    """A running compose project."""

    def __init__(self, compose: list[str], project: str, certificates: ssl.SSLContext | None = None) -> None:
        self._compose = compose
        self._project = project
        scheme = "http" if certificates is None else "https"
        self.url = f"{scheme}://" + self.compose("port", "gateway", "8000").strip()
        self.certificates = certificates or ssl.create_default_context()

    def compose(self, *arguments: str) -> str:
        return output_of([*self._compose, *arguments])

    def docker(self, *arguments: str) -> str:
        return output_of(["docker", *arguments])

    def containers(self, service: str) -> list[str]:
        """Return the ids of a service's running containers."""
        labels = {"project": self._project, "service": service}
        filters = [f"--filter=label=com.docker.compose.{name}={value}" for name, value in labels.items()]
        return self.docker("ps", "-q", *filters).split()

    def inspect(self, container: str) -> Any:
        return json.loads(self.docker("inspect", container))[0]

    def python(self, service: str, code: str) -> str:
        """Run `code` in the first container of a service and return what it prints."""
        return self.docker("exec", self.containers(service)[0], "python", "-c", code).strip()

    def scale(self, service: str, count: int) -> None:
        self.compose("up", "-d", "--no-deps", "--no-recreate", "--scale", f"{service}={count}", service)

    def fleet(self) -> Any:
        return self.ask("GET", "/fleet", headers=ADMIN, timeout=10.0)

    def ask(self, method: str, path: str, **options: Any) -> Any:
        """Return the JSON that the gateway answers."""
        with httpx.Client(verify=self.certificates, trust_env=False) as client:
            return client.request(method, f"{self.url}{path}", **options).raise_for_status().json()

    def workers(self, role: str) -> list[Any]:
        """Return the workers of a role that the gateway sees as ready."""
        members = self.fleet()["workers"]
        return [worker for worker in members if worker["role"] == role and worker["state"] == "ready"]

    def wait(self, what: str, condition: Callable[[], Any], seconds: float = 180.0) -> Any:
        """Wait until `condition` returns something true and return it. Fail after `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if answer := condition():
                    return answer
            except httpx.TransportError:
                pass
            time.sleep(0.25)
        return pytest.fail(f"no {what} within {seconds:.0f} s")

    def wait_for_workers(self, role: str, count: int) -> None:
        self.wait(f"{count} {role} workers", lambda: len(self.workers(role)) == count)


def output_of(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def running_stack() -> Stack:
    if "PACELINE_COMPOSE" not in os.environ:
        pytest.skip("no stack is running; use make test-compose")
    return Stack(os.environ["PACELINE_COMPOSE"].split(), os.environ["COMPOSE_PROJECT_NAME"])


@pytest.fixture
def stack(running_stack: Stack) -> Iterator[Stack]:
    """The stack with two workers of each role; fleets that a test has scaled get two again after it."""
    for role in ("prefill", "decode"):
        running_stack.wait_for_workers(role, 2)
    yield running_stack
    for role in ("prefill", "decode"):
        running_stack.scale(role, 2)
