// The batches of this server and how far they are.
import { bar, h, headRow } from "./dom.js";
import { clock, count } from "./format.js";
import { getJson } from "./store.js";

const EVERY_MS = 3000;
// Status of the answer if the gateway has no store.
const NOT_KEPT = 501;

export function batches(main) {
  const body = h("div", {}, h("p.note", {}, "Loading."));
  let timer = 0;
  let isGone = false;

  main.append(h("h1", {}, "Batches"), body);

  async function refresh() {
    try {
      body.replaceChildren(show((await getJson("v1/batches?limit=100")).data));
    } catch (error) {
      body.replaceChildren(h("p.note", {}, `The list cannot be read: ${error.message}`));
      if (error.status === NOT_KEPT) return;
    }
    if (!isGone) timer = setTimeout(refresh, EVERY_MS);
  }

  refresh();
  return () => { isGone = true; clearTimeout(timer); };
}

function show(list) {
  if (!list.length) {
    return h("p.note", {}, "There is no batch. Upload a file with POST /v1/files and start it with POST /v1/batches.");
  }
  return h("div.scroll", {}, h("table", {},
    headRow(["Batch", "Created", "State", "Progress", "#Completed", "#Failed", "#Total"]),
    h("tbody", {}, list.map(row))));
}

function row(batch) {
  const { total = 0, completed = 0, failed = 0 } = batch.request_counts ?? {};
  return h("tr", {},
    h("th.name", { scope: "row" }, batch.id),
    h("td.mono", {}, clock(batch.created_at * 1000)),
    h("td", {}, h("span.state", { "data-state": batch.status }, batch.status.replaceAll("_", " "))),
    h("td", {}, h("span.meter", { "aria-hidden": "true" }, bar("i", total ? (completed + failed) / total : 0))),
    h("td.number", {}, count(completed)),
    h("td.number", {}, count(failed)),
    h("td.number", {}, count(total)));
}
