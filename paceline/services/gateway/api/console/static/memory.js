// The KV blocks of each host: by state as one bar, and by owner as a table.
import { bar, h, headRow } from "./dom.js";
import { bytes, count, percent } from "./format.js";

const STATES = [
  ["held", "held by requests"],
  ["in_flight", "changing hands"],
  ["cached", "cached, evictable"],
  ["free", "free"],
];

/** Return the elements for all hosts of a snapshot. */
export function memory(hosts) {
  if (!hosts.length) return [h("p.note", {}, "No host has KV memory yet.")];
  return hosts.map((host) => h("article.host", {}, h("h3", {}, host.id), ...(host.error ? silent(host) : ledger(host))));
}

function silent(host) {
  return [h("p.error", {}, `No answer: ${host.error}`)];
}

function ledger(host) {
  const total = Object.values(host.blocks).reduce((sum, blocks) => sum + blocks, 0);
  if (!total) return [h("p.note", {}, "It has no memory before its first worker.")];
  return [
    host.balanced ? null : h("p.error", {}, "The ledger is out of balance. Restart this host's services."),
    h("p.note", {}, count(total), " blocks of ", bytes(host.block_bytes), ", ", bytes(total * host.block_bytes), " in all"),
    h("div.blocks", { "aria-hidden": "true" }, STATES.map(([state]) => bar("i", host.blocks[state] / total, { "data-state": state }))),
    h("dl.legend", {}, STATES.map(([state, words]) =>
      h("div", { "data-state": state }, h("dt", {}, words), h("dd", {}, count(host.blocks[state]), " ", h("small", {}, percent(host.blocks[state] / total)))))),
    owners(host),
  ].filter(Boolean);
}

function owners({ owners: rows, block_bytes }) {
  if (!rows.length) return h("p.note", {}, "No request has blocks now.");
  return h("div.scroll", {}, h("table", {},
    h("caption.unseen", {}, "Blocks by owner"),
    headRow(["Owner", "Lease", "#Blocks", "#Memory"]),
    h("tbody", {}, rows.map((row) => h("tr", {},
      h("th.name", { scope: "row" }, row.owner),
      h("td", {}, row.state),
      h("td.number", {}, count(row.blocks)),
      h("td.number", {}, bytes(row.blocks * block_bytes)))))));
}
