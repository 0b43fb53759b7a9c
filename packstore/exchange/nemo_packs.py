"""NeMo-Aligner's packed DPO file, as its ``prepare_packed_dpo_dataset.py`` writes it.

``numpy.save`` of an array of dicts: `input_ids` and `labels` (whole tokens, not shifted), `reward`
and `lengths` of chosen, rejected, chosen, ..., and `seq_boundaries`. That is layout ``concat`` of
our own format, so the packs stay as they are and in their order. The file is a pickle, which
:mod:`packstore.exchange.pickles` reads without running foreign code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from packstore.config import PackConfig, fingerprint
from packstore.errors import InputError, sentence
from packstore.exchange.import_options import ImportOptions
from packstore.exchange.object_array import Row, numbers, read_rows, reals
from packstore.format.arrays import IGNORE_INDEX, Int64, Packs, Tally, signed, to_offsets
from packstore.format.rules import check_packs, check_tokens
from packstore.io.dataset.dataset import Dataset
from packstore.io.inputs.streams import HashedStream, decompressed
from packstore.io.manifest.manifest import build_manifest
from packstore.io.shards.shard import PackShape
from packstore.io.store.location import Location
from packstore.io.write.shard_writer import ShardWriter
from packstore.io.write.write_job import writing
from packstore.tokenizer import Tokenizer, load_tokenizer
from packstore.version import VERSION

if TYPE_CHECKING:
    from packstore.etl.pipeline import Progress

KEYS = frozenset(("input_ids", "labels", "reward", "lengths", "seq_boundaries"))
"""The keys of every row."""

_RECORDED = ("format", "labels", "compression", "compression_level", "row_group_tokens")
_TOP = np.iinfo(np.int32).max


def import_packs(
    source: Location, place: Location, options: ImportOptions, progress: Progress
) -> Dataset:
    """Imports the file at `source` as a dataset at `place`; see :class:`.import_options.Importer`.

    Raises:
        InputError: the file is not of the format; names the row.
        FormatError: a pack breaks a rule of the format; names the row.
        DatasetExistsError: a dataset exists at `place`.
    """
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    config = PackConfig.of(
        strategy="imported",
        pack_order="plain",
        shuffle=False,
        kind="preference",
        overwrite=options.overwrite,
    )
    shape = PackShape(
        kind="preference",
        layout="concat",
        pack_size=options.pack_size or _TOP,
        carry={},
        vocab_size=tokenizer.vocab_size if tokenizer else None,
    )
    run = fingerprint({"imported": "nemo", "version": VERSION})[:12]
    lone = options.single_writer
    with (
        writing(place, options.overwrite, call="import", single_writer=lone) as job,
        source.open_read() as raw,
        ShardWriter(place, shape, config, run) as writer,
    ):
        hashed, longest = HashedStream(raw), 0
        stream = decompressed(hashed, None, source.display)
        for packs in _packs(stream, source.display, shape, config.row_group_tokens):
            writer.write(packs)
            longest = max(longest, int(np.diff(packs.token_offsets).max()))
            progress("import", writer.counter.packs, None, "packs")
        shards = writer.close()
        pairs = writer.counter.examples
        if not pairs:
            raise InputError(sentence(source.display, "must hold at least one pack", "none"))
        shape = replace(shape, pack_size=options.pack_size or longest)
        recorded = {name: getattr(config, name) for name in _RECORDED}
        settings = {"pack_size": shape.pack_size, "layout": "concat", **recorded}
        found = _found(source, hashed, pairs)
        provenance = _provenance(found, tokenizer, options.tokenizer, settings)
        tally = Tally(read=pairs)
        manifest = build_manifest(shape, config, shards, writer.counter, tally, {}, provenance)
        manifest = replace(manifest, pack_index=writer.pack_index)
        job.commit(manifest)
    progress("import", manifest.num_packs, manifest.num_packs, "packs")
    return job.committed


def _found(source: Location, hashed: HashedStream, pairs: int) -> dict[str, Any]:
    """The manifest's record of the file."""
    size, sha256 = hashed.bytes, hashed.sha256
    return {"path": source.display, "bytes": size, "sha256": sha256, "records": pairs}


def _provenance(
    source: dict[str, Any], tokenizer: Tokenizer | None, path: str | None, settings: dict[str, Any]
) -> dict[str, Any]:
    # Two files with equal bytes have equal examples under equal ids.
    lineage = {"imported": "nemo", "sources": [[source["sha256"], source["records"]]]}
    return {
        "sources": [source],
        "tokenizer": tokenizer and {"path": path, **tokenizer.provenance()},
        "settings": settings,
        "package_version": VERSION,
        "imported_from": {"format": "nemo", "sha256": source["sha256"]},
        "lineage": fingerprint(lineage),
    }


def _packs(stream: Any, path: str, shape: PackShape, tokens: int) -> Iterator[Packs]:
    """Yields checked packs, about `tokens` at a time."""
    waiting: list[dict[str, Any]] = []
    held = first = pairs = 0
    for number, row in enumerate(read_rows(stream, path, KEYS)):
        waiting.append(_columns(row, f"{path}, row {number}"))
        held += len(waiting[-1]["input_ids"])
        if held >= tokens:
            yield _join(waiting, path, shape, first, pairs)
            pairs += sum(len(w["lengths"]) // 2 for w in waiting)
            waiting, held, first = [], 0, number + 1
    if waiting:
        yield _join(waiting, path, shape, first, pairs)


def _columns(row: Row, where: str) -> dict[str, Any]:
    """The columns of one pack, with lengths and number ranges checked."""
    ints = {
        name: _fitting(numbers(row[name], f"{where}, {name}"), f"{where}, {name}", low)
        for name, low in (
            ("input_ids", 0),
            ("labels", IGNORE_INDEX),
            ("lengths", 0),
            ("seq_boundaries", 0),
        )
    }
    with np.errstate(over="ignore"):
        reward = reals(row["reward"], f"{where}, reward").astype(np.float32)
    sequences = len(ints["lengths"])
    if not sequences or sequences % 2:
        must = "a pack must hold chosen and rejected of at least one pair"
        raise InputError(sentence(where, must, f"{sequences} lengths"))
    for name, values, wanted in (
        ("labels", ints["labels"], len(ints["input_ids"])),
        ("reward", reward, sequences),
        ("seq_boundaries", ints["seq_boundaries"], sequences + 1),
    ):
        if len(values) != wanted:
            tokens = len(ints["input_ids"])
            must = f"there must be {wanted}, for {tokens} ids and {sequences} lengths"
            raise InputError(sentence(f"{where}, {name}", must, str(len(values))))
    return {**ints, "reward": reward}


def _fitting(values: Int64, where: str, low: int) -> Any:
    """Converts numbers to int32."""
    bad = (values < low) | (values > _TOP)
    if bad.any():
        at = int(np.argmax(bad))
        must = f"must be {low} to {_TOP}"
        raise InputError(sentence(f"{where}, element {at}", must, str(values[at])))
    return values.astype(np.int32)


def _join(rows: list[dict[str, Any]], path: str, shape: PackShape, first: int, pairs: int) -> Packs:
    """Joins packs, and checks the rules of the format.

    Raises:
        FormatError: a pack breaks a rule of the format.
    """
    whole: dict[str, Any] = {name: np.concatenate([row[name] for row in rows]) for name in KEYS}
    sequences = to_offsets(np.array([len(row["lengths"]) for row in rows]))
    tokens = to_offsets(np.array([len(row["input_ids"]) for row in rows]))
    ids, labels = whole.pop("input_ids"), whole.pop("labels")
    check_tokens(ids, labels, tokens, vocab_size=shape.vocab_size, where=path, first_row=first)
    count = len(whole["lengths"]) // 2
    packs = Packs(
        **whole,
        signed_ids=signed(ids, labels),
        example_ids=np.arange(pairs, pairs + count, dtype=np.int64),
        num_responses=np.full(count, 2, np.int32),
        token_offsets=tokens,
        sequence_offsets=sequences,
        example_offsets=sequences // 2,
    )
    limits: dict[str, Any] = {"pack_size": shape.pack_size, "vocab_size": shape.vocab_size}
    check_packs(packs, layout="concat", where=path, first_row=first, **limits)
    return packs
