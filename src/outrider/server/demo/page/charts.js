// Two charts: a histogram of tokens per pass, and the formula's expected speedup over K.

import { element } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";

/** Leviathan et al. 2023, theorem 3.8. */
export function expectedSpeedup(alpha, k, costRatio) {
  const tau = alpha >= 1 ? k + 1 : (1 - alpha ** (k + 1)) / (1 - alpha);
  return tau / (k * costRatio + 1);
}

/** Draw a table with bars. `counts[n]`: number of rounds that emitted n tokens. */
export function histogram(root, counts, longest) {
  const most = Math.max(...Object.values(counts), 1);
  const table = element("table", "bars");
  for (let tokens = 1; tokens <= Math.max(longest, ...Object.keys(counts).map(Number)); tokens++) {
    const count = counts[tokens] ?? 0;
    const row = table.insertRow();
    const head = element("th", "", tokens);
    head.scope = "row";
    const bar = element("span", "bar");
    bar.style.width = `${(100 * count) / most}%`;
    row.append(head);
    row.insertCell().append(bar);
    row.insertCell().textContent = count;
  }
  root.replaceChildren(table);
}

/** Draw the formula's speedup over K for the measured alpha and c, and dots for the expected and the measured one at mean K. */
export function curve(root, { alpha, cost_ratio: costRatio, mean_k: meanK, speedup, expected }, longest) {
  const [height, left, bottom, top, right] = [210, 34, 44, 10, 14];
  const width = root.clientWidth || 520; // drawn at its final size, so that text is not scaled
  const ks = Array.from({ length: 4 * longest + 1 }, (_, at) => at / 4);
  const values = ks.map((k) => expectedSpeedup(alpha, k, costRatio));
  const highest = Math.max(...values, speedup ?? 0, 1.2) * 1.12;
  const x = (k) => left + (k / longest) * (width - left - right);
  const y = (value) => height - bottom - (value / highest) * (height - bottom - top);
  const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  const step = highest > 6 ? 2 : highest > 2.5 ? 1 : 0.5;
  for (let value = 0; value <= highest; value += step) {
    svg.append(node("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), stroke: "var(--line)" }));
    svg.append(label(left - 8, y(value) + 4, value, "end"));
  }
  svg.append(node("line", { x1: left, x2: width - right, y1: y(1), y2: y(1), stroke: "var(--muted)", "stroke-dasharray": "3 4" }));
  for (let k = 0; k <= longest; k += longest > 8 ? 2 : 1) svg.append(label(x(k), height - bottom + 18, k, "middle"));
  svg.append(label(left + (width - left - right) / 2, height - 6, "drafts per round, K", "middle"));
  const points = ks.map((k, at) => `${x(k).toFixed(1)},${y(values[at]).toFixed(1)}`).join(" ");
  svg.append(node("polyline", { points, fill: "none", stroke: "var(--accent)", "stroke-width": 2.5 }));
  if (expected !== null) svg.append(node("circle", { cx: x(meanK), cy: y(expected), r: 4.5, fill: "var(--accent)" }));
  if (speedup !== null) {
    const at = { cx: x(meanK), cy: y(speedup), r: 5.5, fill: "var(--card)", stroke: "var(--corrected)", "stroke-width": 2.5 };
    svg.append(node("circle", at));
    const isLeft = x(meanK) > width - 110;
    svg.append(label(x(meanK) + (isLeft ? -11 : 11), y(speedup) + 4, "measured", isLeft ? "end" : "start", "var(--corrected)"));
  }
  const title = node("title");
  const said = (value) => value?.toFixed(2) ?? "not known yet";
  title.textContent = `The formula expects ${said(expected)} at K = ${meanK.toFixed(1)}; measured: ${said(speedup)}.`;
  svg.prepend(title);
  root.replaceChildren(svg);
}

function node(name, attributes = {}) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function label(x, y, text, anchor, fill = null) {
  const made = node("text", { x, y, "text-anchor": anchor });
  if (fill) made.style.fill = fill;
  made.textContent = text;
  return made;
}
