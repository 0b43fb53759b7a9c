"""Megatron-Bridge's packed Parquet, read back by its published rules.

The reader below was written from the rules in NVIDIA-NeMo/Megatron-Bridge at 067f987 (2026-08-22),
``src/megatron/bridge/data/packing/parquet.py``, ``gpt_sft.py`` and ``paths.py``.
"""

from __future__ import annotations

import glob
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from exchange_datasets import chats, files, pairs

import packstore
from packstore import Dataset, export
from packstore.cli import main
from packstore.errors import CompatibilityError, ConfigError, DatasetExistsError, StorageError

EOS = 49
"""No token of the records; it is put at some of their ends."""

Pack = Callable[..., Dataset]


@dataclass
class Batch:
    """One row as the reader returns it."""

    tokens: list[int]
    labels: list[int]
    loss_mask: list[int]
    position_ids: list[int]
    padding_mask: list[bool]
    cu_seqlens: list[int]
    cu_seqlens_padded: list[int] | None
    max_seqlen: int


@dataclass
class Reader:
    """The packed dataset of Megatron-Bridge, one row a batch.

    `spec` is a file, a pattern or a folder; `mult` is `pad_seq_to_mult`; with `static` (its
    `pad_cu_seqlens` with `pad_to_max_length`) shapes come from the metadata at `metadata`.
    """

    spec: str
    packed_sequence_size: int
    eos: int = EOS
    mult: int = 1
    static: bool = False
    metadata: str | None = None

    def paths(self) -> list[str]:
        if glob.has_magic(self.spec):
            found = glob.glob(self.spec)
        elif os.path.isdir(self.spec):
            found = [p for e in ("*.parquet", "*.pq") for p in glob.glob(f"{self.spec}/{e}")]
        else:
            found = [self.spec]
        found = [p for p in found if p.lower().endswith((".parquet", ".pq"))]
        assert found
        return sorted(found)

    def rows(self) -> Iterator[tuple[list[int], list[int], list[int]]]:
        for path in self.paths():
            file = pq.ParquetFile(path)
            assert {"input_ids", "seq_start_id", "loss_mask"} <= set(file.schema_arrow.names)
            for group in range(file.num_row_groups):
                for row in file.read_row_group(group).to_pylist():
                    ids, mask, starts = row["input_ids"], row["loss_mask"], row["seq_start_id"]
                    assert len(mask) == len(ids)
                    assert starts
                    assert starts[0] == 0
                    assert all(a <= b for a, b in pairwise(starts))
                    assert starts[-1] < len(ids)
                    assert set(mask) <= {0, 1}
                    yield ids, mask, starts

    def __iter__(self) -> Iterator[Batch]:
        for ids, mask, starts in self.rows():
            yield self.collate(ids, mask, [*starts, len(ids)])

    def collate(self, ids: list[int], mask: list[int], bounds: list[int]) -> Batch:
        spans = list(pairwise(bounds))
        tokens = [t for a, b in spans for t in ids[a : b - 1]]
        labels = [t for a, b in spans for t in ids[a + 1 : b]]
        weights = [w for a, b in spans for w in mask[a : b - 1]]
        position_ids = [p for a, b in spans for p in range(b - a - 1)]
        width = -(-len(tokens) // 16) * 16
        width = self.packed_sequence_size if self.static else min(width, self.packed_sequence_size)
        assert len(tokens) <= width  # "assert cu_seqlens[-1] <= max_length"
        ends = [0, *np.cumsum([b - a - 1 for a, b in spans]).tolist()]
        logical, physical = ends, None
        if self.mult > 1:
            physical, logical = [*ends], [0]
            if physical[-1] != width:
                physical.append(width)
            for a, b in spans:
                real = [i for i, t in enumerate(ids[a : b - 1]) if t != self.eos]
                logical.append(logical[-1] + (real[-1] + 1 if real else 0))
            if len(physical) > len(logical):
                logical.append(logical[-1])
            padding = [False] * width
            for i, (start, end) in enumerate(pairwise(physical)):
                begin = start + logical[i + 1] - logical[i]
                assert begin <= end
                padding[begin:end] = [True] * (end - begin)
        else:
            if logical[-1] != width:
                logical = [*logical, width]
            padding = [False] * len(tokens) + [True] * (width - len(tokens))
        longest = max(np.diff(physical or logical).tolist())
        if self.static:
            assert self.metadata
            packs = json.loads(Path(self.metadata).read_text(encoding="utf-8"))
            most = max(p["max_samples_per_bin"] for p in packs)
            missing = most - len(physical or logical) + 2
            assert missing >= 0
            if physical is not None:
                physical += [width] * missing
                logical += [logical[-1]] * missing
            else:
                logical = logical + [width] * missing
            gap = width - min(p["min_packed_seqlen"] for p in packs)
            static_longest = max(*(p["dataset_max_seqlen"] for p in packs), gap)
            assert longest <= static_longest
            longest = static_longest
        rest = width - len(tokens)
        return Batch(
            tokens=tokens + [self.eos] * rest,
            labels=labels + [self.eos] * rest,
            loss_mask=weights + [0] * rest,
            position_ids=position_ids + [0] * rest,
            padding_mask=padding,
            cu_seqlens=logical,
            cu_seqlens_padded=physical,
            max_seqlen=longest,
        )


def sequences(records: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    """Ids and, for each token, whether it is supervised."""
    return [(r["input_ids"], [int(label != -100) for label in r["labels"]]) for r in records]


def ending(n: int, seed: int) -> list[dict[str, Any]]:
    """Chats of which every second ends with EOS."""
    records = chats(n, seed)
    for record in records[::2]:
        record["input_ids"][-1] = record["labels"][-1] = EOS
    return records


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize("spec", ["", "/packed_300-*.idx.parquet"])
def test_each_sequence_comes_back(layout: str, spec: str, tmp_path: Path, packed: Pack) -> None:
    records = chats(50)
    dataset = packed(records, layout=layout)
    exported = export("megatron", dataset, tmp_path / "out")
    expected = sequences(records)
    reader = Reader(f"{tmp_path}/out{spec}", packed_sequence_size=300)
    assert len(list(reader.rows())) == len(dataset) == exported.facts["rows"]
    for batch in reader:
        for start, stop in pairwise(batch.cu_seqlens):
            if all(batch.padding_mask[start:stop]):
                continue
            ids, on = expected.pop(0)
            assert batch.tokens[start:stop] == ids[:-1]
            assert batch.labels[start:stop] == ids[1:]
            assert batch.loss_mask[start:stop] == on[1:]
            assert batch.position_ids[start:stop] == [*range(len(ids) - 1)]
    assert not expected


@pytest.mark.parametrize("mult", [2, 4, 16])
@pytest.mark.parametrize("static", [False, True])
def test_sequences_are_aligned(mult: int, static: bool, tmp_path: Path, packed: Pack) -> None:
    records, size = ending(60, mult), 240
    exported = export(
        *("megatron", packed(records, pack_size=100), tmp_path / "out"),
        pad_seq_to_mult=mult, pack_size=size, pad_cu_seqlens=static, pad_id=EOS,
    )  # fmt: skip
    metadata = str(tmp_path / "out" / "metadata.json")
    reader = Reader(f"{tmp_path}/out", size, mult=mult, static=static, metadata=metadata)
    expected, shapes, filled = sequences(records), set(), 0
    for batch in reader:
        physical, logical = batch.cu_seqlens_padded, batch.cu_seqlens
        assert physical is not None
        shapes.add((len(physical), len(logical), len(batch.tokens), batch.max_seqlen))
        for i, (start, stop) in enumerate(pairwise(physical)):
            assert start % mult == 0
            length = logical[i + 1] - logical[i]
            padding = [False] * length + [True] * (stop - start - length)
            assert batch.padding_mask[start:stop] == padding
            if length == 0:
                assert not any(batch.loss_mask[start:stop])
                continue
            ids, on = expected.pop(0)
            filled += stop - start - (len(ids) - 1)
            # The last token is an input too, which predicts nothing, unless it looks like filling.
            assert length == len(ids) - (ids[-1] == EOS or stop - start == len(ids) - 1)
            assert batch.tokens[start : start + length] == ids[:length]
            assert batch.labels[start : start + len(ids) - 1] == ids[1:]
            assert batch.loss_mask[start:stop] == on[1:] + [0] * (stop - start - len(ids) + 1)
    assert not expected
    assert exported.facts["tokens of filling"] >= filled > 0
    assert not static or len(shapes) == 1


def test_metadata_count_as_create_packing_strategy(tmp_path: Path, packed: Pack) -> None:
    """A sequence is as long as its inputs, filled."""
    export("megatron", packed(ending(61, 5)), tmp_path / "out", pad_seq_to_mult=4, pad_id=EOS)
    rows = [[*s, len(i)] for i, _, s in Reader(f"{tmp_path}/out", 300).rows()]
    bins = [[b - a - 1 for a, b in pairwise(r)] for r in rows]
    sums, count = [sum(b) for b in bins], sum(map(len, bins))
    assert count == 61
    assert json.loads((tmp_path / "out" / "metadata.json").read_text(encoding="utf-8")) == [
        {
            "dataset_max_seqlen": max(map(max, bins)),
            "max_samples_per_bin": max(map(len, bins)),
            "packing_factor": round(count / len(bins), 2),
            "packing_efficiency": round(sum(sums) / len(sums) / 300 * 100, 2),
            "pack_size": 300,
            "min_packed_seqlen": min(sums),
        }
    ]


def test_sequences_that_no_longer_fit_go_to_other_rows(tmp_path: Path, packed: Pack) -> None:
    records = ending(200, 2)
    dataset, options = packed(records), {"pad_seq_to_mult": 12, "pack_size": 300, "pad_id": EOS}
    exported = export("megatron", dataset, tmp_path / "out", **options)
    rows = list(Reader(f"{tmp_path}/out", 300).rows())
    sums = [len(ids) - len(starts) for ids, _, starts in rows]
    assert max(sums) <= 300
    assert sum(len(starts) for _, _, starts in rows) == 200
    assert exported.facts["sequences moved to other rows"] >= 20
    assert len(rows) < 1.2 * sum(sums) / 300 + 1
    found = sorted(
        (ids[a:b], mask[a:b])
        for ids, mask, starts in rows
        for a, b in pairwise([*starts, len(ids)])
    )
    expected = []
    for ids, on in sequences(records):
        rest = -(len(ids) - 1) % 12
        expected.append((ids + [EOS] * rest, on[1:] + [0] * (rest + 1)))
    assert found == sorted(expected)


@pytest.mark.parametrize(
    ("cp", "tp", "sp"),
    [(1, 1, False), (1, 4, True), (1, 4, False), (2, 1, True), (2, 4, True), (3, 4, True)],
)
def test_the_multiple_of_the_parallelism(
    cp: int, tp: int, sp: bool, tmp_path: Path, packed: Pack
) -> None:
    multiple = math.lcm(2 * cp if cp > 1 else 1, cp * tp if sp and tp > 1 else 1)
    parallel = {"context_parallel": cp, "tensor_parallel": tp, "sequence_parallel": sp}
    parallel = {"pack_size": 240, **parallel}
    dataset = packed(chats(5))
    exported = export("megatron", dataset, tmp_path / "out", pad_id=EOS, **parallel)
    assert exported.facts["pad_seq_to_mult"] == multiple
    if multiple > 1:
        with pytest.raises(ConfigError, match=f"must be a multiple of {multiple} with this"):
            export("megatron", dataset, tmp_path / "x", pad_seq_to_mult=1, **parallel)


@pytest.mark.parametrize(
    ("tail", "on", "lost"),
    [
        ([1, EOS, 7], [0, 1, 1], 0),  # a line break after EOS: one more block keeps it
        ([1, 2, EOS, 7], [0, 0, 1, 1], 0),
        ([1, EOS, EOS, 7], [0, 1, 1, 1], 0),
        ([1, EOS, EOS], [0, 1, 1], 1),
        ([1, 2, EOS, EOS, EOS], [0, 1, 1, 1, 1], 2),
        ([1, EOS], [0, 1], 0),
    ],
)
@pytest.mark.parametrize("mult", [2, 3, 4])
def test_eos_at_the_end(
    tail: list[int], on: list[int], lost: int, mult: int, tmp_path: Path, packed: Pack
) -> None:
    """Tokens that the reader takes for padding are not supervised; all others stay."""
    records = []
    for n in range(6):
        labels = [token if weight else -100 for token, weight in zip(tail, on, strict=True)]
        records.append({"input_ids": [3] * n + tail, "labels": [-100] * n + labels})
    options = {"pad_seq_to_mult": mult, "pad_id": EOS}
    exported = export("megatron", packed(records), tmp_path / "out", **options)
    assert exported.facts["not supervised any more"] == 6 * lost
    total = 0
    for batch in Reader(f"{tmp_path}/out", 300, mult=mult):
        pairs = list(zip(batch.loss_mask, batch.padding_mask, strict=True))
        assert not any(weight and padding for weight, padding in pairs)
        total += sum(batch.loss_mask)
    assert total == 6 * (sum(on) - lost)


def test_refusals(tmp_path: Path, packed: Pack, capsys: pytest.CaptureFixture[str]) -> None:
    out, records = tmp_path / "out", chats(9)
    with pytest.raises(CompatibilityError, match="of kind sft; found kind preference"):
        export("megatron", packed(pairs(6)), out)
    dataset, longest = packed(records), max(len(r["input_ids"]) for r in records)
    with pytest.raises(ConfigError, match="its EOS must be known to fill sequences up"):
        export("megatron", dataset, out, pad_seq_to_mult=4)
    with pytest.raises(ConfigError, match=r"multiple of pad_seq_to_mult, 16.*Give pack_size 304"):
        export("megatron", dataset, out, pad_seq_to_mult=16, pad_id=1)
    with pytest.raises(ConfigError, match="must hold the longest sequence"):
        export("megatron", dataset, out, pack_size=longest - 2)
    for wrong in ({"pad_id": -1}, {"context_parallel": 0}, {"pad_seq_to_mult": 0}):
        with pytest.raises(ConfigError):
            export("megatron", dataset, out, **wrong)
    assert not out.exists()
    export("megatron", dataset, out, pack_size=longest - 1)
    with pytest.raises(DatasetExistsError, match="must not exist yet"):
        export("megatron", dataset, out)
    (out / "mine.parquet").write_text("mine")
    assert main(["export", "megatron", dataset.url, str(out), "--overwrite"]) == 0
    assert "packed_sequence_size" in capsys.readouterr().out
    assert files(out) == ["metadata.json", "mine.parquet", "packed_300-00000.idx.parquet"]


def test_an_export_that_ends_half_way_has_no_metadata(
    tmp_path: Path, packed: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first one leaves nothing; a reader who waits for metadata never mixes two exports."""
    dataset, out = packed(chats(200)), tmp_path / "out"
    monkeypatch.setattr("packstore.exchange.megatron.FILE_BYTES", 600)
    left: list[list[str]] = []

    def interrupted(stage: str, done: int, total: int | None, unit: str) -> None:
        left.append(files(out))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export("megatron", dataset, out, progress=interrupted)
    assert not out.exists()
    export("megatron", dataset, out)
    before = files(out)
    assert len(before) > 3
    # A folder in the place of a file that the export puts: the put fails.
    export("megatron", packed(chats(20)), out, overwrite=True)
    assert len(files(out)) < len(before)
    (out / before[2]).mkdir()
    with pytest.raises(StorageError):
        export("megatron", dataset, out, overwrite=True)
    assert files(out) == [before[2]]
    (out / before[2]).rmdir()
    export("megatron", dataset, out)
    assert files(out) == before
    assert len(list(Reader(f"{out}", 300).rows())) == len(dataset)


def test_on_another_store(packed: Pack) -> None:
    there = export("megatron", packed(chats(20)), "memory://exchange/bridge", overwrite=True)
    assert there.files[-1] == "memory://exchange/bridge/metadata.json"


@pytest.mark.slow
def test_real_chats(shared_data: Path, tmp_path: Path) -> None:
    tokenizer = str(shared_data / "tokenizers/qwen3")
    source = str(shared_data / "sft/toolcall_en.jsonl")
    dataset = packstore.pack(
        source, str(tmp_path / "a"), tokenizer, pack_size=4096, kind="sft", num_workers=0
    )
    eos = dataset.manifest.provenance["tokenizer"]["eos_id"]
    out = tmp_path / "out"
    assert main(["export", "megatron", dataset.url, str(out), "--context-parallel=2"]) == 0
    supervised = 0
    for batch in Reader(f"{out}/packed_4096-*.idx.parquet", 4096, eos=eos, mult=4):
        pairs = list(zip(batch.loss_mask, batch.padding_mask, strict=True))
        assert not any(weight and padding for weight, padding in pairs)
        supervised += sum(batch.loss_mask)
    assert supervised == dataset.manifest.totals.supervised_tokens
