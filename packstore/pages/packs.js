"use strict";
// Draws packs and searches them. Texts of records become text nodes, never markup.
(() => {
const about = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const count = (n) => n.toLocaleString("en");
const FOLD = 60; // tokens left at each end of a folded run
const LONG = 6000; // tokens of a run that a browser would draw for minutes; prompts are folded from 240 on
const HITS = 50; // sequences that a search lists at once
const held = new Map((about.embedded || []).map((pack) => [pack.number, pack]));
const numbers = about.embedded ? [...held.keys()] : null;
const state = { pack: null, find: "", search: 0 };

function make(name, attributes, ...children) {
  const svg = ["svg", "polygon", "rect", "title"].includes(name);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function fail(error) {
  at("error").textContent = error ? String(error.message || error) : "";
  at("error").hidden = !error;
}

// Returns a pack, from the page itself or from its server.
async function load(number) {
  if (held.has(number)) return held.get(number);
  const answer = await fetch(`packs/${number}`, { cache: "no-store" }).catch(() => {
    throw new Error("The server does not answer: start packstore view again.");
  });
  const pack = await answer.json().catch(() => ({ error: `The server answers ${answer.status}.` }));
  if (!answer.ok) throw new Error(pack.error);
  if (held.size > 8) held.delete(held.keys().next().value);
  held.set(number, pack);
  return pack;
}

const roleOf = (own) => (about.sides.includes(own.side) ? own.side : "response");
const omittedOf = (own) => own.length - (own.stop - own.start);

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

function show(pack) {
  state.pack = pack;
  const tokens = pack.ids.length;
  const supervised = pack.ids.filter((id) => id >= 0).length;
  at("pack-title").textContent = `Pack ${count(pack.number)}`;
  at("pack-facts").textContent =
    `${count(tokens)} of ${count(about.packSize)} tokens, ${count(pack.columns.length)} examples, ` +
    `${count(pack.sequences.length)} segments, ${count(supervised)} tokens supervised ` +
    `(${((100 * supervised) / tokens).toFixed(1)} %)`;
  at("number").value = pack.number;
  const place = numbers ? numbers.indexOf(pack.number) : pack.number;
  at("previous").disabled = place <= 0;
  at("next").disabled = place + 1 >= (numbers ? numbers.length : about.packs);
  at("token").textContent = "Point at a token.";
  drawStrip(pack);
  drawAttention(pack);
  drawSequences(pack);
}

// A block for each sequence, as wide as its tokens; hatched: the prompt that others of its example share.
function drawStrip(pack) {
  at("strip").replaceChildren();
  const groups = new Map();
  pack.sequences.forEach((own, i) => {
    if (!groups.has(own.example)) {
      groups.set(own.example, make("div", { class: "example" }));
      at("strip").append(groups.get(own.example));
    }
    const group = groups.get(own.example);
    const name = `Example ${own.example + 1}, ${own.side}, ${count(own.stop - own.start)} tokens` +
      `${omittedOf(own) ? `, ${count(omittedOf(own))} shared` : ""}, ${own.place}`;
    const block = make("button", { type: "button", class: "block", "aria-label": name, title: name });
    block.style.flexGrow = own.stop - own.start;
    const shared = !group.childElementCount && pack.sequences.some((o) => o.example === own.example && omittedOf(o));
    for (const [role, start, stop] of runsOf(pack, own)) {
      const part = make("span", { class: `part ${role}${shared && role === "prompt" ? " shared" : ""}` });
      part.style.flexGrow = stop - start;
      block.append(part);
    }
    block.addEventListener("click", () => select(i));
    group.append(block);
    group.style.flexGrow = Number(group.style.flexGrow || 0) + own.stop - own.start;
  });
  const rest = about.packSize - pack.ids.length;
  if (rest > 0) {
    const unused = make("span", { class: "rest", title: `${count(rest)} tokens unused` });
    unused.style.flexGrow = rest;
    at("strip").append(unused);
  }
}

function drawAttention(pack) {
  const n = pack.ids.length;
  const svg = make("svg", { viewBox: `0 0 ${n} ${n}`, role: "img", "aria-label": "Attention: queries down, keys across" });
  const first = new Map();
  pack.sequences.forEach((own, i) => {
    if (!first.has(own.example)) first.set(own.example, own);
    const [role, , end] = runsOf(pack, own)[0];
    const [a, p, b] = [own.start, role === "prompt" ? end : own.start, own.stop];
    const shape = (points, kind) => svg.append(make("polygon", { points: points.join(" "), class: kind, "data-i": i },
      make("title", {}, `${own.side}, ${own.place}`)));
    if (p > a) shape([[a, a], [p, p], [a, p]], "prompt");
    shape([[a, p], [p, p], [b, b], [a, b]], roleOf(own));
    if (omittedOf(own)) {
      const box = { x: first.get(own.example).start, y: a, width: omittedOf(own), height: b - a };
      svg.append(make("rect", { ...box, class: `gathered ${roleOf(own)}`, "data-i": i },
        make("title", {}, `${own.side} sees ${count(omittedOf(own))} shared tokens`)));
    }
  });
  svg.addEventListener("click", (event) => {
    const shape = event.target.closest("[data-i]");
    if (shape) select(Number(shape.dataset.i));
  });
  at("attention").replaceChildren(svg);
}

function drawSequences(pack) {
  at("sequences").replaceChildren();
  let record = null;
  pack.sequences.forEach((own, i) => {
    if (!i || own.example !== pack.sequences[i - 1].example) {
      const carried = Object.entries(pack.columns[own.example]).map(([name, value]) => `${name}: ${value}`);
      record = make("section", { class: "record" }, make("h3", { dir: "auto" }, own.place),
        make("p", { class: "soft", dir: "auto" }, [`example id ${own.id}`, ...carried].join(" · ")));
      at("sequences").append(record);
    }
    const on = pack.ids.slice(own.start, own.stop).filter((id) => id >= 0).length;
    const facts = [`reward ${own.reward}`, `${count(own.length)} tokens`, `${count(on)} supervised`,
      `places ${count(own.start)}–${count(own.stop - 1)}`];
    if (omittedOf(own)) facts.push(`first ${count(omittedOf(own))} stored in the first segment`);
    const head = make("h4", {}, make("b", { class: roleOf(own) }, own.side), ...facts.map((f) => make("span", {}, f)));
    const tokens = make("div", { class: "tokens", tabindex: 0, role: "group", dir: "auto",
      "aria-label": `Tokens of ${own.side}; arrow keys move`, "data-i": i });
    fill(tokens, pack, own, []);
    record.append(make("article", { class: "sequence", id: `sequence-${i}` }, head, tokens));
  });
}

// Fills a sequence with its tokens; long runs are folded but for the ranges in `opened`.
function fill(box, pack, own, opened) {
  box.replaceChildren();
  for (const [role, start, stop] of runsOf(pack, own)) {
    const whole = stop - start <= (role === "prompt" ? 240 : LONG);
    const visible = (i) => whole || i < start + FOLD || i >= stop - FOLD || opened.some(([from, to]) => i >= from && i < to);
    for (let i = start; i < stop; i++) {
      if (!visible(i)) {
        const from = i;
        while (!visible(i)) i++;
        const open = make("button", { type: "button" }, `… ${count(i - from)} tokens …`);
        open.addEventListener("click", () => fill(box, pack, own, [...opened, [from, from + 2000]]));
        box.append(open);
      }
      if (pack.texts[i] === null && box.lastChild) continue;
      const span = make("span", { class: role, "data-t": i }, (pack.texts[i] || "·").replaceAll("\n", "↵\n"));
      if (pack.ids[i] >= 0) span.classList.add("on");
      box.append(span);
    }
  }
}

// Marks the text that was searched in a sequence, and returns its first token; null: it is not there.
function mark(box, pack, own) {
  const texts = pack.texts.slice(own.start, own.stop).map((text) => text || "");
  const from = texts.join("").toLowerCase().indexOf(state.find.toLowerCase());
  if (!state.find || from < 0) return null;
  let end = 0;
  const hits = texts.flatMap((text, i) => {
    const start = end;
    end += text.length;
    return start < from + state.find.length && end > from ? [i + own.start] : [];
  });
  fill(box, pack, own, [[hits[0] - FOLD, hits[hits.length - 1] + FOLD]]);
  for (const span of box.querySelectorAll("span")) span.classList.toggle("found", hits.includes(Number(span.dataset.t)));
  return box.querySelector(".found");
}

function select(i) {
  const article = at(`sequence-${i}`);
  for (const element of document.querySelectorAll("[aria-current]")) element.removeAttribute("aria-current");
  const block = at("strip").querySelectorAll(".block")[i];
  block.setAttribute("aria-current", "true");
  article.setAttribute("aria-current", "true");
  for (const shape of at("attention").querySelectorAll("[data-i]")) {
    shape.classList.toggle("current", shape.dataset.i === String(i));
  }
  at("token").textContent = block.title;
  const box = article.querySelector(".tokens");
  box.focus({ preventScroll: true });
  const hit = mark(box, state.pack, state.pack.sequences[i]);
  (hit || article).scrollIntoView({ block: hit ? "center" : "start" });
  history.replaceState(null, "", `#${state.pack.number}.${i}`);
}

// Tells the id, role and place of a token.
function tell(span) {
  const pack = state.pack;
  const own = pack.sequences[Number(span.closest(".tokens").dataset.i)];
  const t = Number(span.dataset.t);
  let end = t + 1;
  while (end < own.stop && pack.texts[end] === null) end++;
  for (const other of document.querySelectorAll(".here")) other.classList.remove("here");
  span.classList.add("here");
  const ids = pack.ids.slice(t, end).map((id) => (id < 0 ? ~id : id)).join(" ");
  const role = span.classList.contains("prompt") ? "prompt" : `${own.side}, ${span.classList.contains("on") ? "" : "not "}supervised`;
  at("token").textContent = `id ${ids} ${JSON.stringify(pack.texts[t] || "")} · ${role} · place ${count(t)} of the pack · ` +
    `position ${count(t - own.start + omittedOf(own))} of the sequence`;
}

at("sequences").addEventListener("mouseover", (event) => {
  if (event.target.dataset.t) tell(event.target);
});
at("sequences").addEventListener("keydown", (event) => {
  const spans = [...event.target.querySelectorAll(".tokens > span, :scope > span")];
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step || !spans.length) return;
  event.preventDefault();
  const span = spans[Math.min(Math.max(spans.findIndex((s) => s.classList.contains("here")) + step, 0), spans.length - 1)];
  tell(span);
  span.scrollIntoView({ block: "nearest" });
});

async function go(number, sequence = -1) {
  try {
    if (!Number.isInteger(number) || number < 0 || number >= about.packs) throw new Error(`A pack has a number from 0 to ${about.packs - 1}.`);
    if (numbers && !held.has(number)) throw new Error(`This page holds packs ${numbers[0]} to ${numbers[numbers.length - 1]} only.`);
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
  if (!state.pack || (by > 0 ? at("next") : at("previous")).disabled) return;
  state.find = "";
  go(numbers ? numbers[numbers.indexOf(state.pack.number) + by] : state.wanted + by);
}

at("previous").addEventListener("click", () => step(-1));
at("next").addEventListener("click", () => step(1));
at("number").addEventListener("change", () => go(Number(at("number").value.replaceAll(",", "") || NaN)));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") return stop();
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select")) return;
  if (event.key === "n") step(1);
  else if (event.key === "p") step(-1);
  else if (event.key === "/") at("q").focus();
  else return;
  event.preventDefault();
});

// Returns the text around the match if a sequence is sought, else null.
function match(pack, own, query) {
  if (query.side && own.side !== query.side) return null;
  const [, file, line] = /^(.*):(\d+)$/.exec(query.q) || [];
  const [, path, place] = /^(.*), \w+ (\d+)$/s.exec(own.place) || [];
  if (query.q === own.id || (line && line === place && path.endsWith(file))) return ["", "", ""];
  const text = pack.texts.slice(own.start, own.stop).join("");
  const from = text.toLowerCase().indexOf(query.q.toLowerCase());
  const end = from + query.q.length;
  return from < 0 ? null : [text.slice(Math.max(from - 48, 0), from), text.slice(from, end), text.slice(end, end + 48)];
}

function line(pack, own, i, [before, hit, after]) {
  const facts = ` · pack ${count(pack.number)} · ${own.side} · ${count(own.length)} tokens · reward ${own.reward}`;
  const button = make("button", { type: "button" }, make("b", { dir: "auto" }, own.place), facts);
  if (hit) button.append(make("br", {}), make("span", { class: "soft", dir: "auto" }, `…${before}`, make("mark", {}, hit), `${after}…`));
  button.addEventListener("click", () => {
    state.find = hit;
    go(pack.number, i);
  });
  return make("li", {}, button);
}

// Searches pack by pack, from the shown one on and around, until it is stopped or has found enough.
async function search() {
  const mine = ++state.search;
  const query = Object.fromEntries(["q", "side"].map((name) => [name, at(name).value.trim()]));
  const all = numbers || { length: about.packs };
  const begin = state.pack ? (numbers ? numbers.indexOf(state.pack.number) : state.pack.number) : 0;
  at("hits").replaceChildren();
  at("results").hidden = at("stop").hidden = false;
  let seen = 0;
  const tell = (end) => {
    at("found").textContent = `${count(at("hits").childElementCount)} sequences found in ${count(seen)} of ${count(all.length)} packs${end}`;
  };
  try {
    for (; seen < all.length && at("hits").childElementCount < HITS; seen++) {
      const place = (begin + seen) % all.length;
      const pack = await load(numbers ? numbers[place] : place);
      if (mine !== state.search) return;
      pack.sequences.forEach((own, i) => {
        const around = match(pack, own, query);
        if (around) at("hits").append(line(pack, own, i, around));
      });
      tell(" …");
    }
    fail(null);
  } catch (error) {
    fail(error);
  }
  tell(".");
  at("stop").hidden = true;
}

function stop() {
  state.search++;
  at("stop").hidden = true;
}

at("search").addEventListener("submit", (event) => {
  event.preventDefault();
  search();
});
at("stop").addEventListener("click", stop);

const responses = about.sides.length ? about.sides.map((side) => [side, `${side}, supervised`]) : [["response", "response, supervised"]];
const shared = about.layout === "shared_prefix";
const roles = [["prompt", "prompt"], ...responses, ["unsupervised", "in a response, not supervised"]];
if (shared) roles.push(["prompt shared", "prompt stored once for its example"]);
for (const [role, name] of roles) at("legend").append(make("li", {}, make("i", { class: role }), name));
for (const side of about.sides) at("side").append(make("option", { value: side }, side));
at("of").textContent = `of 0 to ${count(about.packs - 1)}`;
at("attention-note").textContent = "Queries down, keys across: a token sees what is coloured in its row. " +
  (shared ? "Pale blocks: the prompt, stored once, that the other responses of an example also see." : "Segments do not see each other.");
at("note").textContent = about.note;
at("note").hidden = !about.note;

function open() {
  const [, number, sequence] = /^#(\d+)(?:\.(\d+))?$/.exec(location.hash) || [];
  go(Number(number ?? (numbers ? numbers[0] : 0)), Number(sequence ?? -1));
}
addEventListener("hashchange", open);
open();
})();
