"use strict";
// The page of `syncvar dashboard`: it draws what the events at /events say. All text goes through textContent.

const NARROW = "\u00a0"; // between a number and its unit
const SPAN_S = 300; // of the charts
const GAP_S = 13; // between two points without a line
const MATRIX_MAX = 32;
const LIST_MAX = 200; // rows of the tables of calls and links
const WAIT_MIN = 0.01; // share of time below which a late rank is not named in words
const $ = (id) => document.getElementById(id);

const page = {
  status: {}, launcher: { state: "silent", text: "" }, points: [], heard: performance.now(), isEnded: false, source: null, cursor: null, recordsOf: null,
};

// -- text ------------------------------------------------------------------------------------------

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const list = (value) => (Array.isArray(value) ? value.filter((one) => one && typeof one === "object") : []);
const share = (value) => (isNumber(value) ? Math.min(1, Math.max(0, value)) : 0);
const text = (value) => (value === null || value === undefined ? "" : String(value));

function percent(value) {
  if (!isNumber(value)) return "";
  const part = 100 * value;
  return `${part > 0 && part < 1 ? "<1" : part.toFixed(0)}${NARROW}%`;
}
function scaled(value, base, units) {
  let power = 0;
  while (value >= base && power < units.length - 1) { value /= base; power += 1; }
  return `${value >= 100 || Number.isInteger(value) || power === 0 ? value.toFixed(0) : value.toFixed(1)}${NARROW}${units[power]}`;
}
const memory = (value) => (isNumber(value) ? scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]) : "");
const bytes = (value) => (isNumber(value) ? scaled(value, 1000, ["B", "kB", "MB", "GB", "TB"]) : "");
function rate(value) {
  if (!isNumber(value)) return "";
  return value >= 10 || value === 0 ? value.toFixed(0) : value >= 0.1 ? value.toFixed(1) : value.toPrecision(1);
}
function duration(value) {
  if (!isNumber(value)) return "";
  if (value < 0.0995) return `${(1000 * value).toFixed(0)}${NARROW}ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 1 : 0)}${NARROW}s`;
  const minutes = Math.floor(value / 60);
  return minutes < 120 ? `${minutes}${NARROW}min` : `${Math.floor(minutes / 60)}${NARROW}h${NARROW}${minutes % 60}${NARROW}min`;
}
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

// -- elements: they are kept and changed, so that focus and selection stay -----------------------------

function set(element, value) {
  if (element.textContent !== value) element.textContent = value;
}
function children(parent, count, make) {
  while (parent.children.length > count) parent.lastElementChild.remove();
  while (parent.children.length < count) parent.append(make(parent.children.length));
}
function element(tag, className = "", content = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (content) made.textContent = content;
  return made;
}
function rows(id, items, cells) {
  const titles = [...document.querySelectorAll(`#${id} thead th`)];
  const body = document.querySelector(`#${id} tbody`);
  children(body, items.length, () => {
    const row = element("tr");
    titles.forEach((title) => { const cell = element("td"); cell.dataset.label = title.textContent; row.append(cell); });
    return row;
  });
  items.forEach((item, index) => cells(body.children[index], item).forEach((cell, column) => {
    const shown = body.children[index].children[column];
    if (cell === null) return;
    const name = cell.className || "";
    if (shown.className !== name) shown.className = name;
    if (name.startsWith("number")) titles[column].className = "number";
    if ("share" in cell) shown.style.setProperty("--share", share(cell.share).toFixed(3));
    if (cell.below || cell.mark) {
      if (!shown.querySelector("small")) shown.replaceChildren(element("span"), element("small"));
      shown.firstChild.className = cell.mark || "";
      set(shown.firstChild, cell.text);
      set(shown.lastChild, cell.below || "");
    } else if (shown.children.length || shown.textContent !== cell.text) shown.textContent = cell.text;
  }));
}
const plain = (value) => ({ text: text(value) });
const number = (value) => ({ text: value, className: "number" });
const state = (name, below = "") => ({ text: text(name), mark: `state state-${/^[a-z]+$/.test(name) ? name : "unknown"}`, below });
const code = (value, below = "") => ({ text: text(value), className: "code", below });

// -- header and banners ------------------------------------------------------------------------------

function drawHeader() {
  const job = page.status.job || {};
  const ranks = list(page.status.ranks);
  set($("job-name"), text(job.name));
  set($("command"), text(job.command));
  document.title = job.name ? `syncvar ${job.name}` : "syncvar";
  const facts = [["age", duration(job.lasted_s)], ["ranks", text(job.workers)]];
  if (job.servers) facts.push(["servers", text(job.servers)]);
  const hosts = Array.isArray(job.hosts) ? job.hosts : [];
  facts.push(["hosts", hosts.length > 4 ? text(hosts.length) : hosts.map(text).join(", ")]);
  facts.push(["restarts", text(job.restarts)]);
  const steps = Math.max(0, ...ranks.map((rank) => (isNumber(rank.steps) ? rank.steps : 0)));
  if (steps) facts.push(["steps", text(steps)]);
  const error = Math.max(0, ...ranks.map((rank) => (isNumber(rank.clock_error_ns) ? rank.clock_error_ns : 0)));
  if (error) facts.push(["clocks compared within", `${(error / 1e6).toFixed(1)}${NARROW}ms`]);
  children($("facts"), job.name ? facts.length : 0, () => { const pair = element("div"); pair.append(element("dt"), element("dd")); return pair; });
  if (job.name) facts.forEach(([name, value], index) => { const pair = $("facts").children[index]; set(pair.firstChild, name); set(pair.lastChild, value); });
}

function connection() {
  if (page.isEnded) return ["ended", "bad", "The job has ended.", "The values below are the last ones."];
  if (performance.now() - page.heard > 8000) {
    return ["no answer", "bad", "The dashboard does not answer.", "The job has probably ended, or the network is down. The values below are old; this page tries again."];
  }
  if (page.launcher.state === "answers") return ["live", "good", "", ""];
  return ["waiting", "bad", text(page.launcher.text), "The values below, if any, are old."];
}

function drawBanners() {
  const [word, tone, title, more] = connection();
  set($("live"), word);
  $("live").className = `pill ${tone}`;
  const banners = title ? [["bad", title, more]] : [];
  if (!page.isEnded) list(page.status.stragglers).forEach((one) => banners.push(["", text(one.text).split(": ", 1)[0], text(one.text).replace(/^.*?: /, "")]));
  children($("banners"), banners.length, () => { const made = element("div"); made.append(element("strong"), element("span")); return made; });
  banners.forEach(([kind, first, second], index) => {
    const banner = $("banners").children[index];
    banner.className = `banner ${kind}`;
    set(banner.firstChild, first);
    set(banner.lastChild, second);
  });
}

// -- tables --------------------------------------------------------------------------------------------

function lateRanks(rank) {
  return Object.entries(rank.waits && typeof rank.waits === "object" ? rank.waits : {})
    .filter(([, value]) => isNumber(value) && value > 0).sort((one, other) => other[1] - one[1]);
}

function drawRanks() {
  const job = page.status.job || {};
  const late = new Set(list(page.status.stragglers).map((one) => one.rank));
  const hasHosts = Array.isArray(job.hosts) && job.hosts.length > 1;
  rows("ranks", list(page.status.ranks), (row, rank) => {
    row.className = late.has(rank.rank) ? "late" : "";
    const waits = Array.isArray(rank.waits_for) && rank.waits_for.length ? `for ${rank.waits_for.map(text).join(", ")}` : "";
    stacksButton(row.lastElementChild, rank.rank);
    return [
      { text: text(rank.rank), below: [hasHosts ? text(rank.host) : "", text(rank.program)].filter(Boolean).join(" ") },
      state(rank.state, waits),
      code(rank.call || "none yet", text(rank.site)),
      number(`${rank.is_in_call ? "" : "ended "}${duration(rank.age_s)}${rank.is_in_call ? "" : " ago"}`),
      { ...number(percent(rank.wait_share)), className: "number meter", share: rank.wait_share },
      plain(lateRanks(rank).filter(([, value]) => value >= WAIT_MIN).slice(0, 3).map(([other, value]) => `${other}:${NARROW}${percent(value)}`).join(", ") || "none"),
      number(memory(rank.rss_bytes)), number(percent(rank.cpu_share)), number(rate(rank.calls_per_s)), number(bytes(rank.bytes_per_s)), number(rate(rank.steps_per_s)),
      null,
    ];
  });
  const servers = list(page.status.servers);
  $("servers-part").hidden = !servers.length;
  rows("servers", servers, (row, one) => [plain(one.server), plain(one.host), state(one.state), plain(one.position), number(memory(one.rss_bytes)), number(percent(one.cpu_share))]);
}

function stacksButton(cell, rank) {
  if (!cell.firstChild) {
    const button = element("button", "", "stacks");
    button.type = "button";
    button.addEventListener("click", () => showStacks(button.dataset.rank));
    cell.append(button);
  }
  cell.firstChild.dataset.rank = text(rank);
  cell.firstChild.disabled = page.isEnded; // nobody is left to answer
  cell.firstChild.setAttribute("aria-label", `stacks of rank ${text(rank)}`);
}

function drawMatrix() {
  const all = list(page.status.ranks);
  const totals = new Map();
  all.forEach((rank) => lateRanks(rank).forEach(([other, value]) => { totals.set(other, (totals.get(other) || 0) + value); totals.set(text(rank.rank), (totals.get(text(rank.rank)) || 0) + value); }));
  let shown = all;
  if (all.length > MATRIX_MAX) {
    const chosen = new Set([...totals].sort((one, other) => other[1] - one[1]).slice(0, MATRIX_MAX).map(([rank]) => rank));
    shown = all.filter((rank) => chosen.has(text(rank.rank)));
  }
  set($("matrix-help"), `${all.length > shown.length ? `The ${shown.length} of ${all.length} ranks with the largest waits. ` : ""}A row waits for a column. Arrow keys, pointer or a tap show the numbers.`);
  $("matrix").className = shown.length > 12 ? "small" : "";
  const head = document.querySelector("#matrix thead");
  children(head, 1, () => element("tr"));
  const names = ["", ...shown.map((rank) => text(rank.rank))];
  children(head.firstChild, names.length, () => { const cell = element("th"); cell.scope = "col"; return cell; });
  names.forEach((name, index) => set(head.firstChild.children[index], name));
  const body = document.querySelector("#matrix tbody");
  children(body, shown.length, () => { const row = element("tr"); const cell = element("th"); cell.scope = "row"; row.append(cell); return row; });
  shown.forEach((rank, index) => {
    const row = body.children[index];
    set(row.firstChild, text(rank.rank));
    children(row, shown.length + 1, () => { const cell = element("td"); cell.tabIndex = -1; return cell; });
    shown.forEach((other, column) => drawCell(row.children[column + 1], rank, other));
  });
  const first = body.querySelector("td");
  if (first && !body.querySelector("td[tabindex='0']")) first.tabIndex = 0;
  const waits = all.flatMap((rank) => lateRanks(rank).map(([other, value]) => [rank.rank, other, value])).filter((one) => one[2] >= WAIT_MIN).sort((one, other) => other[2] - one[2]).slice(0, 10);
  children($("waits"), Math.max(1, waits.length), () => element("li"));
  if (waits.length) waits.forEach(([rank, other, value], index) => set($("waits").children[index], waitSentence(rank, other, value)));
  else set($("waits").firstChild, "No rank waits for another one for 1 % of its time or more.");
}
const waitSentence = (rank, other, value) => `Rank ${text(rank)} waits ${percent(value)} of its time for rank ${text(other)}.`;

function drawCell(cell, rank, other) {
  const isSelf = rank.rank === other.rank;
  const value = isSelf ? 0 : share((rank.waits || {})[other.rank]);
  cell.className = isSelf ? "self" : value > 0.8 ? "warm hot" : value > 0.6 ? "warm" : ""; // for the contrast of the number
  cell.style.setProperty("--share", value.toFixed(3));
  set(cell, isSelf ? "–" : value >= 0.005 ? (100 * value).toFixed(0) : "");
  const sentence = isSelf ? `Rank ${text(rank.rank)}` : waitSentence(rank.rank, other.rank, value);
  if (cell.getAttribute("aria-label") !== sentence) cell.setAttribute("aria-label", sentence);
}

function drawCalls() {
  const calls = list(page.status.calls).sort((one, other) => share(other.share) - share(one.share)).slice(0, LIST_MAX);
  rows("calls", calls, (row, one) => [code(one.call), plain(one.variable), plain(one.path), { ...number(percent(one.share)), className: "number meter", share: one.share }, number(rate(one.calls_per_s)), number(bytes(one.bytes_per_s))]);
  const byVariable = new Map();
  list(page.status.calls).forEach((one) => { if (one.variable && isNumber(one.bytes_per_s)) byVariable.set(one.variable, (byVariable.get(one.variable) || 0) + one.bytes_per_s); });
  const variables = [...byVariable].sort((one, other) => other[1] - one[1]).slice(0, LIST_MAX);
  const total = variables.reduce((sum, [, value]) => sum + value, 0);
  rows("variables", variables, (row, [name, value]) => [code(name), number(bytes(value)), { ...number(percent(total ? value / total : 0)), className: "number meter", share: total ? value / total : 0 }]);
  const coarse = (one) => Number((one.bytes_per_s || 0).toPrecision(1)); // about equal links keep their places
  const links = list(page.status.links).sort((one, other) => coarse(other) - coarse(one)).slice(0, LIST_MAX);
  rows("links", links, (row, one) => [plain(one.rank), plain(one.peer), plain(one.path), number(bytes(one.bytes_per_s))]);
  empty("calls", calls, "No calls in the last seconds.");
  empty("variables", variables, "No variable moves bytes now.");
  empty("links", links, "No bytes go over links now.");
}
function empty(id, items, sentence) {
  const table = $(id);
  let note = table.parentElement.querySelector(".note");
  if (!note) { note = element("p", "note", sentence); table.after(note); }
  note.hidden = items.length > 0;
  table.hidden = !items.length;
}

// -- charts ----------------------------------------------------------------------------------------------

function svg(tag, attributes, content = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
  if (content) made.textContent = content;
  return made;
}
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((limit) => limit >= value * 0.999);
}
const minuteMarks = (width) => (width < 480 ? [5, 3, 1, 0] : [5, 4, 3, 2, 1, 0]);
function newest() {
  return page.points.length ? page.points[page.points.length - 1][0] : Date.now() / 1000;
}

function drawLine(name, column, format, unit) {
  const place = $(`${name}-chart`);
  const width = Math.max(200, place.clientWidth), height = place.clientHeight || 130;
  const left = 56, right = 8, top = 8, bottom = 20;
  const end = newest(), values = page.points.map((point) => (isNumber(point[column]) ? point[column] : 0));
  const limit = ceiling(Math.max(0, ...values));
  const x = (at) => left + (width - left - right) * (1 - (end - at) / SPAN_S);
  const y = (value) => top + (height - top - bottom) * (1 - value / limit);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  [0, 0.5, 1].forEach((part) => {
    drawing.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(limit * part), y2: y(limit * part) }));
    drawing.append(svg("text", { x: left - 6, y: y(limit * part) + 4, "text-anchor": "end" }, format(limit * part).replace(/\.0$/, "")));
  });
  minuteMarks(width).forEach((minutes) => {
    drawing.append(svg("text", { x: x(end - 60 * minutes), y: height - 4, "text-anchor": minutes === 5 ? "start" : minutes ? "middle" : "end" }, minutes ? `−${minutes}${minutes === 5 ? " min" : ""}` : "now"));
  });
  let pieces = [];
  page.points.forEach((point, index) => {
    if (!index || point[0] - page.points[index - 1][0] > GAP_S) pieces.push([]);
    pieces[pieces.length - 1].push(`${x(point[0]).toFixed(1)},${y(values[index]).toFixed(1)}`);
  });
  pieces.forEach((piece) => {
    const [first, last] = [piece[0].split(",")[0], piece[piece.length - 1].split(",")[0]];
    drawing.append(svg("polygon", { class: "area", points: `${first},${y(0)} ${piece.join(" ")} ${last},${y(0)}` }));
    drawing.append(svg("polyline", { class: "curve", points: piece.join(" ") }));
  });
  const at = pointIndex();
  if (at >= 0) {
    if (page.cursor !== null) drawing.append(svg("line", { class: "cursor", x1: x(page.points[at][0]), x2: x(page.points[at][0]), y1: top, y2: height - bottom }));
    drawing.append(svg("circle", { class: "mark", cx: x(page.points[at][0]), cy: y(values[at]), r: 3.5 }));
  }
  place.replaceChildren(drawing);
  const current = at >= 0 ? `${format(values[at])}${unit}` : "no data yet";
  set($(`${name}-now`), current + (page.cursor !== null && at >= 0 ? `, ${duration(end - page.points[at][0])} ago` : ""));
  place.setAttribute("aria-label", values.length ? `In the last five minutes: now ${current}, lowest ${format(Math.min(...values))}, highest ${format(Math.max(...values))}` : "no data yet");
}
function pointIndex() {
  if (!page.points.length) return -1;
  if (page.cursor === null) return page.points.length - 1;
  const at = newest() - SPAN_S * (1 - page.cursor);
  let best = 0;
  page.points.forEach((point, index) => { if (Math.abs(point[0] - at) < Math.abs(page.points[best][0] - at)) best = index; });
  return best;
}

function drawStrip() {
  const canvas = $("wait-chart"), ranks = list(page.status.ranks).map((rank) => rank.rank);
  const height = ranks.length <= 16 ? 18 : ranks.length <= 64 ? 10 : 4, width = canvas.parentElement.clientWidth;
  const ratio = window.devicePixelRatio || 1, left = 56, right = 48, below = 18;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round((ranks.length * height + below) * ratio);
  canvas.style.height = `${ranks.length * height + below}px`;
  const draw = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  draw.scale(ratio, ratio);
  draw.font = "11px system-ui, sans-serif";
  draw.textBaseline = "middle";
  const end = newest(), inner = width - left - right, at = pointIndex();
  const rowOf = new Map(ranks.map((rank, index) => [rank, index]));
  draw.fillStyle = color("--back");
  draw.fillRect(left, 0, inner, ranks.length * height - 1);
  draw.fillStyle = color("--heat");
  page.points.forEach((point, index) => {
    const next = page.points[index - 1];
    const seconds = next ? Math.min(GAP_S, point[0] - next[0]) : 1;
    const place = (at) => Math.round((left + inner * (1 - (end - at) / SPAN_S)) * ratio) / ratio; // whole pixels do not overlap
    const stop = place(point[0]), start = Math.max(left, place(point[0] - seconds));
    (Array.isArray(point[3]) ? point[3] : []).forEach(([rank, value]) => {
      const row = rowOf.get(rank);
      if (row === undefined || !(value > 0) || stop <= left) return;
      draw.globalAlpha = Math.min(1, value);
      draw.fillRect(start, row * height, stop - start, height - 1);
    });
  });
  draw.globalAlpha = 1;
  draw.fillStyle = color("--muted");
  const values = new Map(at >= 0 && Array.isArray(page.points[at][3]) ? page.points[at][3] : []);
  const every = Math.ceil(13 / height);
  ranks.forEach((rank, index) => {
    if (index % every) return;
    draw.textAlign = "right";
    draw.fillText(`rank ${rank}`, left - 6, (index + 0.5) * height);
    draw.fillText(values.has(rank) ? percent(values.get(rank)) : "", width - 4, (index + 0.5) * height);
  });
  minuteMarks(width).forEach((minutes) => {
    draw.textAlign = minutes === 5 ? "left" : minutes ? "center" : "right";
    draw.fillText(minutes ? `−${minutes}${minutes === 5 ? " min" : ""}` : "now", left + inner * (1 - minutes / 5), ranks.length * height + below / 2 + 2);
  });
  if (page.cursor !== null && at >= 0) draw.fillRect(left + inner * (1 - (end - page.points[at][0]) / SPAN_S), 0, 1, ranks.length * height);
  const sorted = [...values].sort((one, other) => other[1] - one[1]);
  set($("wait-now"), sorted.length ? `most: rank ${sorted[0][0]}, ${percent(sorted[0][1])}${page.cursor !== null ? `, ${duration(end - page.points[at][0])} ago` : ""}` : "");
  canvas.setAttribute("aria-label", sorted.length ? `Now: ${sorted.slice(0, 16).map(([rank, value]) => `rank ${rank} ${percent(value)}`).join(", ")}` : "no data yet");
}

function drawCharts() {
  drawLine("steps", 1, rate, "/s");
  drawLine("bytes", 2, bytes, "/s");
  drawStrip();
}
function followPointer(place, right) {
  place.addEventListener("pointermove", (event) => {
    const edges = place.getBoundingClientRect(), left = 56;
    page.cursor = Math.min(1, Math.max(0, (event.clientX - edges.left - left) / (edges.width - left - right)));
    drawCharts();
  });
  place.addEventListener("pointerleave", () => { page.cursor = null; drawCharts(); });
}

// -- log, records and stacks -----------------------------------------------------------------------------

function drawLog(lines) {
  const log = $("log"), isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
  set(log, Array.isArray(lines) && lines.length ? lines.map(text).join("\n") : "No output yet.");
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

async function loadRecords() {
  try {
    const found = list(await (await fetch("records")).json());
    $("records-none").hidden = found.length > 0;
    children($("records"), found.length, () => { const item = element("li"), button = element("button"); button.type = "button"; button.addEventListener("click", () => showRecord(button.dataset.name)); item.append(button, element("span", "note")); return item; });
    found.forEach((one, index) => {
      const item = $("records").children[index];
      item.firstChild.dataset.name = one.name;
      set(item.firstChild, text(one.name));
      set(item.lastChild, ` ${memory(one.nbytes)}, ${new Date(1000 * one.time_s).toLocaleTimeString()}`);
    });
  } catch { /* the banner says that nothing answers */ }
}
function show(title, content, isPlain) {
  set($("viewer-title"), title);
  set($("viewer-text"), content);
  $("viewer-text").className = isPlain ? "plain" : "";
  if (!$("viewer").open) $("viewer").showModal();
}
async function showStacks(rank) {
  show(`Stacks of rank ${rank}`, "asking the rank …", false);
  try {
    const answer = await fetch(`stacks/${encodeURIComponent(rank)}`, { method: "POST" });
    show(`Stacks of rank ${rank}`, await answer.text(), true);
  } catch { show(`Stacks of rank ${rank}`, "The dashboard does not answer.", false); }
}
async function showRecord(name) {
  show(name, "reading …", false);
  try {
    const answer = await fetch(`records/${encodeURIComponent(name)}`);
    const content = await answer.text();
    show(name, answer.ok ? recordText(content) : content, answer.ok);
  } catch { show(name, "The dashboard does not answer.", false); }
}
function recordText(content) {
  let record;
  try { record = JSON.parse(content); } catch { return content; }
  if (!record || !Array.isArray(record.columns) || !Array.isArray(record.events)) return content;
  const lines = [`rank ${text(record.rank)} on ${text(record.host)}: ${text(record.reason)}`, "", "stack, innermost first:"];
  (Array.isArray(record.stack) ? record.stack : []).forEach((frame) => lines.push(`  ${text(frame[0])}:${text(frame[1])} in ${text(frame[2])}`));
  lines.push("", "calls, newest first:");
  const at = (name) => record.columns.indexOf(name);
  const [what, began, ended, site] = ["what", "began_ns", "ended_ns", "site"].map(at);
  [...record.events].reverse().slice(0, 500).forEach((event) => {
    const took = event[ended] ? `${((event[ended] - event[began]) / 1e6).toFixed(3)} ms` : "unfinished";
    lines.push(`  ${took.padStart(14)}  ${text(event[what])}${site >= 0 && event[site] ? `  at ${text(event[site])}` : ""}`);
  });
  return lines.join("\n");
}

// -- events ------------------------------------------------------------------------------------------------

function draw() {
  drawHeader();
  drawBanners();
  drawRanks();
  drawMatrix();
  drawCalls();
  drawCharts();
}
function hear(source, name, handle) {
  source.addEventListener(name, (event) => {
    page.heard = performance.now();
    handle(JSON.parse(event.data));
  });
}
function trim() {
  const oldest = newest() - SPAN_S;
  page.points = page.points.filter((point) => point[0] >= oldest);
}
function connect() {
  const source = new EventSource("events");
  page.source = source;
  hear(source, "history", (points) => { page.points = points; trim(); });
  hear(source, "point", (point) => { page.points.push(point); trim(); });
  hear(source, "log", drawLog);
  hear(source, "status", (data) => {
    page.launcher = data.launcher;
    if (data.status && data.status.job) page.status = data.status;
    if (data.launcher.state === "ended") { page.isEnded = true; source.close(); }
    draw();
    const restarts = `${text((page.status.job || {}).name)} ${text((page.status.job || {}).restarts)}`;
    if (page.recordsOf !== restarts || page.isEnded) { page.recordsOf = restarts; loadRecords(); }
  });
  source.addEventListener("error", () => {
    if (page.isEnded) return;
    source.close();
    setTimeout(connect, 2000);
  });
}

function moveInMatrix(event) {
  const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  const cell = event.target.closest("td");
  if (!steps || !cell) return;
  const row = cell.parentElement, next = row.parentElement.children[row.sectionRowIndex + steps[0]];
  const target = next && next.children[cell.cellIndex + steps[1]];
  if (!target || target.tagName !== "TD") return;
  event.preventDefault();
  cell.tabIndex = -1;
  target.tabIndex = 0;
  target.focus();
}
function readCell(event) {
  const cell = event.target.closest("#matrix td");
  if (cell) set($("matrix-cell"), cell.getAttribute("aria-label"));
}

function begin() {
  if (location.search) history.replaceState(null, "", location.pathname); // the cookie has the token now
  ["pointerover", "focusin", "click"].forEach((name) => $("matrix").addEventListener(name, readCell));
  $("matrix").addEventListener("keydown", moveInMatrix);
  $("records-again").addEventListener("click", loadRecords);
  $("viewer-close").addEventListener("click", () => $("viewer").close());
  ["steps-chart", "bytes-chart"].forEach((id) => followPointer($(id), 8));
  followPointer($("wait-chart"), 48);
  addEventListener("resize", drawCharts);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
  setInterval(drawBanners, 1000);
  draw();
  connect();
}
begin();
