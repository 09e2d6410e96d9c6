
// ---- Heat map: a row for each attention, a cell for each head.

const PREFERRED = ["jacobian_kappa", "entropy_relative", "q_kappa"];

function preferred(names) {
  return PREFERRED.find((name) => names.includes(name)) || names[0];
}

function heatSection() {
  const names = columnsOf(HEADS).filter((name) => name !== "heads" && !isText(HEADS, name) && measured(HEADS, name));
  if (!names.length) return;
  const state = { name: preferred(names), log: true };
  state.log = wantsLog(state.name);
  const caption = el("p", { class: "hint" });
  const canvas = el("div", { class: "canvas heat scroll", id: "heat" });
  const bar = el("div", { class: "canvas", id: "heat-legend" });
  const again = drawing(canvas, (box, width) => {
    caption.textContent = `${labelOf(state.name)}: ${meaningOf(state.name)}. Click a cell, or press Enter, for its row.`;
    bar.replaceChildren();
    drawHeat(box, bar, width, state);
  });
  const log = check("logarithmic colours", state.log, (on) => { state.log = on; again(); });
  const picked = choice("Quantity", names.map((name) => [name, labelOf(name)]), state.name, (name) => {
    [state.name, state.log] = [name, wantsLog(name)];
    log.querySelector("input").checked = state.log;
    again();
  });
  picked.querySelector("select").id = "heat-quantity";
  picked.querySelector("label").htmlFor = "heat-quantity";
  section("heads", "Heads", el("div", { class: "controls" }, picked, log), caption, bar, canvas);
}

function shorten(text, most) {
  if (text.length <= most) return text;
  const half = Math.floor((most - 1) / 2);
  return `${text.slice(0, half)}…${text.slice(-(most - 1 - half))}`;
}

function heatGrid() {
  const lines = new Map();
  for (const row of HEADS) {
    const key = `${row.layer} ${row.call}`;
    if (!lines.has(key)) lines.set(key, { row, cells: [] });
    lines.get(key).cells.push(row);
  }
  return [...lines.values()];
}

// How a value is drawn: a colour, or a class for what no colour stands for.
function shade(value, colours) {
  if (value === undefined) return { kind: "none" };
  if (Number.isNaN(value)) return { kind: "nan" };
  const at = colours(value);
  if (at === null) return { kind: value > 0 ? "inf" : "low" };
  return { kind: "", ...viridis(at) };
}

// Numbers that share their first digits are told apart by later ones.
function cellText(known) {
  const [low, high] = extent(finite(known));
  const digits = Math.ceil(Math.log10(Math.max(Math.abs(low), Math.abs(high)) / (high - low)) + 1.5);
  if (!(digits > 4) || digits > 7) return format;
  return (value) => (Number.isFinite(value) ? value.toPrecision(digits) : format(value));
}

function drawHeat(canvas, bar, width, { name, log }) {
  const lines = heatGrid();
  const count = 1 + Math.max(...extent(HEADS.map((row) => row.head)));
  const known = HEADS.map((row) => numberOf(row, name)).filter((value) => value !== undefined);
  const colours = makeScale(known, 0, 1, { log, count: 4 });
  const inside = cellText(known);
  const roomy = width > 620;
  const label = (row) => (roomy ? `${shortName(row)}  ${shorten(pathOf(row), 26)}` : shortName(row));
  const left = 12 + 6.4 * Math.max(5, ...lines.map((line) => label(line.row).length));
  const wide = Math.min(Math.max((width - left - 4) / count, 6), 72);
  const tall = lines.length <= 16 ? 24 : lines.length <= 60 ? 15 : 9;
  const top = 22;
  const [full, height] = [left + wide * count + 4, top + tall * lines.length + 4];
  const root = svg("svg", { class: "chart", width: full, height, viewBox: `0 0 ${full} ${height}` });
  const every = thinned(Array.from({ length: count }, (_, i) => String(i)), wide);
  for (let head = 0; head < count; head += every) {
    root.append(svg("text", { class: "tick", x: left + (head + 0.5) * wide, y: 15, "text-anchor": "middle" }, String(head)));
  }
  root.append(svg("text", { class: "name", x: left - 8, y: 15, "text-anchor": "end" }, left > 90 ? "layer · head" : "head"));
  const marks = [];
  const used = new Set();
  const rowsEvery = Math.ceil(13 / tall);
  lines.forEach((line, i) => {
    const y = top + i * tall;
    if (i % rowsEvery === 0) root.append(svg("text", { class: "tick", x: left - 8, y: y + tall / 2 + 4, "text-anchor": "end" }, label(line.row)));
    for (const row of line.cells) {
      const x = left + row.head * wide;
      const value = numberOf(row, name);
      const { kind, colour, dark } = shade(value, colours);
      used.add(kind);
      root.append(svg("rect", { class: `mark ${kind}`, x: x + 0.5, y: y + 0.5, width: Math.max(wide - 1, 1), height: tall - 1, rx: wide > 14 ? 2 : 0, fill: colour }));
      if (wide >= 46 && tall >= 15 && value !== undefined) {
        root.append(svg("text", { class: `inside ${kind ? "plain" : dark ? "light" : "dark"}`, x: x + wide / 2, y: y + tall / 2 + 4, "text-anchor": "middle" }, inside(value)));
      }
      marks.push({
        i, j: row.head, x: x + wide / 2, y: y + tall / 2,
        text: `${where(row)}\n${labelOf(name)} = ${exact(value)}${past(row, name)}`,
        open: () => openRow(keyOf(row)),
      });
    }
  });
  root.setAttribute("aria-label", `${labelOf(name)} of every head. Arrow keys move from cell to cell.`);
  canvas.append(root);
  explorable(root, marks, { cell: [wide, tall] });
  drawHeatLegend(bar, colours, used, known);
}

function drawHeatLegend(bar, colours, used, known) {
  const extras = [["inf", "infinite"], ["nan", "NaN"], ["low", "not above 0"], ["none", "not measured"]]
    .filter(([kind]) => used.has(kind))
    .map(([kind, text]) => [svg("rect", { class: `mark ${kind}`, x: 1, y: 0.5, width: 20, height: 11, rx: 2 }), text]);
  if (finite(known).length) {
    const [width, left, inner, parts] = [300, 1, 270, 40];
    const root = svg("svg", { class: "chart", width, height: 34, viewBox: `0 0 ${width} 34`, role: "img", "aria-label": "Legend of the colours" });
    for (let i = 0; i < parts; i += 1) {
      root.append(svg("rect", { x: left + (i * inner) / parts, y: 2, width: inner / parts + 0.5, height: 10, fill: viridis((i + 0.5) / parts).colour }));
    }
    let last = -Infinity;
    for (const tick of colours.ticks) {
      const x = left + inner * colours(tick);
      const text = tickText(tick, colours.log, colours.ticks);
      if (x < left - 1 || x > left + inner + 1 || x - last < text.length * 7 + 10) continue;
      last = x;
      root.append(svg("line", { class: "axis", x1: x, x2: x, y1: 12, y2: 16 }), svg("text", { class: "tick", x, y: 28, "text-anchor": x < 16 ? "start" : "middle" }, text));
    }
    bar.append(root);
  }
  if (extras.length) bar.append(legend(...extras));
}
