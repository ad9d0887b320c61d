// The fleet as it lives: key figures, workers by role, KV blocks, and charts of the last hour.
import { adapterSection } from "./adapters.js";
import { chart } from "./charts.js";
import { bar, h, headRow } from "./dom.js";
import { count, duration, durationText, percent, plural, rate } from "./format.js";
import { memory } from "./memory.js";
import { column, store } from "./store.js";

const ROLES = [
  ["prefill", "computes prompts"],
  ["decode", "computes tokens"],
  ["encode", "encodes images, videos and sound"],
  ["pool", "makes vectors, scores and labels"],
];
const SNAPSHOTS = 6; // rates are over the last ones, because workers report once in a second and not at the same time

const percentText = (share) => `${(share * 100).toFixed(0)} %`;
const latencyLines = (name) => [
  { column: `${name}_p50`, label: "p50", colour: "--p50" },
  { column: `${name}_p90`, label: "p90", colour: "--p90" },
  { column: `${name}_p99`, label: "p99", colour: "--p99" },
];
const CHARTS = [
  { title: "Time to first token", lines: latencyLines("ttft"), format: durationText },
  { title: "Time between tokens", lines: latencyLines("itl"), format: durationText },
  {
    title: "Tokens per second",
    lines: [
      { column: "generated_tokens_per_s", label: "generated", colour: "--decode" },
      { column: "prompt_tokens_per_s", label: "of prompts", colour: "--prefill" },
    ],
    format: (value) => (value >= 10 || !value ? value.toFixed(0) : value.toFixed(1)),
  },
  {
    title: "Requests at this gateway",
    lines: [
      { column: "running", label: "running", colour: "--decode" },
      { column: "waiting", label: "waiting", colour: "--p99" },
    ],
    format: (value) => (Number.isInteger(value) ? String(value) : value.toFixed(1)),
    most: 4,
  },
  {
    title: "KV memory",
    lines: [
      { column: "kv_used", label: "used by requests", colour: "--handoff" },
      { column: "kv_cached", label: "cached", colour: "--queue" },
    ],
    format: percentText,
    most: 1,
  },
  {
    title: "Hits and drafts",
    lines: [
      { column: "hit_rate", label: "prompt tokens cached", colour: "--decode" },
      { column: "accepted_rate", label: "drafts accepted", colour: "--encode" },
    ],
    format: percentText,
    most: 1,
  },
];

export function fleet(main) {
  const figures = h("dl.figures", { "aria-label": "Key figures" });
  const workers = h("div.workers");
  const blocks = h("div");
  const adapters = adapterSection();
  const charts = CHARTS.map(chart);
  const snapshots = [];
  let shownModel;

  main.append(
    h("h1.unseen", {}, "Fleet"),
    figures,
    h("div.columns", {},
      h("section", { "aria-labelledby": "workers" }, h("h2", { id: "workers" }, "Workers"), workers),
      h("section", { "aria-labelledby": "blocks" }, h("h2", { id: "blocks" }, "KV blocks"), blocks)),
    adapters.element,
    h("section", { "aria-labelledby": "hour" },
      h("h2", { id: "hour" }, "The last hour"),
      globalThis.uPlot ? null : h("p.note", {}, "Charts are not drawn, because this gateway was installed without them. Its log says what to install."),
      h("div.charts", {}, charts.map((each) => each.element))),
  );
  workers.append(h("p.note", {}, "Waiting for the first figures."));

  function onRows() {
    if (!store.about) return;
    showFigures(figures);
    for (const each of charts) each.update();
  }
  function onLive() {
    if (!store.live) return;
    if (shownModel !== store.about?.model) {
      shownModel = store.about?.model;
      snapshots.length = 0; // rates are not of two models
    }
    snapshots.push(store.live);
    if (snapshots.length > SNAPSHOTS) snapshots.shift();
    showFigures(figures);
    workers.replaceChildren(...showWorkers(snapshots));
    blocks.replaceChildren(...memory(store.live.hosts));
    adapters.show(store.live.adapters);
  }
  store.addEventListener("rows", onRows);
  store.addEventListener("live", onLive);
  onRows();
  onLive();
  return () => {
    store.removeEventListener("rows", onRows);
    store.removeEventListener("live", onLive);
    for (const each of charts) each.end();
  };
}

function newest(name) {
  return store.about ? column(name).findLast((value) => value != null) : null;
}

/** Show the key figures: now, or in the last five minutes, and those of the hour below. */
function showFigures(list) {
  const { live, recent, hour } = store;
  const latency = (name) => [
    name === "ttft" ? "Time to first token" : "Time between tokens",
    [duration(recent?.[name].p50), h("small", {}, "p50")],
    [[duration(recent?.[name].p99), " p99"], ["hour ", duration(hour?.[name].p50), " / ", duration(hour?.[name].p99)]],
  ];
  const figures = [
    ["Running", count(live?.running), [[count(live?.waiting), " waiting"]]],
    ["Generated", rate(newest("generated_tokens_per_s"), "tok"), [["prompts ", rate(newest("prompt_tokens_per_s"), "tok")]]],
    latency("ttft"),
    latency("itl"),
    ["Prompt tokens cached", percent(hitRate(live)), ["since the hosts started"]],
    ["Drafts accepted", percent(newest("accepted_rate")), ["of the last ten seconds"]],
  ];
  list.replaceChildren(...figures.map(([name, value, more]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, h("strong", {}, value), more.map((line) => h("span.more", {}, line))))));
}

function hitRate(live) {
  const sum = (name) => (live?.hosts ?? []).reduce((total, host) => total + (host[name] ?? 0), 0);
  return sum("prompt_tokens") ? sum("found_tokens") / sum("prompt_tokens") : null;
}

function showWorkers(snapshots) {
  const { workers } = snapshots.at(-1);
  const groups = ROLES.map(([role, does]) => [role, does, workers.filter((worker) => worker.role === role)]);
  if (!workers.length) {
    return [h("p.note", {}, "No worker has joined yet. Workers appear here while they load the model.")];
  }
  // A model that is an encoder of texts has pool workers alone.
  const generates = workers.some(({ role }) => role === "prefill" || role === "decode") || !workers.some(({ role }) => role === "pool");
  const isShown = ([role, , own]) => own.length || (generates && (role === "prefill" || role === "decode"));
  return groups.filter(isShown).map(([role, does, own]) =>
    h("div.scroll", {}, h(`table.role.${role}`, {},
      h("caption", {}, h("h3", {}, role), " ", h("span.note", {}, does)),
      headRow(["Worker", "State", "Running", "#Waiting", "#Tokens", "#Busy"]),
      h("tbody", {}, own.length ? own.map((worker) => workerRow(worker, snapshots))
        : h("tr", {}, h("td.note", { colspan: 6 }, "No worker. ", role === "prefill" ? "Decode workers compute the prompts." : "Requests wait."))))));
}

function workerRow(worker, snapshots) {
  const [seconds, gained] = gains(worker, snapshots);
  const share = worker.max_seqs ? worker.running / worker.max_seqs : 0;
  const queued = worker.stats.queued_tokens ?? worker.stats.pool_waiting_tokens;
  const tokens = (gained.sampled_tokens ?? 0) + (gained.pooled_tokens ?? 0);
  const accepted = gained.draft_tokens ? percent(gained.accepted_tokens / gained.draft_tokens) : null;
  return h("tr", {},
    h("th.name", { scope: "row" }, worker.id),
    h("td", {}, h("span.state", { "data-state": worker.state }, worker.state)),
    h("td", {}, h("span.meter", { "aria-hidden": "true" }, bar("i", share)),
      h("span.mono", {}, `${count(worker.running)}/${count(worker.max_seqs)}`)),
    h("td.number", {}, count(worker.waiting), queued ? h("small", {}, ` ${plural(queued, "token")}`) : null),
    h("td.number", {}, seconds ? rate(tokens / seconds, "tok") : "–", accepted && h("small.line", {}, "drafts ", accepted)),
    h("td.number", {}, seconds ? percent(Math.min(1, gained.busy_seconds / seconds)) : "–"));
}

/** Return the seconds since an earlier snapshot that has this worker, and what its counters gained since. */
function gains(worker, snapshots) {
  const same = (other) => other.id === worker.id && other.epoch === worker.epoch;
  const first = snapshots.find((each) => each.workers.some(same));
  const before = first.workers.find(same).stats;
  const gained = Object.fromEntries(Object.entries(worker.stats).map(([name, value]) => [name, value - (before[name] ?? 0)]));
  return [snapshots.at(-1).at - first.at, gained];
}
