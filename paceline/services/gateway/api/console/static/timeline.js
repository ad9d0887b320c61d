// One request's life, drawn from its trace: a table whose rows are phases, each with a bar on a common time axis.
import { bar, h } from "./dom.js";
import { clock, count, duration, durationText, plural } from "./format.js";
import { phasesOf, preparation, ticksUpTo } from "./phases.js";
import { getJson } from "./store.js";

const EVERY_MS = 1000;

export function timeline(main, id) {
  const body = h("div.life", { "aria-busy": "true" }, h("p.note", {}, "Loading."));
  let timer = 0;
  let isGone = false;

  main.append(h("p", {}, h("a", { href: "#/requests" }, "All requests")), h("h1.id", {}, id), body);

  async function refresh() {
    try {
      const trace = await getJson(`trace/${encodeURIComponent(id).replaceAll(".", "%2E")}`);
      if (isGone) return;
      body.replaceChildren(...show(trace));
      if (trace.state === "running") timer = setTimeout(refresh, EVERY_MS);
    } catch (error) {
      if (!isGone) body.replaceChildren(h("p.error", { role: "alert" }, error.message));
    }
    body.removeAttribute("aria-busy");
  }

  refresh();
  return () => { isGone = true; clearTimeout(timer); };
}

function show(trace) {
  const left = trace.sequences - new Set(trace.parts.map(({ index }) => index)).size; // a bundle may be computed again
  return [
    facts(trace),
    ...trace.parts.map((part) => choice(trace, part)),
    left ? h("p.note", {}, `${plural(left, "more choice")}, not begun or left out.`) : null,
    h("details", {}, h("summary", {}, "The trace as JSON"), h("pre.scroll", { tabindex: 0 }, JSON.stringify(trace, null, 2))),
  ].filter(Boolean);
}

function facts(trace) {
  const parts = trace.parts;
  const sum = (value) => parts.reduce((total, part) => total + value(part), 0);
  const firsts = parts.flatMap((part) => part.attempts.map((attempt) => attempt.first_token_ms)).filter((at) => at != null);
  const tokens = sum((part) => part.end?.generated_tokens ?? 0);
  const { task, inputs, sampling, temperature } = trace.asked;
  const list = [
    ["State", h("span.state", { "data-state": trace.state }, trace.state)],
    ["Arrived", clock(trace.arrived)],
    task ? ["Task", task] : ["First token", duration(firsts.length ? Math.min(...firsts) / 1000 : null)],
    ["Total", duration(trace.ms / 1000)],
    [task ? "Tokens" : "Prompt", count(sum((part) => part.prompt_tokens))],
    task ? ["Inputs", count(inputs)] : ["Generated", count(tokens)],
    ["Model", h("code", {}, trace.model)],
    ["Endpoint", h("code", {}, trace.endpoint)],
    task ? null : ["Sampling", sampling === "greedy" ? "greedy" : `temperature ${temperature}`],
    trace.session_id ? ["Session", trace.session_id] : null,
    trace.asked.structured_output ? ["Structured output", trace.asked.structured_output] : null,
  ];
  return h("dl.facts", {}, list.filter(Boolean).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function choice(trace, part) {
  const span = Math.max(trace.ms, 0.001);
  const several = trace.sequences > 1 ? `${trace.asked.task ? "Bundle" : "Choice"} ${part.index}` : "Timeline";
  const end = part.end;
  return h("section", {},
    h("h2", {}, several),
    h("table.timeline", {},
      h("caption.unseen", {}, "Phases of the request, with their beginnings after its arrival"),
      h("thead", {}, h("tr", {},
        h("th", { scope: "col" }, "Phase"), h("th.number", { scope: "col" }, "From"), h("th.number", { scope: "col" }, "Took"),
        h("th.axis", { scope: "col" }, h("span.unseen", {}, "What happened"), axis(span)))),
      part.attempts.map((attempt, index) => attemptRows(attempt, index, part.attempts.length, span))),
    end ? h("p.note", {}, `Ended after ${durationText(end.at_ms / 1000)}: ${[end.reason, end.why].filter(Boolean).join(", ")}; `,
      trace.asked.task ? "" : `${plural(end.generated_tokens, "token")} in `, `${plural(end.attempts, "attempt")}.`) : null);
}

function axis(span) {
  return h("span.ticks", { "aria-hidden": "true" }, ticksUpTo(span, 4).map((at) => {
    const tick = h("i", {}, at ? durationText(at / 1000) : "0");
    tick.style.left = `${(at / span) * 100}%`;
    return tick;
  }));
}

function attemptRows(attempt, index, attempts, span) {
  const title = attempts > 1 ? h("tr.attempt", {}, h("th", { colspan: 4, scope: "rowgroup" }, index ? `Attempt ${index + 1}, a retry` : "Attempt 1")) : null;
  const phases = [...(index ? [] : [preparation(attempt)]), ...phasesOf(attempt, span)];
  return h("tbody", {}, title, phases.map((phase) => row(phase, attempt, span)));
}

function row(phase, attempt, span) {
  const took = phase.to - phase.from;
  const piece = bar("i.phase", took / span, { "data-kind": phase.kind });
  piece.style.left = `${(phase.from / span) * 100}%`;
  const marks = (phase.marks ?? []).slice(0, -1).map((at) => mark("i.chunk", at, span));
  const first = attempt.first_token_ms == null ? null : mark("i.first", attempt.first_token_ms, span);
  return h("tr", { "data-kind": phase.kind },
    h("th", { scope: "row" }, phase.name),
    h("td.number", {}, duration(phase.from / 1000)),
    h("td.number", {}, phase.kind === "failure" ? "" : duration(took / 1000)),
    h("td", {}, h("span.track", { "aria-hidden": "true" }, first, piece, marks),
      h("span.what", {}, phase.where ? h("b.mono", {}, phase.where) : null, " ", phase.more)));
}

function mark(tag, at, span) {
  const element = h(tag);
  element.style.left = `${(at / span) * 100}%`;
  return element;
}
