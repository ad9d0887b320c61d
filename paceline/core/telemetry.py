"""Logs and traces. Every log line has the ids of its request and its trace, if there are any."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal

from opentelemetry import propagate, trace

from paceline.core import env
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

LogFormat = Literal["text", "json"]

_request_id: ContextVar[str | None] = ContextVar("paceline_request_id", default=None)
_tracer = trace.get_tracer("paceline")
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "request_id", "trace_id", "taskName"}


def setup(service: str, level: str, log_format: LogFormat) -> None:
    """Configure logs and traces of this process. `service` is its name in both, e.g. "decode-1"."""
    # Only services need these. Commands such as `paceline trace` start sooner without them.
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_add_context)
    handler.setFormatter(_JsonFormatter(service) if log_format == "json" else _TextFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    provider = TracerProvider(resource=Resource.create({"service.name": f"paceline-{service}"}))
    if env.exports_traces():
        provider.add_span_processor(BatchSpanProcessor(_otlp_exporter()))
    trace.set_tracer_provider(provider)


@contextlib.contextmanager
def request_span(
    name: str, request_id: str, carrier: Mapping[str, str] | None = None, began: int | None = None
) -> Iterator[trace.Span]:
    """Open a span for a request in this service. Log lines during the `with` statement have its ids.

    Args:
        carrier: headers or gRPC metadata that may contain a W3C `traceparent`; None continues the current trace.
        began: start of the span on time.time_ns(); None is now.
    """
    parent = propagate.extract(carrier) if carrier is not None else None
    token = _request_id.set(request_id)
    try:
        with _tracer.start_as_current_span(
            name, context=parent, attributes={"paceline.request_id": request_id}, start_time=began
        ) as span:
            yield span
    finally:
        _request_id.reset(token)


def set_request_id(request_id: str) -> None:
    """Set the request id for later log lines of the current task and of tasks that it starts."""
    _request_id.set(request_id)


def trace_headers() -> tuple[tuple[str, str], ...]:
    """Return the current trace as gRPC metadata."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return tuple(carrier.items())


def traceparent() -> str:
    """Return the current trace as a W3C `traceparent`; empty if there is none."""
    return dict(trace_headers()).get("traceparent", "")


def carrier_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """Return gRPC metadata as a carrier for `request_span`."""
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def _otlp_exporter() -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set; install the exporter: pip install 'paceline[otlp]'"
        ) from error
    return OTLPSpanExporter()


def _add_context(record: logging.LogRecord) -> bool:
    if not hasattr(record, "request_id"):
        record.request_id = _request_id.get()
    context = trace.get_current_span().get_span_context()
    record.trace_id = f"{context.trace_id:032x}" if context.is_valid else None
    return True


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, object] = {
            "time": moment.isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", None),
            "trace_id": getattr(record, "trace_id", None),
        }
        line.update((name, value) for name, value in vars(record).items() if name not in _STANDARD_FIELDS)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _TextFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s {service:<12} %(levelname)-7s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if request_id := getattr(record, "request_id", None):
            text += f"  [{request_id}]"
        return text
