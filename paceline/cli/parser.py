"""The parser of the command line. Every field of a config in `paceline.core.config` is a flag; nothing is declared
twice.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from paceline.cli.flags import add_options, help_of
from paceline.cli.services import SERVICES
from paceline.core.config import CACHE_OPTIONS, PREPARE_OPTIONS, ServeConfig
from paceline.core.planner.reports import ROLES
from paceline.simulator import options as simulator_options

OVERVIEW = """\
usage: paceline COMMAND [options]

LLM serving with prefill and decode as separately scaled fleets.

on one machine
  serve [MODEL]       start a whole stack and print a request to try

one service each, for containers and clusters
  gateway MODEL       the HTTP API
  prefill MODEL       a worker that turns prompts into KV blocks
  decode MODEL        a worker that turns KV blocks into tokens
  worker MODEL        a worker without a role, which waits until it is given one
  encode MODEL        a worker that turns images, frames and audio into encodings
  pool MODEL          a worker that turns texts into vectors, scores and labels
  kvtransfer          the owner of a host's KV memory
  planner             adds and drains workers as the load asks

tools
  top                 show the fleet and its speed, live
  trace REQUEST_ID    show one request's life
  profile -o FILE     learn from a running stack how long its steps take, for simulate
  simulate            predict what a fleet does under a load, and what fleet it needs
  scale ROLE=N        change the numbers of workers of a running stack
  run-batch -i F -o F answer the requests of a file, on a stack of its own or a running one
  embed -i F -o F     write the vectors of a file's texts, which a running stack computes
  prepare MODEL       fetch or convert a model and print its folder
  cache [prune]       show, or remove, converted models and packed weights
  key, token          make a key for --api-keys-file, or the secret that services share
  version             print the version

example
  paceline serve gemma-3-270m --prefill 2 --decode 2 --port 9000

Options: paceline COMMAND --help. Without a MODEL, serve takes a small bundled one.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. It puts the name of the chosen command into `command`."""
    parser = _Parser(prog="paceline", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action=_Overview, nargs=0, default=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    _add_services(commands)
    _add_prepare(commands)
    _add_cache(commands)
    _add_top(commands)
    _add_trace(commands)
    _add_scale(commands)
    _add_profile(commands)
    arguments = "--profile FILE --trace FILE | --load FILE [options]"
    simulator_options.add_options(_add_command(commands, "simulate", arguments, simulator_options.DESCRIPTION))
    _add_run_batch(commands)
    _add_embed(commands)
    _add_keys(commands)
    _add_command(commands, "version", "", "Print the version.")
    return parser


def _add_services(commands: Any) -> None:
    for name, service in SERVICES.items():
        command = _add_command(commands, name, f"{service.arguments} [options]".strip(), service.summary)
        command.add_argument(
            "--config", type=Path, metavar="FILE", help=f"TOML file: keys at its top and in [{name}]; flags override it"
        )
        add_options(command, service.config, service.config.model_fields)


def _add_prepare(commands: Any) -> None:
    command = _add_command(commands, "prepare", "MODEL [options]", "Fetch or convert a model and print its folder.")
    command.add_argument("model", metavar="MODEL", help=help_of(ServeConfig, "model"))
    command.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file: keys at its top and in [prepare]; flags override it"
    )
    add_options(command, ServeConfig, PREPARE_OPTIONS)
    command.add_argument(
        "--link", type=Path, metavar="PATH", help="symbolic link to the folder, which is made or replaced"
    )
    command.add_argument("--relayed", action="store_true", help=argparse.SUPPRESS)


def _add_cache(commands: Any) -> None:
    description = (
        "Show the converted models and packed weights that Paceline has made in its cache folder, the least recently "
        "used first. prune removes those that no process uses, by default until the others take --cache-size."
    )
    command = _add_command(commands, "cache", "[list | prune] [options]", description)
    command.add_argument(
        "action", nargs="?", choices=("list", "prune"), default="list", help="what to do [%(default)s]"
    )
    command.add_argument("--all", action="store_true", help="prune everything that is not in use")
    command.add_argument(
        "--older-than", type=float, metavar="DAYS", help="prune what was not used for this many days and is not in use"
    )
    command.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file: keys at its top and in [cache]; flags override it"
    )
    add_options(command, ServeConfig, CACHE_OPTIONS)


def _add_top(commands: Any) -> None:
    command = _add_command(commands, "top", "[options]", "Show the fleet and its speed, live; Ctrl-C ends it.")
    _add_gateway(command)
    _add_fleet(command)
    command.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="time between updates [%(default)s]"
    )
    command.add_argument("--count", type=int, default=0, metavar="N", help="updates to print; 0 for no limit")


def _add_trace(commands: Any) -> None:
    command = _add_command(
        commands, "trace", "REQUEST_ID [options]", "Show one request's life, while it runs and after."
    )
    command.add_argument("request_id", metavar="REQUEST_ID", help="id in the response, or in its header x-request-id")
    _add_gateway(command)
    command.add_argument("--json", action="store_true", help="print the whole trace as JSON")


def _add_scale(commands: Any) -> None:
    command = _add_command(
        commands,
        "scale",
        "[ROLE=N ...] [ID=ROLE ...] [options]",
        "Change how many workers a running stack has, and their roles. No request is lost.",
    )
    command.add_argument(
        "targets",
        metavar="ROLE=N|ID=ROLE",
        nargs="*",
        help="such as prefill=3 decode=1 for numbers of workers, prefill-0=decode for the new role of a running one; "
        "with none, only print the fleet",
    )
    command.add_argument(
        "--drain", action="append", default=[], metavar="ID", help="worker that shall end; may be given several times"
    )
    command.add_argument(
        "--release",
        action="append",
        default=[],
        metavar="ROLE",
        choices=ROLES,
        help="role that the planner may scale again; with a planner, ROLE=N stays until then",
    )
    _add_gateway(command)
    _add_fleet(command)
    command.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wait this long for new workers to be ready and for old ones to end; 0 returns at once",
    )


def _add_profile(commands: Any) -> None:
    command = _add_command(
        commands,
        "profile",
        "-o FILE [options]",
        "Learn from a running stack, which should do nothing else, how long its steps take. It takes a few minutes.",
    )
    command.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="JSON file for the profile")
    command.add_argument("--machine", default="", metavar="NAME", help="name of the machine, such as its processor")
    command.add_argument(
        "--no-scale", action="store_true", help="do not measure how long a decode worker takes to start and to drain"
    )
    _add_gateway(command)
    _add_fleet(command)


def _file_or(standard: str) -> Callable[[str], Path]:
    """Return a function that makes a path of an argument. For "-", the path is `standard`, a standard stream."""
    return lambda text: Path(standard if text == "-" else text)


def _add_run_batch(commands: Any) -> None:
    command = _add_command(
        commands, "run-batch", "-i FILE -o FILE [--model MODEL | --url URL] [options]", "Answer the requests of a file."
    )
    for names, standard, text in (
        (("-i", "--input-file"), "/dev/stdin", "requests, one a line (JSONL); - is standard input"),
        (("-o", "--output-file"), "/dev/stdout", "file for the answers; - is standard output"),
    ):
        command.add_argument(*names, type=_file_or(standard), required=True, metavar="FILE", help=text)
    command.add_argument("--model", default="", metavar="MODEL", help=help_of(ServeConfig, "model"))
    _add_gateway(command, "", "URL of a running stack, or unix:PATH; without it, this command starts a stack")
    command.add_argument(
        "--completion-window", default="24h", metavar="TIME", help="time for all lines, such as 90m or 7d [%(default)s]"
    )
    command.add_argument(
        "--serve-flag",
        action="append",
        default=[],
        metavar="FLAG",
        help="flag for the stack, such as --serve-flag=--decode=2",
    )


def _add_embed(commands: Any) -> None:
    description = (
        "Write the vectors of the texts of a file as a NumPy array, float32, a row for each line. The stack must run "
        "already: paceline serve all-minilm-l6-v2. If the command is ended, the same command goes on later."
    )
    command = _add_command(commands, "embed", "-i FILE -o FILE [options]", description)
    source = 'texts, one a line as JSON: "a text" or {"text": "a text"}; - is standard input'
    command.add_argument("-i", "--input-file", type=_file_or("/dev/stdin"), required=True, metavar="FILE", help=source)
    command.add_argument("-o", "--output-file", type=Path, required=True, metavar="FILE", help="file for the vectors")
    _add_gateway(command)
    command.add_argument(
        "--model", default="", metavar="NAME", help="model to ask, if the gateway serves several that embed"
    )
    command.add_argument(
        "--prompt-name",
        default="",
        metavar="NAME",
        help="prompt of the model to put before each text, such as query; by default the model's default prompt",
    )
    command.add_argument(
        "--dimensions", type=_positive, default=0, metavar="N", help="length of a vector; by default the model's own"
    )
    command.add_argument(
        "--truncate", action="store_true", help="cut texts that are too long; otherwise they end the command"
    )
    command.add_argument(
        "--batch-size", type=_positive, default=64, metavar="N", help="texts in one request [%(default)s]"
    )
    command.add_argument(
        "--concurrency", type=_positive, default=4, metavar="N", help="requests at the same time [%(default)s]"
    )


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError("it must be a whole number from 1")
    return int(text)


def _add_keys(commands: Any) -> None:
    description = (
        "Make the secret for --auth-token-file, or the password for --redis-password-file. Existing ones are kept."
    )
    token = _add_command(commands, "token", "FILE [FILE ...]", description)
    token.add_argument("files", type=Path, nargs="+", metavar="FILE", help="file to write; only this user may read it")
    key = _add_command(commands, "key", "NAME", "Print a new key, and its lines for --api-keys-file.")
    key.add_argument("name", metavar="NAME", help="name of the key, which logs and the console show")


def _add_command(commands: Any, name: str, arguments: str, description: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        description=description,
        usage=f"paceline {name} {arguments}".rstrip(),
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    return parser


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
