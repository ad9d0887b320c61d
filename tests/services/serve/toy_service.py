"""A toy in place of any process of a stack: toy_service.py ACTION ROLE [arguments of the real process]."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from paceline.core.config import GatewayConfig, KVTransferConfig, ServiceConfig, WorkerConfig
from paceline.core.config_source import load_config
from paceline.services.common.lifecycle import announce_ready, stop_on_signals
from paceline.services.kvtransfer.arena import Arena

CONFIGS: dict[str, type[ServiceConfig]] = {
    "gateway": GatewayConfig,
    "prefill": WorkerConfig,
    "decode": WorkerConfig,
    "kvtransfer": KVTransferConfig,
}


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    writer.close()


async def run(action: str, role: str, config: ServiceConfig) -> None:
    stop = stop_on_signals()
    if action == "stubborn":
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
    arena = Arena(Path(KVTransferConfig().arena_dir), 4096) if role == "kvtransfer" else None
    if arena is not None:
        tell(f"arena={arena.path}")
    if action == "hang":
        tell(f"{role} hangs")
        await stop.wait()
        return
    server = await asyncio.start_server(answer, config.host, config.port)
    host, port = server.sockets[0].getsockname()[:2]
    announce_ready(config, f"{host}:{port}")
    await stop.wait()
    server.close()
    if arena is not None:
        arena.close()
    tell(f"{role} stopped")


def main() -> None:
    action, role, *arguments = sys.argv[1:]
    if action == "fail":
        tell("paceline: there is no room")
        sys.exit(2)
    if role == "prepare":
        tell("preparing")
        print(arguments[0], flush=True)
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("--kvtransfer-address", default=argparse.SUPPRESS)
    parser.add_argument("--worker-id", default=argparse.SUPPRESS)
    parser.add_argument("--host-id", default=argparse.SUPPRESS)
    parser.add_argument("--supervisor-socket", default=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=argparse.SUPPRESS)
    flags = vars(parser.parse_args(arguments))
    if action == "serve once":
        served = flags["config"].with_name(f"{flags['config'].stem}-{role}-served")
        if served.exists():
            tell("paceline: it has served")
            sys.exit(3)
        served.touch()
    asyncio.run(run(action, role, load_config(CONFIGS[role], role, flags.pop("config"), flags)))


if __name__ == "__main__":
    # Longer than any test waits for this process, so a waiting test fails first.
    signal.alarm(120)
    main()
