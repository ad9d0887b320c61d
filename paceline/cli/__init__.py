"""The command line.

Exit codes: 0 success; 1 a failure while running; 2 invalid input, or a machine that lacks something; 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.cli.parser import build_parser
from paceline.cli.services import SERVICES, load_service_config, run_service
from paceline.client import GatewayClient
from paceline.core import env
from paceline.core.adapters import adapter_folders
from paceline.core.config import ServeConfig
from paceline.core.config_source import load_config
from paceline.core.errors import ConfigError, InvalidRequestError, ModelError, PacelineError
from paceline.core.progress import StatusLines
from paceline.scale import scale
from paceline.services.common.secret import make_secret, new_key
from paceline.top import top
from paceline.trace import trace

_EXTRAS = {"profile": "gateway", "simulate": "gateway", "run-batch": "gateway", "embed": "gateway"}
"""The pip extra that each command needs. A command that is neither here nor a service needs the extra "convert"."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names and return its exit code. None takes the arguments of this process."""
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


def _run(name: str, arguments: dict[str, Any]) -> int:
    """Run the command `name` with its arguments and return its exit code. A failure raises an exception."""
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
    elif name == "embed":
        _embed(arguments)
    elif name == "token":
        for file in arguments["files"]:
            make_secret(file)
    elif name == "key":
        print(new_key(arguments["name"]))
    elif name == "prepare":
        is_relayed, link, file = (arguments.pop(name) for name in ("relayed", "link", "config"))
        _prepare(is_relayed, link, load_config(ServeConfig, "prepare", file, arguments))
    elif name == "cache":
        action, everything, days, file = (arguments.pop(name) for name in ("action", "all", "older_than", "config"))
        _cache(action, everything, days, load_config(ServeConfig, "cache", file, arguments))
    else:
        run_service(name, load_service_config(name, arguments.pop("config"), arguments))
    return 0


def _run_batch(arguments: dict[str, Any]) -> int:
    from paceline.run_batch import run_batch

    is_good = run_batch(
        arguments["input_file"],
        arguments["output_file"],
        arguments["model"] or ServeConfig.model_fields["model"].default,
        _gateway(arguments),
        arguments["completion_window"],
        arguments["serve_flag"],
    )
    return 0 if is_good else 1


def _embed(arguments: dict[str, Any]) -> None:
    from paceline.embed import EmbedOptions, embed

    gateway = _gateway(arguments)
    files = arguments["input_file"], arguments["output_file"]
    options = {field.name: arguments[field.name] for field in dataclasses.fields(EmbedOptions)}
    embed(*files, gateway, EmbedOptions(**options))


def _api_key(arguments: dict[str, Any]) -> str:
    return arguments["api_key"] or next(iter((*env.admin_keys(), *env.api_keys())), "")


def _gateway(arguments: dict[str, Any]) -> GatewayClient:
    return GatewayClient(arguments["url"], _api_key(arguments), arguments["ssl_ca_certs"], arguments.get("fleet", ""))


def _prepare(is_relayed: bool, link: Path | None, config: ServeConfig) -> None:
    from paceline.cli.footprint import report_prepared
    from paceline.models.sources.assets import link_folder, resolve_model
    from paceline.models.sources.hub_adapter import adapter_folder

    # SIGTERM becomes an exception, so that a half-made folder is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report = StatusLines(sys.stderr, is_relayed)
    # Adapters come first, because they are small: their errors do not wait for the download of the model.
    for place in adapter_folders(config).values():
        adapter_folder(place, report)
    how = config.quantization, config.revision, config.model_impl, config.trust_remote_code, config.mmproj
    folder = resolve_model(config.model, Path(config.cache_dir), report, *how)
    if link is not None:
        link_folder(folder, link)
    if not is_relayed:  # `serve` bounds the caches of its whole stack, and its start does not wait for torch
        report_prepared(folder, config, report)
    print(folder)


def _cache(action: str, everything: bool, days: float | None, config: ServeConfig) -> None:
    from paceline.cli.cache import prune_cache, show_cache

    if action == "prune":
        prune_cache(config, everything, days)
    elif everything or days is not None:
        raise ConfigError("--all and --older-than are for paceline cache prune")
    else:
        show_cache(config)


def _fail(sentence: str, code: int) -> int:
    print(f"paceline: {sentence}", file=sys.stderr)
    return code
