"use strict";
// Draws packs and searches them. Texts of records become text nodes, never markup.
(() => {
const about = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const format = (n) => n.toLocaleString("en");
const FOLD = 60; // tokens shown at each end of a folded run
const LONG = 6000; // tokens of a run above which it is folded, as a browser would draw for minutes; for prompts: 240
const NAMES = 12; // sequences that are named as sharing tokens
const INDENTS = 8; // depths that are drawn indented
const HITS = 50; // sequences that a search lists at once
const cachedPacks = new Map((about.embedded || []).map((pack) => [pack.number, link(pack)]));
const numbers = about.embedded ? [...cachedPacks.keys()] : null;
const state = { pack: null, find: "", search: 0, column: about.columns[0] || "" };

function make(name, attributes, ...children) {
  const svg = ["svg", "polygon", "rect", "title"].includes(name);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function fail(error) {
  byId("error").textContent = error ? String(error.message || error) : "";
  byId("error").hidden = !error;
}

// Returns a pack, from the page itself or from its server.
async function load(number) {
  if (cachedPacks.has(number)) return cachedPacks.get(number);
  const answer = await fetch(`packs/${number}`, { cache: "no-store" }).catch(() => {
    throw new Error("The server does not answer: start packstore view again.");
  });
  const pack = await answer.json().catch(() => ({ error: `The server answers ${answer.status}.` }));
  if (!answer.ok) throw new Error(pack.error);
  if (cachedPacks.size > 8) cachedPacks.delete(cachedPacks.keys().next().value);
  cachedPacks.set(number, link(pack));
  return pack;
}

const roleOf = (sequence) => (about.sides.includes(sequence.side) ? sequence.side : "response");

// Adds to each sequence what it shares: its number; its depth, 0 if it is stored whole; the ranges of earlier
// sequences that it begins with, [sequence, length], the first tokens first; and the later sequences that begin
// with tokens of its own ("readers"): each with the first `least` to `reach` ones.
function link(pack) {
  pack.tokens = [...pack.ids.keys()].filter((t) => pack.ids[t] >= 0); // the supervised tokens
  pack.targets = new Map(pack.tokens.map((t, target) => [t, target]));
  pack.sequences.forEach((sequence, number) => {
    let parent = pack.sequences[sequence.parent];
    const depth = parent ? parent.depth + 1 : 0;
    Object.assign(sequence, { number, depth, ranges: [], readers: [], reach: 0, least: Infinity });
    for (let end = sequence.shared; parent; parent = pack.sequences[parent.parent]) {
      const length = end - parent.shared;
      sequence.ranges.unshift([parent, length]);
      parent.readers.push(sequence);
      parent.reach = Math.max(parent.reach, length);
      parent.least = Math.min(parent.least, length);
      end = parent.shared;
    }
  });
  return pack;
}

// Returns the runs of a segment with one role that are or are not shared: [role, start, stop, isShared].
function runsOf(pack, sequence) {
  const runs = [];
  let seen = false;
  for (let i = sequence.start; i < sequence.stop; i++) {
    const on = pack.ids[i] >= 0;
    seen = seen || on;
    const role = on ? roleOf(sequence) : seen ? "unsupervised" : "prompt";
    const isShared = i < sequence.start + sequence.reach;
    const last = runs[runs.length - 1];
    if (last && last[0] === role && last[3] === isShared) last[2] = i + 1;
    else runs.push([role, i, i + 1, isShared]);
  }
  return runs;
}

// Say how many tokens a sequence shares: with the earlier one that stores them, and with later ones.
const sharedTokens = (sequence) => `shares its first ${format(sequence.shared)} tokens with `;
function sharedBy(sequence) {
  if (!sequence.readers.length) return "";
  const which = sequence.shared ? "next" : "first";
  const orFewer = sequence.least < sequence.reach ? " or fewer" : "";
  return `its ${which} ${format(sequence.reach)} tokens${orFewer} are shared by ${namesOf(sequence.readers)}`;
}

function namesOf(sequences) {
  const names = sequences.slice(0, NAMES).map((sequence) => sequence.number).join(", ");
  if (sequences.length === 1) return `sequence ${names}`;
  return sequences.length > NAMES ? `${format(sequences.length)} sequences: ${names}, …` : `sequences ${names}`;
}

function show(pack) {
  state.pack = pack;
  const tokens = pack.ids.length;
  const keys = pack.sequences.reduce((sum, sequence) => sum + sequence.length, 0);
  const supervised = pack.ids.filter((id) => id >= 0).length;
  byId("pack-title").textContent = `Pack ${format(pack.number)}`;
  byId("pack-facts").textContent =
    `${format(tokens)} of ${format(about.packSize)} tokens, ${format(pack.columns.length)} examples, ` +
    `${format(pack.sequences.length)} segments, ${format(supervised)} tokens supervised ` +
    `(${((100 * supervised) / tokens).toFixed(1)} %)` +
    (keys > tokens ? `; the whole sequences have ${format(keys)} tokens` : "");
  byId("number").value = pack.number;
  const place = numbers ? numbers.indexOf(pack.number) : pack.number;
  byId("previous").disabled = place <= 0;
  byId("next").disabled = place + 1 >= (numbers ? numbers.length : about.packs);
  byId("token").textContent = "Point at a token.";
  drawStrip(pack);
  drawAttention(pack);
  drawSequences(pack);
  drawScale(pack);
}

const short = (number) => String(Number(number.toPrecision(3))).replace("-", "−");
const percent = (logp) => `${(100 * Math.exp(logp)).toPrecision(3)} %`;

// Returns the values of the chosen column, or null if tokens have the colours of their roles.
const valuesOf = (pack) => pack.values[state.column] || null;

// Draws the range of the colours. The line below a token is as thick as its value is low.
function drawScale(pack) {
  const values = valuesOf(pack);
  byId("scale").replaceChildren();
  if (!values) return;
  const hasAbsent = values.numbers.includes(null);
  byId("scale").append(short(values.low));
  for (let v = 0; v <= 1; v += 0.125) {
    const step = make("i", { class: "valued" });
    step.style.setProperty("--v", v);
    byId("scale").append(step);
  }
  byId("scale").append(short(values.high));
  if (hasAbsent) byId("scale").append(make("span", {}, make("i", { class: "absent" }), ` not among the top ${format(values.k)}`));
}

// Colours a supervised token by its value.
function colour(span, values, target) {
  const number = values.numbers[target];
  if (number === null) return span.classList.add("absent");
  const fraction = values.high > values.low ? (number - values.low) / (values.high - values.low) : 1;
  span.classList.add("valued");
  span.style.setProperty("--v", Math.min(Math.max(fraction, 0), 1).toFixed(3));
}

// Describes the values of tokens: all columns, and of a top k its ids.
function valueLines(pack, from, to) {
  const lines = [];
  for (const name of about.columns) {
    const values = pack.values[name];
    const numbers = values.numbers.slice(from, to).map((number) => (number === null ? `not among the top ${format(values.k)}` : short(number)));
    const line = make("span", {}, make("b", {}, name), ` ${numbers.join(", ")}`);
    for (let target = from; values.ids && target < to; target++) {
      line.append(": ");
      values.ids[target].forEach((id, place) => {
        const text = values.texts ? `“${values.texts[id].replaceAll("\n", "↵")}”` : id;
        const isTarget = id === pack.ids[pack.tokens[target]];
        line.append(make(isTarget ? "b" : "span", { class: "outcome" }, `${text} ${percent(values.logps[target][place])}`), " ");
      });
      if (values.k > values.ids[target].length) line.append(`and ${format(values.k - values.ids[target].length)} more`);
    }
    lines.push(line);
  }
  return lines;
}

// Draws a block for each sequence, as wide as its tokens. What later sequences share is hatched.
function drawStrip(pack) {
  byId("strip").replaceChildren();
  const groups = new Map();
  pack.sequences.forEach((sequence, i) => {
    if (!groups.has(sequence.example)) {
      groups.set(sequence.example, make("div", { class: "example" }));
      byId("strip").append(groups.get(sequence.example));
    }
    const group = groups.get(sequence.example);
    const shares = sequence.shared ? `${sharedTokens(sequence)}sequence ${sequence.parent}` : "";
    const facts = [`Sequence ${i}`, sequence.side, `${format(sequence.stop - sequence.start)} tokens`, shares, sharedBy(sequence)];
    const name = [...facts, sequence.place].filter(Boolean).join(", ");
    const block = make("button", { type: "button", class: "block", "aria-label": name, title: name });
    block.style.flexGrow = sequence.stop - sequence.start;
    for (const [role, start, stop, isShared] of runsOf(pack, sequence)) {
      const part = make("span", { class: `part ${role}${isShared ? " shared" : ""}` });
      part.style.flexGrow = stop - start;
      block.append(part);
    }
    block.addEventListener("click", () => select(i));
    group.append(block);
    group.style.flexGrow = Number(group.style.flexGrow || 0) + sequence.stop - sequence.start;
  });
  const unusedTokens = about.packSize - pack.ids.length;
  if (unusedTokens > 0) {
    const unused = make("span", { class: "rest", title: `${format(unusedTokens)} tokens unused` });
    unused.style.flexGrow = unusedTokens;
    byId("strip").append(unused);
  }
}

function drawAttention(pack) {
  const n = pack.ids.length;
  const svg = make("svg", { viewBox: `0 0 ${n} ${n}`, role: "img", "aria-label": "Attention: queries down, keys across" });
  pack.sequences.forEach((sequence, i) => {
    const prompt = runsOf(pack, sequence).filter(([role]) => role === "prompt").pop();
    const [a, p, b] = [sequence.start, prompt ? prompt[2] : sequence.start, sequence.stop];
    const shape = (points, kind) => svg.append(make("polygon", { points: points.join(" "), class: kind, "data-i": i },
      make("title", {}, `${sequence.side}, ${sequence.place}`)));
    if (p > a) shape([[a, a], [p, p], [a, p]], "prompt");
    shape([[a, p], [p, p], [b, b], [a, b]], roleOf(sequence));
    for (const [other, length] of sequence.ranges) {
      const box = { x: other.start, y: a, width: length, height: b - a };
      svg.append(make("rect", { ...box, class: `gathered ${roleOf(sequence)}`, "data-i": i },
        make("title", {}, `sequence ${i} sees ${format(length)} tokens of sequence ${other.number}`)));
    }
  });
  svg.addEventListener("click", (event) => {
    const shape = event.target.closest("[data-i]");
    if (shape) select(Number(shape.dataset.i));
  });
  byId("attention").replaceChildren(svg);
}

function drawSequences(pack) {
  byId("sequences").replaceChildren();
  let record = null;
  pack.sequences.forEach((sequence, i) => {
    if (!i || sequence.example !== pack.sequences[i - 1].example) {
      const carried = Object.entries(pack.columns[sequence.example]).map(([name, value]) => `${name}: ${value}`);
      record = make("section", { class: "record" }, make("h3", { dir: "auto" }, sequence.place),
        make("p", { class: "soft", dir: "auto" }, [`example id ${sequence.id}`, ...carried].join(" · ")));
      byId("sequences").append(record);
    }
    const on = pack.ids.slice(sequence.start, sequence.stop).filter((id) => id >= 0).length;
    const sequenceValues = Object.entries(sequence.values).map(([name, value]) => `${name} ${short(value)}`);
    const facts = [`reward ${sequence.reward}`, ...sequenceValues, `${format(sequence.length)} tokens`, `${format(on)} supervised`,
      `places ${format(sequence.start)}–${format(sequence.stop - 1)}`];
    const name = make("b", { class: roleOf(sequence) }, `sequence ${i} · ${sequence.side}`);
    const head = make("h4", {}, name, ...facts.map((fact) => make("span", {}, fact)));
    const shares = make("p", { class: "soft shares" });
    if (sequence.shared) {
      const parent = make("button", { type: "button" }, `sequence ${sequence.parent}`);
      parent.addEventListener("click", () => select(sequence.parent));
      shares.append(sharedTokens(sequence), parent, sequence.readers.length ? "; " : "");
    }
    shares.append(sharedBy(sequence));
    const tokens = make("div", { class: "tokens", tabindex: 0, role: "group", dir: "auto",
      "aria-label": `Tokens of ${sequence.side}; arrow keys move`, "data-i": i });
    fill(tokens, pack, sequence, []);
    const article = make("article", { class: "sequence", id: `sequence-${i}` }, head, shares, tokens);
    article.style.setProperty("--depth", Math.min(sequence.depth, INDENTS));
    record.append(article);
  });
}

// Fills a sequence with its tokens. Long runs are folded, except for the ranges in `opened`.
function fill(box, pack, sequence, opened) {
  box.replaceChildren();
  const values = valuesOf(pack);
  for (const [role, start, stop, isShared] of runsOf(pack, sequence)) {
    const isShort = stop - start <= (role === "prompt" ? 240 : LONG);
    const visible = (i) => isShort || i < start + FOLD || i >= stop - FOLD || opened.some(([from, to]) => i >= from && i < to);
    for (let i = start; i < stop; i++) {
      if (!visible(i)) {
        const from = i;
        while (!visible(i)) i++;
        const open = make("button", { type: "button" }, `… ${format(i - from)} tokens …`);
        open.addEventListener("click", () => fill(box, pack, sequence, [...opened, [from, from + 2000]]));
        box.append(open);
      }
      if (pack.texts[i] === null && box.lastChild) continue;
      const span = make("span", { class: isShared ? `${role} shared` : role, "data-t": i }, (pack.texts[i] || "·").replaceAll("\n", "↵\n"));
      if (pack.ids[i] >= 0) span.classList.add("on");
      if (pack.ids[i] >= 0 && values) colour(span, values, pack.targets.get(i));
      box.append(span);
    }
  }
}

// Marks the text of the search in a sequence; returns its first token, or null if the text is absent.
function mark(box, pack, sequence) {
  if (!state.find) return null;
  const texts = pack.texts.slice(sequence.start, sequence.stop).map((text) => text || "");
  const before = textBefore(pack, sequence, state.find.length - 1);
  const from = (before + texts.join("")).toLowerCase().indexOf(state.find.toLowerCase());
  if (from < 0) return null;
  let end = before.length;
  const hits = texts.flatMap((text, i) => {
    const start = end;
    end += text.length;
    return start < from + state.find.length && end > from ? [i + sequence.start] : [];
  });
  fill(box, pack, sequence, [[hits[0] - FOLD, hits[hits.length - 1] + FOLD]]);
  for (const span of box.querySelectorAll("span")) span.classList.toggle("found", hits.includes(Number(span.dataset.t)));
  return box.querySelector(".found");
}

function select(i) {
  const article = byId(`sequence-${i}`);
  for (const element of document.querySelectorAll("[aria-current]")) element.removeAttribute("aria-current");
  const block = byId("strip").querySelectorAll(".block")[i];
  block.setAttribute("aria-current", "true");
  article.setAttribute("aria-current", "true");
  const sequence = state.pack.sequences[i];
  const related = new Set([...sequence.ranges.map(([other]) => other), ...sequence.readers].map((other) => other.number));
  byId("strip").querySelectorAll(".block").forEach((other, j) => other.classList.toggle("related", related.has(j)));
  for (const shape of byId("attention").querySelectorAll("[data-i]")) {
    shape.classList.toggle("current", shape.dataset.i === String(i));
  }
  byId("token").textContent = block.title;
  const box = article.querySelector(".tokens");
  box.focus({ preventScroll: true });
  const hit = mark(box, state.pack, state.pack.sequences[i]);
  (hit || article).scrollIntoView({ block: hit ? "center" : "start" });
  history.replaceState(null, "", `#${state.pack.number}.${i}`);
}

// Describes a token below the packs: its id, role and place.
function describe(span) {
  const pack = state.pack;
  const sequence = pack.sequences[Number(span.closest(".tokens").dataset.i)];
  const t = Number(span.dataset.t);
  let end = t + 1;
  while (end < sequence.stop && pack.texts[end] === null) end++;
  for (const other of document.querySelectorAll(".here")) other.classList.remove("here");
  span.classList.add("here");
  const ids = pack.ids.slice(t, end).map((id) => (id < 0 ? ~id : id)).join(" ");
  const role = span.classList.contains("prompt") ? "prompt" : `${sequence.side}, ${span.classList.contains("on") ? "" : "not "}supervised`;
  byId("token").textContent = `id ${ids} ${JSON.stringify(pack.texts[t] || "")} · ${role} · place ${format(t)} of the pack · ` +
    `position ${format(t - sequence.start + sequence.shared)} of the sequence`;
  const target = pack.targets.get(t);
  if (target !== undefined) byId("token").append(...valueLines(pack, target, target + end - t));
}

byId("sequences").addEventListener("mouseover", (event) => {
  if (event.target.dataset.t) describe(event.target);
});
byId("sequences").addEventListener("keydown", (event) => {
  const spans = [...event.target.querySelectorAll(".tokens > span, :scope > span")];
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step || !spans.length) return;
  event.preventDefault();
  const span = spans[Math.min(Math.max(spans.findIndex((s) => s.classList.contains("here")) + step, 0), spans.length - 1)];
  describe(span);
  span.scrollIntoView({ block: "nearest" });
});

async function go(number, sequence = -1) {
  try {
    if (!Number.isInteger(number) || number < 0 || number >= about.packs) throw new Error(`A pack has a number from 0 to ${about.packs - 1}.`);
    if (numbers && !cachedPacks.has(number)) throw new Error(`This page holds packs ${numbers[0]} to ${numbers[numbers.length - 1]} only.`);
    state.wanted = number;
    const pack = await load(number);
    if (number !== state.wanted) return;
    fail(null);
    if (state.pack !== pack) show(pack);
    history.replaceState(null, "", `#${number}`);
    if (pack.sequences[sequence]) select(sequence);
  } catch (error) {
    fail(error);
  }
}

function step(by) {
  if (!state.pack || (by > 0 ? byId("next") : byId("previous")).disabled) return;
  state.find = "";
  go(numbers ? numbers[numbers.indexOf(state.pack.number) + by] : state.wanted + by);
}

byId("previous").addEventListener("click", () => step(-1));
byId("next").addEventListener("click", () => step(1));
byId("number").addEventListener("change", () => go(Number(byId("number").value.replaceAll(",", "") || NaN)));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") return stop();
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select")) return;
  if (event.key === "n") step(1);
  else if (event.key === "p") step(-1);
  else if (event.key === "/") byId("q").focus();
  else return;
  event.preventDefault();
});

// Returns the last characters of what a sequence shares with earlier ones, at most `length`.
function textBefore(pack, sequence, length) {
  let text = "";
  for (const [other, tokens] of [...sequence.ranges].reverse()) {
    for (let i = other.start + tokens - 1; i >= other.start && text.length < length; i--) text = (pack.texts[i] || "") + text;
  }
  return text.slice(text.length - Math.min(length, text.length));
}

// Returns the text around the match if a sequence matches the query, else null.
function match(pack, sequence, query) {
  if (query.side && sequence.side !== query.side) return null;
  const [, file, line] = /^(.*):(\d+)$/.exec(query.q) || [];
  const [, path, place] = /^(.*), \w+ (\d+)$/s.exec(sequence.place) || [];
  if (query.q === sequence.id || (line && line === place && path.endsWith(file))) return ["", "", ""];
  const text = textBefore(pack, sequence, query.q.length - 1) + pack.texts.slice(sequence.start, sequence.stop).join("");
  const from = text.toLowerCase().indexOf(query.q.toLowerCase());
  const end = from + query.q.length;
  return from < 0 ? null : [text.slice(Math.max(from - 48, 0), from), text.slice(from, end), text.slice(end, end + 48)];
}

function line(pack, sequence, i, [before, hit, after]) {
  const facts = ` · pack ${format(pack.number)} · ${sequence.side} · ${format(sequence.length)} tokens · reward ${sequence.reward}`;
  const button = make("button", { type: "button" }, make("b", { dir: "auto" }, sequence.place), facts);
  if (hit) button.append(make("br", {}), make("span", { class: "soft", dir: "auto" }, `…${before}`, make("mark", {}, hit), `${after}…`));
  button.addEventListener("click", () => {
    state.find = hit;
    go(pack.number, i);
  });
  return make("li", {}, button);
}

// Searches pack by pack, from the shown pack to the one before it, until it is stopped or has enough hits.
async function search() {
  const ticket = ++state.search;
  const query = Object.fromEntries(["q", "side"].map((name) => [name, byId(name).value.trim()]));
  const all = numbers || { length: about.packs };
  const begin = state.pack ? (numbers ? numbers.indexOf(state.pack.number) : state.pack.number) : 0;
  byId("hits").replaceChildren();
  byId("results").hidden = byId("stop").hidden = false;
  let seen = 0;
  const report = (end) => {
    byId("found").textContent = `${format(byId("hits").childElementCount)} sequences found in ${format(seen)} of ${format(all.length)} packs${end}`;
  };
  try {
    for (; seen < all.length && byId("hits").childElementCount < HITS; seen++) {
      const place = (begin + seen) % all.length;
      const pack = await load(numbers ? numbers[place] : place);
      if (ticket !== state.search) return;
      pack.sequences.forEach((sequence, i) => {
        const around = match(pack, sequence, query);
        if (around) byId("hits").append(line(pack, sequence, i, around));
      });
      report(" …");
    }
    fail(null);
  } catch (error) {
    fail(error);
  }
  report(".");
  byId("stop").hidden = true;
}

function stop() {
  state.search++;
  byId("stop").hidden = true;
}

byId("search").addEventListener("submit", (event) => {
  event.preventDefault();
  search();
});
byId("stop").addEventListener("click", stop);

const responses = about.sides.length ? about.sides.map((side) => [side, `${side}, supervised`]) : [["response", "response, supervised"]];
const shared = about.layout === "shared_prefix";
const roles = [["prompt", "prompt"], ...responses, ["unsupervised", "in a response, not supervised"]];
if (shared) roles.splice(1, 0, ["prompt shared", "stored once, shared with later sequences"]);
for (const [role, name] of roles) byId("legend").append(make("li", {}, make("i", { class: role }), name));
for (const side of about.sides) byId("side").append(make("option", { value: side }, side));
for (const name of about.columns) byId("column").append(make("option", { value: name }, name));
byId("column").append(make("option", { value: "" }, "role"));
byId("values").hidden = !about.columns.length;
byId("column").addEventListener("change", () => {
  state.column = byId("column").value;
  show(state.pack);
});
byId("of").textContent = `of 0 to ${format(about.packs - 1)}`;
byId("attention-note").textContent = "Queries down, keys across: a token sees what is coloured in its row. " +
  (shared ? "Pale blocks: tokens that a sequence shares with an earlier one, and sees there." : "Segments do not see each other.");
byId("note").textContent = about.note;
byId("note").hidden = !about.note;

function open() {
  const [, number, sequence] = /^#(\d+)(?:\.(\d+))?$/.exec(location.hash) || [];
  go(Number(number ?? (numbers ? numbers[0] : 0)), Number(sequence ?? -1));
}
addEventListener("hashchange", open);
open();
})();
