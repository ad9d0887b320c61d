// The report's page. It draws the JSON of `Report` (content.py), which the page holds.
const results = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("main");
const PALETTE = ["--p50", "--p99", "--handoff", "--encode"];
const CHARTS = [
  { title: "Time to first token", lines: [["ttft_p50", "p50"], ["ttft_p99", "p99"]], format: durationText },
  { title: "Time between tokens", lines: [["itl_p50", "p50"], ["itl_p99", "p99"]], format: durationText },
  { title: "Requests within their objectives", lines: [["within", "share"]], format: share, most: 1 },
  { title: "Workers", lines: [["prefill", "prefill"], ["decode", "decode"], ["changing", "starting or draining"]], format: plain },
  { title: "Devices", lines: [["devices", "in use"]], format: plain },
  { title: "Cost", lines: [["cost", "per hour"]], format: plain },
  { title: "Arrivals", lines: [["arrivals", "per second"]], format: plain },
  { title: "Requests", lines: [["waiting", "waiting"], ["running", "running"]], format: plain },
  { title: "Tokens found in caches", lines: [["hit_rate", "of prompts"]], format: share, most: 1 },
  { title: "KV memory", lines: [["kv_usage", "used by requests"]], format: share, most: 1 },
];
let marked = null; // the decision that is highlighted
let drawn = [];

function share(value) { return value == null ? "–" : `${(value * 100).toFixed(0)} %`; }
function plain(value) { return value == null ? "–" : value >= 10 || Number.isInteger(value) ? count(value) : value.toFixed(2); }
function clockText(seconds) {
  const parts = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.floor(seconds % 60)];
  return parts.map((part, index) => index ? String(part).padStart(2, "0") : String(part)).join(":");
}
function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
function notes(sentences) { return sentences.length ? h("ul.notes", {}, sentences.map((each) => h("li", {}, each))) : null; }

function figures(result) {
  const all = result.classes[""];
  const which = Object.keys(result.classes).length > 2 ? ", slowest class" : "";
  const shown = [
    ["Requests", count(all.requests)],
    ["Within objectives", percent(all.within)],
    ["Goodput", rate(all.goodput, "req")],
    [`TTFT p99${which}`, duration(all.ttft.p99)],
    [`ITL p99${which}`, duration(all.itl.p99)],
    ["Devices, on average", plain(result.seconds ? result.device_seconds / result.seconds : null)],
    ["Cost", plain(result.cost)],
    ["Tokens found in caches", percent(result.hit_rate)],
  ];
  return h("dl.figures", {}, shown.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function table(caption, columns, rows) {
  const body = rows.map((cells) => h("tr", {}, cells.map((cell, index) =>
    index ? h(columns[index].startsWith("#") ? "td.number" : "td", {}, cell) : h("th", { scope: "row" }, cell))));
  return h("div.scroll", { tabindex: "0", role: "region", "aria-label": caption }, h("table", {}, headRow(columns), h("tbody", {}, body)));
}

function comparison() {
  const rows = results.simulations.map((result) => {
    const all = result.classes[""];
    return [
      result.name, percent(all.within), rate(all.goodput, "req"), duration(all.ttft.p50), duration(all.ttft.p99),
      duration(all.itl.p50), duration(all.itl.p99), percent(result.hit_rate),
      plain(result.seconds ? result.device_seconds / result.seconds : null), plain(result.cost),
    ];
  });
  const columns = ["Fleet", "#within", "#goodput", "#TTFT p50", "#p99", "#ITL p50", "#p99", "#hits", "#devices", "#cost"];
  return h("section", {}, h("h2", {}, "Alternatives"), table("Alternatives", columns, rows), notes(results.notes));
}

function classes(result) {
  const columns = ["Class", "#requests", "#refused", "#TTFT p50", "#p95", "#p99", "#ITL p50", "#p95", "#p99", "#whole p50", "#p99", "#within"];
  const rows = Object.entries(result.classes).filter(([name]) => name).map(([name, own]) => [
    name, count(own.requests), [count(own.refused), ...Object.entries(own.refusals).map(([why, number]) => `${why} ${number}`)].join(", "),
    ...[own.ttft.p50, own.ttft.p95, own.ttft.p99, own.itl.p50, own.itl.p95, own.itl.p99, own.total.p50, own.total.p99].map(duration),
    percent(own.within),
  ]);
  return h("section", {}, h("h2", {}, "Classes of requests"), table("Classes of requests", columns, rows));
}

function decisions(result) {
  if (!result.decisions.length) return null;
  const rows = result.decisions.map((decision, index) => {
    const choose = () => mark(result, marked === index ? null : index);
    return h("tr", { "data-index": index },
      h("td", {}, h("button", { type: "button", click: choose, "aria-label": `Mark the decision at ${clockText(decision.at)} in the charts` }, clockText(decision.at))),
      h("td", {}, decision.actions.join(", ")), h("td", {}, decision.line), h("td", {}, decision.effect));
  });
  return h("section", {}, h("h2", {}, "Decisions of the planner"),
    h("div.scroll", { tabindex: "0", role: "region", "aria-label": "Decisions of the planner" },
      h("table.decisions", {}, headRow(["Time", "What", "Why", "What it did"]), h("tbody", {}, rows))));
}

function mark(result, index) {
  marked = index;
  for (const row of document.querySelectorAll(".decisions tbody tr")) {
    row.toggleAttribute("aria-current", Number(row.dataset.index) === marked);
  }
  for (const each of drawn) each.redraw();
}

/** Draw a line at each decision. The marked one is solid. */
function drawMarks(plot, result) {
  const context = plot.ctx;
  context.save();
  result.decisions.forEach((decision, index) => {
    const x = plot.valToPos(decision.at, "x", true);
    context.strokeStyle = colour(index === marked ? "--ink" : "--queue");
    context.setLineDash(index === marked ? [] : [2, 4]);
    context.beginPath();
    context.moveTo(x, plot.bbox.top);
    context.lineTo(x, plot.bbox.top + plot.bbox.height);
    context.stroke();
  });
  context.restore();
}

function chart(result, { title, lines, format, most = 0 }) {
  const series = result.series.find((each) => lines.some(([name]) => name in each.values));
  const known = lines.filter(([name]) => series?.values[name]?.some((value) => value != null));
  if (!known.length) return null;
  const data = [series.at, ...known.map(([name]) => series.values[name])];
  const values = known.map(() => h("b", {}, ""));
  const keys = known.map(([, label], index) => {
    const swatch = h("i", { "aria-hidden": "true" });
    swatch.style.background = `var(${PALETTE[index]})`;
    return h("li", {}, swatch, label, " ", values[index]);
  });
  const showValues = (index) => values.forEach((value, number) => {
    value.textContent = format(index == null ? data[number + 1].findLast((each) => each != null) : data[number + 1][index]);
  });
  showValues(null);
  const spoken = known.map(([, label], index) => `${label} at the end ${values[index].textContent}`).join(", ");
  const plot = h("div.plot", { role: "img", "aria-label": `${title}: ${spoken}` });
  const draw = () => {
    const axis = { stroke: colour("--soft"), font: "11px system-ui, sans-serif", ticks: { show: false } };
    drawn.push(new uPlot({
      width: plot.clientWidth,
      height: 150,
      legend: { show: false },
      cursor: { sync: { key: "report" }, drag: { x: false, y: false }, points: { size: 6 } },
      scales: { x: { time: false }, y: { range: (_, low, high) => [0, Math.max(most, (high ?? 0) * 1.1) || 1] } },
      axes: [
        { ...axis, grid: { show: false }, space: 70, size: 26, values: (_, splits) => splits.map(clockText) },
        { ...axis, grid: { stroke: colour("--rule"), width: 1 }, space: 34, size: 62, values: (_, splits) => splits.map(format) },
      ],
      series: [{}, ...known.map((_, index) => ({ stroke: colour(PALETTE[index]), width: 1.5, points: { show: data[0].length < 40 } }))],
      hooks: { setCursor: [(own) => showValues(own.cursor.idx)], draw: [(own) => drawMarks(own, result)] },
    }, data, plot));
  };
  return { element: h("figure.chart", {}, h("figcaption", {}, title), h("ul.keys", {}, keys), plot), draw };
}

function show(result) {
  for (const each of drawn) each.destroy();
  drawn = [];
  marked = null;
  const charts = globalThis.uPlot ? CHARTS.map((each) => chart(result, each)).filter(Boolean) : [];
  const chooser = results.simulations.length > 1
    ? h("label.shown", {}, "Shown below", h("select", { change: (event) => show(results.simulations[event.target.value]) },
      results.simulations.map((each, index) => h("option", { value: index, selected: each === result }, each.name))))
    : null;
  main.replaceChildren(
    ...[h("h1", {}, results.simulations[0].name), results.simulations.length > 1 ? comparison() : notes(results.notes),
      h("section", {}, chooser, h("p.lead", {}, `${result.load}, on ${result.fleet}, with the times of ${result.profile}. Simulated: ${clockText(result.seconds)}.`),
        notes(result.notes), figures(result)),
      classes(result),
      charts.length ? h("section", {}, h("h2", {}, "Over time"), h("div.charts", {}, charts.map((each) => each.element))) : null,
      decisions(result)].filter(Boolean));
  for (const each of charts) each.draw();
}

function redraw() { show(results.simulations[document.querySelector("select")?.value ?? 0]); }
addEventListener("resize", () => {
  for (const each of drawn) each.setSize({ width: each.root.parentElement.clientWidth, height: 150 });
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
document.getElementById("save").addEventListener("click", () => {
  const url = URL.createObjectURL(new Blob([document.getElementById("data").textContent], { type: "application/json" }));
  h("a", { href: url, download: "simulation.json" }).click();
  URL.revokeObjectURL(url);
});
show(results.simulations[0]);
