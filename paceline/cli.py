"""The command line. Every field of a config in `paceline.core.config` is a flag; nothing is declared twice.

Exit codes: 0 success; 1 a failure while running; 2 invalid input, or a machine that lacks something; 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib
import os
import shutil
import signal
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from paceline import __version__
from paceline.client import GatewayClient
from paceline.core import env, telemetry
from paceline.core.config import (
    PREPARE_OPTIONS,
    GatewayConfig,
    KVTransferConfig,
    PlannerConfig,
    ServeConfig,
    ServiceConfig,
    WorkerConfig,
)
from paceline.core.config_source import RENAMED, load_config
from paceline.core.errors import ConfigError, InvalidRequestError, ModelError, PacelineError
from paceline.core.options import Options, flag, group_of
from paceline.core.planner.reports import ROLES
from paceline.core.progress import StatusLines
from paceline.run_batch import run_batch
from paceline.scale import scale
from paceline.services.common.secret import make_secret, new_key
from paceline.simulator.options import DESCRIPTION, add_options
from paceline.top import top
from paceline.trace import trace

OVERVIEW = """\
usage: paceline COMMAND [options]

LLM serving with prefill and decode as separately scaled fleets.

on one machine
  serve [MODEL]       start a whole stack and print a request to try

one service each, for containers and clusters
  gateway MODEL       the HTTP API
  prefill MODEL       a worker that turns prompts into KV blocks
  decode MODEL        a worker that turns KV blocks into tokens
  worker MODEL        a worker that waits until it is told to be prefill or decode
  encode MODEL        a worker that turns images, frames and audio into encodings
  kvtransfer          the owner of a host's KV memory
  planner             adds and drains workers as the load asks

tools
  top                 show the fleet and its speed, live
  trace REQUEST_ID    show one request's life
  profile -o FILE     learn from a running stack how long its steps take, for simulate
  simulate            say what a fleet would do under a load: how many of each?
  scale ROLE=N        change how many workers a running stack has
  run-batch -i F -o F answer the requests of a file, on a stack of its own or a running one
  prepare MODEL       fetch or convert a model and print its folder
  key, token          make a key for --api-keys-file, or the secret that services share
  version             print the version

example
  paceline serve gemma-3-270m --prefill 2 --decode 2 --port 9000

Options: paceline COMMAND --help. Without a MODEL, serve takes a small bundled one.
"""


@dataclasses.dataclass(frozen=True)
class Service:
    """A command that runs `paceline.services.<name>.main.run` with a config until a signal stops it.

    The commands of workers for text have one implementation, because such a worker may change its role.
    """

    config: type[ServiceConfig | ServeConfig]
    arguments: str
    summary: str
    extra: str
    """The pip extra with its dependencies."""
    role: str = ""
    """For a command that runs `paceline.services.worker.main.run`, the role in which the worker starts."""


SERVICES = {
    "serve": Service(ServeConfig, "[MODEL]", "Start a whole stack on this machine; Ctrl-C stops it.", "serve"),
    "gateway": Service(GatewayConfig, "MODEL", "The HTTP API.", "gateway"),
    "prefill": Service(WorkerConfig, "MODEL", "A worker that turns prompts into KV blocks.", "worker", "prefill"),
    "decode": Service(WorkerConfig, "MODEL", "A worker that turns KV blocks into tokens.", "worker", "decode"),
    "worker": Service(WorkerConfig, "MODEL", "A worker that waits until it is given a role.", "worker", "standby"),
    "encode": Service(WorkerConfig, "MODEL", "A worker that turns images, frames and audio into encodings.", "worker"),
    "kvtransfer": Service(KVTransferConfig, "", "The owner of a host's KV memory.", "worker"),
    "planner": Service(
        PlannerConfig, "", "The planner, which adds and drains workers as the load asks.", "compose,kubernetes"
    ),
}
_EXTRAS = {"profile": "gateway", "simulate": "gateway"}
"""The pip extra with the dependencies of a tool; those of the others are in "convert"."""
_GROUPS = ("model", "fleet", "planner", "compute", "memory", "store", "media", "limits", "network", "cluster", "logs")
_METAVARS = {
    "advertise": "HOST",
    "allowed_local_media_path": "FOLDER",
    "allowed_headers": "NAMES",
    "allowed_media_domains": "NAMES",
    "allowed_methods": "NAMES",
    "allowed_origins": "ORIGINS",
    "api_keys_file": "FILE",
    "auth_token_file": "FILE",
    "cluster_ca_certs": "FILE",
    "cluster_cert_name": "NAME",
    "cluster_certfile": "FILE",
    "cluster_keyfile": "FILE",
    "chat_template": "FILE",
    "classes_file": "FILE",
    "limit_mm_per_prompt": "JSON",
    "mm_processor_kwargs": "JSON",
    "models_file": "FILE",
    "record_trace": "FILE",
    "root_path": "PATH",
    "ssl_ca_certs": "FILE",
    "ssl_cert_reqs": "0|1|2",
    "ssl_certfile": "FILE",
    "ssl_keyfile": "FILE",
    "uds": "PATH",
    "store": "FILE|URL|none",
    "kvtransfer_address": "ADDRESS",
    "port": "PORT",
    "record": "FILE",
    "replay": "FILE",
    "docker_socket": "PATH",
    "compose_prefix": "TEXT",
    "compose_project": "NAME",
    "redis": "URL",
    "speculative_config": "JSON",
}
SHORT_FLAGS = {"speculative_config": ("-sc",)}
HIDDEN_OPTIONS = {"ready_fd", "supervisor_socket"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = vars(build_parser().parse_args(argv or ["--help"]))
    name = arguments.pop("command")
    try:
        return _run(name, arguments)
    except ModuleNotFoundError as error:
        if (error.name or "paceline").split(".")[0] == "paceline":
            raise
        extra = SERVICES[name].extra if name in SERVICES else _EXTRAS.get(name, "convert")
        return _fail(f"{name} needs {error.name}, which is not installed: pip install 'paceline[{extra}]'", 2)
    except (ConfigError, ModelError, InvalidRequestError) as error:
        return _fail(str(error), 2)
    except PacelineError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="paceline", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action=_Overview, nargs=0, default=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for name, service in SERVICES.items():
        command = _add_command(commands, name, f"{service.arguments} [options]".strip(), service.summary)
        command.add_argument(
            "--config", type=Path, metavar="FILE", help=f"TOML file: keys at its top and in [{name}]; flags override it"
        )
        _add_options(command, service.config, service.config.model_fields)
    prepare = _add_command(commands, "prepare", "MODEL [options]", "Fetch or convert a model and print its folder.")
    prepare.add_argument("model", metavar="MODEL", help=_help(ServeConfig, "model"))
    prepare.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file: keys at its top and in [prepare]; flags override it"
    )
    _add_options(prepare, ServeConfig, PREPARE_OPTIONS)
    prepare.add_argument(
        "--link", type=Path, metavar="PATH", help="symbolic link to the folder, which is made or replaced"
    )
    prepare.add_argument("--live-progress", action="store_true", help=argparse.SUPPRESS)
    watch = _add_command(commands, "top", "[options]", "Show the fleet and its speed, live; Ctrl-C ends it.")
    _add_gateway(watch)
    _add_fleet(watch)
    watch.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="time between updates [%(default)s]"
    )
    watch.add_argument("--count", type=int, default=0, metavar="N", help="updates to print; 0 for no limit")
    look = _add_command(commands, "trace", "REQUEST_ID [options]", "Show one request's life, while it runs and after.")
    look.add_argument("request_id", metavar="REQUEST_ID", help="id in the response, or in its header x-request-id")
    _add_gateway(look)
    look.add_argument("--json", action="store_true", help="print the whole trace as JSON")
    resize = _add_command(
        commands,
        "scale",
        "[ROLE=N ...] [ID=ROLE ...] [options]",
        "Change how many workers a running stack has, and their roles. No request is lost.",
    )
    resize.add_argument(
        "targets",
        metavar="ROLE=N|ID=ROLE",
        nargs="*",
        help="such as prefill=3 decode=1 for numbers of workers, prefill-0=decode for the new role of a running one; "
        "with none, only print the fleet",
    )
    resize.add_argument(
        "--drain", action="append", default=[], metavar="ID", help="worker that shall end; may be given several times"
    )
    resize.add_argument(
        "--release",
        action="append",
        default=[],
        metavar="ROLE",
        choices=ROLES,
        help="role that the planner may scale again; with a planner, ROLE=N stays until then",
    )
    _add_gateway(resize)
    _add_fleet(resize)
    resize.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wait this long for new workers to be ready and for old ones to end; 0 returns at once",
    )
    _add_profile(commands)
    add_options(_add_command(commands, "simulate", "--profile FILE --trace FILE | --load FILE [options]", DESCRIPTION))
    batch = _add_command(
        commands, "run-batch", "-i FILE -o FILE [--model MODEL | --url URL] [options]", "Answer the requests of a file."
    )
    batch.add_argument(
        "-i", "--input-file", type=Path, required=True, metavar="FILE", help="requests, one a line (JSONL)"
    )
    batch.add_argument("-o", "--output-file", type=Path, required=True, metavar="FILE", help="file for the answers")
    batch.add_argument("--model", default="", metavar="MODEL", help=_help(ServeConfig, "model"))
    _add_gateway(batch, "", "URL of a running stack, or unix:PATH; without it, this command starts a stack")
    batch.add_argument(
        "--completion-window", default="24h", metavar="TIME", help="time for all lines, such as 90m or 7d [%(default)s]"
    )
    batch.add_argument(
        "--serve-flag",
        action="append",
        default=[],
        metavar="FLAG",
        help="flag for the stack, such as --serve-flag=--decode=2",
    )
    token = _add_command(commands, "token", "FILE", "Make the secret for --auth-token-file. An existing one is kept.")
    token.add_argument("file", type=Path, metavar="FILE", help="file to write; only this user may read it")
    key = _add_command(commands, "key", "NAME", "Print a new key, and its lines for --api-keys-file.")
    key.add_argument("name", metavar="NAME", help="name of the key, which logs and the console show")
    _add_command(commands, "version", "", "Print the version.")
    return parser


def _add_profile(commands: Any) -> None:
    learn = _add_command(
        commands,
        "profile",
        "-o FILE [options]",
        "Learn from a running stack, which should do nothing else, how long its steps take. It takes a few minutes.",
    )
    learn.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="JSON file for the profile")
    learn.add_argument("--machine", default="", metavar="NAME", help="name of the machine, such as its processor")
    learn.add_argument(
        "--no-scale", action="store_true", help="do not start and drain one more decode worker to measure these times"
    )
    _add_gateway(learn)
    _add_fleet(learn)


def _add_gateway(
    parser: argparse.ArgumentParser,
    default: str = "http://127.0.0.1:8000",
    help: str = "URL of the gateway, or unix:PATH for its Unix socket [%(default)s]",
) -> None:
    parser.add_argument("--url", default=default, help=help)
    parser.add_argument(
        "--ssl-ca-certs",
        default="",
        metavar="FILE",
        help="PEM file with the authorities that may have signed the gateway's certificate; by default those of the "
        "system, or of $SSL_CERT_FILE",
    )
    parser.add_argument(
        "--api-key",
        default="",
        metavar="KEY",
        help="key to send; by default the first one in $PACELINE_ADMIN_KEY, else in $PACELINE_API_KEY",
    )


def _add_fleet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="",
        dest="fleet",
        metavar="NAME",
        help="model whose fleet is meant, if the gateway serves several",
    )


def _run(name: str, arguments: dict[str, Any]) -> int:
    """Run a command. Return its exit code; errors raise exceptions."""
    if name == "version":
        print(f"paceline {__version__}")
    elif name == "top":
        top(_gateway(arguments), max(arguments["interval"], 0.1), arguments["count"])
    elif name == "trace":
        trace(arguments["request_id"], _gateway(arguments), arguments["json"])
    elif name == "scale":
        wishes = arguments["targets"], arguments["drain"], arguments["release"]
        scale(*wishes, _gateway(arguments), arguments["wait"])
    elif name == "profile":
        from paceline.profiler.profile import profile

        profile(_gateway(arguments), arguments["output"], arguments["machine"], not arguments["no_scale"])
    elif name == "simulate":
        from paceline.simulator.command import simulate_fleet

        return simulate_fleet(arguments)
    elif name == "run-batch":
        return _run_batch(arguments)
    elif name == "token":
        make_secret(arguments["file"])
    elif name == "key":
        print(new_key(arguments["name"]))
    elif name == "prepare":
        is_relayed, link, file = (arguments.pop(own) for own in ("live_progress", "link", "config"))
        _prepare(is_relayed, link, load_config(ServeConfig, "prepare", file, arguments))
    else:
        config = _load(name, arguments.pop("config"), arguments)
        # Until the service handles signals itself, there is nothing to clean up. Without this handler, SIGTERM would
        # not end the first process of a container.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        env.share_cores()
        env.quiet_grpc()
        role = SERVICES[name].role
        run = importlib.import_module(f"paceline.services.{'worker' if role else name}.main").run
        # A worker's name in its logs and traces is its name in the cluster.
        telemetry.setup(getattr(config, "worker_id", "") or name, config.log_level, config.log_format)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(run(config, role) if role else run(config))
    return 0


def _run_batch(arguments: dict[str, Any]) -> int:
    is_good = run_batch(
        arguments["input_file"],
        arguments["output_file"],
        arguments["model"] or ServeConfig.model_fields["model"].default,
        _gateway(arguments),
        arguments["completion_window"],
        arguments["serve_flag"],
    )
    return 0 if is_good else 1


def _api_key(arguments: dict[str, Any]) -> str:
    return arguments["api_key"] or next(iter((*env.admin_keys(), *env.api_keys())), "")


def _gateway(arguments: dict[str, Any]) -> GatewayClient:
    return GatewayClient(arguments["url"], _api_key(arguments), arguments["ssl_ca_certs"], arguments.get("fleet", ""))


def _prepare(is_relayed: bool, link: Path | None, config: ServeConfig) -> None:
    from paceline.models.assets import link_folder, resolve_model

    # SIGTERM becomes an exception, so that a half-made folder is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report = StatusLines(sys.stderr, is_relayed)
    how = config.quantization, config.revision, config.model_impl, config.trust_remote_code
    folder = resolve_model(config.model, Path(config.cache_dir), report, *how)
    if link is not None:
        link_folder(folder, link)
    print(folder)


def _load(name: str, file: Path | None, flags: dict[str, Any]) -> ServiceConfig | ServeConfig:
    config = load_config(SERVICES[name].config, name, file, flags)
    model = getattr(config, "model", None)
    if getattr(config, "models_file", ""):
        if "model" in flags:
            raise ConfigError("MODEL and --models-file exclude each other: the file names the models")
        return config
    if model == "":
        raise ConfigError(f"{name} needs a model: paceline {name} MODEL")
    if model and name != "serve" and not Path(model).is_dir():
        raise ConfigError(f"{name} takes the folder of a model; run: paceline prepare {model}, which prints the folder")
    return config


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def _fail(sentence: str, code: int) -> int:
    print(f"paceline: {sentence}", file=sys.stderr)
    return code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"paceline: {message}; see {self.prog} --help\n")


class _Overview(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        print(OVERVIEW, end="")
        parser.exit()


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=min(100, shutil.get_terminal_size().columns))

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Keep the line breaks of a help text. A line that begins with white space is a list item."""
        return [line for part in text.split("\n") for line in self._wrap(part, width)]

    def _wrap(self, line: str, width: int) -> list[str]:
        indent = line[: len(line) - len(line.lstrip())]
        return textwrap.wrap(line, width, subsequent_indent=indent + indent, break_on_hyphens=False)


def _add_command(commands: Any, name: str, arguments: str, description: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        description=description,
        usage=f"paceline {name} {arguments}".rstrip(),
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    return parser


def _add_options(parser: argparse.ArgumentParser, config: type[Options], names: Iterable[str]) -> None:
    hints = typing.get_type_hints(config)
    groups: dict[str, Any] = {}
    for name in sorted(names, key=lambda name: _GROUPS.index(group_of(config, name))):
        title = group_of(config, name)
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        if name == "model":
            help = _help(config, name)
            group.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=help)
            continue
        # Suppress defaults, because only flags that are given override the file.
        group.add_argument(
            flag(name),
            *SHORT_FLAGS.get(name, ()),
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS if name in HIDDEN_OPTIONS else _help(config, name),
            **_kind(name, hints[name]),
        )
    for name in RENAMED.get(config, {}):
        parser.add_argument(flag(name), default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _kind(name: str, hint: Any) -> dict[str, Any]:
    if typing.get_origin(hint) is Literal:
        return {"choices": typing.get_args(hint), "type": str.lower}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    fallback = "N" if hint is int else name.split("_")[-1].upper()
    return {"type": hint, "metavar": _METAVARS.get(name, fallback)}


def _help(config: type[Options], name: str) -> str:
    field = config.model_fields[name]
    text = str(field.description).replace("%", "%%")
    return text if field.default in ("", 0, "auto") else f"{text} [{field.default}]"
