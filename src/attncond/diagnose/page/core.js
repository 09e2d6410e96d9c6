"use strict";

// ---- What every other part uses: the data, numbers as text, elements, colours.

const byId = (id) => document.getElementById(id);

function read(id) {
  const node = byId(id);
  return node && node.type === "application/json" ? JSON.parse(node.textContent) : null;
}

const META = read("meta");
const REPORT = read("report");
const BEFORE = read("before");
const HISTORY = read("history");

const ROWS = REPORT ? REPORT.rows : [];
const HEADS = ROWS.filter((row) => row.head !== null);
const WHOLES = ROWS.filter((row) => row.head === null);
const IDENTITY = ["layer", "head", "path", "call", "cls", "kind"];
const TEXT = new Set(META.text);

// JSON has no NaN and no infinities: there they are words.
const SPECIAL = new Map([["inf", Infinity], ["-inf", -Infinity], ["nan", NaN]]);

function number(value) {
  return typeof value === "number" ? value : SPECIAL.get(value);
}

function valueOf(row, name) {
  if (IDENTITY.includes(name)) return row[name];
  return Object.hasOwn(row.values, name) ? row.values[name] : null;
}

const numberOf = (row, name) => number(valueOf(row, name));
const measured = (rows, name) => rows.some((row) => numberOf(row, name) !== undefined);

// The same name for a row in every report of the model.
const KEYS = new WeakMap();

function keyOf(row) {
  if (!KEYS.has(row)) KEYS.set(row, JSON.stringify([row.layer, row.path, row.call, row.head]));
  return KEYS.get(row);
}

// Every column that some row has, the documented ones first; an unknown one is shown as it is.
function columnsOf(rows) {
  const found = new Set();
  for (const row of rows) {
    for (const [name, value] of Object.entries(row.values)) if (value !== null) found.add(name);
  }
  const known = Object.keys(META.columns).filter((name) => found.has(name));
  return [...known, ...[...found].filter((name) => !Object.hasOwn(META.columns, name)).sort()];
}

function isText(rows, name) {
  if (TEXT.has(name)) return true;
  return rows.some((row) => typeof valueOf(row, name) === "string" && number(valueOf(row, name)) === undefined);
}

// ---- Words

const NAMES = {
  entropy: "entropy (nats)",
  entropy_min: "least entropy (nats)",
  entropy_relative: "relative entropy",
  saturation: "saturated",
  logit_max: "largest logit",
  logit_rms: "logits, rms",
  token_stable_rank: "rank of tokens",
  token_residue: "residue of tokens",
  token_rms: "tokens, rms",
  jacobian_paper_bound: "paper’s bound",
  jacobian_certificate: "certificate",
  jacobian_rank: "rank(J)",
  jacobian_tokens: "tokens of J",
  jacobian_status: "Jacobian",
  jacobian_path: "J found by",
  jacobian_kappa_error: "error of κ(J)",
  cls: "class",
  call: "run",
};

const PARTS = {
  sigma_max: (of) => `σ_max(${of})`,
  sigma_min: (of) => `σ_min(${of})`,
  kappa: (of) => `κ(${of})`,
  stable_rank: (of) => `stable rank(${of})`,
  grad_norm: (of) => `‖∇${of}‖`,
  sigma_1: (of) => `σ₁(${of})`,
  sigma_2: (of) => `σ₂(${of})`,
  gap: (of) => `σ₁−σ₂(${of})`,
};

function labelOf(name) {
  if (Object.hasOwn(NAMES, name)) return NAMES[name];
  const match = /^(raw_)?([qkv]|attention|jacobian)_(.+)$/.exec(name);
  if (!match || !Object.hasOwn(PARTS, match[3])) return name;
  const [, raw, of, part] = match;
  if (of === "attention") return PARTS[part](raw ? "softmax" : "P");
  if (of === "jacobian") return PARTS[part]("J");
  return PARTS[part](`${raw ? "stored " : ""}W_${of.toUpperCase()}`);
}

const meaningOf = (name) => (Object.hasOwn(META.columns, name) ? META.columns[name] : "not a column that this version knows");
// Sizes that differ by orders of magnitude.
const wantsLog = (name) => /kappa|sigma_m|bound|certificate|norm|logit/.test(name);

function format(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return String(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

const exact = (value) => (typeof value === "number" && Number.isFinite(value) ? String(value) : format(value));
const pathOf = (row) => row.path || "(the model)";
const shortName = (row) => `${row.layer}${row.call ? `·${row.call + 1}` : ""}`;
const plural = (count, one, many) => `${count} ${count === 1 ? one : many || `${one}s`}`;

function where(row) {
  const run = row.call ? `, run ${row.call + 1}` : "";
  const head = row.head === null || row.head === undefined ? "" : `, head ${row.head}`;
  return `layer ${row.layer}, ${pathOf(row)}${run}${head}`;
}

// The rows of the report before, and what they say beside a number of now.
const OLD = new Map((BEFORE ? BEFORE.rows : []).map((row) => [keyOf(row), row]));

function past(row, name) {
  const found = OLD.get(keyOf(row));
  return found ? ` (before: ${exact(numberOf(found, name))})` : "";
}

// ---- Elements. Text goes in as text nodes, never as markup.

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "on") for (const [event, run] of Object.entries(value)) node.addEventListener(event, run);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// A name that someone chose may be written in any direction.
const given = (text, tag = "bdi") => el(tag, { class: "given", dir: "auto" }, text);

let identifiers = 0;

function choice(label, options, value, changed) {
  const id = `c${(identifiers += 1)}`;
  const select = el("select", { id, on: { change: () => changed(select.value) } });
  for (const [key, text] of options) select.append(el("option", { value: key, selected: key === value }, text));
  return el("div", { class: "field" }, el("label", { for: id }, label), select);
}

function check(label, value, changed, attributes = {}) {
  const box = el("input", { type: "checkbox", on: { change: () => changed(box.checked) }, ...attributes });
  box.checked = value;
  return el("label", { class: "check" }, box, label);
}

// ---- Colours: viridis, which survives colour blindness and grey print.

const VIRIDIS = ["440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725"]
  .map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));

function viridis(share) {
  const place = Math.min(Math.max(share, 0), 1) * (VIRIDIS.length - 1);
  const low = Math.min(Math.floor(place), VIRIDIS.length - 2);
  const mixed = VIRIDIS[low].map((part, i) => Math.round(part + (place - low) * (VIRIDIS[low + 1][i] - part)));
  return { colour: `rgb(${mixed})`, dark: 0.299 * mixed[0] + 0.587 * mixed[1] + 0.114 * mixed[2] < 130 };
}

const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

// Lines by depth leave out the end of the palette that the background swallows.
const depthColour = (share) => viridis(isDark() ? 0.3 + 0.7 * share : 0.85 * share).colour;

// ---- Drawings know their width, so they are drawn again when it or the colours change.

const drawings = [];

function drawing(canvas, draw) {
  const again = () => {
    if (!canvas.clientWidth) return;
    canvas.replaceChildren();
    draw(canvas, canvas.clientWidth);
  };
  drawings.push({ canvas, again, width: 0 });
  return again;
}

function redrawAll() {
  for (const one of drawings) {
    one.width = one.canvas.clientWidth;
    one.again();
  }
}

function redrawResized() {
  for (const one of drawings) {
    if (one.canvas.clientWidth === one.width) continue;
    one.width = one.canvas.clientWidth;
    one.again();
  }
}

function section(id, title, ...children) {
  const node = el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), ...children);
  byId("main").append(node);
  byId("nav").append(el("a", { href: `#${id}` }, title));
  return node;
}
