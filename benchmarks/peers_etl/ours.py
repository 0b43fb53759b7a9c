"""packstore: the whole job, with either engine."""

from __future__ import annotations

import sys

import packstore
from peers_etl.child import Task, Watch


def pack(task: Task, watch: Watch) -> None:
    """The job as users run it."""

    def progress(stage: str, done: int, total: int | None, unit: str) -> None:
        if stage == "read" and not done:
            watch.stage("load tokenizer")
        elif stage == "read":
            watch.stage("read, tokenize, spill")
        else:
            watch.stage("plan, fill, write")

    out, size = task.out, task.pack_size
    dataset = packstore.pack(
        task.source, out, task.tokenizer, pack_size=size, progress=progress
    )
    watch.stage("commit")
    totals = dataset.manifest.totals
    watch.counts.update(tokens=totals.tokens, packs=totals.packs)
    watch.engine = dataset.manifest.provenance["tokenizer"]["engine"]


def pack_by_reference(task: Task, watch: Watch) -> None:
    """The same with Hugging Face's library, as where no wheel of the fast engine is to
    be had.
    """
    sys.modules["fastokens"] = None  # type: ignore[assignment]
    pack(task, watch)
