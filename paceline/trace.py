"""`paceline trace`: show one request's life, from /trace of a gateway."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.client import GatewayClient

CHUNKS_SHOWN = 8
"""Largest number of chunks of one attempt that are shown, not counting the last chunk, which is always shown."""

Json = Mapping[str, Any]
Line = tuple[float | None, str, str]
"""An event: milliseconds since the request's arrival or None, the name of the event, and its details."""


def trace(request_id: str, gateway: GatewayClient, as_json: bool) -> None:
    """Print the trace of a request from the gateway. Raises the errors of `GatewayClient.fetch`."""
    # Dots are quoted, too, because "." and ".." have a meaning in a path.
    name = urllib.parse.quote(request_id, safe="").replace(".", "%2E")
    told = gateway.fetch(f"/trace/{name}")
    print(json.dumps(told, indent=2) if as_json else "\n".join(render(told)))


def render(told: Json) -> list[str]:
    """Return the lines to print for a trace, given as the gateway's JSON."""
    lines = [
        f"{told['request_id']}: {told['state']} after {told['ms']:.1f} ms",
        f"{_asked(told)}; arrived {told['arrived']}",
    ]
    if told["earlier"]:
        lines.append(f"earlier requests with this id: {', '.join(told['earlier'])}")
    pools = "task" in told["asked"]
    for part in told["parts"]:
        several = f"{'bundle' if pools else 'choice'} {part['index']}: " if told["sequences"] > 1 else ""
        size = "tokens" if pools else f"prompt tokens, at most {part['max_tokens']} to generate"
        lines += ["", f"{several}{part['prompt_tokens']} {size}"]
        lines.append(f"workers know it as {part['sequence_id']}")
        lines += [_row(*line) for line in _part(part, pools)]
    # A bundle that was computed again has several parts.
    if left := told["sequences"] - len({part["index"] for part in told["parts"]}):
        lines += ["", f"{left} more {'bundles' if pools else 'choices'}, which have not begun or were left out"]
    return lines


def _asked(told: Json) -> str:
    asked = told["asked"]
    if task := asked.get("task"):
        return f"{task} of {_count(asked['inputs'], 'input')}"
    words = [told["endpoint"] + (", streamed" if told["streamed"] else "")]
    if adapter := asked.get("adapter"):
        words.append(f"adapter {adapter['name']} ({adapter['digest'][:16]})")
    if told["sequences"] > 1:
        words.append(f"{asked['prompts']} x {asked['n']} choices")
    words.append("greedy" if asked["sampling"] == "greedy" else f"random, temperature {asked['temperature']:g}")
    if asked["structured_output"]:
        words.append(f"structured output: {asked['structured_output']}")
    if asked["stop_strings"]:
        words.append(_count(asked["stop_strings"], "stop string"))
    return "; ".join(words)


def _part(part: Json, pools: bool) -> Iterator[Line]:
    yield part["began_ms"], "begin", ""
    for attempt in part["attempts"]:
        yield from sorted(_attempt(attempt), key=lambda line: line[0] or 0.0)
    if left := part["attempts_left_out"]:
        yield None, "attempts", f"{left} more, which failed before the last one"
    if end := part["end"]:
        why = f": {end['why']}" if end["why"] else ""
        made = "" if pools else f"{end['generated_tokens']} tokens in "
        yield end["at_ms"], "end", f"{end['reason']}{why}; {made}{_count(end['attempts'], 'attempt')}"


def _attempt(attempt: Json) -> Iterator[Line]:
    yield from _queue(attempt["queue"])
    if asked := attempt["asked"]:
        places = [f"{role} {_place(asked[role])}" for role in ("prefill", "decode") if asked[role]]
        yield asked["at_ms"], f"attempt {attempt['attempt']}", ", ".join(places)
    if admission := attempt["admission"]:
        yield (
            admission["at_ms"],
            "admitted",
            f"{admission['cached_tokens']} of {admission['context_tokens']} tokens cached: "
            f"{admission['cached_blocks']} of {admission['blocks']} blocks reused",
        )
        for step, change in admission["numerics_changes"].items():
            yield admission["at_ms"], "numerics", f"of {step}: {change}; tokens may differ"
    for encoding in attempt["encodings"]:
        yield encoding["ended_ms"], "encoding", _encoding(encoding)
    if left := attempt["encodings_left_out"]:
        yield attempt["encodings"][-1]["ended_ms"], "encodings", f"{left} more"
    if prefill := attempt["prefill"]:
        yield from _prefill(prefill)
    if attempt["first_token_ms"] is not None:
        yield attempt["first_token_ms"], "first token", ""
    if handoff := attempt["handoff"]:
        yield from _handoff(handoff)
    if decode := attempt["decode"]:
        yield from _decode(decode)
    if failure := attempt["failure"]:
        yield failure["at_ms"], attempt["outcome"].upper(), failure["reason"]


def _queue(queue: Json) -> Iterator[Line]:
    words = ["waits" if queue["ms"] is None else f"{queue['ms']:.1f} ms"]
    words += [f"{queue['ahead']} before it"] * bool(queue["ahead"])
    for reason, times in queue["waited_for"].items():
        words.append(reason + (f" ({times} times)" if times > 1 else ""))
    yield queue["began_ms"], "queue", "; ".join(words)


def _encoding(encoding: Json) -> str:
    """Return the source of an encoding and the time that it took."""
    words = [f"{encoding['kind']} of {_count(encoding['tokens'], 'token')} on {encoding['worker']}"]
    if encoding["cached"]:
        words.append("cached")
    else:
        words.append(f"{encoding['queue_ms']:.1f} ms in the queue, {encoding['encode_ms']:.1f} ms of encoding")
    if encoding["bytes_moved"]:
        words.append(f"{encoding['bytes_moved']} bytes moved")
    words.append(f"{encoding['ended_ms'] - encoding['began_ms']:.1f} ms in all")
    return "; ".join(words)


def _prefill(prefill: Json) -> Iterator[Line]:
    steps = f"{prefill['tokens']} tokens in {_count(prefill['steps'], 'chunk')}, {prefill['steps_ms']:.1f} ms of steps"
    yield prefill["began_ms"], "prefill", steps
    chunks: Sequence[Json] = prefill["chunks"]
    shown = [*chunks[:CHUNKS_SHOWN], *chunks[CHUNKS_SHOWN:][-1:]]
    for chunk in shown:
        last = chunk["first"] + chunk["tokens"] - 1
        yield (
            chunk["at_ms"],
            "  chunk",
            f"tokens {chunk['first']}-{last} on {chunk['worker']}: {chunk['step_ms']:.1f} ms",
        )
    if left := prefill["steps"] - len(shown):
        yield prefill["ended_ms"], "  chunks", f"{left} more"


def _handoff(handoff: Json) -> Iterator[Line]:
    yield handoff["filled_ms"], "filled", ""
    if handoff["adopted_ms"] is None:
        yield handoff["told_ms"] or handoff["filled_ms"], "handoff", "not known to be over"
        return
    moved = f"{_count(handoff['blocks'], 'block')}, {handoff['bytes_moved']} bytes moved, path: {handoff['path']}"
    yield handoff["adopted_ms"], "handoff", f"{moved}; {handoff['ms']:.1f} ms"


def _decode(decode: Json) -> Iterator[Line]:
    yield decode["first_token_ms"], "decode", "first token"
    words = [_count(decode["tokens"], "token")]
    if decode["steps"] is not None:
        words.append(_count(decode["steps"], "step"))
    if gaps := decode["between_tokens"]:
        words.append(
            "between tokens " + ", ".join(f"{name} {gaps[f'{name}_ms']:.1f}" for name in ("p50", "p99", "max")) + " ms"
        )
    if decode["drafts"]:
        words.append(f"{decode['accepted_tokens']} of {decode['draft_tokens']} drafts accepted")
    if decode["preemptions"]:
        words.append(_count(decode["preemptions"], "preemption"))
    yield decode["last_token_ms"], "decode", "last token; " + "; ".join(words)


def _place(place: Json) -> str:
    return f"{place['worker']} on {place['host']}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _row(at: float | None, what: str, more: str) -> str:
    return f"{'' if at is None else format(at, '.1f'):>10}  {what:<11} {more}".rstrip()
