"""Count the source files of Paceline whose code runs during one streamed request that is handed over.

    python -m bench.gateway.hops

A profiling hook in every process of a stack notes the files of all calls, first for some seconds without a request and
then during one request. To count an older checkout, run this file with that checkout's Python and with that checkout
in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from bench.common.services import serving

IDLE_SECONDS = 3.0
SETTLE_SECONDS = 1.0
"""Longer than the hook takes to notice the start or the end of a window, and to write its file."""
MODEL = "smollm2-135m-instruct"
_HOOK = """
import os, sys, threading, time
from pathlib import Path

folder, seen, noting = Path(os.environ["HOPS_FOLDER"]), set(), False

def note(frame, event, argument):
    if noting and event == "call":
        seen.add(frame.f_code.co_filename)

def watch():
    global noting
    while True:
        time.sleep(0.05)
        wanted = (folder / "on").exists()
        if wanted and not noting:
            seen.clear()
        elif noting and not wanted:
            (folder / f"{os.getpid()}.files").write_text("\\n".join(seen))
        noting = wanted

threading.setprofile(note)
sys.setprofile(note)
threading.Thread(target=watch, daemon=True).start()
"""


def files_during(folder: Path, act: Callable[[], object]) -> set[str]:
    """Return the files of Paceline, below its package, whose code runs in any process while `act` runs."""
    window = folder / "on"
    window.touch()
    time.sleep(SETTLE_SECONDS)
    act()
    time.sleep(SETTLE_SECONDS)
    window.unlink()
    time.sleep(SETTLE_SECONDS)
    found: set[str] = set()
    for file in folder.glob("*.files"):
        found |= {name.rpartition("/paceline/")[2] for name in file.read_text().split("\n") if "/paceline/" in name}
        file.unlink()
    return found


def ask(url: str) -> None:
    """Send a prompt that is long enough for a prefill worker, and read the whole answer."""
    messages = [{"role": "user", "content": "Why is the sky blue? " * 20}]
    body = json.dumps({"model": MODEL, "messages": messages, "max_tokens": 24, "stream": True}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        reply.read()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gateway.hops", description=__doc__.splitlines()[0])
    parser.add_argument("--names", action="store_true", help="print the names of the files, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(_HOOK)
        os.environ["HOPS_FOLDER"] = name
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (name, os.environ.get("PYTHONPATH"))))
        with serving(folder / "log", MODEL, "--local-prefill-tokens=0") as (_, url):
            ask(url)  # the first request also runs code that is needed only once
            idle = files_during(folder, lambda: time.sleep(IDLE_SECONDS))
            busy = files_during(folder, lambda: ask(url))
    if options.names:
        print("\n".join(sorted(busy)))
    for what, files in (("in a request", busy), ("in a request, but not without one", busy - idle)):
        gateway = sum(file.startswith("services/gateway/") for file in files)
        print(f"{what}: {len(files)} files, of them {gateway} of the gateway")


if __name__ == "__main__":
    main()
