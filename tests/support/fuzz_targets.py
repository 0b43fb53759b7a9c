"""Fuzz targets: parsers of foreign bytes, and the changes to real files that they get.

Hashes fit what is changed: what they do not fit is refused whatever it is
(test_flips.py), and manifests are tried with every value (tests/schemas).

An input is a pure function of (target, number), so a number alone reproduces a crash.
`fuzz.py` runs many of them in child processes; `tests/fuzz` runs a few, and all that
were kept.
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from forged import MANIFEST, fit, replace_shard, sealed

import packstore

GOLDEN = Path(__file__).parents[2] / "schemas" / "conformance" / "v1"
CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"
RECORDS = (
    b'{"prompt": "What is 2 + 2?", "chosen": "4", "rejected": "five \\u00e9", '
    b'"reward": 1.5}\n'
    b'{"prompt": [{"role": "user", "content": "hi"}], "chosen": "a", "rejected": '
    b"null}\n"
) * 3
CSV = b'prompt,chosen,rejected,reward\n"a ""b""",c,d,1\n"line\nend",c,d,\n' * 3
TEMPLATE = (
    b"{% set ns = namespace(x='') %}{% for m in messages %}{% if loop.first and m.role "
    b"== 'user' %}"
    b"{{ '<|' + m.role + '|>' ~ m['content'] | trim | replace('a', 'b') }}{% else %}{% "
    b"set ns.x = "
    b"ns.x * 2 %}{% endif %}{% endfor %}{% macro f(a, b=[1]) %}{{ a.split()[0] | "
    b"tojson }}{{ b | "
    b"join(', ') }}{% endmacro %}{{ f('x y') ~ '%5d' % 7 }}{{ range(9) | list | "
    b"map('string') "
    b"| join }}{{ {'k': (1, 2)}.items() | list }}{% if not x is defined %}{{ 2 ** 3 "
    b"}}{% endif %}"
)


@dataclass(frozen=True)
class Target:
    """A parser: `run` takes bytes, and may raise nothing but a PackstoreError."""

    run: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    text: bool = False


@functools.cache
def folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fuzz-")


def copied(name: str) -> Path:
    """A copy of a golden dataset, the same for every input."""
    path = Path(folder().name, name)
    shutil.copytree(GOLDEN / name, path, dirs_exist_ok=True)
    return path


def read_shard(data: bytes, name: str) -> None:
    """Reads it with hashes that fit it."""
    path = copied(f"datasets/{name}")
    shard = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["shards"][0]
    replace_shard(path, data, shard["row_groups"]["crc32"])
    list(packstore.open(path).iter_packs())


def read_index(data: bytes) -> None:
    path = copied(f"datasets/{PARQUET}")
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    (path / manifest["pack_index"]["path"]).write_bytes(data)
    fit(manifest["pack_index"], data)
    (path / MANIFEST).write_bytes(sealed(manifest))
    _ = packstore.open(path).pack_index


def read_input(data: bytes, suffix: str) -> None:
    """Reads and tokenizes it; records that are none are counted."""
    path = Path(folder().name, f"x.{suffix}")
    path.write_bytes(data)
    packstore.doctor(path, tokenizer(), num_workers=0)


@functools.cache
def tokenizer() -> Path:
    path = Path(folder().name, "tokenizer.json")
    path.write_bytes(tokenizer_seeds()[0])
    return path


def render(data: bytes) -> None:
    path = Path(folder().name, "x.jinja")
    path.write_bytes(data)
    talk = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "he"}]
    records = [{"messages": talk}, {"messages": [talk[0], {"role": "x", "content": 1}]}]
    packstore.doctor(records, tokenizer(), chat_template=str(path), num_workers=0)


def tokenize(data: bytes) -> None:
    path = Path(folder().name, "fuzzed.json")
    path.write_bytes(data)
    pair = {"prompt": "hello, world <s> 你好", "chosen": "a" * 99, "rejected": " "}
    packstore.doctor([pair] * 9, path, num_workers=0)


def tokenizer_seeds() -> list[bytes]:
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
    )

    vocab = {
        t: i for i, t in enumerate(["<s>", "<unk>", *"helowrda,", "he", "hel", "Ġ"])
    }
    merges = [("h", "e"), ("he", "l")]
    out = []
    for model in (
        models.BPE(vocab, merges, unk_token="<unk>"),
        models.WordLevel(vocab, "<unk>"),
    ):
        made = Tokenizer(model)
        made.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace(" ", "Ġ"), normalizers.Lowercase()]
        )
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(",", "isolated"), pre_tokenizers.ByteLevel()]
        )
        made.decoder = decoders.ByteLevel()
        made.post_processor = processors.TemplateProcessing(
            "<s> $A", None, [("<s>", 0)]
        )
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
        for how in (
            {},
            {"compression": "zstd"},
            {"use_dictionary": False, "version": "1.0"},
        ):
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


def shard_files(name: str) -> list[bytes]:
    return files(f"datasets/{name}/data/*")[:1]


PARQUET, ARROW = "preference-concat", "preference-concat-arrow"
GROUPS = "scored-shared_prefix"
TARGETS: dict[str, Target] = {
    "dishonest_parquet": Target(
        lambda d: read_shard(d, PARQUET), lambda: shard_files(PARQUET)
    ),
    "dishonest_groups": Target(
        lambda d: read_shard(d, GROUPS), lambda: shard_files(GROUPS)
    ),
    "dishonest_arrow": Target(
        lambda d: read_shard(d, ARROW), lambda: shard_files(ARROW)
    ),
    "dishonest_index": Target(
        read_index, lambda: files(f"datasets/{PARQUET}/*/*.index")
    ),
    "jsonl": Target(lambda d: read_input(d, "jsonl"), lambda: [RECORDS], text=True),
    "json": Target(
        lambda d: read_input(d, "json"),
        lambda: [b"[" + b",".join(RECORDS.splitlines()) + b"]", RECORDS],
        text=True,
    ),
    "csv": Target(lambda d: read_input(d, "csv"), lambda: [CSV], text=True),
    "gzip": Target(
        lambda d: read_input(d, "jsonl.gz"), lambda: [gzip.compress(RECORDS, mtime=0)]
    ),
    "zstd": Target(lambda d: read_input(d, "jsonl.zst"), lambda: [zstd(RECORDS)]),
    "parquet": Target(lambda d: read_input(d, "parquet"), parquet_seeds),
    "arrow": Target(lambda d: read_input(d, "arrow"), arrow_seeds),
    "tokenizer": Target(tokenize, tokenizer_seeds, text=True),
    "template": Target(render, lambda: [TEMPLATE], text=True),
}
_NUMBERS = [
    0,
    1,
    -1,
    127,
    255,
    1 << 15,
    (1 << 31) - 1,
    1 << 31,
    1 << 40,
    (1 << 63) - 1,
    1 << 63,
]
_WORDS = [
    *(str(n).encode() for n in _NUMBERS),
    *(
        b"1e400",
        b"-0.5",
        b"NaN",
        b"null",
        b"true",
        b'""',
        b"[]",
        b"{}",
        b'"\\ud800"',
        b"\xff",
    ),
    *(
        b"[" * 2000,
        b'{"a":' * 2000,
        b"9" * 5000,
        b'"../../etc/passwd"',
        b'"/etc/passwd"',
        b"\0",
    ),
    *(
        b'"file:///etc/passwd"',
        b'"' + b"x" * 5000 + b'"',
        b"\r",
        b"\n",
        b",",
        b'"',
        b"{{",
        b"%}",
    ),
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


def _change(
    data: bytearray, rng: random.Random, text: bool, seeds: list[bytes]
) -> None:
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
