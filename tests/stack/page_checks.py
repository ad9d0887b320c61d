"""Scripts that check a page in a browser for what people need to read and to use it."""

CONTRASTS = """
const luminance = (colour) => {
  const most = colour.startsWith("color(") ? 1 : 255;  // a mixed colour is color(srgb 0.5 0.7 0.7)
  const [red, green, blue] = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / most)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
};
const behind = (element) => {
  for (; element; element = element.parentElement) {
    const colour = getComputedStyle(element).backgroundColor;
    if (!/, 0\\)$|transparent/.test(colour)) return colour;
  }
  return "rgb(255, 255, 255)";
};
const weak = [];
for (const element of document.querySelectorAll("body *")) {
  const hasText = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  if (!hasText || !element.checkVisibility() || element.closest(":disabled")) continue;
  const [one, other] = [getComputedStyle(element).color, behind(element)].map(luminance);
  const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  const name = `${element.tagName} ${element.textContent.trim().slice(0, 30)}`;
  if (contrast < 4.5) weak.push(`${name}: ${contrast.toFixed(2)}`);
}
return weak;
"""
"""Returns the texts whose contrast with what is behind them is below 4.5, the least of WCAG 2 (AA)."""

UNNAMED = """
const name = (element) => element.getAttribute("aria-label") || element.labels?.[0]?.textContent || element.textContent;
return [...document.querySelectorAll("a, button, input, select, textarea, summary, [role=img]")]
  .filter((element) => element.checkVisibility() && !name(element).trim()).map((element) => element.outerHTML);
"""
"""Returns the controls and pictures that have no name for a screen reader."""
