
// ---- Scales, axes, and marks that pointer and arrow keys can explore.

const finite = (values) => values.filter((value) => Number.isFinite(value));

function ticksLinear(low, high, count) {
  const rough = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((m) => m * power >= rough * 0.75) * power;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i += 1) found.push(i * step);
  return found;
}

function ticksLog(low, high, count) {
  const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  if (last - first >= 2) {
    const step = Math.ceil((last - first) / count);
    return Array.from({ length: Math.floor((last - first) / step) + 1 }, (_, i) => 10 ** (first + i * step));
  }
  const found = [];
  for (let power = first - 1; power <= last; power += 1) {
    for (const m of [1, 2, 5]) found.push(m * 10 ** power);
  }
  const inside = found.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  return inside.length >= 3 ? inside : ticksLinear(low, high, Math.min(count, 4)).filter((tick) => tick > 0);
}

// A log scale needs positive numbers; where there are none it falls back to a linear one.
function makeScale(values, from, to, { log = false, count = 5, zero = false, pad = 0.04 } = {}) {
  let known = finite(values);
  const logarithmic = log && known.some((value) => value > 0);
  if (logarithmic) known = known.filter((value) => value > 0);
  let low = Math.min(...extent(known));
  let high = Math.max(...extent(known));
  if (zero && !logarithmic && low > 0 && low < 0.6 * high) low = 0;
  if (logarithmic) {
    const room = Math.max((high / low) ** pad, low === high ? 2 : 1.02);
    [low, high] = [low / room, high * room];
  } else {
    const room = low === high ? Math.abs(low) * 0.1 || 1 : (high - low) * pad;
    [low, high] = [low === 0 ? 0 : low - room, high + room];
  }
  const map = logarithmic ? Math.log : (value) => value;
  const [start, end] = [map(low), map(high)];
  const place = (value) => {
    if (!Number.isFinite(value) || (logarithmic && value <= 0)) return null;
    return from + ((map(value) - start) / (end - start)) * (to - from);
  };
  place.log = logarithmic;
  place.ticks = logarithmic ? ticksLog(low, high, count) : ticksLinear(low, high, count);
  return place;
}

function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return low <= high ? [low, high] : [0, 1];
}

const RAISED = [..."⁰¹²³⁴⁵⁶⁷⁸⁹"];

// As many decimals as tell neighbours apart.
function tickText(value, log, ticks = []) {
  const power = Math.floor(Math.log10(Math.abs(value)) + 1e-9);
  const times = Math.round(value / 10 ** power);
  if (log && (power >= 4 || power <= -3) && Math.abs(value / 10 ** power - times) < 1e-9) {
    const digits = [...String(Math.abs(power))].map((d) => RAISED[d]).join("");
    return `${times === 1 ? "" : `${times}·`}10${power < 0 ? "⁻" : ""}${digits}`;
  }
  const step = ticks.length > 1 ? Math.min(...ticks.slice(1).map((tick, i) => tick - ticks[i])) : 0;
  if (step > 1e-8 && step < 1 && Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5) {
    const decimals = Math.ceil(-Math.log10(step) - 1e-9);
    return String(Number(value.toFixed(decimals + 1)));
  }
  return format(Number(value.toPrecision(6)));
}

// Axes and grid. `x.values` are numbers, or `x.names` one name for each position 0, 1, ...
function frame(canvas, width, { height = 260, x, y, label }) {
  const infinite = y.values.some((value) => value === Infinity);
  const top = infinite ? 34 : 12;
  const bottom = height - (x.label ? 40 : 24);
  const place = makeScale(y.values, bottom, top, { log: y.log, count: Math.max(3, Math.round(height / 42)), zero: true });
  const texts = place.ticks.map((tick) => tickText(tick, place.log, place.ticks));
  const left = 14 + 6.6 * Math.max(3, ...texts.map((text) => text.length));
  const right = width - 12;
  const root = svg("svg", { class: "chart", width, height, viewBox: `0 0 ${width} ${height}` });
  place.ticks.forEach((tick, i) => {
    const at = place(tick);
    root.append(svg("line", { class: "grid", x1: left, x2: right, y1: at, y2: at }));
    root.append(svg("text", { class: "tick", x: left - 7, y: at + 4, "text-anchor": "end" }, texts[i]));
  });
  if (infinite) {
    root.append(svg("line", { class: "grid dashed", x1: left, x2: right, y1: 25, y2: 25 }));
    root.append(svg("text", { class: "tick", x: left - 7, y: 17, "text-anchor": "end" }, "∞"));
  }
  root.append(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
  let across;
  if (x.names) {
    const step = (right - left) / Math.max(x.names.length, 1);
    across = (position) => left + (position + 0.5) * step;
    const every = thinned(x.names, step);
    x.names.forEach((name, i) => {
      if (i % every === 0) root.append(svg("text", { class: "tick", x: across(i), y: bottom + 16, "text-anchor": "middle" }, name));
    });
    across.step = step;
  } else {
    across = makeScale(x.values, left + 6, right - 12, { count: Math.max(3, Math.round(width / 110)), pad: 0 });
    for (const tick of across.ticks) {
      const at = across(tick);
      if (at >= left - 1 && at <= right + 1) root.append(svg("text", { class: "tick", x: at, y: bottom + 16, "text-anchor": "middle" }, tickText(tick, false, across.ticks)));
    }
  }
  if (x.label) root.append(svg("text", { class: "name", x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, x.label));
  root.setAttribute("aria-label", label);
  canvas.append(root);
  const up = (value) => (value === Infinity && infinite ? 13 : place(value));
  return { root, across, up, left, right, top, bottom, log: place.log };
}

function thinned(names, step) {
  const widest = Math.max(1, ...names.map((name) => name.length)) * 7 + 6;
  const least = Math.ceil(widest / step);
  return [1, 2, 5, 10, 20, 50, 100, 200, 500].find((every) => every >= least) || least;
}

// A line through what is there, broken where something is not.
function trace(points, attributes) {
  let path = "";
  let pen = "M";
  for (const [x, y] of points) {
    if (y === null) pen = "M";
    else {
      path += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
      pen = "L";
    }
  }
  return svg("path", { fill: "none", d: path, ...attributes });
}

const dot = (x, y, attributes) => svg("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: 3, ...attributes });

// One tip for the page, and one line that screen readers speak.
const tip = el("div", { class: "tip", hidden: true, "aria-hidden": "true" });
const spoken = el("p", { class: "unseen", "aria-live": "polite", id: "spoken" });

function showTip(root, mark) {
  tip.textContent = mark.text;
  tip.hidden = false;
  const box = root.getBoundingClientRect();
  const room = document.documentElement.clientWidth;
  const left = Math.min(Math.max(box.left + mark.x - tip.offsetWidth / 2, 6), room - tip.offsetWidth - 6);
  const above = box.top + mark.y - tip.offsetHeight - 12;
  tip.style.left = `${left + scrollX}px`;
  tip.style.top = `${(above > 4 ? above : box.top + mark.y + 16) + scrollY}px`;
}

// Marks are { i, j, x, y, text, open }: arrows left and right walk along j, up and down along i.
function explorable(root, marks, { cell } = {}) {
  if (!marks.length) return;
  const places = new Map(marks.map((mark) => [`${mark.i} ${mark.j}`, mark]));
  const [lastI, lastJ] = [Math.max(...extent(marks.map((m) => m.i))), Math.max(...extent(marks.map((m) => m.j)))];
  const cursor = cell
    ? svg("rect", { class: "cursor", width: cell[0] + 2, height: cell[1] + 2, visibility: "hidden" })
    : svg("circle", { class: "cursor", r: 6, visibility: "hidden" });
  root.append(cursor);
  root.setAttribute("tabindex", "0");
  root.setAttribute("role", "application");
  root.setAttribute("aria-roledescription", "chart");
  let current = null;
  const go = (mark) => {
    current = mark;
    cursor.setAttribute("visibility", "visible");
    if (cell) {
      cursor.setAttribute("x", mark.x - cell[0] / 2 - 1);
      cursor.setAttribute("y", mark.y - cell[1] / 2 - 1);
    } else {
      cursor.setAttribute("cx", mark.x);
      cursor.setAttribute("cy", mark.y);
    }
    showTip(root, mark);
  };
  const leave = () => {
    cursor.setAttribute("visibility", "hidden");
    tip.hidden = true;
  };
  const step = (di, dj) => {
    let [i, j] = [current.i + di, current.j + dj];
    while (i >= 0 && j >= 0 && i <= lastI && j <= lastJ) {
      const found = places.get(`${i} ${j}`);
      if (found) return found;
      [i, j] = [i + di, j + dj];
    }
    return current;
  };
  const nearest = (event) => {
    const box = root.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let [best, least] = [null, cell ? Infinity : 40 ** 2];
    for (const mark of marks) {
      if (cell && (Math.abs(mark.x - x) > cell[0] / 2 + 1 || Math.abs(mark.y - y) > cell[1] / 2 + 1)) continue;
      const far = (mark.x - x) ** 2 + (mark.y - y) ** 2;
      if (far < least) [best, least] = [mark, far];
    }
    return best;
  };
  const row = (i) => marks.filter((mark) => mark.i === i);
  const moves = {
    ArrowLeft: () => step(0, -1),
    ArrowRight: () => step(0, 1),
    ArrowUp: () => step(-1, 0),
    ArrowDown: () => step(1, 0),
    Home: () => row(current.i).reduce((a, b) => (b.j < a.j ? b : a)),
    End: () => row(current.i).reduce((a, b) => (b.j > a.j ? b : a)),
  };
  root.addEventListener("pointermove", (event) => {
    const mark = nearest(event);
    if (mark) go(mark);
    else leave();
  });
  root.addEventListener("pointerleave", leave);
  root.addEventListener("click", (event) => {
    const mark = nearest(event);
    if (mark && mark.open) mark.open();
  });
  root.addEventListener("focus", () => {
    if (!root.matches(":focus-visible")) return; // a click brings its own place
    go(current || marks[0]);
    spoken.textContent = current.text;
  });
  root.addEventListener("blur", leave);
  root.addEventListener("keydown", (event) => {
    if (event.key === "Escape") leave();
    else if (event.key === "Enter" && current && current.open) current.open();
    else if (Object.hasOwn(moves, event.key) && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      if (!current) current = marks[0];
      go(moves[event.key]());
      spoken.textContent = current.text;
    }
  });
}

function legend(...entries) {
  return el("ul", { class: "legend" }, ...entries.map(([swatch, text]) => {
    const sample = svg("svg", { width: 22, height: 12, "aria-hidden": "true" }, swatch);
    return el("li", {}, sample, text);
  }));
}

const sampleLine = (attributes) => svg("line", { x1: 1, x2: 21, y1: 6, y2: 6, ...attributes });
