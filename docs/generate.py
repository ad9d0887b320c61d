"""Writes the reference pages from the code: options, metrics, and fields of requests.

    python docs/generate.py [--check]

With --check nothing is written; the exit code is 1 if a page is not what the code says.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

from prometheus_client.metrics_core import Metric
from pydantic import BaseModel

from paceline.cli.flags import HIDDEN_OPTIONS, SHORT_FLAGS
from paceline.cli.services import SERVICES
from paceline.core.metrics import Family
from paceline.core.options import Options, flag, group_of, range_of
from paceline.services.gateway.api.pooling.cohere import CohereRequest
from paceline.services.gateway.api.pooling.embeddings import EmbeddingRequest
from paceline.services.gateway.api.pooling.tei import PredictRequest, TeiEmbedRequest
from paceline.services.gateway.api.pooling.vllm import ClassifyRequest, PoolingRequest
from paceline.services.gateway.api.scoring.requests import RerankRequest, ScoreRequest
from paceline.services.gateway.planning.schemas import ChatRequest, CompletionRequest
from paceline.services.gateway.queueing.admission_queue import AdmissionQueue
from paceline.services.gateway.telemetry.gateway_metrics import GatewayMetrics
from paceline.services.gateway.telemetry.metrics import Metrics

FOLDER = Path(__file__).parent / "reference"
SCHEMAS: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v2/embed": CohereRequest,
    "/pooling": PoolingRequest,
    "/classify": ClassifyRequest,
    "/score": ScoreRequest,
    "/rerank": RerankRequest,
    "/embed": TeiEmbedRequest,
    "/predict": PredictRequest,
}
"""The bodies of the routes whose fields are on the page of requests."""
PACKAGE = Path(__file__).parents[1] / "paceline"


def options() -> str:
    """Return the page of all options."""
    lines = [
        "# Options",
        "",
        "Each option is a flag of its command and a key of a TOML file (`--config FILE`): `--max-seqs 8` is",
        "`max-seqs = 8`. A key at the top of the file is for every service that has it; a key in a table such as",
        "`[decode]` is for that service. A flag takes precedence over the table, the table over the top, and the top",
        "over the default.",
    ]
    for name, service in SERVICES.items():
        config: type[Options] = service.config
        lines += ["", f"## paceline {name}", "", service.summary, ""]
        lines += ["| option | group | values | default | meaning |", "| --- | --- | --- | --- | --- |"]
        for field, info in config.model_fields.items():
            if field not in HIDDEN_OPTIONS:
                values = _values(config, field)
                default = "`~/.cache/paceline`" if field == "cache_dir" else _code(info.default)
                cells = (_flags(config, field), group_of(config, field), values, default, _cell(info.description))
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """Return the page of all metrics."""
    # A gateway shows its own process with the metric of all services.
    rows = {row[0]: row for row in (*_gateway_metrics(), *_worker_metrics())}.values()
    lines = [
        "# Metrics",
        "",
        "`GET /metrics` of a gateway shows its own metrics and those of all workers and hosts, for Prometheus. Names",
        "begin with `paceline:`; names of counters end with `_total`.",
        "",
        "| name | kind | counted by | meaning |",
        "| --- | --- | --- | --- |",
        *(f"| `{name}` | {kind} | {place} | {_cell(help)} |" for name, kind, place, help in sorted(rows)),
    ]
    return "\n".join(lines) + "\n"


def api() -> str:
    """Return the page of the fields of requests."""
    lines = [
        "# Fields of requests",
        "",
        "The fields are those of OpenAI, and vLLM's where OpenAI has none. Fields of other servers that would change",
        "the answer, such as `logits_processors`, are refused with status 400. All other unknown fields are ignored,",
        "with a warning in the log.",
    ]
    for path, schema in SCHEMAS.items():
        described = schema.model_json_schema()
        lines += ["", f"## POST {path}", "", "| field | type | default |", "| --- | --- | --- |"]
        for name, field in described["properties"].items():
            default = "required" if name in described.get("required", ()) else _code(field.get("default"))
            lines.append(f"| `{name}` | {_cell(_type(field, described))} | {default} |")
    return "\n".join(lines) + "\n"


PAGES = {"options.md": options, "metrics.md": metrics, "api.md": api}


def stale() -> list[str]:
    """Return the names of pages that are not what the code says."""
    return [name for name, make in PAGES.items() if _read(FOLDER / name) != make()]


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


_PLACES = {"kvtransfer": "kvtransfer", "planner": "planner", "common": "each service"}
"""By folder: who counts the metrics that its files declare. All others are counted by workers."""


def _worker_metrics() -> Iterator[tuple[str, str, str, str]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        if "= Family(" in file.read_text():
            module = importlib.import_module(".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts))
            for family in vars(module).values():
                if isinstance(family, Family) and family.name:
                    place = next((each for each in _PLACES if each in file.parts), "workers")
                    yield f"paceline:{family.name}", family.kind, _PLACES.get(place, place), family.help


def _gateway_metrics() -> Iterator[tuple[str, str, str, str]]:
    idle: Any = SimpleNamespace(
        running=0,
        waiting=0,
        queue=AdmissionQueue(1, 1.0),
        worker_wait=(),
    )
    metrics = Metrics("model")
    metrics.read_from(lambda: (), idle)
    registries = GatewayMetrics().registry, metrics.registry
    found: list[Metric] = [metric for registry in registries for metric in registry.collect()]
    for metric in found:
        yield metric.name, metric.type, "gateway", metric.documentation


def _flags(config: type[Options], field: str) -> str:
    """Return how an option is written on the command line."""
    if field == "model":
        return "`MODEL`"
    name = flag(field)
    if config.model_fields[field].annotation is bool:
        name = name.replace("--", "--[no-]", 1)
    return ", ".join(f"`{each}`" for each in (name, *SHORT_FLAGS.get(field, ())))


def _values(config: type[Options], field: str) -> str:
    """Return the values that an option accepts: the choices, or the type of a number and its range."""
    kind = config.model_fields[field].annotation
    if kind is bool:
        return "`true` or `false`"
    if choices := get_args(kind):
        *others, last = (f"`{choice}`" for choice in choices)
        return f"{', '.join(others)} or {last}"
    if kind not in (int, float):
        return ""
    least, most = range_of(config, field)
    limits = "" if least is None else f", at least {least:g}" if most is None else f", from {least:g} to {most:g}"
    return ("integer" if kind is int else "number") + limits


def _code(default: object) -> str:
    text = str(default).lower() if isinstance(default, bool) else str(default)
    return "" if default in ("", None) else f"`{text}`"


def _type(field: dict[str, Any], schema: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(each, schema) for each in field["anyOf"]))
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if field.get("type") == "array":
        return f"array of {_type(field['items'], schema)}" if "items" in field else "array"
    if "enum" in field:
        return " or ".join(map(repr, field["enum"]))
    limits = [f"{word} {field[key]}" for key, word in _LIMITS.items() if key in field]
    return ", ".join([str(field.get("type", "any")), *limits])


_LIMITS = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
}


def _cell(text: str | None) -> str:
    return "<br>".join(" ".join(line.split()) for line in (text or "").splitlines()).replace("|", "\\|")


def main() -> int:
    if "--check" in sys.argv:
        for name in stale():
            print(f"docs/reference/{name} is not what the code says; run: python docs/generate.py", file=sys.stderr)
        return bool(stale())
    FOLDER.mkdir(exist_ok=True)
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make())
    return 0


if __name__ == "__main__":
    sys.exit(main())
