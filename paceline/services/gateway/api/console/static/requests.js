// The newest requests of this gateway. Each row leads to the request's timeline.
import { h, headRow } from "./dom.js";
import { clock, count, duration } from "./format.js";
import { getJson, store } from "./store.js";

const EVERY_MS = 2000;

export function requests(main) {
  const body = h("tbody");
  const note = h("p.note", { role: "status" }, "Loading.");
  const table = h("table.requests", { hidden: true },
    h("caption.unseen", {}, "The newest requests of this gateway"),
    headRow(["Arrived", "Request", "State", "#Prompt", "#Generated", "#First token", "#Total", "Workers"]), body);
  const rows = new Map();
  let timer = 0;
  let isGone = false;

  main.append(h("h1", {}, "Requests"), note, h("div.scroll", {}, table));

  async function refresh() {
    try {
      if (!document.hidden) show((await getJson("console/requests?limit=100")).requests);
    } catch (error) {
      note.textContent = `The list cannot be read: ${error.message}`;
    }
    if (!isGone) timer = setTimeout(refresh, EVERY_MS);
  }

  /** Update rows in place, so that the focus stays where it is. The list has the newest request first. */
  function show(list) {
    note.textContent = list.length ? "" : "No request has come yet. Send one in the chat.";
    table.hidden = !list.length;
    const known = new Set(list.map((each) => each.own_id));
    for (const [id, row] of rows) {
      if (!known.has(id)) { row.remove(); rows.delete(id); }
    }
    let next = body.firstElementChild;
    for (const each of list) {
      const row = rows.get(each.own_id);
      if (row) {
        fill(row, each);
        next = row.nextElementSibling;
      } else {
        const added = fill(newRow(each), each);
        rows.set(each.own_id, added);
        body.insertBefore(added, next);
      }
    }
  }

  refresh();
  return () => { isGone = true; clearTimeout(timer); };
}

function newRow({ own_id: id, request_id: name, arrived }) {
  return h("tr", {},
    h("td.mono.when", {}, clock(arrived)),
    h("th.name", { scope: "row" }, h("a.mono", { href: `#/requests/${encodeURIComponent(id)}` }, name)));
}

function fill(row, each) {
  while (row.children.length > 2) row.lastElementChild.remove();
  const cached = each.cached_tokens ? h("small", {}, ` ${count(each.cached_tokens)} cached`) : null;
  const model = store.about?.models.length > 1 ? h("small", {}, ` ${each.model}`) : null;
  const retried = each.attempts > each.sequences ? h("small", {}, ` ${each.attempts} attempts`) : null;
  row.append(
    h("td", {}, h("span.state", { "data-state": each.state }, each.state), retried),
    h("td.number", { "data-label": "prompt" }, count(each.prompt_tokens), cached),
    h("td.number", { "data-label": "generated" }, count(each.generated_tokens)),
    h("td.number", { "data-label": "first token" }, duration(each.ttft_ms == null ? null : each.ttft_ms / 1000)),
    h("td.number", { "data-label": "total" }, duration(each.ms / 1000)),
    h("td.mono.places", {}, each.workers.join(", ") || "–", model));
  return row;
}
