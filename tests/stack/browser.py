"""A real browser for tests: Debian's Chromium, driven by its own driver over WebDriver, which is HTTP and JSON.

apt-get install chromium chromium-driver
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from bench.common.services import free_port

DRIVER = "chromedriver"
PATIENCE = 60.0
"""Seconds after which a wait for the page fails."""

KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Escape": "\ue00c", "Space": "\ue00d"}

_OPTIONS = [
    "--headless=new",
    "--no-sandbox",  # tests may run as root
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-prefers-reduced-motion",
]


def is_installed() -> bool:
    return shutil.which(DRIVER) is not None and shutil.which("chromium") is not None


class Browser:
    """One window of a browser."""

    def __init__(self, driver: httpx.Client, session: str) -> None:
        self._driver = driver
        self._session = f"/session/{session}"

    def _ask(self, path: str, **body: Any) -> Any:
        answer = self._driver.post(self._session + path, json=body).json()["value"]
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(f"{answer['error']}: {answer['message']}")
        return answer

    def open(self, url: str) -> None:
        self._ask("/url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a function in the page and return its result."""
        return self._ask("/execute/sync", script=script, args=list(arguments))

    def wait(self, expression: str, *arguments: Any) -> Any:
        """Wait until an expression in the page is true, and return its value. Raises TimeoutError."""
        deadline = time.monotonic() + PATIENCE
        while not (value := self.run(f"return {expression}", *arguments)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expression} did not become true; the page shows:\n{self.text()}")
            time.sleep(0.05)
        return value

    def text(self, selector: str = "body") -> str:
        """Return the visible text of an element."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def click(self, selector: str) -> None:
        """Click in the middle of an element as a mouse does. Fails if something else covers it."""
        found = self._ask("/element", using="css selector", value=selector)
        self._ask(f"/element/{next(iter(found.values()))}/click")

    def press(self, *keys: str) -> None:
        """Press keys, by name or as text, one after another."""
        typed = [KEYS.get(key, key) for key in keys]
        actions = [{"type": kind, "value": each} for key in typed for each in key for kind in ("keyDown", "keyUp")]
        self._ask("/actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def focused(self) -> str:
        """Return the name of the focused element: its label or its text."""
        return str(
            self.run(
                "const e = document.activeElement; return e === document.body ? '' : "
                "(e.getAttribute('aria-label') || e.labels?.[0]?.innerText || e.innerText || e.id).trim()"
            )
        )

    def resize(self, width: int, height: int = 900) -> None:
        """Set the size of the page in CSS pixels. Unlike a window, it may be as narrow as a phone."""
        self._devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def prefer(self, scheme: str) -> None:
        """Prefer a "dark" or "light" colour scheme."""
        self._devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._driver.get(f"{self._session}/screenshot").json()["value"]))

    def errors(self) -> list[str]:
        """Return what the console of the browser has shown since the last call: errors and violations of the policy."""
        return [
            each["message"] for each in self._ask("/se/log", type="browser") if each["level"] in ("WARNING", "SEVERE")
        ]

    def requested(self) -> list[str]:
        """Return the URLs that the page has requested since the last call."""
        messages = (json.loads(entry["message"])["message"] for entry in self._ask("/se/log", type="performance"))
        return [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]

    def _devtools(self, command: str, **parameters: Any) -> None:
        self._ask("/goog/cdp/execute", cmd=command, params=parameters)


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a browser with a new profile in `folder`, and end it."""
    port = free_port()
    with (folder / "driver.log").open("w") as log:
        process = subprocess.Popen([DRIVER, f"--port={port}"], stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as driver:
            _wait_for_driver(driver)
            options = {"binary": shutil.which("chromium"), "args": [*_OPTIONS, f"--user-data-dir={folder / 'profile'}"]}
            wanted = {
                "browserName": "chrome",
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            }
            begun = driver.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
            if "sessionId" not in begun:
                raise RuntimeError(f"Chromium did not start: {begun['message']}")
            try:
                yield Browser(driver, begun["sessionId"])
            finally:
                driver.delete(f"/session/{begun['sessionId']}")
    finally:
        process.terminate()
        process.wait(30)


def _wait_for_driver(driver: httpx.Client) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(httpx.TransportError):
            if driver.get("/status").json()["value"]["ready"]:
                return
        if time.monotonic() > deadline:
            raise TimeoutError("the browser's driver does not answer")
        time.sleep(0.05)
