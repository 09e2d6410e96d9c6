
// ---- The table of all rows: sorted, filtered, a group of columns at a time.

const GROUPS = [
  ["key figures", /^(entropy_relative|saturation|attention_sigma_2|token_stable_rank|[qkv]_kappa|jacobian_kappa)$/],
  ["attention", /^(entropy|saturation|attention_|logit_)/],
  ["softmax before gap removal", /^raw_attention_/],
  ["tokens", /^token/],
  ["W_Q", /^(raw_)?q_/],
  ["W_K", /^(raw_)?k_/],
  ["W_V", /^(raw_)?v_/],
  ["Jacobian", /^jacobian_/],
  ["class and kind", /^heads$/],
];
const CHUNK = 200;
const natural = new Intl.Collator("en", { numeric: true });

// Numbers, then NaN, then what was not measured, in either direction.
function ordered(rows, name, down, text) {
  const rank = (value) => (value === undefined || value === null ? 2 : Number.isNaN(value) ? 1 : 0);
  const keyed = rows.map((row, at) => ({ row, at, value: text ? valueOf(row, name) : numberOf(row, name) }));
  keyed.sort((a, b) => {
    const [ra, rb] = [rank(a.value), rank(b.value)];
    if (ra !== rb) return ra - rb;
    let way = 0;
    if (ra === 0 && a.value !== b.value) way = text ? natural.compare(a.value, b.value) : a.value < b.value ? -1 : 1;
    return (down ? -way : way) || a.at - b.at;
  });
  return keyed.map((one) => one.row);
}

const table = { columns: [], groups: new Set(["key figures"]), sort: null, filter: "", scope: "all", shown: [], drawn: 0 };

function inGroups(name) {
  const groups = GROUPS.filter(([, pattern]) => pattern.test(name)).map(([group]) => group);
  return (groups.length ? groups : ["other"]).some((group) => table.groups.has(group));
}

function tableColumns() {
  const several = ROWS.some((row) => row.call);
  const base = ["layer", "head", "path", ...(several ? ["call"] : [])];
  if (table.groups.has("class and kind")) base.push("cls", "kind");
  return [...base, ...table.columns.filter(inGroups)];
}

function matches(row, words) {
  if (table.scope === "whole" && row.head !== null) return false;
  if (table.scope === "heads" && row.head === null) return false;
  const status = valueOf(row, "jacobian_status") || "";
  const text = `${where(row)} ${row.cls} ${row.kind} ${status}`.toLowerCase();
  return words.every((word) => text.includes(word));
}

function updateTable() {
  const words = table.filter.toLowerCase().split(/\s+/).filter(Boolean);
  table.shown = ROWS.filter((row) => matches(row, words));
  const { sort } = table;
  if (sort) table.shown = ordered(table.shown, sort.name, sort.down, isText(ROWS, sort.name));
  drawTable();
}

function sortBy(name) {
  const first = !IDENTITY.includes(name) && !isText(ROWS, name); // of numbers one wants the largest
  const { sort } = table;
  if (!sort || sort.name !== name) table.sort = { name, down: first };
  else table.sort = sort.down === first ? { name, down: !first } : null;
  updateTable();
  byId(`sort-${name}`).focus();
}

function headCell(name, at) {
  const state = table.sort && table.sort.name === name ? (table.sort.down ? "descending" : "ascending") : "none";
  const arrow = { none: "", ascending: "▲", descending: "▼" }[state];
  const explain = () => { byId("meaning").textContent = `${labelOf(name)}: ${meaningOf(name)}`; };
  const button = el(
    "button",
    { type: "button", id: `sort-${name}`, title: meaningOf(name), on: { click: () => sortBy(name), focus: explain, pointerenter: explain } },
    labelOf(name), el("span", { class: "arrow", "aria-hidden": "true" }, arrow),
  );
  return el("th", { scope: "col", "aria-sort": state, "data-column": name, class: `${isText(ROWS, name) ? "word" : "number"}${at < 2 ? ` pinned p${at}` : ""}` }, button);
}

function bodyRow(row, columns) {
  const line = el("tr", { "data-key": keyOf(row), class: row.head === null ? "whole" : null });
  columns.forEach((name, at) => {
    const value = valueOf(row, name);
    const parsed = number(value);
    let text = parsed === undefined ? (value === null ? "–" : value) : format(parsed);
    if (name === "head" && value === null) text = "all";
    if (name === "call") text = String(value + 1);
    if (name === "path") text = pathOf(row);
    const pinned = at < 2 ? ` pinned p${at}` : "";
    const kind = (parsed === undefined && text !== "–" && name !== "head" ? "word" : "number") + pinned;
    if (at === 0) line.append(el("th", { scope: "row", class: kind, tabindex: -1 }, text));
    else line.append(el("td", { class: kind, title: parsed === undefined ? null : exact(parsed) }, parsed === undefined ? given(text) : text));
  });
  return line;
}

// Thousands of rows take seconds to draw, so they come as one scrolls to them.
function drawMore(until) {
  const columns = tableColumns();
  const body = byId("rows");
  for (const row of table.shown.slice(table.drawn, until)) body.append(bodyRow(row, columns));
  table.drawn = Math.max(table.drawn, Math.min(until, table.shown.length));
}

function drawTable() {
  byId("head-row").replaceChildren(...tableColumns().map(headCell));
  byId("rows").replaceChildren();
  table.drawn = 0;
  drawMore(CHUNK);
  byId("count").textContent = `${table.shown.length} of ${plural(ROWS.length, "row")}`;
}

function openRow(key) {
  if (!table.shown.some((row) => keyOf(row) === key)) {
    [table.filter, table.scope] = ["", "all"];
    byId("filter").value = "";
    byId("scope").value = "all";
    updateTable();
  }
  const at = table.shown.findIndex((row) => keyOf(row) === key);
  if (at < 0) return;
  drawMore(at + CHUNK);
  for (const old of document.querySelectorAll("tr.found")) old.classList.remove("found");
  const line = byId("rows").children[at];
  line.classList.add("found");
  line.scrollIntoView({ block: "center" });
  line.firstElementChild.focus({ preventScroll: true });
}

function save(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = el("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

function toCsv(rows) {
  const columns = [...IDENTITY, ...table.columns];
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const lines = [columns, ...rows.map((row) => columns.map((name) => valueOf(row, name)))];
  return `${lines.map((line) => line.map(cell).join(",")).join("\r\n")}\r\n`;
}

function groupChoice() {
  const names = [...GROUPS.map(([name]) => name), "other"];
  const found = names.filter((name) => {
    const pattern = GROUPS.find(([group]) => group === name);
    if (pattern) return table.columns.some((column) => pattern[1].test(column));
    return table.columns.some((column) => !GROUPS.some(([, p]) => p.test(column)));
  });
  const boxes = found.map((name) =>
    check(name, table.groups.has(name), (on) => {
      if (on) table.groups.add(name);
      else table.groups.delete(name);
      updateTable();
    }, { "data-group": name }));
  return el("fieldset", { class: "groups" }, el("legend", {}, "Columns"), ...boxes);
}

function tableSection() {
  table.columns = columnsOf(ROWS);
  const filter = el("input", {
    type: "search", id: "filter", autocomplete: "off", spellcheck: "false", placeholder: "blocks.3, head 2, window …",
    on: { input: () => { table.filter = filter.value; updateTable(); } },
  });
  const scope = choice("Rows", [["all", "attentions and heads"], ["whole", "whole attentions"], ["heads", "heads"]], "all", (value) => {
    table.scope = value;
    updateTable();
  });
  scope.querySelector("select").id = "scope";
  scope.querySelector("label").htmlFor = "scope";
  const box = el(
    "div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": "Table of all rows", id: "table-box" },
    el("table", {}, el("thead", {}, el("tr", { id: "head-row" })), el("tbody", { id: "rows" })),
  );
  box.addEventListener("scroll", () => {
    if (box.scrollTop + box.clientHeight > box.scrollHeight - 600) drawMore(table.drawn + CHUNK);
  }, { passive: true });
  const meanings = el("dl", { class: "meanings" });
  for (const name of [...IDENTITY, ...table.columns]) {
    meanings.append(el("dt", {}, labelOf(name), " ", el("code", {}, name)), el("dd", {}, meaningOf(name)));
  }
  section(
    "table", "All numbers",
    el("div", { class: "controls" },
      el("div", { class: "field" }, el("label", { for: "filter" }, "Filter"), filter), scope,
      el("span", { class: "buttons" },
        el("button", { type: "button", on: { click: () => save("report.csv", "text/csv", toCsv(table.shown)) } }, "CSV of these rows"),
        el("button", { type: "button", on: { click: () => save("report.json", "application/json", JSON.stringify(REPORT)) } }, "JSON"))),
    groupChoice(),
    el("p", { class: "hint" }, el("span", { id: "count", "aria-live": "polite" }), ". ", el("span", { id: "meaning" }, "A heading sorts, and says here what it means.")),
    box,
    el("details", {}, el("summary", {}, "What the columns mean"), meanings),
  );
  updateTable();
}
