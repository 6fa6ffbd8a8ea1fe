"use strict";
// What every section is made of. Everything shown goes through text nodes: names and reasons come from other machines.
const $ = id => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) if (value != null) node.setAttribute(name, value);
  node.append(...children.filter(child => child != null));
  return node;
}
const fill = (node, ...children) => node.replaceChildren(...children.filter(child => child != null));

const share = (part, whole) => whole > 0 ? part / whole : null;
const percent = x => x == null ? "–" : (100 * x).toFixed(x > 0.9995 || x === 0 ? 0 : 1) + " %";
function count(x) {
  if (x == null) return "–";
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (x >= 10 * size || (x >= size && size > 1e3)) return (x / size).toFixed(x < 100 * size ? 1 : 0) + " " + unit;
  return Math.round(x).toLocaleString("en");
}
const several = (x, one, many) => `${count(x)} ${x === 1 ? one : many}`;
function seconds(x) {
  if (x == null) return ["–", ""];
  return x < 0.9995 ? [(1000 * x).toFixed(x < 0.00995 ? 1 : 0), "ms"] : [x.toFixed(x < 9.995 ? 2 : 0), "s"];
}
const time = x => seconds(x).join(" ").trim();
const bytes = x => x >= 2 ** 30 ? (x / 2 ** 30).toFixed(1) + " GiB" : (x / 2 ** 20).toFixed(1) + " MiB";
function span(s) {
  const d = Math.floor(s / 86400), h = Math.floor(s % 86400 / 3600), m = Math.floor(s % 3600 / 60);
  return d ? `${d} d ${h} h` : h ? `${h} h ${m} min` : m ? `${m} min` : `${Math.max(0, Math.floor(s))} s`;
}
const ago = (then, now) => now - then < 2 ? "now" : span(now - then) + " ago";
const clock = at => new Date(1000 * at).toLocaleTimeString("en-GB");

function bar(x, high) {
  const part = make("i", {class: high && x > high ? "high" : null});
  part.style.width = 100 * Math.min(1, Math.max(0, x || 0)) + "%";
  return make("div", {class: "bar", "aria-hidden": "true"}, part);
}

// The runs of points that are known, as SVG paths from 0 at the bottom to `top`.
function runs(values, top) {
  const found = [];
  let run = null;
  values.forEach((value, at) => {
    if (value == null) { run = null; return; }
    if (!run) found.push(run = []);
    run.push([at, 39 - 37 * Math.min(1, value / top)]);
  });
  return found;
}
function curve(first, second) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${first.length - 1} 40`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const known = [...first, ...(second || [])].filter(value => value != null);
  const top = Math.max(...known, 0) * 1.08 || 1;
  const draw = (kind, d) => {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", kind);
    path.setAttribute("d", d);
    svg.append(path);
  };
  const text = run => run.map(([x, y]) => `${x} ${y.toFixed(2)}`).join("L");
  const widened = run => run.length > 1 ? run : [[Math.max(0, run[0][0] - .5), run[0][1]], [run[0][0] + .5, run[0][1]]];
  for (const run of runs(second || [], top).map(widened)) draw("line second", "M" + text(run));
  for (const run of runs(first, top).map(widened)) {
    draw("area", `M${run[0][0]} 40L${text(run)}L${run[run.length - 1][0]} 40Z`);
    draw("line", "M" + text(run));
  }
  return svg;
}

function table(kind, heads, rows) {
  return make("table", {class: kind},
    make("thead", {}, make("tr", {}, ...heads.map(([name, side]) => make("th", {class: side, scope: "col"}, name)))),
    make("tbody", {}, ...rows));
}
// A cell that says its column's name where rows are cards.
const cell = (name, kind, ...children) => make("td", {class: kind, "data-name": name}, ...children);

// A sentence that begins with a replica's name.
function sentence(said, replica) {
  return said.startsWith(replica) ? [make("b", {}, replica), said.slice(replica.length)] : [said];
}
