// The adapters of the model: who uses them, and which workers have them in memory.
import { h, headRow } from "./dom.js";
import { count } from "./format.js";

/** Return the section about adapters; it is hidden while the model has none. */
export function adapterSection() {
  const place = h("div.scroll");
  const section = h("section", { "aria-labelledby": "adapters", hidden: true }, h("h2", { id: "adapters" }, "Adapters"), place);
  return { element: section, show: (adapters) => {
    section.hidden = !adapters.length;
    place.replaceChildren(h("table", {},
      headRow(["Adapter", "#Running", "#Waiting", "In memory of"]),
      h("tbody", {}, adapters.map(adapterRow))));
  } };
}

function adapterRow({ name, digest, running, waiting, workers }) {
  return h("tr", {},
    h("th.name", { scope: "row", title: `digest ${digest}` }, name),
    h("td.number", {}, count(running)),
    h("td.number", {}, count(waiting)),
    h("td.mono.places", {}, workers.join(", ") || "–"));
}
