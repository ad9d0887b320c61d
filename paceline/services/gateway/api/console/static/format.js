// Numbers as people read them. Each function returns a node with the unit set apart, or a dash if there is no value.
import { h } from "./dom.js";

const NONE = "–";

function withUnit(number, unit) {
  return h("span", {}, number, h("span.unit", {}, unit));
}

function digits(value) {
  if (value >= 100) return value.toFixed(0);
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** Return [number, unit] of a duration in seconds. */
export function durationParts(seconds) {
  if (seconds < 1) return [digits(seconds * 1000), "ms"];
  if (seconds < 120) return [digits(seconds), "s"];
  return seconds < 7200 ? [digits(seconds / 60), "min"] : [digits(seconds / 3600), "h"];
}

export function duration(seconds) {
  return seconds == null ? NONE : withUnit(...durationParts(seconds));
}

export function durationText(seconds) {
  if (seconds == null) return "none";
  return seconds ? durationParts(seconds).join(" ") : "0";
}

export function rate(perSecond, unit) {
  return perSecond == null ? NONE : withUnit(perSecond >= 1000 ? count(perSecond) : digits(perSecond), `${unit}/s`);
}

export function percent(share) {
  return share == null ? NONE : withUnit((share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0), "%");
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  for (; value >= 1024 && power < units.length - 1; power++) value /= 1024;
  return withUnit(power ? digits(value) : String(value), units[power]);
}

/** Return an integer with narrow spaces between groups of three digits. */
export function count(value) {
  return value == null ? NONE : Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

export function plural(number, what) {
  return `${count(number)} ${what}${number === 1 ? "" : "s"}`;
}

export function clock(date) {
  return new Date(date).toLocaleTimeString([], { hour12: false });
}
