// From a trace (GET /trace/{id}) to the phases of a request's life. Pure: no elements, no requests.
// Times are in milliseconds since the request arrived.
import { count, plural } from "./format.js";

const ms = (value) => `${value.toFixed(1)} ms`;

/** Return what the gateway does before the first attempt: it renders and tokenizes the prompt, and decodes media. */
export function preparation(attempt) {
  const until = attempt.queue.began_ms;
  return { kind: "preparation", name: "Preparation", from: 0, to: until, where: "gateway", more: "prompt, tokens, media" };
}

/** Return the phases of an attempt, in the order of their beginnings: {kind, name, from, to, where, more, marks}. */
export function phasesOf(attempt, now) {
  const phases = [...before(attempt, now), ...attempt.encodings.map(encoding)];
  if (attempt.prefill) phases.push(prefill(attempt.prefill));
  if (attempt.handoff) phases.push(handoff(attempt.handoff, now));
  if (attempt.decode) phases.push(decode(attempt));
  phases.sort((one, other) => one.from - other.from);
  if (attempt.failure) {
    const at = attempt.failure.at_ms;
    const name = attempt.outcome === "cancelled" ? "Cancelled" : "Failed";
    phases.push({ kind: "failure", name, from: at, to: at, where: "", more: attempt.failure.reason });
  }
  return phases;
}

function before({ queue, asked, admission, failure }, now) {
  const reasons = Object.entries(queue.waited_for).map(([reason, times]) => (times > 1 ? `${reason} (${times} times)` : reason));
  const ahead = queue.ahead ? [`${plural(queue.ahead, "request")} before it`] : [];
  const waiting = {
    kind: "queue", name: "Queue", from: queue.began_ms, to: asked ? asked.at_ms : now,
    where: "gateway", more: [...ahead, ...reasons].join("; ") || "a place was free",
  };
  if (!asked) return [waiting];
  const placement = {
    kind: "placement", name: "Placement", from: asked.at_ms, to: admission?.at_ms ?? failure?.at_ms ?? now,
    where: [asked.prefill, asked.decode].filter(Boolean).map((each) => each.worker).join(" → "), more: "not admitted",
  };
  if (!admission) return [waiting, placement];
  const blocks = `${count(admission.cached_blocks)} of ${plural(admission.blocks, "block")} reused`;
  const changes = Object.entries(admission.numerics_changes).map(([step, change]) => `numerics of ${step}: ${change}`);
  return [waiting, {
    ...placement,
    more: [`${count(admission.cached_tokens)} of ${plural(admission.context_tokens, "token")} cached, ${blocks}`, ...changes].join("; "),
  }];
}

function encoding(each) {
  const work = each.cached ? "cached" : `${ms(each.queue_ms)} in the queue, ${ms(each.encode_ms)} of encoding`;
  return {
    kind: "encode", name: `Encode ${each.kind}`, from: each.began_ms, to: each.ended_ms, where: each.worker,
    more: `${plural(each.tokens, "token")}; ${work}`,
  };
}

function prefill(own) {
  return {
    kind: "prefill", name: "Prefill", from: own.began_ms, to: own.ended_ms,
    where: [...new Set(own.chunks.map((chunk) => chunk.worker))].join(", "),
    more: `${plural(own.tokens, "token")} in ${plural(own.steps, "chunk")}, ${ms(own.steps_ms)} of steps`,
    marks: own.chunks.map((chunk) => chunk.at_ms),
  };
}

function handoff(own, now) {
  const isDone = own.adopted_ms != null;
  return {
    kind: "handoff", name: "Handoff", from: own.filled_ms, to: own.adopted_ms ?? own.told_ms ?? now, where: own.path ?? "",
    more: isDone ? `${plural(own.blocks, "block")}, ${count(own.bytes_moved)} bytes moved` : "not known to be over",
  };
}

function decode({ decode: own, admission }) {
  const gaps = own.between_tokens;
  const words = [plural(own.tokens, "token")];
  if (own.steps != null) words.push(plural(own.steps, "step"));
  if (gaps) words.push(`between tokens p50 ${ms(gaps.p50_ms)}, p99 ${ms(gaps.p99_ms)}`);
  if (own.drafts) words.push(`${own.accepted_tokens} of ${plural(own.draft_tokens, "draft")} accepted`);
  if (own.preemptions) words.push(plural(own.preemptions, "preemption"));
  return {
    kind: "decode", name: "Decode", from: own.first_token_ms, to: own.last_token_ms,
    where: admission?.decode?.worker ?? "", more: words.join("; "),
  };
}

/** Return about `most` round instants from 0 to `end`. */
export function ticksUpTo(end, most) {
  const rough = Math.max(end, 0.001) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((each) => each >= rough);
  return Array.from({ length: Math.floor(end / step) + 1 }, (_, index) => index * step);
}
