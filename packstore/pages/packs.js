"use strict";
// Draws packs and searches them. Texts of records become text nodes, never markup.
(() => {
const about = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const count = (n) => n.toLocaleString("en");
const FOLD = 60; // prompt tokens left at each end of a folded prompt
const LONG = 2000; // the same of other runs, which a browser would draw for minutes; tokens that a button opens
const state = { pack: null, sequence: -1, find: "", search: 0, query: null };

function make(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "class") element.className = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

function draw(name, attributes, title) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (title) element.append(draw("title", {}));
  if (title) element.firstChild.textContent = title;
  return element;
}

function fail(error) {
  at("error").textContent = error ? String(error.message || error) : "";
  at("error").hidden = !error;
}

// Packs and searches: from the page itself, or from its server.

const held = new Map((about.embedded || []).map((pack) => [pack.number, pack]));
const numbers = about.embedded ? [...held.keys()] : null;

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store" }).catch(() => {
    throw new Error("The server does not answer: start packstore view again.");
  });
  const value = await answer.json().catch(() => ({ error: `The server answers ${answer.status}.` }));
  if (!answer.ok) throw new Error(value.error);
  return value;
}

async function load(number) {
  if (held.has(number)) return held.get(number);
  const pack = await ask(`packs/${number}`);
  if (held.size > 8) held.delete(held.keys().next().value);
  held.set(number, pack);
  return pack;
}

function searchHere(query, first) {
  const hits = [];
  const words = query.text.toLowerCase();
  const [file, line] = /^\d+$/.test(query.record) ? ["", query.record]
    : (/^(.*):(\d+)$/.exec(query.record) || [0, query.record, ""]).slice(1);
  const bound = (text, other) => (text === "" ? other : Number(text));
  for (const pack of about.embedded) {
    if (pack.number < first) continue;
    pack.sequences.forEach((own, i) => {
      const [, path, place] = /^(.*), \w+ (\d+)$/s.exec(own.place) || [0, own.place, ""];
      if ((file && !path.includes(file)) || (line && place !== line)) return;
      if (query.limit && !pack.atLimit[own.example]) return;
      if ((query.id && own.id !== query.id) || (query.side && own.side !== query.side)) return;
      if (own.length < bound(query.shortest, 0) || own.length > bound(query.longest, Infinity)) return;
      if (own.reward < bound(query.lowest, -Infinity) || own.reward > bound(query.highest, Infinity)) return;
      const text = words ? pack.texts.slice(own.start, own.stop).join("") : "";
      const place_ = text.toLowerCase().indexOf(words);
      if (place_ < 0) return;
      const end = place_ + words.length;
      const match = [text.slice(Math.max(place_ - 48, 0), place_), text.slice(place_, end), text.slice(end, end + 48)];
      hits.push({ pack: pack.number, sequence: i, ...own, match });
    });
  }
  return { hits, next: null };
}

function searchThere(query, first) {
  return ask(`search?${new URLSearchParams({ ...query, from: first })}`);
}

// One pack.

const idOf = (signed) => (signed < 0 ? ~signed : signed);

function roleOf(own) {
  return about.sides.includes(own.side) ? own.side : "response";
}

// Runs of a sequence with one role: [role, start, stop].
function runsOf(pack, own) {
  const runs = [];
  let seen = false;
  for (let i = own.start; i < own.stop; i++) {
    const on = pack.ids[i] >= 0;
    seen = seen || on;
    const role = on ? roleOf(own) : seen ? "unsupervised" : "prompt";
    const last = runs[runs.length - 1];
    if (last && last[0] === role) last[2] = i + 1;
    else runs.push([role, i, i + 1]);
  }
  return runs;
}

// Tokens of the first sequence that the others of its example leave out.
function sharedOf(pack, own) {
  const others = pack.sequences.filter((o) => o.example === own.example && o !== own);
  const omitted = others.map((o) => o.length - (o.stop - o.start));
  return Math.max(0, ...omitted);
}

const omittedOf = (own) => own.length - (own.stop - own.start);

function show(pack) {
  state.pack = pack;
  state.sequence = -1;
  const tokens = pack.ids.length;
  const supervised = pack.ids.filter((id) => id >= 0).length;
  const examples = pack.columns.length;
  at("pack-title").textContent = `Pack ${count(pack.number)}`;
  at("pack-facts").textContent =
    `${count(tokens)} of ${count(about.packSize)} tokens, ${count(examples)} ${examples === 1 ? "example" : "examples"}, ` +
    `${count(pack.sequences.length)} segments, ${count(supervised)} tokens supervised ` +
    `(${((100 * supervised) / tokens).toFixed(1)} %)`;
  at("number").value = pack.number;
  const place = numbers ? numbers.indexOf(pack.number) : pack.number;
  at("previous").disabled = place <= 0;
  at("next").disabled = place + 1 >= (numbers ? numbers.length : about.packs);
  at("token").textContent = "Point at a token, or focus a text and press the arrow keys.";
  drawStrip(pack);
  drawAttention(pack);
  drawSequences(pack);
}

function drawStrip(pack) {
  const strip = at("strip");
  strip.replaceChildren();
  let group = null;
  let example = -1;
  pack.sequences.forEach((own, i) => {
    if (own.example !== example) {
      group = make("div", { class: "example" });
      example = own.example;
      strip.append(group);
    }
    const size = own.stop - own.start;
    const omitted = omittedOf(own);
    const name = `Example ${own.example + 1}, ${own.side}, ${count(size)} tokens` +
      `${omitted ? `, ${count(omitted)} shared` : ""}, ${own.place}`;
    const block = make("button", { type: "button", class: "block", "aria-label": name, title: name, tabindex: i ? -1 : 0 });
    block.style.flexGrow = size;
    const shared = omitted ? 0 : sharedOf(pack, own);
    for (const [role, start, stop] of runsOf(pack, own)) {
      const part = make("span", { class: `part ${role}${shared && role === "prompt" ? " shared" : ""}` });
      part.style.flexGrow = stop - start;
      block.append(part);
    }
    block.addEventListener("click", () => select(i, true));
    group.append(block);
    group.style.flexGrow = Number(group.style.flexGrow || 0) + size;
  });
  const rest = about.packSize - pack.ids.length;
  if (rest > 0) {
    const unused = make("span", { class: "rest", title: `${count(rest)} tokens unused` });
    unused.style.flexGrow = rest;
    strip.append(unused);
  }
}

at("strip").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const blocks = [...at("strip").querySelectorAll(".block")];
  const to = blocks[blocks.indexOf(document.activeElement) + step];
  if (to) {
    document.activeElement.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
    at("token").textContent = to.title;
  }
  event.preventDefault();
  event.stopPropagation();
});

function drawAttention(pack) {
  const n = pack.ids.length;
  const svg = draw("svg", {
    viewBox: `0 0 ${n} ${n}`, role: "img",
    "aria-label": `Attention of ${count(pack.sequences.length)} segments: queries down, keys across; each segment sees its own earlier tokens` +
      `${about.layout === "shared_prefix" ? " and the shared prompt of its example" : ""}`,
  });
  const first = new Map();
  pack.sequences.forEach((own, i) => {
    if (!first.has(own.example)) first.set(own.example, own);
    const name = `${own.side}, ${own.place}`;
    const [run] = runsOf(pack, own);
    const prompt = run[0] === "prompt" ? run[2] : own.start;
    const shape = (points, role) => {
      const polygon = draw("polygon", { points: points.map((p) => p.join(",")).join(" "), class: role, "data-i": i }, name);
      svg.append(polygon);
    };
    const [a, p, b] = [own.start, prompt, own.stop];
    if (p > a) shape([[a, a], [p, p], [a, p]], "prompt");
    shape([[a, p], [p, p], [b, b], [a, b]], roleOf(own));
    const omitted = omittedOf(own);
    if (omitted) {
      const from = first.get(own.example).start;
      const box = { x: from, y: a, width: omitted, height: b - a, class: `gathered ${roleOf(own)}`, "data-i": i };
      svg.append(draw("rect", box, `${name}: sees ${count(omitted)} shared tokens`));
    }
  });
  svg.addEventListener("click", (event) => {
    const i = event.target.getAttribute("data-i");
    if (i !== null) select(Number(i), true);
  });
  at("attention").replaceChildren(svg);
  at("attention-note").textContent = "Queries down, keys across: a token sees what is coloured in its row. " +
    (about.layout === "shared_prefix"
      ? "Pale blocks: the prompt, stored once, that the other responses of an example also see."
      : "Segments do not see each other.");
}

function drawSequences(pack) {
  const all = at("sequences");
  all.replaceChildren();
  let record = null;
  let example = -1;
  pack.sequences.forEach((own, i) => {
    if (own.example !== example) {
      example = own.example;
      const carried = Object.entries(pack.columns[example]).map(([name, value]) => `${name}: ${value}`);
      record = make("section", { class: "record" },
        make("h3", { dir: "auto" }, own.place),
        make("p", { class: "soft", dir: "auto" }, [`example id ${own.id}`, ...carried].join(" · ")));
      all.append(record);
    }
    const omitted = omittedOf(own);
    const size = own.stop - own.start;
    let on = 0;
    for (let t = own.start; t < own.stop; t++) on += pack.ids[t] >= 0;
    const facts = [`reward ${own.reward}`, `${count(own.length)} tokens`, `${count(on)} supervised`, `places ${count(own.start)}–${count(own.stop - 1)}`];
    if (omitted) facts.push(`first ${count(omitted)} stored in the first segment`);
    if (pack.atLimit[own.example]) facts.push("at the limit");
    const head = make("h4", {}, make("b", { class: roleOf(own) }, own.side), ...facts.map((f) => make("span", {}, f)));
    const tokens = make("div", { class: "tokens", tabindex: 0, role: "group", dir: "auto",
      "aria-label": `Tokens of ${own.side}, ${count(size)}; arrow keys move`, "data-i": i });
    fill(tokens, pack, own, []);
    record.append(make("article", { class: "sequence", id: `sequence-${i}` }, head, tokens));
  });
}

// Fills a sequence with its tokens; long runs are folded but for the ranges in `opened`.
function fill(box, pack, own, opened) {
  box.replaceChildren();
  for (const [role, start, stop] of runsOf(pack, own)) {
    const ends = role === "prompt" && own.stop - own.start > 4 * FOLD ? FOLD : LONG;
    const visible = (i) => stop - start <= 3 * ends || i < start + ends || i >= stop - ends ||
      opened.some(([from, to]) => i >= from && i < to);
    for (let i = start; i < stop; i++) {
      if (!visible(i)) {
        const from = i;
        while (!visible(i)) i++;
        const open = make("button", { type: "button" }, `… ${count(i - from)} ${role === "prompt" ? "prompt tokens" : "tokens"} …`);
        open.addEventListener("click", () => {
          fill(box, pack, own, [...opened, [from, from + LONG]]);
          box.focus();
        });
        box.append(open);
      }
      if (pack.texts[i] === null && box.lastChild && box.lastChild.nodeName === "SPAN") continue;
      const text = pack.texts[i] || "·";
      const span = make("span", { class: role }, text.replaceAll("\n", "↵\n"));
      if (pack.ids[i] >= 0) span.classList.add("on");
      span.dataset.t = i;
      box.append(span);
    }
  }
}

// Marks the tokens of the text that was found, and goes there; false: there is none.
function mark(box, pack, own) {
  const words = state.find.toLowerCase();
  if (!words) return false;
  const texts = pack.texts.slice(own.start, own.stop).map((text) => text || "");
  const from = texts.join("").toLowerCase().indexOf(words);
  if (from < 0) return false;
  let end = 0;
  const found = texts.flatMap((text, i) => {
    const start = end;
    end += text.length;
    return start < from + words.length && end > from ? [i + own.start] : [];
  });
  fill(box, pack, own, [[found[0] - FOLD, found[found.length - 1] + FOLD]]);
  for (const span of box.querySelectorAll("span")) {
    if (found.includes(Number(span.dataset.t))) span.classList.add("found");
  }
  settle(box.querySelector(".found"), "center");
  return true;
}

// Scrolls to an element; sequences above it get their true heights while they come into view.
function settle(element, block, frames = 4) {
  if (!element) return;
  element.scrollIntoView({ block });
  if (frames) requestAnimationFrame(() => settle(element, block, frames - 1));
}

function select(i, scroll) {
  state.sequence = i;
  const pack = state.pack;
  const article = at(`sequence-${i}`);
  for (const element of document.querySelectorAll(".block, .sequence")) element.removeAttribute("aria-current");
  const block = at("strip").querySelectorAll(".block")[i];
  block.setAttribute("aria-current", "true");
  article.setAttribute("aria-current", "true");
  for (const shape of at("attention").querySelectorAll("[data-i]")) {
    shape.classList.toggle("current", shape.getAttribute("data-i") === String(i));
  }
  at("token").textContent = block.title;
  if (scroll) {
    const box = article.querySelector(".tokens");
    box.focus({ preventScroll: true });
    if (!mark(box, pack, pack.sequences[i])) settle(article, "start");
  }
  history.replaceState(null, "", `#${pack.number}.${i}`);
}

// One token.

function tell(span) {
  const box = span.closest(".tokens");
  const pack = state.pack;
  const own = pack.sequences[Number(box.dataset.i)];
  const t = Number(span.dataset.t);
  let end = t + 1;
  while (end < own.stop && pack.texts[end] === null) end++;
  for (const other of document.querySelectorAll(".here")) other.classList.remove("here");
  span.classList.add("here");
  const ids = pack.ids.slice(t, end).map(idOf).join(" ");
  const role = span.classList.contains("on") ? `${own.side}, supervised` : `${span.classList[0]}, not supervised`;
  at("token").textContent = `id ${ids} ${JSON.stringify(pack.texts[t] || "")} · ${role.replace("unsupervised, ", "in a response, ")} · ` +
    `place ${count(t)} of the pack · position ${count(t - own.start + omittedOf(own))} of the sequence`;
}

at("sequences").addEventListener("mouseover", (event) => {
  if (event.target.dataset.t) tell(event.target);
});

at("sequences").addEventListener("keydown", (event) => {
  const box = event.target;
  if (!box.classList.contains("tokens")) return;
  const spans = [...box.querySelectorAll("span")];
  const here = spans.indexOf(box.querySelector(".here"));
  const to = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: spans.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  event.stopPropagation();
  const span = spans[Math.min(Math.max(to, 0), spans.length - 1)];
  tell(span);
  span.scrollIntoView({ block: "nearest", behavior: "instant" });
});

// Steps from pack to pack.

async function go(number, sequence) {
  const many = about.packs;
  try {
    if (!Number.isInteger(number) || number < 0 || number >= many) throw new Error(`A pack has a number from 0 to ${many - 1}.`);
    if (numbers && !held.has(number)) throw new Error(`This page holds packs ${numbers[0]} to ${numbers[numbers.length - 1]} only.`);
    const wanted = (state.wanted = number);
    const pack = await load(number);
    if (wanted !== state.wanted) return;
    fail(null);
    if (state.pack !== pack) show(pack);
    history.replaceState(null, "", `#${number}`);
    if (sequence >= 0 && sequence < pack.sequences.length) select(sequence, true);
  } catch (error) {
    fail(error);
  }
}

function step(by) {
  const button = by > 0 ? at("next") : at("previous");
  if (state.pack && !button.disabled) {
    state.find = "";
    go(numbers ? numbers[numbers.indexOf(state.pack.number) + by] : (state.wanted ?? state.pack.number) + by);
  }
}

at("previous").addEventListener("click", () => step(-1));
at("next").addEventListener("click", () => step(1));
at("number").addEventListener("change", () => go(Number(at("number").value.replaceAll(",", "") || NaN)));
at("number").addEventListener("keydown", (event) => {
  if (event.key === "Enter") go(Number(at("number").value || NaN));
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") return stop();
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  if (event.key === "n" || event.key === "ArrowRight") step(1);
  else if (event.key === "p" || event.key === "ArrowLeft") step(-1);
  else if (event.key === "/") at("q").focus();
  else return;
  event.preventDefault();
});

// Search.

const HINTS = {
  text: "words of a prompt or response",
  record: "prefs.jsonl:17, or 17, or a file",
  id: "example id",
};
const BOUNDS = ["side", "shortest", "longest", "lowest", "highest"];

at("by").addEventListener("change", () => at("q").setAttribute("placeholder", HINTS[at("by").value]));

function read() {
  const query = { text: "", record: "", id: "" };
  query[at("by").value] = at("q").value.trim();
  for (const name of BOUNDS) query[name] = at(name).value.trim();
  query.limit = at("limit").checked ? "1" : "";
  return query;
}

async function run(first) {
  const mine = ++state.search;
  const query = state.query;
  let from = first;
  let found = at("hits").childElementCount;
  at("more").hidden = true;
  at("results").hidden = false;
  at("progress").max = about.packs;
  searching(true);
  try {
    do {
      at("found").textContent = `Searching: pack ${count(from)} of ${count(about.packs)}`;
      at("progress").value = from;
      state.from = from;
      const answer = await (numbers ? searchHere(query, from) : searchThere(query, from));
      if (mine !== state.search) return;
      for (const hit of answer.hits) at("hits").append(line(hit));
      found += answer.hits.length;
      from = answer.next;
      if (answer.hits.length) break;
    } while (from !== null);
    fail(null);
    ended(found, from);
  } catch (error) {
    if (mine !== state.search) return;
    fail(error);
    at("found").textContent = "";
  }
  searching(false);
}

function searching(on) {
  at("stop").hidden = at("progress").hidden = !on;
}

// Says what a search has found, and where it can go on; null: it has reached the end.
function ended(found, from) {
  const done = from === null;
  at("found").textContent = `${found ? count(found) : "No"} ${found === 1 ? "sequence" : "sequences"} found` +
    (done ? (state.first ? ` from pack ${count(state.first)} to the end.` : ".")
      : from > state.first ? ` in packs ${count(state.first)} to ${count(from - 1)}.` : ".");
  at("more").textContent = done ? "Search from pack 0" : `Continue at pack ${count(from)}`;
  at("more").hidden = done && !state.first;
  state.from = from;
}

function stop() {
  if (at("stop").hidden) return;
  const held = at("stop") === document.activeElement;
  state.search++;
  searching(false);
  ended(at("hits").childElementCount, state.from);
  if (held) at("more").focus();
}

function begin(first) {
  state.query = read();
  state.first = first;
  at("hits").replaceChildren();
  if (Object.values(state.query).every((value) => value === "")) {
    at("results").hidden = true;
    return fail("Give a text, a record, an id or a filter.");
  }
  return run(first);
}

function line(hit) {
  const facts = ` · pack ${count(hit.pack)} · ${hit.side} · ${count(hit.length)} tokens · reward ${hit.reward}`;
  const button = make("button", { type: "button" }, make("b", { dir: "auto" }, hit.place), facts);
  if (hit.match[1]) {
    const [before, match, after] = hit.match;
    button.append(make("br"), make("span", { class: "soft", dir: "auto" }, `…${before}`, make("mark", {}, match), `${after}…`));
  }
  button.addEventListener("click", () => {
    state.find = state.query.text;
    go(hit.pack, hit.sequence);
  });
  return make("li", {}, button);
}

at("search").addEventListener("submit", (event) => {
  event.preventDefault();
  // A place is looked up everywhere, a text from the current pack on.
  begin(read().text && state.pack && !numbers ? state.pack.number : 0);
});
at("search").addEventListener("reset", () => {
  state.search++;
  state.find = "";
  searching(false);
  at("results").hidden = true;
  fail(null);
});
at("stop").addEventListener("click", stop);
at("more").addEventListener("click", () => (state.from === null ? begin(0) : run(state.from)));

// The page.

const ROLES = [
  ["prompt", "prompt"],
  ...(about.sides.length ? about.sides.map((side) => [side, `${side}, supervised`]) : [["response", "response, supervised"]]),
  ["unsupervised", "in a response, not supervised"],
];
for (const [role, name] of ROLES) at("legend").append(make("li", {}, make("i", { class: role }), name));
if (about.layout === "shared_prefix") {
  at("legend").append(make("li", {}, make("i", { class: "prompt shared" }), "prompt stored once for its example"));
}
for (const side of about.sides) at("side").append(make("option", { value: side }, side));
at("side").parentElement.hidden = !about.sides.length;
at("of").textContent = `of 0 to ${count(about.packs - 1)}`;
const truncated = about.truncated === null ? "repacked, so those truncated filled earlier packs"
  : about.truncated ? `the ${count(about.truncated)} truncated ${about.truncated === 1 ? "record is" : "records are"} among these`
    : "no record was truncated";
at("limit-note").textContent = `examples as long as max_length or a pack permits; ${truncated}`;
at("note").textContent = [about.note, about.texts ? "" : "Token ids are shown in place of text."].join(" ").trim();
at("note").hidden = !at("note").textContent;

function open() {
  const [, number, sequence] = /^#(\d+)(?:\.(\d+))?$/.exec(location.hash) || [];
  go(number === undefined ? (numbers ? numbers[0] : 0) : Number(number), sequence === undefined ? -1 : Number(sequence));
}
addEventListener("hashchange", open);
open();
})();
