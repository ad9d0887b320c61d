// Builds elements. Text is always set as text, so nothing from a model or a client is read as HTML.

/** Return an element. `props` are attributes; functions are listeners by event name; children may be nested or null. */
export function h(tag, props, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(props || {})) {
    if (typeof value === "function") element.addEventListener(key, value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return element;
}

/** Return an element with a width in percent. The policy of the page forbids style attributes, but not this. */
export function bar(tag, share, props) {
  const element = h(tag, props);
  element.style.width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
  return element;
}

/** Return a header row. Columns that begin with "#" are of numbers. */
export function headRow(columns) {
  const cells = columns.map((name) =>
    h(name.startsWith("#") ? "th.number" : "th", { scope: "col" }, name.replace(/^#/, "")));
  return h("thead", {}, h("tr", {}, cells));
}
