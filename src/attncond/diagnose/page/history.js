
// ---- A monitor's record: one line for each layer, over the steps of training.

const OVER = [
  ["whole", "whole attentions", null],
  ["max", "largest of the heads", (values) => Math.max(...values)],
  ["median", "median of the heads", median],
  ["min", "smallest of the heads", (values) => Math.min(...values)],
];

function historySection() {
  if (!HISTORY) return;
  const records = HISTORY.records.slice().sort((a, b) => a.step - b.step);
  const rows = records.flatMap((record) => record.rows);
  const names = columnsOf(rows).filter((name) => !isText(rows, name) && measured(rows, name));
  const losses = records.filter((record) => number(record.loss) !== undefined);
  const parts = [el("p", { class: "hint" }, `${plural(records.length, "record")}${records.length ? `, steps ${records[0].step} to ${records[records.length - 1].step}` : ""}.`)];
  if (!records.length || (!names.length && !losses.length)) {
    section("history", "Through training", ...parts, el("p", {}, "Nothing was recorded."));
    return;
  }
  if (names.length) parts.push(...historyParts(records, names));
  if (losses.length) {
    const canvas = el("div", { class: "canvas", id: "loss-chart" });
    drawing(canvas, (box, width) => drawLoss(box, width, records, losses));
    parts.push(el("h3", {}, "Loss"), canvas);
  }
  section("history", "Through training", ...parts);
}

function historyParts(records, names) {
  const rows = records.flatMap((record) => record.rows);
  const possible = (name) => OVER.filter(([, , join]) => measured(rows.filter((row) => (join === null) === (row.head === null || row.head === undefined)), name));
  // A monitor is there for κ of the weights, whatever its probe measures besides.
  const state = { name: names.includes("q_kappa") ? "q_kappa" : preferred(names), over: "", log: true };
  const canvas = el("div", { class: "canvas", id: "history-chart" });
  const key = el("div");
  const note = el("p", { class: "hint" });
  const caption = el("p", { class: "hint" });
  const slot = el("div", { class: "controls" });
  const again = drawing(canvas, (box, width) => {
    caption.textContent = `${labelOf(state.name)}: ${meaningOf(state.name)}.`;
    drawHistory(box, width, records, state, key, note);
  });
  const controls = () => {
    const found = possible(state.name);
    if (!found.some(([over]) => over === state.over)) state.over = found[0][0];
    const over = choice("Of", found.map(([key_, text]) => [key_, text]), state.over, (value) => { state.over = value; again(); });
    over.querySelector("select").dataset.control = "history-over";
    slot.replaceChildren(picked, over, check("logarithmic", state.log, (on) => { state.log = on; again(); }, { "data-control": "history-log" }));
  };
  const picked = choice("Quantity", names.map((name) => [name, labelOf(name)]), state.name, (name) => {
    [state.name, state.log] = [name, wantsLog(name)];
    controls();
    again();
    picked.querySelector("select").focus();
  });
  picked.querySelector("select").dataset.control = "history-quantity";
  state.log = wantsLog(state.name);
  controls();
  return [slot, caption, key, canvas, note];
}

function historyLines(records, { name, over }) {
  const join = OVER.find(([key]) => key === over)[2];
  const lines = new Map();
  records.forEach((record, at) => {
    const groups = new Map();
    for (const row of record.rows) {
      const value = numberOf(row, name);
      const isWhole = row.head === null || row.head === undefined;
      if (value === undefined || isWhole !== (join === null)) continue;
      const key = `${row.layer} ${row.path}`;
      if (!groups.has(key)) groups.set(key, { row, values: [] });
      groups.get(key).values.push(value);
    }
    for (const [key, { row, values }] of groups) {
      if (!lines.has(key)) lines.set(key, { row, points: [] });
      lines.get(key).points.push({ at, step: record.step, value: join === null ? values[values.length - 1] : join(values) });
    }
  });
  return [...lines.values()].sort((a, b) => a.row.layer - b.row.layer);
}

function drawHistory(canvas, width, records, state, key, note) {
  const lines = historyLines(records, state);
  const chart = frame(canvas, width, {
    height: 320, x: { values: records.map((record) => record.step), label: "step" },
    y: { values: lines.flatMap((line) => line.points.map((p) => p.value)), log: state.log },
    label: `${labelOf(state.name)} over the steps, a line for each layer`,
  });
  const marks = [];
  let hidden = 0;
  lines.forEach(({ row, points }, i) => {
    const colour = depthColour(lines.length > 1 ? i / (lines.length - 1) : 0.5);
    const places = [];
    let last = -1;
    for (const p of points) {
      if (p.at !== last + 1) places.push([0, null]); // a record without this layer breaks its line
      last = p.at;
      places.push([chart.across(p.step), chart.up(p.value)]);
      const y = chart.up(p.value);
      if (y === null) hidden += 1;
      else marks.push({ i, j: p.at, x: chart.across(p.step), y, text: `step ${p.step}, ${where({ ...row, call: 0, head: null })}\n${labelOf(state.name)} = ${exact(p.value)}` });
    }
    chart.root.append(trace(places, { class: "mark line", stroke: colour }));
    if (records.length <= 60) for (const [x, y] of places) if (y !== null) chart.root.append(dot(x, y, { fill: colour, r: 2.2 }));
  });
  explorable(chart.root, marks);
  const layers = lines.map((line) => line.row.layer);
  key.replaceChildren(layers.length > 1 ? depthLegend(layers) : "");
  note.textContent = hidden ? `${plural(hidden, "value")} without a place on this scale (NaN${chart.log ? ", or not above 0" : ""}) ${hidden === 1 ? "is" : "are"} not drawn.` : "";
}

function drawLoss(canvas, width, records, losses) {
  const values = losses.map((record) => number(record.loss));
  const chart = frame(canvas, width, { height: 200, x: { values: records.map((record) => record.step), label: "step" }, y: { values }, label: "Loss over the steps" });
  const points = losses.map((record, j) => [chart.across(record.step), chart.up(values[j])]);
  chart.root.append(trace(points, { class: "mark line q" }));
  if (losses.length <= 60) for (const [x, y] of points) if (y !== null) chart.root.append(dot(x, y, { class: "q", r: 2.2 }));
  explorable(chart.root, points.map(([x, y], j) => ({ i: 0, j, x, y, text: `step ${losses[j].step}\nloss = ${exact(values[j])}` })).filter((mark) => mark.y !== null));
}
