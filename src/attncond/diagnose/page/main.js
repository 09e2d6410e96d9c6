
// ---- The page: what it is about, what was found, then every part that has something to show.

const FACTS = {
  date: "measured", batch: "batch", device: "device", dtype: "precision", samples: "samples at most", tokens: "tokens of a Jacobian at most",
  seconds: "seconds", attncond: "attncond", torch: "torch",
};
const SHOWN = innerWidth < 640 ? 3 : 5;

function facts() {
  const info = REPORT ? REPORT.info : {};
  const known = Object.keys(FACTS).filter((name) => Object.hasOwn(info, name));
  const others = Object.keys(info).filter((name) => name !== "model" && !Object.hasOwn(FACTS, name));
  const pairs = [...known, ...others].map((name) => {
    const value = info[name];
    const text = value === null ? "all" : typeof value === "object" ? JSON.stringify(value) : String(value);
    return [Object.hasOwn(FACTS, name) ? FACTS[name] : name, text];
  });
  pairs.push(["page written", META.written.replace("T", " ")]);
  return el("dl", { class: "facts" }, ...pairs.map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, given(text)))));
}

function measuredWords() {
  if (!REPORT) return "A record of training.";
  const sites = new Set(WHOLES.map((row) => row.layer)).size;
  const runs = WHOLES.filter((row) => row.call).length;
  const heads = HEADS.filter((row) => row.call === 0).length;
  const kinds = [["q_kappa", "weights"], ["entropy", "attention"], ["token_rms", "tokens"], ["q_grad_norm", "gradients"], ["jacobian_kappa", "Jacobians"]]
    .filter(([name]) => measured(ROWS, name)).map(([, text]) => text);
  const what = kinds.length ? `Measured: ${kinds.join(", ")}.` : "Nothing was measured.";
  const alone = kinds.length === 1 && kinds[0] === "weights" ? " There was no batch, so this is about the weights alone." : "";
  return `${plural(sites, "attention")} with ${plural(heads, "head")}${runs ? `, ${plural(runs, "further run")} of shared layers` : ""}. ${what}${alone}`;
}

function themeButton() {
  const name = () => (isDark() ? "Light colours" : "Dark colours");
  const button = el("button", { type: "button", id: "theme", on: { click: () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    button.textContent = name();
    redrawAll();
  } } }, name());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    button.textContent = name();
    redrawAll();
  });
  return button;
}

function topPart() {
  const model = (REPORT && REPORT.info.model) || (HISTORY && HISTORY.model) || "model";
  byId("top").append(
    el("div", { class: "brand" }, el("span", {}, REPORT ? (BEFORE ? "attncond · report, before and after" : "attncond · report") : "attncond · history"), themeButton()),
    given(String(model), "h1"),
    el("p", { class: "lead" }, measuredWords()),
    facts(),
  );
  byId("top").hidden = false;
  byId("nav").hidden = false;
}

// A list that starts short: a deep model repeats a finding in each layer.
function shortened(items) {
  const list = el("ul", { class: "findings" }, ...items.slice(0, SHOWN));
  if (items.length <= SHOWN + 1) {
    list.append(...items.slice(SHOWN));
    return [list];
  }
  const more = el("button", { type: "button", class: "more", on: { click: () => {
    list.append(...items.slice(SHOWN));
    more.remove();
    items[SHOWN].querySelector("a").focus();
  } } }, `Show all ${items.length}`);
  return [list, more];
}

function findingItem(finding) {
  const key = keyOf(finding);
  const link = el("a", { href: "#table", on: { click: (event) => {
    event.preventDefault();
    openRow(key);
  } } }, given(finding.message));
  return el("li", {}, link);
}

function findingsSection() {
  const groups = new Map();
  for (const finding of REPORT.findings) {
    if (!groups.has(finding.code)) groups.set(finding.code, []);
    groups.get(finding.code).push(finding);
  }
  const order = ["error", "warning", "info"];
  const sorted = [...groups.entries()].sort((a, b) => order.indexOf(a[1][0].severity) - order.indexOf(b[1][0].severity));
  const parts = sorted.map(([code, list]) => {
    const meaning = Object.hasOwn(META.codes, code) ? META.codes[code] : code;
    const severity = list[0].severity;
    return el(
      "details", { class: `finding ${severity}`, open: severity !== "info", "data-code": code },
      el("summary", {}, el("span", { class: "badge" }, severity), " ", el("span", { class: "what" }, meaning), " ",
        el("span", { class: "times" }, list.length > 1 ? `${list.length} times` : "once"), " ", el("code", {}, code)),
      ...shortened(list.map(findingItem)),
    );
  });
  const words = parts.length ? "" : ROWS.length ? "Nothing out of the ordinary." : "The report has no rows.";
  section("findings", "Findings", words ? el("p", { class: ROWS.length ? "calm" : null }, words) : null, ...parts);
}

function notesSection() {
  if (!REPORT.notes.length) return;
  const items = REPORT.notes.map((note) => el("li", {}, given(note)));
  section("notes", "Left out", ...(items.length > 12
    ? [el("details", {}, el("summary", {}, plural(items.length, "note")), el("ul", {}, ...items))]
    : [el("ul", {}, ...items)]));
}

function start() {
  topPart();
  if (REPORT) {
    findingsSection();
    notesSection();
    changeSection();
    heatSection();
    spectraSection();
    jacobianSection();
    depthSection();
  }
  historySection();
  if (ROWS.length) tableSection();
  byId("foot").append(`Made by attncond ${META.version}. This file is complete: it asks the network for nothing.`);
  document.body.append(tip, spoken);
  redrawAll();
  let waiting = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(redrawResized);
  });
  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
}

start();
