"""Megatron-Bridge's packed Parquet: options and output; the rules are in :mod:`._megatron_rows`."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from packstore.config import setting
from packstore.errors import ConfigError, PackstoreError, sentence
from packstore.exchange import Exported, Exporter, ExportOptions, exists
from packstore.io.store.location import Location
from packstore.io.store.operations import remove_empty
from packstore.io.store.staging import Staging

if TYPE_CHECKING:
    from pyarrow import RecordBatch

    from packstore.exchange._megatron_rows import Figures, RowMaker
    from packstore.io.dataset.dataset import Dataset
    from packstore.progress import Progress

log = logging.getLogger("packstore")

METADATA = "metadata.json"

FILE_BYTES = 192 << 20
"""Bytes of a Parquet file, about."""


@dataclass(frozen=True, kw_only=True)
class MegatronOptions(ExportOptions):
    """Options of this format; those named as in Megatron-Bridge have its meaning."""

    pack_size: int | None = setting(None, "most tokens of a row; default: the dataset's", low=1)
    pad_seq_to_mult: int | None = setting(
        None, "pad sequences to it; default: by the parallelism", low=1
    )
    context_parallel: int = setting(1, "Bridge's context_parallel_size", low=1)
    tensor_parallel: int = setting(1, "Bridge's tensor_model_parallel_size", low=1)
    sequence_parallel: bool = setting(False, "Bridge's sequence_parallel")
    pad_cu_seqlens: bool = setting(False, "static shapes, for CUDA graphs")
    pad_id: int | None = setting(
        None, "the padding token; default: the tokenizer's EOS", low=0, high=2**31 - 1
    )

    def __post_init__(self) -> None:
        ExportOptions.__post_init__(self)
        if self.pad_seq_to_mult and self.pad_seq_to_mult % self.parallel_multiple:
            raise ConfigError(
                f"setting pad_seq_to_mult must be a multiple of {self.parallel_multiple} with this "
                f"parallelism; found {self.pad_seq_to_mult}. Omit it to have that number."
            )

    @property
    def parallel_multiple(self) -> int:
        """The multiple that the parallelism requires.

        ``lcm(2 CP if CP > 1 else 1, CP TP if sequence parallel and TP > 1 else 1)``
        (Megatron-Bridge, ``docs/training/packed-sequences.md``).
        """
        cp, tp = self.context_parallel, self.tensor_parallel
        by_context = 2 * cp if cp > 1 else 1
        by_sequence = cp * tp if self.sequence_parallel and tp > 1 else 1
        return math.lcm(by_context, by_sequence)

    @property
    def multiple(self) -> int:
        """The multiple in effect."""
        return self.pad_seq_to_mult or self.parallel_multiple


def _run(
    dataset: Dataset, place: Location, options: MegatronOptions, progress: Progress
) -> Exported:
    from packstore.exchange._megatron_rows import RowMaker, write_files

    if not len(dataset):
        raise ConfigError(sentence(dataset.url, "must hold at least one pack", "none"))
    names = [name for name, _ in place.files()]
    earlier = [n for n in names if n == METADATA or fnmatchcase(n, "packed_*-*.idx.parquet")]
    if earlier and not options.overwrite:
        raise exists(place, f"{earlier[0]} in it")
    pack_size, is_new = _pack_size(dataset, options), not place.exists()
    rows = RowMaker(pack_size, options.multiple, _pad_id(dataset, options))
    try:
        with Staging(place) as staging:
            stem, batches = f"packed_{pack_size}", _batches(dataset, rows, progress)
            paths = write_files(batches, staging, stem, FILE_BYTES)
            with staging.file() as file:
                file.write(json.dumps([rows.figures.metadata(pack_size)]).encode())
            _publish(place, staging, {**paths, METADATA: file.name}, earlier)
    finally:
        if is_new:
            remove_empty(place, "")
    if (figures := rows.figures).hidden:
        log.warning(
            "%s supervised tokens follow nothing but EOS at the end of their sequence, which "
            "Megatron-Bridge takes for filling: they are not supervised there",
            f"{figures.hidden:,}",
        )
    return Exported(
        files=[place.join(name).display for name in (*paths, METADATA)],
        facts=_facts(place, figures, pack_size, options),
    )


def _batches(dataset: Dataset, rows: RowMaker, progress: Progress) -> Iterator[RecordBatch]:
    for group, packs in enumerate(dataset.iter_packs(), 1):
        yield rows.add(packs)
        progress("export", group, len(dataset.row_groups), "row groups")
    yield from rows.finish()


def _publish(
    place: Location, staging: Staging, files: Mapping[str, str], earlier: Sequence[str]
) -> None:
    """Replaces files of an earlier export by `files`, name -> local path, the metadata last.

    Earlier metadata go first, so that metadata always mark a whole export.
    """
    stored: list[str] = []
    try:
        if METADATA in earlier:
            place.remove(METADATA)
        for name, path in files.items():
            if name == METADATA:
                for old in set(earlier) - set(files):
                    place.remove(old)
            staging.store(path, name)
            stored.append(name)
    except BaseException:
        for name in stored:
            with contextlib.suppress(PackstoreError):
                place.remove(name)
        raise


def _facts(
    place: Location, figures: Figures, pack_size: int, options: MegatronOptions
) -> dict[str, object]:
    """Facts about the export, and the matching settings of Megatron-Bridge."""
    return {
        "rows": figures.rows,
        "sequences": figures.sequences,
        "fill rate": figures.tokens / figures.rows / pack_size,
        "not supervised any more": figures.hidden,
        "tokens of filling": figures.filled,
        "sequences moved to other rows": figures.moved,
        "packed_sequence_size": pack_size,
        "packed_train_data_path": place.join(f"packed_{pack_size}-*.idx.parquet").display,
        "packed_metadata_path": place.join(METADATA).display,
        "pad_seq_to_mult": options.multiple,
        "pad_cu_seqlens": options.pad_cu_seqlens,
        "dataset_kwargs.pad_to_max_length": options.pad_cu_seqlens,
    }


def _pack_size(dataset: Dataset, options: MegatronOptions) -> int:
    """Most tokens of a row."""
    size, m = options.pack_size or dataset.manifest.pack_size, options.multiple
    if size % m:
        up = -(-size // m) * m
        rule = f"must be a multiple of pad_seq_to_mult, {m}"
        raise ConfigError(sentence("pack_size", rule, str(size), f"Give pack_size {up}"))
    longest = dataset.manifest.statistics.longest_sequence - 1
    if -(-longest // m) * m > size:
        rule = f"must hold the longest sequence, which takes up {-(-longest // m) * m}"
        raise ConfigError(sentence("pack_size", rule, str(size), "Give a larger pack_size"))
    return size


def _pad_id(dataset: Dataset, options: MegatronOptions) -> int:
    if options.pad_id is not None:
        return options.pad_id
    eos = (dataset.manifest.provenance.get("tokenizer") or {}).get("eos_id")
    if isinstance(eos, int):
        return eos
    if options.multiple == 1:
        return 0  # unused
    rule = "its EOS must be known to fill sequences up"
    raise ConfigError(sentence(dataset.url, rule, "none", "Give pad_id"))


EXPORTER = Exporter(
    help="Megatron-Bridge's packed Parquet and its metadata (kind sft)",
    out=("FOLDER", "the folder to write"),
    examples="  packstore export megatron chats-8k bridge-8k\n"
    "  packstore export megatron chats-8k bridge-8k --context-parallel 2 --tensor-parallel 4 "
    "--sequence-parallel\n"
    "  packstore export megatron chats-8k bridge-8k --pad-seq-to-mult 16 --pad-cu-seqlens\n",
    kind="sft",
    options=MegatronOptions,
    run=_run,
)
