"""Each stage of packing, and beside it the least that its work could cost: CPU seconds of both.

A stage runs on a part of the input, then its floor, so that both meet the same state of the
machine. The floor of a stage is the same work by one call of the library that does it, on the same
data: a copy of the bytes and their sha256 (read); orjson alone (parse); the tokenizer engine alone,
in as many threads, on each prompt with its chosen text and on each rejected text (tokenize); a
copy of the tokens (fill); zstd alone, on the ids at the dataset's level and on the labels at level
1, and sha256 of the files (write, hash). Nothing is less than a plan, which is its own floor.
Rendered chats are given to the engine ready: rendering has no floor. Loading the tokenizer and
the compiled loops (start), and keeping tokens on disk (spill) have none, either.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from packstore.config import PackConfig
from packstore.etl.engines import ENGINES
from packstore.etl.sources import RecordExampleReader
from packstore.etl.spill import Spill, filled
from packstore.etl.warm_up import warm_up
from packstore.io.inputs.files import InputReader
from packstore.io.shards.shard import PackShape
from packstore.io.store.location import Location
from packstore.io.write.shard_writer import ShardWriter
from packstore.pack.layout import sizes
from packstore.pack.plan import plan
from packstore.tokenizer import Tokenizer
from peers_etl.child import Task, Watch, cpu_seconds

STAGES = ("start", "read", "parse", "tokenize", "spill", "plan", "fill", "write, hash")
BLOCKS = 4
"""Blocks of input of a part: few, as a job holds few at a time."""
TEXTS_AT_ONCE = 1024
ZSTD_BYTES = 1 << 20
CHECKED = 16
"""Dialogues of a part whose quickly joined text is compared with the template's."""

Record = dict[str, Any]


class Clock:
    """CPU seconds of this process by name."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        """Runs `work`, and returns its result."""
        begun = cpu_seconds()
        found = work()
        self.spent[name] = self.spent.get(name, 0) + cpu_seconds() - begun
        return found


class InThreads:
    """Work that the local engine does in threads."""

    suits_threads = True

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work

    def __call__(self, item: Any) -> Any:
        return self._work(item)


def stages(task: Task, watch: Watch) -> None:
    """Runs every stage and its floor; notes both in `watch.floors`."""
    config = PackConfig(pack_size=task.pack_size, chat_template=task.template)
    ours, least = Clock(), Clock()
    ours("start", lambda: warm_up(config))
    reader = ours("start", lambda: RecordExampleReader(task.source, task.tokenizer, config, {}))
    assert reader.tokenizer is not None
    work, run = reader.tokenize(), ENGINES.load("local")
    with Spill(None) as spill, open(task.source, "rb") as file:
        blocks = iter(InputReader(task.source, None, config))
        while group := ours("read", lambda: list(itertools.islice(blocks, BLOCKS))):
            rows = ours("parse", lambda: [block.parse() for block in group])
            parts = ours("tokenize", lambda: list(run(InThreads(work.of), rows, None)))  # noqa: B023

            def keep() -> None:
                for examples, _ in parts:  # noqa: B023
                    spill.append(examples, sizes(examples, config.layout))

            ours("spill", keep)
            lines = list(itertools.islice(file, sum(block.records for block in group)))
            _input_floors(lines, reader, least)
            del rows, parts, group
        assert not file.read(1)
        packing = ours("plan", lambda: plan(spill.lengths(), config=config))
        packs = ours("fill", lambda: list(filled(spill, packing, config)))
    shape = PackShape(
        kind=reader.kind, layout=config.layout, pack_size=config.pack_size, carry={},
        vocab_size=reader.vocab_size,
    )  # fmt: skip

    def write() -> None:
        with ShardWriter(Location(task.out, {}), shape, config, "0" * 12) as writer:
            for one in packs:
                writer.write(one)

    ours("write, hash", write)
    least.spent["plan"] = ours.spent["plan"]
    codecs = [pa.Codec("zstd", compression_level=level) for level in (3, 1)]
    for one in packs:
        order = np.argsort(np.arange(len(one.signed_ids) // config.pack_size) % 97)
        whole = one.signed_ids[: len(order) * config.pack_size].reshape(-1, config.pack_size)
        least("fill", lambda: whole[order])  # noqa: B023
        ids = one.input_ids
        labels = np.where(one.supervised, ids, -100).astype(np.int32)
        for codec, column in zip(codecs, (ids, labels), strict=True):
            least("write, hash", lambda: _compressed(codec, column))  # noqa: B023
    files = [path.read_bytes() for path in Path(task.out).rglob("*.parquet")]
    least("write, hash", lambda: [hashlib.sha256(file).digest() for file in files])
    watch.stage("all")
    watch.floors = {name: [ours.spent[name], least.spent.get(name)] for name in STAGES}
    watch.counts["tokens"] = sum(len(one.signed_ids) for one in packs)


def _input_floors(lines: list[bytes], reader: RecordExampleReader, least: Clock) -> None:
    """Runs the floors of reading, parsing and tokenizing on some lines."""
    assert reader.tokenizer is not None
    data, engine = b"".join(lines), reader.tokenizer.engine
    least("read", lambda: (bytearray(data), hashlib.sha256(data).digest()))
    gc.disable()  # no object dies here, and looking for some is no part of parsing
    records = least("parse", lambda: [orjson.loads(line) for line in lines])
    gc.enable()
    chats = isinstance(records[0]["prompt"], list)
    texts = list(_of_chats(records, reader.tokenizer) if chats else _of_texts(records))
    batches = [texts[i : i + TEXTS_AT_ONCE] for i in range(0, len(texts), TEXTS_AT_ONCE)]

    def encode(some: list[str]) -> None:
        engine.encode_batch(some, control=chats)

    run = ENGINES.load("local")
    least("tokenize", lambda: list(run(InThreads(encode), batches, None)))


def _of_texts(records: list[Record]) -> Iterator[str]:
    for record in records:
        yield record["prompt"] + record["chosen"]
        yield record["rejected"]


def _of_chats(records: list[Record], tokenizer: Tokenizer) -> Iterator[str]:
    """The rendered texts: each prompt with its chosen answer, and each rejected answer."""
    template, shapes = tokenizer.template, {}
    assert template is not None
    for number, record in enumerate(records):
        prompt, [chosen], [rejected] = (record[n] for n in ("prompt", "chosen", "rejected"))
        roles = tuple(turn["role"] for turn in prompt)
        if roles not in shapes:
            turns = [*roles, chosen["role"]]
            marked = [{"role": r, "content": f"<{i}>"} for i, r in enumerate(turns)]
            shapes[roles] = re.split(r"<\d+>", template.render(marked))
        first, *between = shapes[roles]
        contents = [turn["content"] for turn in (*prompt, chosen)]
        pieces = zip(contents, between, strict=True)
        text = first + "".join(piece for pair in pieces for piece in pair)
        if number < CHECKED:
            assert text == template.render([*prompt, chosen]), (text, "differs from the template's")
        yield text
        yield rejected["content"] + between[-1]


def _compressed(codec: pa.Codec, column: Any) -> None:
    step = ZSTD_BYTES // column.itemsize
    for i in range(0, len(column), step):
        codec.compress(pa.py_buffer(column[i : i + step]))
