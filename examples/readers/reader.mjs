// A reader of packstore datasets that was written from the pages in schemas/ alone.
//
//     npm install && node reader.mjs DATASET [SIDE...]
//
// It checks and reads all of a dataset of Parquet files, and prints what packstore's conformance
// kit asks for. Example ids are BigInt, as they have up to 63 bits.

import { createHash } from "node:crypto";
import { existsSync, readdirSync, readFileSync, statSync } from "node:fs";
import { join } from "node:path";
import { crc32 } from "node:zlib";
import { parquetMetadata, parquetReadObjects } from "hyparquet";
import { compressors } from "hyparquet-compressors";

const KINDS = { preference: 2, sft: 1, scored: null };
const I32 = "INT32", I64 = "INT64", F32 = "FLOAT", F16 = "FLOAT16", U8 = "UINT_8", TEXT = "BYTE_ARRAY";
const SCALARS = { string: TEXT, int64: I64, float64: "DOUBLE", bool: "BOOLEAN" };
const NUMBERS = { "list<float32>": [F32], "token<float32>": [F32], "token<float16>": [F16] };
const SIDE = { ...SCALARS, float32: F32, ...NUMBERS };
const TOP = { float16: { ids: [I32], logps: [F16] }, uint8: { ids: [I32], logps: [U8], scale: F32 } };
const COUNTS = ["best_tokens", "pairs_best_vs_rest", "pairs_all", "pairs_adjacent"];
const TOKENIZER_TEXTS = ["name", "path", "sha256", "vocab_sha256", "probe_sha256", "chat_template",
  "chat_template_sha256", "tool_use_template", "tool_use_template_sha256"];
const GROUPS = ["rows", "examples", "tokens", "longest"];
const SUMS = ["rows", "examples", "sequences", "tokens", "supervised_tokens", "bytes"];
const CODECS = ["ZSTD", "LZ4_RAW", "UNCOMPRESSED"];
const ENCODINGS = ["PLAIN", "RLE", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT", "BIT_PACKED"];
const COLUMNS = ["input_ids", "labels", "reward", "lengths", "seq_boundaries",
  "parent_distances", "example_ids", "num_responses"];

class Refused extends Error {}

/** Refuses the dataset under a name of section 9 or annex G unless `ok`. */
function need(ok, name) {
  if (!ok) throw new Refused(name);
}

const sum = (values) => values.reduce((a, b) => a + b, 0);
const most = (values) => values.reduce((a, b) => Math.max(a, b), 0);
const steps = (values) => values.slice(1).map((v, i) => v - values[i]);
const range = (a, b) => Array.from({ length: b - a }, (_, i) => a + i);
const same = (a, b) => a.length === b.length && a.every((v, i) => v === b[i]);
const sha256 = (data) => createHash("sha256").update(data).digest("hex");

// ---------------------------------------------- manifests (annex B; for side data, annex E)

/** I-JSON: members have different names, texts are Unicode; large whole numbers are BigInt. */
function parseJson(text) {
  const token = /[ \t\n\r]*("(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null|[{}[\],:]|$)/y;
  let now;
  const next = () => ((now = token.exec(text)?.[1]), need(now !== undefined, "manifest"));
  const take = (sign) => (need(now === sign, "manifest"), next());
  const scalar = () => {
    const value = JSON.parse(now);
    if (typeof value === "string") need(value.isWellFormed(), "manifest");
    if (typeof value === "number") need(Number.isFinite(value), "manifest"); // 1e400
    const large = /^-?\d+$/.test(now) && !Number.isSafeInteger(value);
    return large ? BigInt(now) : value;
  };
  const list = (close, item) => {
    for (next(); now !== close; ) {
      item();
      if (now !== close) need(now === "," && (next(), now !== close), "manifest");
    }
    next();
  };
  const value = () => {
    if (now === "[") {
      const out = [];
      list("]", () => out.push(value()));
      return out;
    }
    if (now === "{") {
      const out = Object.create(null);
      list("}", () => {
        const name = scalar();
        need(typeof name === "string" && !(name in out), "manifest");
        next();
        take(":");
        out[name] = value();
      });
      return out;
    }
    const out = scalar();
    next();
    return out;
  };
  try {
    next();
    const document = value();
    need(now === "" && isObject(document), "manifest");
    return document;
  } catch (error) {
    throw error instanceof SyntaxError ? new Refused("manifest") : error;
  }
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** The current manifest; a field that is missing or of another type breaks it. */
function checked(folder, prefix, check) {
  const document = readManifest(folder, prefix);
  try {
    check(document);
  } catch (error) {
    throw error instanceof TypeError ? new Refused("manifest") : error;
  }
  return document;
}

/** The manifest with the highest number, its hash verified. */
function readManifest(folder, prefix) {
  const pattern = new RegExp(`^${prefix}-(\\d{6}|[1-9]\\d{6,})\\.json$`);
  const names = readdirSync(join(folder, "_packstore")).filter((name) => pattern.test(name));
  const number = (name) => Number(pattern.exec(name)[1]);
  const last = names.sort((a, b) => number(a) - number(b)).at(-1);
  need(last && number(last) > 0, "manifest");
  const data = readFileSync(join(folder, "_packstore", last));
  const comma = data.lastIndexOf(",");
  const end = /^,\s*"(.*)"\s*:\s*"([0-9a-f]{64})"\s*}\s*$/s.exec(data.subarray(comma).toString());
  const fits = end && sha256(data.subarray(0, comma)) === end[2];
  need(!end || fits === (end[1] === "sha256"), "manifest");
  let text;
  try {
    text = utf8.decode(data);
  } catch {
    throw new Refused("manifest");
  }
  const document = parseJson(text);
  need(!("sha256" in document) || (end && end[1] === "sha256"), "manifest");
  return document;
}

/** A whole number of a manifest, of which BigInts are the large ones. */
function count(value, low = 0, high = 2n ** 63n - 1n) {
  const whole = typeof value === "bigint" || Number.isSafeInteger(value);
  need(whole && value >= low && value <= high, "manifest");
  return value;
}

function checkSha256(text) {
  need(typeof text === "string" && /^[0-9a-f]{64}$/.test(text), "manifest");
}

/** Sizes and hashes are such; paths are relative, and no two are the same. */
function checkFiles(files) {
  for (const file of files) {
    count(file.bytes);
    checkSha256(file.sha256);
    const parts = file.path.split("/");
    need(parts.every((part) => /^[A-Za-z0-9_][A-Za-z0-9_.\-=]*$/.test(part)), "manifest");
  }
  need(new Set(files.map((file) => file.path)).size === files.length, "manifest");
}

function checkNames(columns) {
  for (const name of Object.keys(columns)) {
    need(/^_?[A-Za-z][A-Za-z0-9_]*$/.test(name) && !COLUMNS.includes(name), "manifest");
    need(typeof columns[name] === "string", "manifest");
  }
}

const isText = (value) => typeof value === "string";

/** Members of settings and tokenizer that readers use, where they are there. */
function checkProvenance({ settings, tokenizer }) {
  const { on = {}, chat_template: template = null, pad_to_multiple: multiple = 1 } = settings;
  need(isObject(on) && Object.values(on).every(isText), "manifest");
  need(template === null || isText(template), "manifest");
  count(multiple, 1, 2 ** 31 - 1);
  const { vocab_size: size = 1, files = null, ...others } = tokenizer ?? {};
  need(isObject(tokenizer ?? {}), "manifest");
  count(size, 1, 2 ** 31 - 1);
  need(files === null || (isObject(files) && Object.values(files).every(isText)), "manifest");
  for (const name of ["bos_id", "eos_id", "pad_id"]) count(others[name] ?? 0);
  for (const name of TOKENIZER_TEXTS) need(isText(others[name] ?? ""), "manifest");
}

/** What a manifest tells of itself; what is missing raises a TypeError. */
function checkManifest(m) {
  need(count(m.format_version) === 1, "unsupported");
  need(m.features.length === 0, "unsupported");
  need(m.kind in KINDS && ["concat", "shared_prefix"].includes(m.layout), "unsupported");
  need(m.file_format === "parquet", "unsupported"); // Arrow is left out here
  const { pack_index: index, further_files: further = [], shards, totals, records } = m;
  const about = m.provenance, k = KINDS[m.kind];
  need(m.num_responses === k, "manifest");
  count(m.pack_size, 1, 2 ** 31 - 1);
  checkProvenance(about);
  checkSha256(about.lineage ?? "0".repeat(64));
  checkNames(m.carry);
  checkFiles([...shards, ...further, ...(index ? [index] : [])]);
  for (const { path, sha256: hash } of further) {
    const named = path.split("/").at(-1).includes(hash.slice(0, 16));
    need(path.startsWith("data/") && named, "manifest");
  }
  if (index) {
    need(index.bytes <= 65536 + 4096 * shards.length + 32 * totals.packs, "manifest");
    need(!index.path.endsWith(".parquet"), "manifest");
  }
  for (const s of shards) {
    const g = s.row_groups, n = g.rows.length;
    count(s.example_id_base);
    checkSha256(s.footer_sha256);
    need(GROUPS.every((name) => g[name].length === n), "manifest");
    need(/^[0-9a-f]*$/.test(g.crc32) && g.crc32.length === 8 * n, "manifest");
    for (const name of GROUPS.slice(0, 3)) need(sum(g[name]) === s[name], "manifest");
    need(count(s.footer_bytes, 1) <= Math.min(s.bytes, 2 ** 24 + 2 ** 16 * n), "manifest");
    need(k === null || s.sequences === k * s.examples, "manifest");
    for (let i = 0; i < n; i++) {
      const [rows, examples, tokens, longest] = GROUPS.map((name) => count(g[name][i]));
      need(0 < rows && rows <= examples && 0 < longest && longest <= tokens, "manifest");
      need(tokens <= rows * m.pack_size, "manifest");
    }
  }
  for (const name of SUMS) {
    const total = sum(shards.map((s) => count(s[name])));
    need(count(totals[name === "rows" ? "packs" : name]) === total, "manifest");
  }
  need(records.read === records.packed + sum(Object.values(records.dropped)), "manifest");
  need(records.packed === totals.examples, "manifest");
  const { fill_rate: fill, examples_per_pack: spread } = m.statistics;
  need(typeof fill === "number" && typeof spread.mean === "number", "manifest");
  need((about.combined_from ?? []).every((p) => Number.isSafeInteger(p.sources)), "manifest");
}

/** What the manifest of a side dataset tells of itself. */
function checkSide(side) {
  need(count(side.side_version) === 1 && side.features.length === 0, "unsupported");
  need(side.kind in KINDS, "unsupported");
  checkNames(side.columns);
  checkFiles(side.shards);
  checkSha256(side.lineage);
}

// ------------------------------------------------------------------------- shards (annex A)

/** The bytes of a file, its size and hash verified. */
function stored(folder, file, name = "bytes") {
  const path = join(folder, file.path);
  need(existsSync(path) && statSync(path).size === file.bytes, name);
  const data = readFileSync(path);
  need(sha256(data) === file.sha256, name);
  return data;
}

/** The columns that are not to be skipped, name to type; `form` gives the types that are known. */
function known(columns, form) {
  const names = Object.keys(columns).filter((n) => form(columns[n]) && !n.startsWith("_"));
  return Object.fromEntries(names.map((n) => [n, columns[n]]));
}

/** Compares columns of a Parquet file with types: a scalar, a list, a struct, or null for any. */
function checkSchema(metadata, types, texts, name) {
  const found = metadata.key_value_metadata ?? [];
  const pairs = found.filter((pair) => pair.key !== "ARROW:schema");
  need(pairs.length === Object.keys(texts).length, name);
  for (const { key, value } of pairs) need(texts[key] === value, name);
  const elements = metadata.schema;
  let at = 1;
  const skip = () => {
    for (let left = elements[at++].num_children ?? 0; left > 0; left--) skip();
  };
  const leaf = (element, type) => {
    need(element.repetition_type === "REQUIRED" && scalarOf(element) === type, name);
  };
  const list = (type) => {
    const [outer, repeated, element] = elements.slice(at, at + 3);
    const isList = outer.converted_type === "LIST" || outer.logical_type?.type === "LIST";
    need(isList && outer.repetition_type === "REQUIRED", name);
    need(repeated?.name === "list" && repeated.repetition_type === "REPEATED", name);
    need(repeated.num_children === 1 && element?.name === "element", name);
    leaf(element, type);
    at += 3;
  };
  const members = (parent, types) => {
    need(parent.num_children === Object.keys(types).length, name);
    for (const [member, type] of Object.entries(types)) {
      need(elements[at].name === member, name);
      if (type === null) skip();
      else if (Array.isArray(type)) list(type[0]);
      else if (isObject(type)) {
        need(elements[at].repetition_type === "REQUIRED", name);
        members(elements[at++], type);
      } else leaf(elements[at++], type);
    }
  };
  members(elements[0], types);
}

/** The type of a leaf of a Parquet file; undefined for one that no column has. */
function scalarOf({ type, type_length: width, converted_type: converted, logical_type: logical }) {
  if (type === TEXT) return converted === "UTF8" || logical?.type === "STRING" ? TEXT : undefined;
  if (converted === U8) return type === I32 ? U8 : undefined;
  if (logical?.type === F16) return width === 2 ? F16 : undefined;
  const plain = !(logical ?? converted) || ["INT_32", "INT_64"].includes(converted);
  return plain ? type : undefined;
}

const start = (chunk) => Number(chunk.meta_data.data_page_offset);
const size = (chunk) => Number(chunk.meta_data.total_compressed_size);

/** Compression, encodings, sizes, and places of the columns `names`, in all row groups. */
function checkChunks(metadata, names, name) {
  for (const { columns } of metadata.row_groups) {
    for (const [i, { meta_data: chunk }] of columns.entries()) {
      need(i === 0 || start(columns[i - 1]) + size(columns[i - 1]) === start(columns[i]), name);
      if (!names.includes(chunk.path_in_schema[0])) continue;
      need(CODECS.includes(chunk.codec) && !chunk.dictionary_page_offset, name);
      need(chunk.encodings.every((encoding) => ENCODINGS.includes(encoding)), name);
      need(chunk.num_values <= 2n ** 27n, name);
    }
    const bytes = sum(columns.map((c) => Number(c.meta_data.total_uncompressed_size)));
    need(bytes <= 2 ** 29, name);
  }
}

const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const parsers = { stringFromBytes: (bytes) => bytes && utf8.decode(bytes) };

/** The rows of a row group, as objects of the columns `names`. */
async function readRows(data, metadata, group, names, name) {
  const file = data.buffer.slice(data.byteOffset, data.byteOffset + data.length);
  const rowStart = sum(metadata.row_groups.slice(0, group).map((g) => Number(g.num_rows)));
  const rowEnd = rowStart + Number(metadata.row_groups[group].num_rows);
  const how = { metadata, rowStart, rowEnd, columns: names, compressors, parsers };
  try {
    return await parquetReadObjects({ file, ...how });
  } catch {
    throw new Refused(name);
  }
}

/** The footer of a Parquet file. */
function footer(data, name) {
  try {
    return parquetMetadata(data.buffer.slice(data.byteOffset, data.byteOffset + data.length));
  } catch {
    throw new Refused(name);
  }
}

/** The packs of a shard, checked, with the ids that readers see. */
async function readShard(folder, shard, m) {
  const data = stored(folder, shard), groups = shard.row_groups, packs = [];
  need(sha256(data.subarray(-shard.footer_bytes)) === shard.footer_sha256, "bytes");
  need(shard.footer_bytes === data.readUInt32LE(data.length - 8) + 8, "bytes");
  const metadata = footer(data, "encoding");
  const types = { input_ids: [I32], labels: [I32], reward: [F32] };
  Object.assign(types, { lengths: [I32], seq_boundaries: [I32] });
  if (m.layout === "shared_prefix") types.parent_distances = [I32];
  types.example_ids = [I64];
  if (KINDS[m.kind] === null) types.num_responses = [I32];
  const carry = known(m.carry, (type) => SCALARS[type]);
  for (const n of Object.keys(m.carry)) types[n] = n in carry ? [SCALARS[carry[n]]] : null;
  const texts = { format_version: "1", kind: m.kind, layout: m.layout, features: "" };
  const keys = Object.keys(texts).map((n) => [`packstore.${n}`, texts[n]]);
  checkSchema(metadata, types, Object.fromEntries(keys), "schema");
  need(metadata.row_groups.length === groups.rows.length, "counts");
  const names = Object.keys(types).filter((n) => types[n] !== null);
  checkChunks(metadata, names, "encoding");
  for (const [g, { columns }] of metadata.row_groups.entries()) {
    const end = start(columns.at(-1)) + size(columns.at(-1));
    const crc = crc32(data.subarray(start(columns[0]), end));
    need(crc === parseInt(groups.crc32.slice(8 * g, 8 * g + 8), 16), "bytes");
    const rows = await readRows(data, metadata, g, names, "encoding");
    for (const pack of rows) {
      checkPack(pack, m);
      const base = BigInt(shard.example_id_base);
      need(pack.example_ids.every((i) => i >= 0n && i + base < 2n ** 63n), "example-ids");
      pack.example_ids = pack.example_ids.map((i) => i + base);
    }
    need(rows.length === groups.rows[g], "counts");
    need(sum(rows.map((p) => p.example_ids.length)) === groups.examples[g], "counts");
    need(sum(rows.map((p) => p.input_ids.length)) === groups.tokens[g], "counts");
    need(most(rows.flatMap((p) => steps(p.seq_boundaries))) === groups.longest[g], "counts");
    packs.push(...rows);
  }
  return packs;
}

// --------------------------------- packs (sections 3 to 5, 7 and 9), pack index (annex D)

/** K of each example. */
function responses(pack, kind) {
  return pack.num_responses ?? pack.example_ids.map(() => KINDS[kind]);
}

/** Every rule. */
function checkPack(pack, m) {
  const { input_ids: ids, labels, seq_boundaries: b, lengths, reward } = pack;
  const tokens = ids.length, examples = pack.example_ids.length;
  need(labels.length === tokens && lengths.length === reward.length, "columns-agree");
  for (const n of Object.keys(m.carry))
    need(!(n in pack) || pack[n].length === examples, "columns-agree");
  need(b.length === lengths.length + 1, "boundaries-count");
  if (m.layout === "shared_prefix")
    need(pack.parent_distances.length === lengths.length, "parents-count");
  need(b[0] === 0 && b.at(-1) === tokens, "boundaries-span");
  need(b.every((edge) => 0 <= edge && edge <= tokens), "boundaries-span");
  const segments = steps(b), counts = responses(pack, m.kind);
  need(segments.every((n) => n > 0), "segments-nonempty");
  need(counts.length === examples && counts.every((k) => k >= 1), "responses-count");
  need(sum(counts) === lengths.length, "responses-count");
  need(examples > 0, "pack-nonempty");
  need(tokens <= m.pack_size, "pack-size");
  const top = m.provenance.tokenizer?.vocab_size ?? 2 ** 31 - 1;
  need(ids.every((i) => 0 <= i && i < top), "ids-range");
  need(labels.every((x, t) => x === ids[t] || x === -100), "labels-are-ids");
  need(segments.every((_, i) => labels[b[i]] === -100), "first-unsupervised");
  for (const i of segments.keys())
    need(labels.slice(b[i], b[i + 1]).some((x) => x !== -100), "supervised-nonempty");
  need(reward.every(Number.isFinite), "reward-finite");
  const offsets = offsetsOf(pack);
  if (m.layout === "concat") need(offsets.every((n) => n === 0), "lengths-concat");
  else checkParents(pack, offsets);
  need(sum(lengths) <= m.statistics.most_keys, "pack-keys");
}

/** The number of leading tokens that each segment leaves out. */
function offsetsOf({ lengths, seq_boundaries: b }) {
  return steps(b).map((n, i) => lengths[i] - n);
}

/** The rules of layout `shared_prefix`. */
function checkParents({ input_ids: ids, seq_boundaries: b, lengths, ...pack }, offsets) {
  for (const [i, distance] of pack.parent_distances.entries()) {
    need(0 <= distance && distance <= i, "parent-earlier");
    need((distance === 0) === (offsets[i] === 0), "prefix-whole");
    if (distance === 0) continue;
    const parent = i - distance;
    need(0 <= offsets[i] && offsets[i] < lengths[parent], "prefix-inside");
    need(offsets[i] > offsets[parent], "parent-stores");
    // The parent stores the token behind those that its child leaves out.
    const repeated = b[parent] + offsets[i] - offsets[parent];
    need(ids[repeated] === ids[b[i]], "prefix-repeats");
  }
}

/**
 * The derived values of section 5. The keys of a sequence are the places of its tokens in the
 * pack: those that its segment leaves out are the first keys of its parent.
 */
function derive(pack) {
  const { seq_boundaries: b, lengths } = pack, segments = steps(b), offsets = offsetsOf(pack);
  const keys = [], sequenceLabels = [], ends = [0];
  for (const [i, offset] of offsets.entries()) {
    const leftOut = offset ? keys[i - pack.parent_distances[i]].slice(0, offset) : [];
    keys.push([...leftOut, ...range(b[i], b[i + 1])]);
    sequenceLabels.push(...leftOut.map(() => -100), ...pack.labels.slice(b[i], b[i + 1]));
    ends.push(ends[i] + lengths[i]);
  }
  return {
    segment_offsets: offsets,
    segment_ids: segments.flatMap((n, i) => Array(n).fill(i)),
    position_ids: segments.flatMap((_, i) => range(offsets[i], lengths[i])),
    cu_seqlens: b,
    cu_seqlens_k: ends,
    kv_index: keys.flat(),
    sequence_labels: sequenceLabels,
    max_seqlen: most(segments),
    max_seqlen_k: most(lengths),
  };
}

/** What the pack index tells of a pack. */
function sizes(pack, kind) {
  const { seq_boundaries: b, labels, lengths, reward } = pack, examples = pack.example_ids.length;
  const squares = sum(steps(b).map((n, i) => n * (2 * lengths[i] - n)));
  const out = { tokens: labels.length, examples, squares };
  for (const name of COUNTS) out[name] = kind === "preference" && name !== COUNTS[0] ? examples : 0;
  let s = 0;
  for (const k of responses(pack, kind)) {
    const rewards = reward.slice(s, s + k), top = rewards.reduce((a, r) => Math.max(a, r));
    const best = s + (kind === "scored" ? rewards.indexOf(top) : 0);
    out.best_tokens += labels.slice(b[best], b[best + 1]).filter((x) => x !== -100).length;
    if (kind === "scored") {
      out.pairs_best_vs_rest += rewards.filter((r) => r < top).length;
      out.pairs_all += sum(rewards.map((x) => rewards.filter((y) => x < y).length));
      out.pairs_adjacent += new Set(rewards).size - 1;
    }
    s += k;
  }
  return out;
}

/** Compares the pack index with the packs of each shard. */
async function checkIndex(folder, m, shards) {
  const data = stored(folder, m.pack_index, "pack-index"), metadata = footer(data, "pack-index");
  const found = metadata.schema.slice(1).filter((e) => e.repetition_type !== "REPEATED");
  const told = found.map((e) => [e.name, e.type, e.repetition_type].join(" "));
  const first = [`tokens ${I32}`, `examples ${I32}`, `squares ${I64}`].map((t) => `${t} REQUIRED`);
  const more = COUNTS.map((name) => `${name} ${I64} OPTIONAL`);
  need(same(told.slice(0, 3), first), "pack-index");
  const counted = same(told.slice(3, 7), more);
  need(counted || !found.some((e) => COUNTS.includes(e.name)), "pack-index");
  need(metadata.row_groups.length === shards.length, "pack-index");
  const names = found.slice(0, counted ? 7 : 3).map((e) => e.name);
  checkChunks(metadata, names, "pack-index");
  for (const [g, packs] of shards.entries()) {
    const rows = await readRows(data, metadata, g, names, "pack-index");
    need(rows.length === packs.length, "pack-index");
    const real = packs.map((pack) => sizes(pack, m.kind));
    for (const name of names) {
      const nobody = COUNTS.includes(name) && rows.every((row) => row[name] == null);
      const right = rows.every((row, i) => Number(row[name] ?? NaN) === real[i][name]);
      need(nobody || right, "pack-index");
    }
  }
}

/** Compares counts and statistics with the packs. */
function checkCounts(m, shards) {
  for (const [i, own] of shards.entries()) {
    const { sequences, supervised_tokens: supervised } = m.shards[i];
    need(sequences === sum(own.map((p) => p.lengths.length)), "counts");
    const labels = own.flatMap((p) => p.labels);
    need(supervised === labels.filter((x) => x !== -100).length, "counts");
  }
  const packs = shards.flat(), n = Math.max(packs.length, 1), s = m.statistics;
  const lengths = packs.flatMap((p) => p.lengths);
  const examples = packs.map((p) => p.example_ids.length);
  const tokens = packs.map((p) => p.input_ids.length), spread = s.examples_per_pack;
  const least = (values) => (values.length ? values.reduce((a, b) => Math.min(a, b)) : 0);
  need(m.totals.logical_tokens === sum(lengths), "counts");
  need(Math.abs(s.fill_rate - sum(tokens) / (n * m.pack_size)) <= 1e-6, "counts");
  need(Math.abs(spread.mean - sum(examples) / n) <= 1e-6, "counts");
  need(spread.min === least(examples) && spread.max === most(examples), "counts");
  need(s.longest_sequence === most(lengths) && s.shortest_pack === least(tokens), "counts");
  need(s.most_segments === most(packs.map((p) => p.lengths.length)), "counts");
  need(s.most_keys === most(packs.map((p) => sum(p.lengths))), "counts");
  const targets = packs.map((p) => p.labels.filter((x) => x !== -100).length);
  need(s.most_targets === most(targets), "counts");
  const histogram = {};
  for (const length of lengths) {
    const bucket = 2 ** Math.floor(Math.log2(length));
    histogram[bucket] = (histogram[bucket] ?? 0) + 1;
  }
  const names = Object.keys(s.length_histogram);
  need(names.length === Object.keys(histogram).length, "counts");
  need(names.every((name) => s.length_histogram[name] === histogram[name]), "counts");
}

// ------------------------------------------------------------------ side datasets (annex E)

/** The lineage of a dataset: its fingerprint if the manifest tells none. */
function lineageOf(m) {
  const texts = [1, m.kind, m.layout, m.pack_size, m.file_format, ...m.features];
  texts.push(...m.shards.map((s) => `${s.sha256}+${s.example_id_base}`));
  return m.provenance.lineage ?? sha256(texts.join("\n"));
}

/** The runs of parts: first, end (exclusive) and lineage; one part has two. */
function runsOf(parts) {
  const runs = [];
  for (let first = 0; first < parts.length; first++)
    for (let end = first + 1; end <= parts.length; end++) {
      const run = parts.slice(first, end).map((p) => [p.lineage, p.sources]);
      if (run.length === 1) runs.push([first, end, run[0][0]]);
      runs.push([first, end, sha256(JSON.stringify({ parts: run }))]);
    }
  return runs;
}

/** The ids that a side dataset covers: first, and end (exclusive). */
function spansOf(side, m) {
  if (side.lineage === lineageOf(m)) return [[0n, 2n ** 63n]];
  const parts = m.provenance.combined_from ?? [], spans = [];
  const at = (n) => BigInt(sum(parts.slice(0, n).map((p) => p.sources))) << 40n;
  let done = 0;
  for (const [first, end, lineage] of runsOf(parts)) {
    if (lineage !== side.lineage || first < done) continue;
    spans.push([at(first), at(end)]);
    done = end;
  }
  return spans;
}

/** K of a type of the top k; 0 for any other type. */
function kOf(type) {
  const k = Number(/^token<top([1-9]\d{0,3}),(float16|uint8)>$/.exec(type)?.[1] ?? 0);
  return k <= 1024 ? k : 0;
}

/** The form of a column of side data in Parquet; undefined if this reader does not know it. */
function sideForm(type) {
  return kOf(type) ? TOP[type.endsWith(",uint8>") ? "uint8" : "float16"] : SIDE[type];
}

/** A value of a row, checked; log-probabilities of 8 bits become numbers. */
function sideValue(value, type) {
  const k = kOf(type), rule = type.startsWith("token<") ? "token-finite" : "side";
  if (type in NUMBERS) need(value.every(Number.isFinite), rule);
  if (!k) return value;
  const { ids, scale } = value;
  let { logps } = value;
  if (scale !== undefined) {
    need(scale > 0 && Number.isFinite(scale), "top-scale");
    let sum = 0; // of the gaps of a token up to each
    logps = logps.map((gap, i) => Math.fround(-scale * (sum = i % k ? sum + gap : gap)));
  }
  need(logps.every(Number.isFinite), "token-finite");
  need(ids.length === logps.length && ids.length % k === 0, "token-count");
  need(ids.every((i) => i >= 0), "top-ids");
  need(logps.every((x) => x <= 0), "top-sign");
  for (let first = 0; first < ids.length; first += k) {
    need(new Set(ids.slice(first, first + k)).size === k, "top-distinct");
    need(steps(logps.slice(first, first + k)).every((step) => step <= 0), "top-order");
  }
  return { ids, logps };
}

/** The known columns of a side dataset, its rows by id, and the ids that it covers. */
async function readSide(folder, m) {
  const side = checked(folder, "side", checkSide), rows = new Map();
  const columns = known(side.columns, sideForm), covered = spansOf(side, m);
  need((side.columns.ref_logps ?? "list<float32>") === "list<float32>", "side");
  need(side.kind === m.kind && covered.length > 0, "side");
  const types = { example_ids: I64 };
  for (const n of Object.keys(side.columns)) types[n] = n in columns ? sideForm(columns[n]) : null;
  for (const shard of side.shards) {
    const data = stored(folder, shard, "side"), metadata = footer(data, "side");
    const names = ["example_ids", ...Object.keys(columns)];
    checkSchema(metadata, types, { "packstore.side_version": "1" }, "side");
    checkChunks(metadata, names, "side");
    need(Number(metadata.num_rows) === shard.rows, "side");
    for (const g of metadata.row_groups.keys())
      for (const row of await readRows(data, metadata, g, names, "side")) {
        need(!rows.has(row.example_ids), "side");
        for (const n of Object.keys(columns)) row[n] = sideValue(row[n], columns[n]);
        rows.set(row.example_ids, row);
      }
  }
  return { columns, rows, covered };
}

/** The side dataset in a folder, or the values of parts there. */
async function readSides(folder, m) {
  if (existsSync(join(folder, "_packstore"))) return [await readSide(folder, m)];
  const isThere = (lineage) => existsSync(join(folder, lineage));
  let lineages = [lineageOf(m)];
  if (!isThere(lineages[0])) {
    const parts = m.provenance.combined_from ?? [];
    lineages = parts.map((part) => part.lineage);
    if (!lineages.every(isThere)) lineages = runsOf(parts).map(([, , lineage]) => lineage);
  }
  const names = [...new Set(lineages)].filter(isThere), sides = [];
  need(names.length > 0, "side");
  for (const name of names) sides.push(await readSide(join(folder, name), m));
  return sides;
}

/** The sequences and the supervised tokens of each example of a pack. */
function countsOf(pack, kind) {
  const { seq_boundaries: b, labels } = pack;
  let sequence = 0;
  return responses(pack, kind).map((sequences) => {
    const own = labels.slice(b[sequence], b[(sequence += sequences)]);
    return { sequences, targets: own.filter((x) => x !== -100).length };
  });
}

/** Lists of an example have a value for each sequence, or for each supervised token. */
function checkCount(value, type, { sequences, targets }) {
  if (type === "list<float32>") need(value.length === sequences, "side");
  else if (type in NUMBERS) need(value.length === targets, "token-count");
  else if (kOf(type)) need(value.ids.length === kOf(type) * targets, "token-count");
}

/** The values of the examples of a pack; lists are joined. */
function endToEnd(values, type) {
  const all = (name) => values.flatMap((value) => value[name]);
  if (kOf(type)) return { ids: all("ids"), logps: all("logps") };
  return type in NUMBERS ? values.flat() : values;
}

/** Puts the columns of side datasets into packs, under `side`. */
function joinSides(packs, sides, kind) {
  for (const name of new Set(sides.flatMap((side) => Object.keys(side.columns)))) {
    const owners = sides.filter((side) => name in side.columns), type = owners[0].columns[name];
    need(owners.every((side) => side.columns[name] === type), "side");
    for (const pack of packs) {
      const counts = countsOf(pack, kind), values = [];
      for (const [e, id] of pack.example_ids.entries()) {
        const found = owners.flatMap(({ rows, covered }) =>
          covered
            .filter(([first, end]) => first <= id && id < end)
            .map(([first]) => rows.get(id - first)?.[name]),
        );
        need(found.length === 1 && found[0] !== undefined, "side");
        checkCount(found[0], type, counts[e]);
        values.push(found[0]);
      }
      (pack.side ??= {})[name] = endToEnd(values, type);
    }
  }
}

/** All of a dataset, checked: packs with derived values and the columns of side datasets. */
async function read(folder, folders) {
  const m = checked(folder, "manifest", checkManifest);
  for (const file of m.further_files ?? []) stored(folder, file);
  const shards = [];
  for (const shard of m.shards) shards.push(await readShard(folder, shard, m));
  const packs = shards.flat(), ids = packs.flatMap((pack) => pack.example_ids);
  need(new Set(ids).size === ids.length, "example-ids");
  checkCounts(m, shards);
  if (m.pack_index) await checkIndex(folder, m, shards);
  const sides = [];
  for (const path of folders) sides.push(...(await readSides(path, m)));
  joinSides(packs, sides, m.kind);
  return { packs: packs.map((pack) => ({ ...pack, ...derive(pack) })) };
}

/** JSON: BigInt as digits, numbers that are not finite as texts. */
function toJson(value) {
  if (typeof value === "bigint") return String(value);
  if (typeof value === "number" && !Number.isFinite(value)) return `"${value}"`;
  if (Array.isArray(value)) return `[${value.map(toJson).join(",")}]`;
  if (!isObject(value)) return JSON.stringify(value);
  const members = Object.entries(value).map(([n, v]) => `${JSON.stringify(n)}:${toJson(v)}`);
  return `{${members.join(",")}}`;
}

try {
  const [folder, ...sides] = process.argv.slice(2);
  console.log(toJson(await read(folder, sides)));
} catch (error) {
  if (!(error instanceof Refused)) throw error;
  console.log(JSON.stringify({ refused: error.message }));
}
