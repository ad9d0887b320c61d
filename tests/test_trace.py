"""How `paceline trace` prints a gateway's answer, and what it says if there is none."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.cli import main
from paceline.trace import CHUNKS_SHOWN, render


def chunk(index: int) -> dict[str, Any]:
    return {"at_ms": 10.0 + index, "worker": "prefill-0", "first": 512 * index, "tokens": 512, "step_ms": 0.9}


def attempt(**parts: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(("asked", "admission", "prefill", "first_token_ms", "handoff", "decode", "failure"))
    queue = {"began_ms": 2.0, "ms": None, "ahead": 0, "waited_for": {}}
    encodings = {"encodings": [], "encodings_left_out": 0}
    return {"attempt": 1, "queue": queue, **nothing, **encodings, "outcome": None, **parts}


def told(*attempts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    part = {"index": 0, "sequence_id": "r-1", "began_ms": 1.0, "prompt_tokens": 7, "max_tokens": 9, "end": None}
    part |= {"attempts_left_out": 0}
    asked = {"prompts": 1, "n": 1, "sampling": "random", "temperature": 0.7}
    asked |= {"structured_output": "regex", "stop_strings": 0}
    return {
        "request_id": "r", "state": "running", "ms": 33.0, "earlier": [], "arrived": "2026-01-02T03:04:05.678+00:00",
        "endpoint": "/v1/completions", "streamed": True, "asked": asked, "sequences": 1,
        "parts": [{**part, "attempts": list(attempts)}], **fields,
    }  # fmt: skip


def test_a_request_that_waits() -> None:
    waiting = attempt(queue={"began_ms": 2.0, "ms": None, "ahead": 3, "waited_for": {"no worker has room": 4}})
    head, asked, *lines = render(told(waiting, earlier=["r-0"]))
    assert head == "r: running after 33.0 ms"
    assert asked.startswith("/v1/completions, streamed; random, temperature 0.7; structured output: regex; arrived")
    assert lines[0] == "earlier requests with this id: r-0"
    assert lines[-1] == "       2.0  queue       waits; 3 before it; no worker has room (4 times)"


def test_long_prompts_are_cut_in_the_middle() -> None:
    chunks = [chunk(index) for index in range(20)]
    prefill = {"began_ms": 9.0, "ended_ms": 60.0, "tokens": 50 * 512, "steps": 50, "steps_ms": 45.0}
    lines = render(told(attempt(prefill={**prefill, "chunks": chunks, "chunks_left_out": 30})))
    assert "50 chunks, 45.0 ms of steps" in lines[-1 - CHUNKS_SHOWN - 2]
    assert [line for line in lines if "tokens 9728-10239 on prefill-0" in line]
    assert lines[-1] == f"      60.0    chunks    {50 - CHUNKS_SHOWN - 1} more"


def test_a_handoff_that_is_not_known_to_be_over_and_a_failure() -> None:
    handoff = {"filled_ms": 20.0, "told_ms": 20.5, "adopted_ms": None}
    failure = {"outcome": "failed", "failure": {"at_ms": 30.0, "reason": "decode worker d: gone"}}
    lines = render(told(attempt(handoff=handoff, **failure)))
    assert lines[-3:] == [
        "      20.0  filled",
        "      20.5  handoff     not known to be over",
        "      30.0  FAILED      decode worker d: gone",
    ]


def test_attempts_that_no_worker_has_admitted() -> None:
    queue = {"began_ms": 2.0, "ms": 0.5, "ahead": 0, "waited_for": {}}
    asked = {"at_ms": 2.5, "decode": {"worker": "d", "host": "h", "numerics": None}, "prefill": None}
    failure = {"at_ms": 90.0, "reason": "decode worker d hangs"}
    ended = attempt(queue=queue, asked=asked, outcome="failed", failure=failure)
    cancelled = attempt(attempt=2, queue=queue, asked=asked, outcome="cancelled", failure=failure)
    lines = render(told(ended, cancelled))
    assert lines[-6:] == [
        "       2.0  queue       0.5 ms",
        "       2.5  attempt 1   decode d on h",
        "      90.0  FAILED      decode worker d hangs",
        "       2.0  queue       0.5 ms",
        "       2.5  attempt 2   decode d on h",
        "      90.0  CANCELLED   decode worker d hangs",
    ]
    many = told(ended)
    many["parts"][0]["attempts_left_out"] = 7
    assert render(many)[-1].endswith("attempts    7 more, which failed before the last one")


def test_an_attempt_that_goes_on_with_other_numerics() -> None:
    place = {"worker": "d", "host": "h", "numerics": "portable bfloat16"}
    admission = {"asked_ms": 3.0, "at_ms": 4.0, "decode": place, "prefill": None, "context_tokens": 7}
    admission |= dict.fromkeys(("cached_tokens", "blocks", "cached_blocks"), 0)
    change = "avx2 bfloat16 before, portable bfloat16 now"
    admission |= {"numerics_changes": {"decode": change}}
    queue = {"began_ms": 2.0, "ms": 1.0, "ahead": 0, "waited_for": {}}
    lines = render(told(attempt(queue=queue, admission=admission)))
    assert lines[-1] == f"       4.0  numerics    of decode: {change}; tokens may differ"


def test_choices_that_are_not_shown_are_counted() -> None:
    lines = render(told(attempt(), sequences=5))
    assert any(line.startswith("choice 0: 7 prompt tokens") for line in lines)
    assert lines[-1].startswith("4 more choices")


def test_bundles_of_inputs_are_shown_as_such() -> None:
    """A bundle that was computed again, because the model was replaced, is shown twice and counts once."""
    asked = {"task": "embed", "inputs": 80, "dimensions": None, "normalize": None, "activation": None}
    end = {"at_ms": 9.0, "reason": "stop", "why": "", "generated_tokens": 0, "attempts": 2}
    answer = told(attempt(), asked=asked, sequences=2)
    answer["parts"] = [{**answer["parts"][0], "index": index, "end": end} for index in (0, 1, 1)]
    lines = render(answer)
    assert lines[1].startswith("embed of 80 inputs")
    assert [line for line in lines if line.startswith("bundle")] == [f"bundle {index}: 7 tokens" for index in (0, 1, 1)]
    assert lines[-1].endswith("stop; 2 attempts")


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, Any]]]:
    """An HTTP server that answers with the status and body that a test sets, and records the path and the API key."""
    seen: dict[str, Any] = {"status": 200, "body": b"{}"}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.update(path=self.path, key=self.headers.get("Authorization"))
            self.send_response(seen["status"])
            self.send_header("content-length", str(len(seen["body"])))
            self.end_headers()
            self.wfile.write(seen["body"])

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", seen
        running.shutdown()
        thread.join()


@pytest.mark.slow
def test_an_id_with_odd_characters_is_asked_for_as_it_is(
    server: tuple[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, seen = server
    assert main(["trace", "../a b?c#ü", "--url", f"{url}/", "--json", "--api-key", "secret"]) == 0
    assert seen["path"] == "/trace/%2E%2E%2Fa%20b%3Fc%23%C3%BC"
    assert seen["key"] == "Bearer secret"
    assert capsys.readouterr().out == "{}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "body", "code", "sentence"),
    [
        (404, b'{"error": {"message": "unknown to me"}}', 2, "answers 404: unknown to me"),
        (401, b'{"error": {"message": "a key is needed"}}', 2, "answers 401: a key is needed"),
        (502, b"<html>", 2, "answers 502: Bad Gateway"),
        (404, b'{"error": "text"}', 2, "answers 404: Not Found"),
        (200, b"<html>", 1, "name it with --url"),
        (200, b"[]", 1, "name it with --url"),
    ],
)
def test_a_refusal_is_told_in_the_words_of_the_gateway(
    server: tuple[str, dict[str, Any]],
    status: int,
    body: bytes,
    code: int,
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, seen = server
    seen.update(status=status, body=body)
    assert main(["trace", "x", "--url", url]) == code
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "127.0.0.1:8000", "file:///etc/hostname", "http://[", "http://"])
def test_without_a_gateway_there_is_one_clear_sentence(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "x", "--url", url]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"paceline: no gateway at {url} (")
    assert error.endswith("; name it with --url\n")


def test_what_does_not_speak_http_is_no_gateway(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"220 mail.example ESMTP\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert main(["trace", "x", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}"]) == 1
        thread.join()
    assert "name it with --url" in capsys.readouterr().err


def test_encodings_are_shown_with_what_they_took() -> None:
    computed = {"began_ms": 5.0, "ended_ms": 65.5, "worker": "encode-0", "kind": "image", "tokens": 256}
    computed |= {"cached": False, "queue_ms": 10.0, "encode_ms": 40.25, "bytes": 1024, "bytes_moved": 1024}
    found = {**computed, "ended_ms": 6.0, "worker": "prefill-0", "cached": True, "bytes_moved": 0}
    lines = render(told(attempt(encodings=[found, computed], encodings_left_out=3)))
    assert [line.split(maxsplit=2)[1:] for line in lines if "encoding" in line] == [
        ["encoding", "image of 256 tokens on prefill-0; cached; 1.0 ms in all"],
        [
            "encoding",
            "image of 256 tokens on encode-0; 10.0 ms in the queue, 40.2 ms of encoding; 1024 bytes moved; "
            "60.5 ms in all",
        ],
        ["encodings", "3 more"],
    ]
