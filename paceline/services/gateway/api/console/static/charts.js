// Charts of the history, drawn by uPlot. All of them share one cursor. Each has its newest values as text, too.
import { h } from "./dom.js";
import { clock } from "./format.js";
import { column, store } from "./store.js";

const HEIGHT = 150;
const LEAST_SECONDS = 600;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/**
 * Return a chart: its `element`, `update` for new rows, and `end`.
 *
 * `lines` are {column, label, colour}; `format` makes text of a value; `most` is the least upper end of the scale.
 */
export function chart({ title, lines, format, most = 0 }) {
  const values = lines.map(() => h("b", {}, "–"));
  const keys = lines.map((line, index) => {
    const swatch = h("i", { "aria-hidden": "true" });
    swatch.style.background = `var(${line.colour})`;
    return h("li", {}, swatch, line.label, " ", values[index]);
  });
  const plot = h("div.plot", { role: "img" });
  const element = h("figure.chart", {}, h("figcaption", {}, title), h("ul.keys", {}, keys), plot);
  let drawn = null;

  const data = () => [column("at"), ...lines.map((line) => column(line.column))];
  const last = (series) => series.findLast((value) => value != null);

  function showValues(index) {
    const all = data().slice(1);
    all.forEach((series, number) => {
      const value = index == null ? last(series) : series[index];
      values[number].textContent = value == null ? "–" : format(value);
    });
    return all;
  }

  function range() {
    const times = column("at");
    const end = times.at(-1) ?? Date.now() / 1000;
    return [Math.min(times[0] ?? end, end - LEAST_SECONDS), end];
  }

  function draw() {
    drawn?.destroy();
    if (!globalThis.uPlot || !plot.clientWidth) { drawn = null; return; }
    const axis = { stroke: colour("--soft"), font: "11px system-ui, sans-serif", ticks: { show: false } };
    const grid = { stroke: colour("--rule"), width: 1 };
    drawn = new globalThis.uPlot({
      width: plot.clientWidth,
      height: HEIGHT,
      legend: { show: false },
      cursor: { sync: { key: "paceline" }, drag: { x: false, y: false }, points: { size: 6 } },
      scales: { x: { range }, y: { range: (_, low, high) => [0, Math.max(most, (high ?? 0) * 1.1) || 1] } },
      axes: [
        { ...axis, grid: { show: false }, space: 70, size: 26, values: (_, splits) => splits.map((at) => clock(at * 1000).slice(0, 5)) },
        { ...axis, grid, space: 34, size: 58, values: (_, splits) => splits.map(format) },
      ],
      series: [{}, ...lines.map((line) => ({
        stroke: colour(line.colour),
        width: 1.5,
        points: { size: 3, show: (plotted, number) => plotted.data[number].filter((value) => value != null).length < 40 },
      }))],
      hooks: { setCursor: [(plotted) => showValues(plotted.cursor.idx)] },
    }, data(), plot);
  }

  function update() {
    const all = showValues(null);
    const spoken = lines.map((line, number) => `${line.label} ${last(all[number]) == null ? "has no value" : format(last(all[number]))}`);
    plot.setAttribute("aria-label", `${title} over the last hour. Newest: ${spoken.join(", ")}`);
    if (drawn) drawn.setData(data());
    else draw();
  }

  const resized = new ResizeObserver(() => {
    if (drawn && plot.clientWidth) drawn.setSize({ width: plot.clientWidth, height: HEIGHT });
    else if (store.about) draw();
  });
  resized.observe(plot);
  document.addEventListener("theme", draw);
  return {
    element,
    update,
    end() {
      resized.disconnect();
      document.removeEventListener("theme", draw);
      drawn?.destroy();
    },
  };
}
