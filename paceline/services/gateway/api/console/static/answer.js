// One answer of the model: reasoning folded, content, tool calls, and what it took.
import { h } from "./dom.js";
import { count, duration, rate } from "./format.js";
import { getJson } from "./store.js";

/** Return an answer's `element`, `update` while it streams, and `end`. `reply` sends the results of tool calls, if it can. */
export function answerView(answer, reply) {
  const reasoning = h("p.words");
  const thought = h("summary", {}, "Reasoning");
  const folded = h("details.reasoning", { hidden: true }, thought, reasoning);
  const content = h("p.words");
  const calls = h("div.calls");
  const wanted = h("div");
  const facts = h("p.facts-line");
  const element = h("li.turn.model", { "aria-busy": "true" }, h("h2", {}, "Model"), folded, content, calls, wanted, facts);
  let isDrawn = true;
  let places = null;

  /** Draw at most once a frame, because tokens may come faster. */
  function update() {
    if (!isDrawn) return;
    isDrawn = false;
    requestAnimationFrame(draw);
  }

  function draw() {
    isDrawn = true;
    folded.hidden = !answer.reasoning;
    thought.textContent = answer.reasoning && !answer.content && !answer.finish ? "Reasoning …" : "Reasoning";
    reasoning.textContent = answer.reasoning.trim();
    content.textContent = answer.content.trim();
    calls.replaceChildren(...answer.calls.map(showCall));
    facts.replaceChildren(...figures(answer), ...(places ?? []));
  }

  async function end(key) {
    element.removeAttribute("aria-busy");
    draw();
    if (answer.calls.length && answer.finish !== "error") wanted.append(results(answer.calls, reply));
    places = await servedBy(answer, key);
    draw();
  }

  return { element, update, end };
}

function showCall(call) {
  let text = call.arguments;
  try {
    text = JSON.stringify(JSON.parse(text), null, 2);
  } catch { /* it has not come whole yet */ }
  return h("div.call", {}, h("h3.mono", {}, call.name), h("pre.scroll", { tabindex: 0 }, text));
}

/** Return a form for what the tools answered. */
function results(calls, reply) {
  const areas = calls.map((call) => h("textarea.mono", { rows: 2, "aria-label": `Result of ${call.name}`, placeholder: `Result of ${call.name}` }));
  const form = h("form.results", {
    submit: (event) => {
      event.preventDefault();
      const values = calls.map((call, index) => ({ role: "tool", tool_call_id: call.id, content: areas[index].value }));
      if (reply(values)) form.remove();
    },
  }, areas, h("button.quiet", { type: "submit" }, calls.length > 1 ? "Send the results" : "Send the result"));
  return form;
}

function figures({ usage, sent, first, last, finish }) {
  const words = [];
  if (first) words.push(["first token ", duration((first - sent) / 1000)]);
  const tokens = usage?.completion_tokens;
  if (tokens > 1 && last > first) words.push([rate(((tokens - 1) * 1000) / (last - first), "tok")]);
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    words.push([count(usage.prompt_tokens), " prompt", cached ? ` (${count(cached)} cached)` : "", ", ", count(tokens), " generated"]);
  }
  if (finish && finish !== "stop") words.push([{ length: "cut off at the most tokens", stopped: "stopped by you" }[finish] ?? finish.replaceAll("_", " ")]);
  return words.flatMap((each, index) => (index ? [" · ", ...each] : each));
}

/** Return which workers served an answer, with a link to its timeline; null if the trace may not be read. */
async function servedBy(answer, key) {
  if (!answer.id) return null;
  try {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const trace = await getJson(`trace/${encodeURIComponent(answer.id)}`, { headers });
    const admitted = trace.parts.flatMap((part) => part.attempts).map((attempt) => attempt.admission).filter(Boolean).at(-1);
    const names = admitted ? [admitted.prefill, admitted.decode].filter(Boolean).map((place) => place.worker) : [];
    return [" · ", h("a", { href: `#/requests/${encodeURIComponent(trace.own_id)}` }, `${names.join(" → ")} timeline`)];
  } catch {
    return null;
  }
}
