
// ---- Curves over ranks and depth: spectra, Jacobians, profiles.

const roleName = (role) => `W_${role.toUpperCase()}`;

// ---- Spectra of whole projections

function spectraSection() {
  const spectra = REPORT.spectra;
  if (!spectra.length) return;
  const layers = [...new Map(spectra.map((s) => [s.layer, s])).values()];
  const roles = [...new Set(spectra.map((s) => s.role))];
  const state = { layer: String(layers[0].layer), role: "all", form: "effective" };
  const canvas = el("div", { class: "canvas", id: "spectra-chart" });
  const key = el("div");
  const note = el("p", { class: "hint" });
  const again = drawing(canvas, (box, width) => drawSpectra(box, width, state, key, note));
  const layer = choice("Layer", [["all", "all layers"], ...layers.map((s) => [String(s.layer), `${s.layer}  ${shorten(pathOf(s), 40)}`])], state.layer, (value) => {
    state.layer = value;
    again();
  });
  const role = choice("Projection", [["all", "all"], ...roles.map((r) => [r, roleName(r)])], state.role, (value) => {
    state.role = value;
    again();
  });
  layer.querySelector("select").dataset.control = "spectra-layer";
  role.querySelector("select").dataset.control = "spectra-role";
  section(
    "spectra", "Spectra of the projections",
    el("p", { class: "hint" }, "Singular values of whole weights, the largest first: as the forward pass uses them, and as they are stored."),
    el("div", { class: "controls" }, layer, role), key, canvas, note,
  );
}

const same = (a, b) => a && b && a.values.length === b.values.length && a.values.every((v, i) => v === b.values[i]);

function chosenSpectra(state) {
  const wanted = (s) => (state.layer === "all" || String(s.layer) === state.layer) && (state.role === "all" || s.role === state.role);
  const now = REPORT.spectra.filter(wanted);
  const find = (list, s, raw) => list.find((o) => o.layer === s.layer && o.path === s.path && o.role === s.role && o.raw === raw);
  const found = [];
  for (const s of now.filter((one) => !one.raw)) {
    const stored = find(now, s, true);
    const before = BEFORE ? find(BEFORE.spectra, s, false) : null;
    found.push({ s, form: stored && !same(s, stored) ? "effective" : "both" });
    if (stored && !same(s, stored)) found.push({ s: stored, form: "stored" });
    if (before && !same(s, before) && !same(before, stored)) found.push({ s: before, form: "before" });
  }
  for (const s of now.filter((one) => one.raw)) if (!find(now, s, false)) found.push({ s, form: "stored" });
  return found;
}

function drawSpectra(canvas, width, state, key, note) {
  const chosen = chosenSpectra(state);
  const all = chosen.flatMap(({ s }) => s.values.map(number));
  const ranks = chosen.flatMap(({ s }) => s.rank);
  const chart = frame(canvas, width, {
    height: 300, x: { values: ranks, label: "rank of the singular value" }, y: { values: all, log: true }, label: "Singular values of projections",
  });
  const depths = [...new Set(chosen.map(({ s }) => s.layer))];
  const dashes = { effective: null, both: null, stored: "6 4", before: "1.5 4" };
  const forms = { effective: "as used", both: "as used and stored", stored: "as stored", before: "before" };
  const marks = [];
  let hidden = 0;
  chosen.forEach(({ s, form }, i) => {
    const look = state.layer === "all"
      ? { stroke: depthColour(depths.length > 1 ? depths.indexOf(s.layer) / (depths.length - 1) : 0.5) }
      : { class: s.role };
    const points = s.values.map((value, j) => [chart.across(s.rank[j]), chart.up(number(value))]);
    hidden += points.filter(([, y]) => y === null).length;
    chart.root.append(trace(points, { ...look, class: `mark line ${look.class || ""}`, "stroke-dasharray": dashes[form], "stroke-linecap": "round" }));
    points.forEach(([x, y], j) => {
      if (y !== null) marks.push({ i, j, x, y, text: `${where({ ...s, call: 0, head: null })}\n${roleName(s.role)} ${forms[form]}: σ_${s.rank[j]} = ${exact(number(s.values[j]))}` });
    });
  });
  explorable(chart.root, marks);
  const kinds = [...new Set(chosen.map(({ form }) => form))];
  const roles = [...new Set(chosen.map(({ s }) => s.role))];
  const entries = state.layer === "all" ? [] : roles.map((role) => [sampleLine({ class: `line ${role}` }), roleName(role)]);
  entries.push(...kinds.map((form) => [sampleLine({ class: "line plain", "stroke-dasharray": dashes[form] }), forms[form]]));
  key.replaceChildren(legend(...entries), state.layer === "all" && depths.length > 1 ? depthLegend(depths) : "");
  note.textContent = hidden ? `${plural(hidden, "value")} of 0 or without a number ${hidden === 1 ? "is" : "are"} not drawn.` : "";
}

function depthLegend(layers) {
  const root = svg("svg", { width: 120, height: 10, "aria-hidden": "true" });
  for (let i = 0; i < 24; i += 1) root.append(svg("rect", { x: i * 5, y: 0, width: 5.5, height: 10, fill: depthColour((i + 0.5) / 24) }));
  return el("p", { class: "depth" }, `layer ${layers[0]} `, root, ` ${layers[layers.length - 1]}`);
}

// ---- Jacobians: exact κ beside the paper's bound and the certificate

const BOUNDS = [["jacobian_certificate", "certificate", "v"], ["jacobian_paper_bound", "paper’s bound", "k"], ["jacobian_kappa", "κ(J), exact", "q"]];

function jacobianSection() {
  const rows = HEADS.filter((row) => numberOf(row, "jacobian_kappa") !== undefined);
  const statuses = new Set(WHOLES.map((row) => valueOf(row, "jacobian_status")).filter(Boolean));
  if (!rows.length) {
    const why = [...statuses];
    if (why.length) section("jacobians", "Jacobians of the heads", el("p", { class: "hint" }, "None was computed: ", given(why.slice(0, 3).join("; ")), "."));
    return;
  }
  const both = rows.filter((row) => numberOf(row, "jacobian_paper_bound") !== undefined);
  const above = both.filter((row) => numberOf(row, "jacobian_kappa") > numberOf(row, "jacobian_paper_bound"));
  const held = rows.filter((row) => numberOf(row, "jacobian_certificate") < Infinity);
  const state = new Set(BOUNDS.map(([name]) => name));
  const canvas = el("div", { class: "canvas", id: "jacobian-chart" });
  const again = drawing(canvas, (box, width) => drawJacobians(box, width, rows, state));
  const boxes = BOUNDS.slice(0, 2).reverse().map(([name, text]) => check(text, true, (on) => {
    if (on) state.add(name);
    else state.delete(name);
    again();
  }));
  section(
    "jacobians", "Jacobians of the heads",
    el("p", {}, `κ is above the paper’s bound in ${above.length} of ${plural(both.length, "head")}; a finite certificate was found for ${held.length} of ${rows.length}.`),
    el("div", { class: "controls" }, ...boxes),
    legend(...BOUNDS.slice().reverse().map(([name, text, role]) => [bound(name, 11, 6, { class: `mark ${role}` }), text])),
    canvas,
  );
}

// Three shapes as well as three colours.
function bound(name, x, y, attributes, size = 1) {
  if (name === "jacobian_kappa") return dot(x, y, { ...attributes, r: 3 * size });
  if (name === "jacobian_paper_bound") return svg("line", { x1: x - 5 * size, x2: x + 5 * size, y1: y, y2: y, ...attributes, "stroke-width": 1 + size });
  return svg("path", { d: `M${x - 4 * size} ${y - 3.5 * size}h${8 * size}l${-4 * size} ${7 * size}z`, ...attributes, "fill-opacity": 0.55 });
}

function drawJacobians(canvas, width, rows, state) {
  const having = new Set(rows);
  const lines = heatGrid().map((line) => ({ row: line.row, cells: line.cells.filter((row) => having.has(row)) })).filter((line) => line.cells.length);
  const shown = BOUNDS.filter(([name]) => state.has(name));
  const chart = frame(canvas, width, {
    height: 320,
    x: { names: lines.map((line) => shortName(line.row)), label: "layer; the heads of one stand side by side" },
    y: { values: shown.flatMap(([name]) => rows.map((row) => numberOf(row, name))).filter((v) => v !== undefined), log: true },
    label: "Condition numbers of the heads' Jacobians by layer",
  });
  const marks = [];
  const most = Math.max(...lines.map((line) => line.cells.length));
  const size = Math.min(Math.max((0.7 * chart.across.step) / most / 5, 0.4), 1); // many heads, small marks
  let j = 0;
  lines.forEach((line, at) => {
    const { cells } = line;
    cells.forEach((row, h) => {
      const x = chart.across(at + (0.7 * (h + 0.5)) / cells.length - 0.35);
      shown.forEach(([name, text, role], i) => {
        const value = numberOf(row, name);
        const y = value === undefined ? null : chart.up(value);
        if (y === null) return;
        chart.root.append(bound(name, x, y, { class: `mark ${role}` }, size));
        marks.push({ i: shown.length - 1 - i, j, x, y, text: `${where(row)}\n${text}: ${exact(value)}`, open: () => openRow(keyOf(row)) });
      });
      j += 1;
    });
  });
  explorable(chart.root, marks);
}

// ---- Profiles over depth, of whole attentions

const PROFILES = [
  ["Stable rank of the tokens", ["token_stable_rank"]],
  ["Residue of the tokens", ["token_residue"]],
  ["Entropy, share of the largest possible", ["entropy_relative"]],
  ["Saturated queries", ["saturation"]],
  ["Second singular value of attention", ["attention_sigma_2"]],
  ["Largest logit", ["logit_max"]],
  ["Size of the tokens (rms)", ["token_rms"]],
  ["κ of the projections", ["q_kappa", "k_kappa", "v_kappa"]],
  ["Norm of the projections (σ_max)", ["q_sigma_max", "k_sigma_max", "v_sigma_max"]],
  ["Norm of the gradients", ["q_grad_norm", "k_grad_norm", "v_grad_norm"]],
  ["Worst κ(J) of the heads", ["jacobian_kappa"]],
];

function depthSection() {
  const found = PROFILES.map(([title, names]) => [title, names.filter((name) => measured(WHOLES, name))]).filter(([, names]) => names.length);
  if (!found.length) return;
  const grid = el("div", { class: "profiles", id: "profiles" });
  for (const [title, names] of found) {
    const canvas = el("div", { class: "canvas" });
    drawing(canvas, (box, width) => drawProfile(box, width, title, names));
    const entries = names.length > 1 ? names.map((name) => [sampleLine({ class: `line ${name[0]}` }), roleName(name[0])]) : [];
    if (OLD.size) entries.push([sampleLine({ class: "line plain", "stroke-dasharray": "3 4" }), "before"]);
    grid.append(el("figure", {}, el("figcaption", { title: meaningOf(names[0]) }, title), entries.length ? legend(...entries) : null, canvas));
  }
  section("depth", "Through the depth", el("p", { class: "hint" }, "Whole attentions in the order of the layers."), grid);
}

function drawProfile(canvas, width, title, names) {
  const values = (rows, name) => rows.map((row) => (row ? numberOf(row, name) : undefined));
  const olds = WHOLES.map((row) => OLD.get(keyOf(row)));
  const all = names.flatMap((name) => [...values(WHOLES, name), ...values(olds, name)]).filter((v) => v !== undefined);
  const chart = frame(canvas, width, { height: 180, x: { names: WHOLES.map(shortName) }, y: { values: all, log: wantsLog(names[0]) }, label: title });
  const marks = [];
  names.forEach((name, i) => {
    const role = names.length > 1 ? name[0] : "q";
    const place = (list) => values(list, name).map((value, at) => [chart.across(at), value === undefined ? null : chart.up(value)]);
    if (OLD.size) chart.root.append(trace(place(olds), { class: `line faint ${role}`, "stroke-dasharray": "3 4" }));
    const points = place(WHOLES);
    chart.root.append(trace(points, { class: `line ${role}` }));
    points.forEach(([x, y], j) => {
      if (y === null) return;
      const row = WHOLES[j];
      chart.root.append(dot(x, y, { class: `mark ${role}`, r: WHOLES.length > 40 ? 1.6 : 2.8 }));
      marks.push({ i, j, x, y, text: `${where(row)}\n${labelOf(name)} = ${exact(numberOf(row, name))}${past(row, name)}`, open: () => openRow(keyOf(row)) });
    });
  });
  explorable(chart.root, marks);
}
