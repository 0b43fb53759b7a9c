"""Fuzz targets: parsers of foreign bytes, and the changes to real files that they get.

An input is a pure function of (target, number), so a number alone reproduces a crash.
`fuzz.py` runs many of them in child processes; `tests/fuzz` runs a few, and all that were kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import io
import random
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packstore.io.dataset.pack_index import PackIndex
from packstore.io.dataset.reader import ShardReader
from packstore.io.inputs.files import HashedStream, decompressed
from packstore.io.inputs.pieces import FORMATS, ReadOptions
from packstore.io.manifest.manifest import Manifest
from packstore.io.manifest.side_manifest import SideManifest
from packstore.io.manifest.stored_file import StoredFile
from packstore.io.shards.parquet import byte_range
from packstore.io.shards.shard import FileHashes
from packstore.io.store.location import Location
from packstore.tokenizer.chat.template import ChatTemplate

GOLDEN = Path(__file__).parents[2] / "schemas" / "golden"
CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"
OPTIONS = ReadOptions(block_bytes=1 << 16, json_columns=frozenset({"reward"}))
RECORDS = (
    b'{"prompt": "What is 2 + 2?", "chosen": "4", "rejected": "five \\u00e9", "reward": 1.5}\n'
    b'{"prompt": [{"role": "user", "content": "hi"}], "chosen": "a", "rejected": null}\n'
) * 3
CSV = b'prompt,chosen,rejected,reward\n"a ""b""",c,d,1\n"line\nend",c,d,\n' * 3
TEMPLATE = (
    b"{% set ns = namespace(x='') %}{% for m in messages %}{% if loop.first and m.role == 'user' %}"
    b"{{ '<|' + m.role + '|>' ~ m['content'] | trim | replace('a', 'b') }}{% else %}{% set ns.x = "
    b"ns.x * 2 %}{% endif %}{% endfor %}{% macro f(a, b=[1]) %}{{ a.split()[0] | tojson }}{{ b | "
    b"join(', ') }}{% endmacro %}{{ f('x y') ~ '%5d' % 7 }}{{ range(9) | list | map('string') "
    b"| join }}{{ {'k': (1, 2)}.items() | list }}{% if not x is defined %}{{ 2 ** 3 }}{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Target:
    """A parser: `run` takes bytes, and may raise nothing but a PackstoreError."""

    run: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    text: bool = False


def stored(name: str) -> Path:
    return GOLDEN / "v1" / name


@functools.cache
def manifest_of(name: str) -> Manifest:
    path = stored(name) / "_packstore" / "manifest-000001.json"
    return Manifest.from_json(path.read_bytes())


@functools.cache
def ranges(data: bytes) -> list[tuple[int, int]]:
    """Finds the row groups of a Parquet file."""
    found = pq.read_metadata(io.BytesIO(data))
    return [byte_range(found.row_group(i), len(data)) for i in range(found.num_row_groups)]


def shard_files(name: str) -> list[bytes]:
    manifest = manifest_of(name)
    return [(stored(name) / s.path).read_bytes() for s in manifest.shards[:1]]


def read_shard(data: bytes, name: str, honest: bool) -> None:
    """Reads it with the hashes of the golden manifest, or with those of a dishonest one."""
    manifest = manifest_of(name)
    shard = manifest.shards[0]
    if not honest:
        hashes = dataclasses.asdict(FileHashes.of(io.BytesIO(data)))
        groups = shard.row_groups
        if manifest.file_format == "parquet":
            good = shard_files(name)[0]
            crcs = [zlib.crc32(data[a:b]) for a, b in ranges(good)]
            groups = dataclasses.replace(groups, crc32=np.array(crcs, np.int64))
        shard = dataclasses.replace(shard, row_groups=groups, **hashes)
    stream: Any = SimpleNamespace(read=lambda start, stop: data[start:stop])
    reader = ShardReader(Location("memory://fuzz"), manifest, shard, stream)
    for group in range(len(shard.row_groups)):
        reader.read_packs(group)
        reader.decode(group, reader.fetch(group))


def read_index(data: bytes, honest: bool) -> None:
    manifest = manifest_of("preference-concat-plain")
    info = manifest.pack_index
    assert info is not None
    place = Location("memory://fuzz/index")
    if not honest:
        sha256 = hashlib.sha256(data).hexdigest()
        info = StoredFile(path=info.path, bytes=len(data), sha256=sha256)
    with place.filesystem()[0].open(f"/fuzz/index/{info.path}", "wb") as file:
        file.write(data)
    index = PackIndex(place, manifest, info)
    for number in range(len(manifest.shards)):
        index.shard(number)


def read_input(data: bytes, form: str, compression: str | None = None) -> None:
    stream: Any = io.BytesIO(data)
    if compression:
        stream = decompressed(HashedStream(stream), compression, "fuzz")
    load = FORMATS.load(form)
    for piece in load.read(stream, "fuzz", OPTIONS):
        load.parse(piece.payload, "fuzz", piece.first)


def render(data: bytes) -> None:
    from packstore.tokenizer.refusals import Refused

    talk: list[dict[str, Any]] = [{"role": "user", "content": "a b"}, {"role": "x", "content": 1}]
    with contextlib.suppress(Refused):  # becomes a counted drop
        ChatTemplate(data.decode("utf-8", "replace"), {"bos_token": "<s>"}).render(talk)


def tokenize(data: bytes) -> None:
    from packstore.tokenizer.engines.tokenizers import TokenizersEngine

    engine = TokenizersEngine(data, "fuzz")
    engine.register(["<s>"])
    for control in (True, False):
        engine.encode_batch(["hello, world <s> 你好", "", "a" * 99], control=control)
    engine.decode([0, 1, 2])
    engine.wrapping()
    engine.vocab_size()


def tokenizer_seeds() -> list[bytes]:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    vocab = {t: i for i, t in enumerate(["<s>", "<unk>", *"helowrda,", "he", "hel", "Ġ"])}
    merges = [("h", "e"), ("he", "l")]
    out = []
    for model in (models.BPE(vocab, merges, unk_token="<unk>"), models.WordLevel(vocab, "<unk>")):
        made = Tokenizer(model)
        made.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace(" ", "Ġ"), normalizers.Lowercase()]
        )
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(",", "isolated"), pre_tokenizers.ByteLevel()]
        )
        made.decoder = decoders.ByteLevel()
        made.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
        made.add_special_tokens(["<s>"])
        out.append(made.to_str().encode())
    return out


def tables() -> Iterator[pa.Table]:
    flat = {"prompt": "What?", "chosen": "4", "rejected": "five", "reward": 1.5}
    yield pa.Table.from_pylist([flat] * 40)
    talk = {"messages": [{"role": "user", "content": "hi"}], "scores": [1.0, 2.0]}
    yield pa.Table.from_pylist([talk] * 9)


def parquet_seeds() -> list[bytes]:
    out = []
    for table in tables():
        for how in ({}, {"compression": "zstd"}, {"use_dictionary": False, "version": "1.0"}):
            sink = io.BytesIO()
            pq.write_table(table, sink, **how)
            out.append(sink.getvalue())
    return out


def arrow_seeds() -> list[bytes]:
    out = []
    for table in tables():
        for make in (pa.ipc.new_file, pa.ipc.new_stream):
            for codec in (None, "lz4", "zstd"):
                sink = io.BytesIO()
                options = pa.ipc.IpcWriteOptions(compression=codec)
                with make(sink, table.schema, options=options) as writer:
                    writer.write_table(table)
                out.append(sink.getvalue())
    return out


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, "zstd", asbytes=True))


def files(pattern: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(GOLDEN.glob(pattern))]


PARQUET, ARROW = "preference-concat-plain", "preference-concat-plain-arrow"
SPANS = "ranked-shared_prefix-spans"
TARGETS: dict[str, Target] = {
    "manifest": Target(
        Manifest.from_json, lambda: files("v1/*/_packstore/manifest-*.json"), text=True
    ),
    "side_manifest": Target(
        SideManifest.from_json, lambda: files("side-v1/*/_packstore/side-*.json"), text=True
    ),
    "shard_parquet": Target(lambda d: read_shard(d, PARQUET, True), lambda: shard_files(PARQUET)),
    "shard_arrow": Target(lambda d: read_shard(d, ARROW, True), lambda: shard_files(ARROW)),
    "pack_index": Target(lambda d: read_index(d, True), lambda: files(f"v1/{PARQUET}/*/*.index")),
    "dishonest_parquet": Target(
        lambda d: read_shard(d, PARQUET, False), lambda: shard_files(PARQUET)
    ),
    "dishonest_spans": Target(lambda d: read_shard(d, SPANS, False), lambda: shard_files(SPANS)),
    "dishonest_arrow": Target(lambda d: read_shard(d, ARROW, False), lambda: shard_files(ARROW)),
    "dishonest_index": Target(
        lambda d: read_index(d, False), lambda: files(f"v1/{PARQUET}/*/*.index")
    ),
    "jsonl": Target(lambda d: read_input(d, "jsonl"), lambda: [RECORDS], text=True),
    "json": Target(
        lambda d: read_input(d, "json"),
        lambda: [b"[" + b",".join(RECORDS.splitlines()) + b"]", RECORDS],
        text=True,
    ),
    "csv": Target(lambda d: read_input(d, "csv"), lambda: [CSV], text=True),
    "gzip": Target(
        lambda d: read_input(d, "jsonl", "gzip"), lambda: [gzip.compress(RECORDS, mtime=0)]
    ),
    "zstd": Target(lambda d: read_input(d, "jsonl", "zstd"), lambda: [zstd(RECORDS)]),
    "parquet": Target(lambda d: read_input(d, "parquet"), parquet_seeds),
    "arrow": Target(lambda d: read_input(d, "arrow"), arrow_seeds),
    "tokenizer": Target(tokenize, tokenizer_seeds, text=True),
    "template": Target(render, lambda: [TEMPLATE], text=True),
}
_NUMBERS = [0, 1, -1, 127, 255, 1 << 15, (1 << 31) - 1, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63]
_WORDS = [
    *(str(n).encode() for n in _NUMBERS),
    *(b"1e400", b"-0.5", b"NaN", b"null", b"true", b'""', b"[]", b"{}", b'"\\ud800"', b"\xff"),
    *(b"[" * 2000, b'{"a":' * 2000, b"9" * 5000, b'"../../etc/passwd"', b'"/etc/passwd"', b"\0"),
    *(b'"file:///etc/passwd"', b'"' + b"x" * 5000 + b'"', b"\r", b"\n", b",", b'"', b"{{", b"%}"),
]
_TOKEN = re.compile(rb'-?\d+(\.\d+)?|"[^"]*"|[A-Za-z_]+|[\[\]{}:,|%()~*+]')


def make_input(name: str, number: int) -> bytes:
    """Input `number` of a target."""
    rng = random.Random(f"{name} {number}")
    seeds = _seeds(name)
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        _change(data, rng, TARGETS[name].text, seeds)
    return bytes(data)


@functools.cache
def _seeds(name: str) -> list[bytes]:
    return TARGETS[name].seeds()


def _change(data: bytearray, rng: random.Random, text: bool, seeds: list[bytes]) -> None:
    if not data:
        data += rng.randbytes(8)
        return
    at = rng.randrange(len(data))
    if not text and rng.random() < 0.3:
        at = max(len(data) - 1 - int(rng.expovariate(1 / 300)), 0)  # the footer
    how = rng.randrange(9)
    if text and how < 5:
        tokens = list(_TOKEN.finditer(bytes(data)))
        if tokens:
            start, end = rng.choice(tokens).span()
            other = rng.choice(tokens).group()
            data[start:end] = rng.choice(_WORDS) if rng.random() < 0.6 else other
    elif how < 3:
        data[at] ^= 1 << rng.randrange(8)
    elif how == 3:
        data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    elif how == 4:
        width = rng.choice((2, 4, 8))
        value = rng.choice(_NUMBERS) & ((1 << 8 * width) - 1)
        data[at : at + width] = value.to_bytes(width, "little")
    elif how == 5:
        del data[at : at + rng.choice((1, 2, 8, 100))]
    elif how == 6:
        data[at:at] = rng.randbytes(rng.choice((1, 2, 8, 100)))
    elif how == 7:
        other_seed = rng.choice(seeds)
        begin = rng.randrange(len(other_seed))
        data[at : at + 32] = other_seed[begin : begin + rng.choice((4, 32, 400))]
    else:
        del data[at:]
