"""packstore: the whole job, with either engine, and each of its stages alone."""

from __future__ import annotations

import packstore
from packstore.build.engines import ENGINES
from packstore.build.sources import RecordExampleReader
from packstore.build.spill import Spill, filled
from packstore.config import PackConfig
from packstore.io.inputs.files import InputReader
from packstore.io.shards.shard import PackShape
from packstore.io.store.location import Location
from packstore.io.write.shard_writer import ShardWriter
from packstore.pack.layout import sizes
from packstore.pack.plan import plan
from packstore.tokenizer import RecordTokenizer
from peers_etl.child import Task, Watch


def pack(task: Task, watch: Watch) -> None:
    """The job as users run it."""
    _pack(task, watch, "auto")


def pack_by_reference(task: Task, watch: Watch) -> None:
    """The same with Hugging Face's library."""
    _pack(task, watch, "tokenizers")


def _pack(task: Task, watch: Watch, engine: str) -> None:
    def progress(stage: str, done: int, total: int | None, unit: str) -> None:
        if stage == "read" and not done:
            watch.stage("load tokenizer")
        elif stage == "read":
            watch.stage("read, tokenize, spill")
        else:
            watch.stage("plan, fill, write")

    dataset = packstore.pack(
        task.source, task.out, task.tokenizer, pack_size=task.pack_size, tokenizer_engine=engine,
        progress=progress,
    )  # fmt: skip
    watch.stage("commit")
    used = dataset.manifest.provenance["tokenizer"]["engine"]
    assert (used == "tokenizers") == (engine == "tokenizers"), used


def stages(task: Task, watch: Watch) -> None:
    """One stage after the other, each over all of the input."""
    config = PackConfig(pack_size=task.pack_size)
    reader = RecordExampleReader(task.source, task.tokenizer, config, {})
    watch.stage("load tokenizer")
    blocks = list(InputReader(task.source, None, config))
    watch.stage("read")
    rows = [block.parse() for block in blocks]
    watch.stage("parse")
    work = RecordTokenizer(reader.tokenizer, config, reader.kind)
    found = list(ENGINES.load("local")(_Threaded(work), rows, None))
    watch.stage("tokenize")
    with Spill(None) as spill:
        for examples, _ in found:
            spill.append(examples, sizes(examples, config.layout))
        watch.stage("spill")
        packing = plan(spill.lengths(), config=config)
        packing.statistics()
        watch.stage("plan")
        packs_made = list(filled(spill, packing, config))
        watch.stage("fill")
        shape = PackShape(
            kind=reader.kind, layout=config.layout, pack_size=config.pack_size, carry={},
            vocab_size=reader.vocab_size,
        )  # fmt: skip
        with ShardWriter(Location(task.out, {}), shape, config, "0" * 12) as writer:
            for packs in packs_made:
                writer.write(packs)
        watch.stage("write")


class _Threaded:
    """Work that the local engine does in threads."""

    suits_threads = True

    def __init__(self, work: RecordTokenizer) -> None:
        self._work = work

    def __call__(self, rows: packstore.format.arrays.Rows) -> object:
        return self._work(rows)
