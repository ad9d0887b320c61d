"""If traces are exported, operations of a traced request are spans of its trace. Otherwise they cost nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"

PROGRAM = f"""
import json
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from paceline.core.errors import StaleError
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.kvtransfer.ledger.ledger import Ledger
from paceline.services.kvtransfer.operations import adopted, apply
from tests.services.kvtransfer.kv_host import key, reserve
from tests.services.kvtransfer.kv_toolkit import make_layout

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
ledger = Ledger(make_layout((16, 0)), 4, 10.0)
for operation in (reserve(key("a"), tokens=48), reserve(key("b"), tokens=32), pb.Operation()):
    operation.traceparent = "00-{TRACE}-{PARENT}-01"
    apply(ledger, 1, operation, 0.0)
adopt = pb.Operation(adopt=pb.Adopt(key=key("c")), traceparent="00-{TRACE}-{PARENT}-01")
adopted(ledger, adopt, StaleError("over"), began=1234)
apply(ledger, 1, reserve(key("untraced"), tokens=16), 0.0)
made = exporter.get_finished_spans()
assert [span.start_time for span in made if span.name == "adopt"] in ([], [1234])
print(json.dumps([
    (span.name, f"{{span.context.trace_id:032x}}", f"{{span.parent.span_id:016x}}", dict(span.attributes))
    for span in made
]))
"""


def spans(**variables: str) -> list[Any]:
    """Return the spans of PROGRAM. It runs in a new process, because a process can have only one tracer provider."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**environment, **variables}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    made: list[Any] = json.loads(done.stdout)
    return made


def test_an_operation_is_a_span_of_its_request_s_trace() -> None:
    made = {"paceline.request_id": "a", "paceline.code": "CODE_OK", "paceline.state": "reserved", "paceline.blocks": 3}
    refused = {"paceline.request_id": "b", "paceline.code": "CODE_EXHAUSTED"}
    assert spans(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:4318") == [
        ["reserve", TRACE, PARENT, made],
        ["reserve", TRACE, PARENT, refused],
        ["adopt", TRACE, PARENT, {"paceline.request_id": "c", "paceline.code": "CODE_STALE"}],
    ]


def test_no_span_is_made_where_nobody_collects_them() -> None:
    assert spans() == []
