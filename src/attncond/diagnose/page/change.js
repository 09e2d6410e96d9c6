
// ---- Before and after.

function pairsOf(name) {
  const found = [];
  for (const row of ROWS) {
    const past = OLD.get(keyOf(row));
    const [before, after] = [past ? numberOf(past, name) : undefined, numberOf(row, name)];
    if (before !== undefined && after !== undefined) found.push({ row, before, after });
  }
  return found;
}

// Large where a number changed by a large factor, in either direction; -1 where that means nothing.
function weight({ before, after }) {
  if (before === after || (Number.isNaN(before) && Number.isNaN(after))) return 0;
  if (Number.isNaN(before) || Number.isNaN(after)) return -1;
  if (!(before > 0) || !(after > 0)) return -1;
  return Math.abs(Math.log(after / before));
}

function factor({ before, after }) {
  if (before === after) return "=";
  const ratio = after / before;
  if (!Number.isFinite(ratio) || ratio <= 0) return "–";
  return ratio >= 1 ? `× ${format(ratio)}` : `÷ ${format(1 / ratio)}`;
}

function median(values) {
  const known = values.filter((value) => !Number.isNaN(value)).sort((a, b) => a - b);
  if (!known.length) return NaN;
  const [low, high] = [known[(known.length - 1) >> 1], known[known.length >> 1]];
  return low === high ? low : (low + high) / 2;
}

function changeSection() {
  if (!BEFORE) return;
  const names = columnsOf(ROWS).filter((name) => !["heads", "tokens", "jacobian_kappa_error"].includes(name) && !isText(ROWS, name) && pairsOf(name).length);
  const medians = names.map((name) => {
    const pairs = pairsOf(name);
    const wholes = pairs.filter(({ row }) => row.head === null);
    const taken = wholes.length ? wholes : pairs;
    return { name, before: median(taken.map((p) => p.before)), after: median(taken.map((p) => p.after)) };
  }).filter((one) => weight(one) !== 0);
  const parts = [findingsChange()];
  if (!medians.length) parts.push(el("p", {}, "All numbers that both reports have are equal."));
  else parts.push(...changeParts(medians));
  if (META.missing.length) {
    parts.push(el("details", {}, el("summary", {}, `Only in one report: ${plural(META.missing.length, "row")}`), el("ul", {}, ...META.missing.slice(0, 200).map((text) => el("li", {}, given(text))))));
  }
  section("change", "Before and after", ...parts);
}

function findingsChange() {
  const list = (title, items) => {
    if (!items.length) return el("div", { class: "change" }, `No finding ${title}.`);
    return el(
      "details", { class: "change", open: items.length <= 6 },
      el("summary", {}, `${plural(items.length, "finding")} ${title}`),
      el("ul", {}, ...items.map((text) => el("li", {}, given(text)))),
    );
  };
  return el("div", { class: "pair" }, list("gone", META.gone), list("new", META.new));
}

function changeParts(medians) {
  const order = medians.slice().sort((a, b) => weight(b) - weight(a));
  const names = order.map((one) => one.name);
  const state = { name: preferred(names) };
  const canvas = el("div", { class: "canvas", id: "change-chart" });
  const biggest = el("tbody");
  const caption = el("p", { class: "hint" });
  const again = drawing(canvas, (box, width) => {
    caption.textContent = `${labelOf(state.name)}: ${meaningOf(state.name)}.`;
    drawChange(box, width, state.name);
    const top = pairsOf(state.name).filter((pair) => weight(pair) !== 0).sort((a, b) => weight(b) - weight(a)).slice(0, 8);
    biggest.replaceChildren(...top.map((pair) => el("tr", {},
      el("td", { class: "word" }, el("button", { type: "button", class: "link", on: { click: () => openRow(keyOf(pair.row)) } }, given(where(pair.row)))),
      ...changeCells(pair))));
  });
  const picked = choice("Quantity", names.map((name) => [name, labelOf(name)]), state.name, (name) => {
    state.name = name;
    again();
  });
  const select = picked.querySelector("select");
  select.dataset.control = "change-quantity";
  const rows = order.map((one) => el("tr", {},
    el("td", { class: "word" }, el("button", { type: "button", class: "link", title: meaningOf(one.name), on: { click: () => { select.value = one.name; state.name = one.name; again(); } } }, labelOf(one.name))),
    ...changeCells(one)));
  const head = (first) => el("thead", {}, el("tr", {}, ...[first, "before", "after", "change"].map((text, at) => el("th", { scope: "col", class: at ? "number" : null }, text))));
  const box = (label, first, body) => el("div", { class: "scroll short", tabindex: 0, role: "region", "aria-label": label }, el("table", { class: "small" }, head(first), body));
  return [
    el("div", { class: "controls" }, picked), caption,
    legend([dot(11, 6, { class: "mark before", r: 3.5 }), "before"], [dot(11, 6, { class: "mark q", r: 3.5 }), "after"]),
    canvas,
    el("div", { class: "pair" },
      el("div", {}, el("h3", {}, "Medians over whole attentions"), box("Medians before and after", "quantity", el("tbody", { id: "medians" }, ...rows))),
      el("div", {}, el("h3", {}, "Largest changes of this quantity"), box("Largest changes", "where", biggest))),
  ];
}

function changeCells(pair) {
  return [
    el("td", { class: "number", title: exact(pair.before) }, format(pair.before)),
    el("td", { class: "number", title: exact(pair.after) }, format(pair.after)),
    el("td", { class: "number" }, factor(pair)),
  ];
}

// A dumbbell for each attention; for each head where only heads have the quantity.
function drawChange(canvas, width, name) {
  const pairs = pairsOf(name);
  const wholes = pairs.filter(({ row }) => row.head === null);
  const shown = wholes.length ? wholes : pairs;
  const title = (row) => (row.head === null ? shortName(row) : `${shortName(row)}h${row.head}`);
  const chart = frame(canvas, width, {
    height: 280, x: { names: shown.map(({ row }) => title(row)), label: wholes.length ? "layer" : "layer and head" },
    y: { values: shown.flatMap(({ before, after }) => [before, after]), log: wantsLog(name) },
    label: `${labelOf(name)} before and after, by layer`,
  });
  const marks = [];
  const size = chart.across.step < 9 ? 2 : 4;
  shown.forEach((pair, j) => {
    const x = chart.across(j);
    const [from, to] = [chart.up(pair.before), chart.up(pair.after)];
    if (from !== null && to !== null) chart.root.append(svg("line", { class: "tie", x1: x, x2: x, y1: from, y2: to }));
    if (from !== null) chart.root.append(dot(x, from, { class: "mark before", r: size }));
    if (to !== null) chart.root.append(dot(x, to, { class: "mark q", r: size }));
    if (from === null && to === null) return;
    const text = `${where(pair.row)}\n${labelOf(name)}: ${exact(pair.before)} → ${exact(pair.after)} (${factor(pair)})`;
    marks.push({ i: 0, j, x, y: to === null ? from : to, text, open: () => openRow(keyOf(pair.row)) });
  });
  explorable(chart.root, marks);
}
