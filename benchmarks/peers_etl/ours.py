"""packstore: the whole job, with either engine."""

from __future__ import annotations

import packstore
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
        chat_template=task.template, progress=progress,
    )  # fmt: skip
    watch.stage("commit")
    totals = dataset.manifest.totals
    watch.counts.update(tokens=totals.tokens, packs=totals.packs)
    used = dataset.manifest.provenance["tokenizer"]["engine"]
    assert engine in ("auto", used), used
    watch.engine = used
