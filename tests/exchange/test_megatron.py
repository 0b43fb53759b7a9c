"""Megatron-Bridge's packed Parquet, read back by its published rules.

The reader below was written from the rules in NVIDIA-NeMo/Megatron-Bridge at 067f987 (2026-08-22),
``src/megatron/bridge/data/packing/parquet.py``, ``gpt_sft.py`` and ``paths.py``.
"""

from __future__ import annotations

import glob
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import packstore
from packstore import export
from packstore.cli import main
from packstore.errors import CompatibilityError, ConfigError, DatasetExistsError
from packstore.exchange.megatron import MegatronOptions
from packstore.format.arrays import Examples, to_offsets
from packstore.io.store.location import Location

EOS = 49


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


def sequences(examples: Examples) -> list[tuple[list[int], list[int]]]:
    """Ids and, for each token, whether it is supervised."""
    parts = [slice(*examples.sequence_offsets[i : i + 2]) for i in range(examples.num_sequences)]
    ids, on = examples.input_ids, examples.supervised.astype(int)
    return [(ids[part].tolist(), on[part].tolist()) for part in parts]


def without_eos(dataset_kit: SimpleNamespace, n: int, seed: int, **how: Any) -> Any:
    """A dataset in which EOS occurs at the end of sequences only, there in half of them."""
    from packstore.testing import random_examples

    examples = random_examples(n, seed=seed, kind="sft", vocab_size=EOS)
    last = examples.sequence_offsets[1:] - 1
    examples.input_ids[last[::2]] = EOS
    tokenizer = {"vocab_size": 50, "eos_id": EOS}
    return dataset_kit.write(how.pop("url"), examples, kind="sft", tokenizer=tokenizer, **how)


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize("spec", ["", "/packed_300-*.idx.parquet"])
def test_each_sequence_comes_back(
    layout: str, spec: str, tmp_path: Path, kit: SimpleNamespace
) -> None:
    dataset = kit.dataset(50, kind="sft", layout=layout, per_pack=7)
    exported = export("megatron", dataset, tmp_path / "out")
    expected = sequences(kit.examples(dataset))
    reader = Reader(f"{tmp_path}/out{spec}", packed_sequence_size=300)
    stored = [(i, m, s) for i, m, s in reader.rows()]
    assert len(stored) == len(dataset) == exported.facts["rows"]
    for batch, packs in zip(reader, range(len(dataset)), strict=True):
        bounds = batch.cu_seqlens
        for start, stop in pairwise(bounds):
            if all(batch.padding_mask[start:stop]):
                continue
            ids, on = expected.pop(0)
            assert batch.tokens[start:stop] == ids[:-1]
            assert batch.labels[start:stop] == ids[1:]
            assert batch.loss_mask[start:stop] == on[1:], packs
            assert batch.position_ids[start:stop] == [*range(len(ids) - 1)]
    assert not expected


@pytest.mark.parametrize("mult", [2, 4, 16, 24])
@pytest.mark.parametrize("static", [False, True])
def test_aligned(mult: int, static: bool, tmp_path: Path, kit: SimpleNamespace) -> None:
    dataset = without_eos(kit, 60, mult, url=str(tmp_path / "a"), per_pack=9)
    size = 240
    exported = export(
        *("megatron", dataset, tmp_path / "out"),
        pad_seq_to_mult=mult, pack_size=size, pad_cu_seqlens=static,
    )  # fmt: skip
    metadata = str(tmp_path / "out" / "metadata.json")
    reader = Reader(f"{tmp_path}/out", size, mult=mult, static=static, metadata=metadata)
    expected, shapes, filled = sequences(kit.examples(dataset)), set(), 0
    for batch in reader:
        physical, logical = batch.cu_seqlens_padded, batch.cu_seqlens
        assert physical is not None
        shapes.add((len(physical), len(logical), len(batch.tokens), batch.max_seqlen))
        for i, (start, stop) in enumerate(pairwise(physical)):
            assert start % mult == 0
            length = logical[i + 1] - logical[i]
            assert batch.padding_mask[start:stop] == [False] * length + [True] * (
                stop - start - length
            )
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
    assert exported.facts["pad_cu_seqlens"] is static


def test_the_metadata(tmp_path: Path, kit: SimpleNamespace) -> None:
    """As `create_packing_strategy` counts: a sequence is as long as its inputs, filled."""
    dataset = without_eos(kit, 61, 5, url=str(tmp_path / "a"), per_pack=9)
    export("megatron", dataset, tmp_path / "out", pad_seq_to_mult=4)
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


def test_what_no_longer_fits_goes_to_other_rows(tmp_path: Path, kit: SimpleNamespace) -> None:
    dataset = without_eos(kit, 200, 2, url=str(tmp_path / "a"), per_pack=10)
    options = {"pad_seq_to_mult": 12, "pack_size": 120}
    exported = export("megatron", dataset, tmp_path / "out", **options)
    rows = list(Reader(f"{tmp_path}/out", 120).rows())
    sums = [len(ids) - len(starts) for ids, _, starts in rows]
    assert max(sums) <= 120
    assert sum(len(starts) for _, _, starts in rows) == 200
    assert exported.facts["sequences moved to other rows"] >= 50
    assert len(rows) < 1.2 * sum(sums) / 120 + 1
    found = sorted(
        (ids[a:b], mask[a:b])
        for ids, mask, starts in rows
        for a, b in pairwise([*starts, len(ids)])
    )
    expected = []
    for ids, on in sequences(kit.examples(dataset)):
        rest = -(len(ids) - 1) % 12
        expected.append((ids + [EOS] * rest, on[1:] + [0] * (rest + 1)))
    assert found == sorted(expected)


@pytest.mark.parametrize(
    ("cp", "tp", "sp", "multiple"),
    [(1, 1, False, 1), (1, 4, True, 4), (1, 4, False, 1), (2, 1, False, 4), (2, 1, True, 4),
     (2, 4, True, 8), (4, 2, True, 8), (3, 4, True, 12), (8, 1, False, 16), (2, 3, True, 12)],
)  # fmt: skip
def test_the_multiple_of_the_parallelism(cp: int, tp: int, sp: bool, multiple: int) -> None:
    options = MegatronOptions(context_parallel=cp, tensor_parallel=tp, sequence_parallel=sp)
    assert options.multiple == multiple
    by_hand = math.lcm(2 * cp if cp > 1 else 1, cp * tp if sp and tp > 1 else 1)
    assert options.multiple == by_hand
    if multiple > 1:
        with pytest.raises(ConfigError, match=f"must be a multiple of {multiple} with this"):
            MegatronOptions(
                context_parallel=cp, tensor_parallel=tp, sequence_parallel=sp, pad_seq_to_mult=1
            )


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
    tail: list[int], on: list[int], lost: int, mult: int, tmp_path: Path, kit: SimpleNamespace
) -> None:
    """Tokens that the reader takes for padding are not supervised; all others stay."""
    parts = [([3] * n + tail, [0] * n + on) for n in range(6)]
    examples = Examples(
        input_ids=np.array([t for ids, _ in parts for t in ids], np.int32),
        supervised=np.array([w for _, mask in parts for w in mask], bool),
        sequence_offsets=to_offsets(np.array([len(ids) for ids, _ in parts])),
        example_offsets=np.arange(7),
        reward=np.ones(6, np.float32),
        example_ids=np.arange(6),
    )
    tokenizer = {"vocab_size": 50, "eos_id": EOS}
    dataset = kit.write(str(tmp_path / "a"), examples, kind="sft", tokenizer=tokenizer)
    exported = export("megatron", dataset, tmp_path / "out", pad_seq_to_mult=mult)
    assert exported.facts["not supervised any more"] == 6 * lost
    total = 0
    for batch in Reader(f"{tmp_path}/out", 300, mult=mult):
        pairs = list(zip(batch.loss_mask, batch.padding_mask, strict=True))
        assert not any(weight and padding for weight, padding in pairs)
        total += sum(batch.loss_mask)
    assert total == 6 * (sum(on) - lost)


def test_refusals(tmp_path: Path, kit: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    for kind in ("preference", "ranked"):
        with pytest.raises(CompatibilityError, match=rf"of kind sft; found kind {kind}"):
            export("megatron", kit.dataset(6, kind=kind), out)
    dataset = kit.dataset(9, kind="sft")
    longest = dataset.manifest.statistics.longest_sequence
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
    before = kit.left(out)
    (out / "mine.parquet").write_text("mine")
    assert main(["export", "megatron", dataset.url, str(out), "--overwrite"]) == 0
    assert "packed_sequence_size" in capsys.readouterr().out
    assert (
        kit.left(out) == ["metadata.json", "mine.parquet", "packed_300-00000.idx.parquet"] != before
    )


def test_a_failed_export_leaves_nothing(
    tmp_path: Path, kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, out = kit.dataset(60, kind="sft"), tmp_path / "out"
    read = type(dataset).read_packs

    def fail(self: Any, group: int) -> Any:
        if group > 1:
            raise ConfigError("no more.")
        return read(self, group)

    monkeypatch.setattr(type(dataset), "read_packs", fail)
    with pytest.raises(ConfigError):
        export("megatron", dataset, out)
    assert not out.exists()


def test_an_overwrite_that_ends_half_way_has_no_metadata(
    tmp_path: Path, kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a reader who waits for it never takes old and new files for one export."""
    dataset, out = kit.dataset(60, kind="sft"), tmp_path / "out"
    monkeypatch.setattr("packstore.exchange.megatron.FILE_BYTES", 600)
    export("megatron", dataset, out)
    before = kit.left(out)
    put, left = Location.put_file, []

    def killed(self: Any, path: str, name: str) -> None:
        if name.endswith("00001.idx.parquet"):
            left.extend(kit.left(out))
            raise KeyboardInterrupt
        put(self, path, name)

    with monkeypatch.context() as patch:
        patch.setattr(Location, "put_file", killed)
        with pytest.raises(KeyboardInterrupt):
            export("megatron", dataset, out, overwrite=True)
    assert "metadata.json" in before
    assert "metadata.json" not in left
    export("megatron", dataset, out, overwrite=True)
    assert kit.left(out) == before
    whole = kit.dataset(10, kind="sft")
    export("megatron", whole, out, overwrite=True)
    assert len(kit.left(out)) < len(before)
    assert len(list(Reader(f"{out}", 300).rows())) == len(whole)


def test_several_files_and_another_store(
    tmp_path: Path, kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = kit.dataset(60, kind="sft")
    monkeypatch.setattr("packstore.exchange.megatron.FILE_BYTES", 600)
    exported = export("megatron", dataset, tmp_path / "out")
    assert len(exported.files) > 3
    rows = list(Reader(f"{tmp_path}/out", 300).rows())
    assert len(rows) == len(dataset)
    there = export("megatron", dataset, "memory://exchange/bridge", overwrite=True)
    assert len(there.files) == len(exported.files)
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
