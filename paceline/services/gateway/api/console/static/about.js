// What this is, and the licence of the chart library.
import { h } from "./dom.js";
import { store, url } from "./store.js";

export function about(main) {
  const version = h("dd.mono");
  const model = h("dd.mono");
  const licence = h("pre.scroll", { tabindex: 0 }, "Loading.");

  main.append(
    h("h1", {}, "About"),
    h("dl.facts", {},
      h("div", {}, h("dt", {}, "Paceline"), version),
      h("div", {}, h("dt", {}, "Model"), model),
      h("div", {}, h("dt", {}, "Licence"), h("dd", {}, "Apache 2.0"))),
    h("p.note", {}, "This page shows what this gateway knows: all workers and hosts of the fleet, and its own requests. ",
      "Percentiles are of sequences that this gateway has served. It asks no other server for anything."),
    h("h2", {}, "Keys"),
    h("p.note", {}, "Tab and Enter reach everything. In the chat, Enter sends, Shift+Enter begins a new line, Escape stops an answer."),
    h("h2", {}, "uPlot, the chart library"),
    licence);

  const show = () => {
    version.textContent = store.about?.version ?? "";
    model.textContent = store.about?.model ?? "";
  };
  store.addEventListener("rows", show);
  show();
  fetch(url("console/uplot-license.txt")).then((response) => response.text())
    .then((text) => { licence.textContent = text; }, () => { licence.textContent = "The licence cannot be read now."; });
  return () => store.removeEventListener("rows", show);
}
