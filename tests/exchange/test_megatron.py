"""Megatron-Bridge's packed Parquet, read back by its published rules.

The reader below was written from the rules in NVIDIA-NeMo/Megatron-Bridge at 067f987
(2026-08-22), ``src/megatron/bridge/data/packing/parquet.py``, ``gpt_sft.py`` and
``paths.py``.
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
from agent_turns import agent_turns
from exchange_datasets import chats, pairs
from places import Files

import packstore
from packstore import Dataset, export
from packstore.cli import main
from packstore.errors import (
    CompatibilityError,
    ConfigError,
    DatasetExistsError,
    StorageError,
)

EOS = 49
"""No token of the records; it is put at some of their ends."""

Pack = Callable[..., Dataset]


@dataclass
class Batch:
    """One row as the reader returns it; `logical` and `physical` are its two
    ``cu_seqlens``.
    """

    tokens: list[int]
    labels: list[int]
    mask: list[int]
    positions: list[int]
    padding: list[bool]
    logical: list[int]
    physical: list[int]
    longest: int


@dataclass
class Reader:
    """The packed dataset of Megatron-Bridge, one row a batch.

    `spec` is a file, a pattern or a folder; `mult` is `pad_seq_to_mult`; with `static`
    (its `pad_cu_seqlens` with `pad_to_max_length`) shapes come from the metadata in
    that file.
    """

    spec: str
    pack_size: int
    eos: int = EOS
    mult: int = 1
    static: str = ""

    def rows(self) -> Iterator[tuple[list[int], list[int], list[int]]]:
        """Ids, mask and bounds."""
        paths = sorted(glob.glob(self.spec))
        if os.path.isdir(self.spec):
            paths = sorted(
                p for e in ("*.parquet", "*.pq") for p in glob.glob(f"{self.spec}/{e}")
            )
        assert paths
        for path in paths:
            for row in pq.read_table(path).to_pylist():
                ids, mask, starts = (
                    row["input_ids"],
                    row["loss_mask"],
                    row["seq_start_id"],
                )
                assert len(mask) == len(ids)
                assert starts[0] == 0
                assert starts == sorted(starts)
                assert starts[-1] < len(ids)
                assert set(mask) <= {0, 1}
                yield ids, mask, [*starts, len(ids)]

    def __iter__(self) -> Iterator[Batch]:
        for ids, mask, bounds in self.rows():
            yield self.collate(ids, mask, list(pairwise(bounds)))

    def collate(
        self, ids: list[int], mask: list[int], spans: list[tuple[int, int]]
    ) -> Batch:
        tokens = [t for a, b in spans for t in ids[a : b - 1]]
        width = min(-(-len(tokens) // 16) * 16, self.pack_size)
        width = self.pack_size if self.static else width
        rest = width - len(tokens)
        assert rest >= 0  # "assert cu_seqlens[-1] <= max_length"
        physical = [0, *np.cumsum([b - a - 1 for a, b in spans]).tolist()]
        logical, padding = [*physical], [False] * len(tokens) + [True] * rest
        if self.mult > 1:
            logical = [0]
            for a, b in spans:
                real = [i for i, t in enumerate(ids[a : b - 1], 1) if t != self.eos]
                logical.append(logical[-1] + max(real, default=0))
            for i, (start, end) in enumerate(pairwise(physical)):
                begin = start + logical[i + 1] - logical[i]
                assert begin <= end
                padding[begin:end] = [True] * (end - begin)
        if rest:
            physical.append(width)
            logical.append(logical[-1] if self.mult > 1 else width)
        longest = max(np.diff(physical).tolist())
        if self.static:
            packs = json.loads(Path(self.static).read_text(encoding="utf-8"))
            missing = max(p["max_samples_per_bin"] for p in packs) - len(physical) + 2
            assert missing >= 0
            physical += [width] * missing
            logical += [logical[-1]] * missing
            gap = width - min(p["min_packed_seqlen"] for p in packs)
            most = max(gap, *(p["dataset_max_seqlen"] for p in packs))
            assert longest <= most
            longest = most
        return Batch(
            tokens=tokens + [self.eos] * rest,
            labels=[t for a, b in spans for t in ids[a + 1 : b]] + [self.eos] * rest,
            mask=[w for a, b in spans for w in mask[a : b - 1]] + [0] * rest,
            positions=[p for a, b in spans for p in range(b - a - 1)] + [0] * rest,
            padding=padding,
            logical=logical,
            physical=physical,
            longest=longest,
        )


def sequences(records: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    """Ids and, for each token, whether it is supervised."""
    return [
        (r["input_ids"], [int(label != -100) for label in r["labels"]]) for r in records
    ]


def ending(n: int, seed: int) -> list[dict[str, Any]]:
    """Chats of which every second ends with EOS."""
    records = chats(n, seed)
    for record in records[::2]:
        record["input_ids"][-1] = record["labels"][-1] = EOS
    return records


@pytest.mark.parametrize(
    ("mult", "static"), [(1, False), (2, False), (4, True), (16, False), (16, True)]
)
def test_each_sequence_comes_back(
    mult: int, static: bool, tmp_path: Path, packed: Pack
) -> None:
    """At a multiple, and filled up to one; by the name of the folder and by that of its
    files.
    """
    records, out = ending(60, mult), tmp_path / "out"
    how: dict[str, Any] = {"pad_seq_to_mult": mult, "pack_size": 240, "pad_id": EOS}
    dataset = packed(records, layout="concat", pack_size=100)
    exported = export("megatron", dataset, out, pad_cu_seqlens=static, **how)
    metadata = str(out / "metadata.json") if static else ""
    batches = list(Reader(str(out), 240, mult=mult, static=metadata))
    assert batches == list(
        Reader(f"{out}/packed_240-*.idx.parquet", 240, EOS, mult, metadata)
    )
    assert len(batches) == exported.facts["rows"]
    assert mult > 1 or len(batches) == len(dataset)
    expected, shapes, filled = sequences(records), set(), 0
    for batch in batches:
        physical, logical = batch.physical, batch.logical
        shapes.add((len(physical), len(logical), len(batch.tokens), batch.longest))
        for i, (start, stop) in enumerate(pairwise(physical)):
            assert start % mult == 0
            if all(batch.padding[start:stop]):
                assert not any(batch.mask[start:stop])
                continue
            length = logical[i + 1] - logical[i]
            padding = [False] * length + [True] * (stop - start - length)
            assert batch.padding[start:stop] == padding
            ids, on = expected.pop(0)
            filled += stop - start - (len(ids) - 1)
            # The last token is an input too, which predicts nothing, unless it looks
            # like filling.
            assert length == len(ids) - (ids[-1] == EOS or stop - start == len(ids) - 1)
            assert batch.tokens[start : start + length] == ids[:length]
            assert batch.labels[start : start + len(ids) - 1] == ids[1:]
            assert batch.mask[start:stop] == on[1:] + [0] * (
                stop - start - len(ids) + 1
            )
            assert batch.positions[start:stop] == [*range(stop - start)]
    assert not expected
    assert exported.facts["padding tokens"] >= filled
    assert (filled > 0) == (mult > 1)
    assert not static or len(shapes) == 1


def test_sequences_that_no_longer_fit_go_to_other_rows(
    tmp_path: Path, packed: Pack
) -> None:
    """And the metadata count as create_packing_strategy: a sequence is its inputs,
    filled.
    """
    records = ending(200, 2)
    how: dict[str, Any] = {"pad_seq_to_mult": 12, "pack_size": 300, "pad_id": EOS}
    exported = export("megatron", packed(records), tmp_path / "out", **how)
    rows = list(Reader(f"{tmp_path}/out", 300).rows())
    bins = [[b - a - 1 for a, b in pairwise(bounds)] for _, _, bounds in rows]
    sums = [sum(lengths) for lengths in bins]
    assert max(sums) <= 300
    assert exported.facts["sequences moved to other rows"] >= 20
    assert len(rows) < 1.2 * sum(sums) / 300 + 1
    cut = [(i[a:b], m[a:b]) for i, m, bounds in rows for a, b in pairwise(bounds)]
    expected = []
    for ids, on in sequences(records):
        rest = -(len(ids) - 1) % 12
        expected.append((ids + [EOS] * rest, on[1:] + [0] * (rest + 1)))
    assert sorted(cut) == sorted(expected)
    (metadata,) = json.loads(
        (tmp_path / "out" / "metadata.json").read_text(encoding="utf-8")
    )
    assert metadata == {
        "dataset_max_seqlen": max(map(max, bins)),
        "max_samples_per_bin": max(map(len, bins)),
        "packing_factor": round(200 / len(bins), 2),
        "packing_efficiency": round(sum(sums) / len(sums) / 300 * 100, 2),
        "pack_size": 300,
        "min_packed_seqlen": min(sums),
    }


@pytest.mark.parametrize("mult", [1, 4])
def test_rows_are_planned_anew_where_prefixes_are_stored_once(
    mult: int, tmp_path: Path, packed: Pack
) -> None:
    """Agents' turns share most of their tokens over the examples of a pack."""
    records = agent_turns()
    dataset = packed(records, share_prefixes="pack", pack_size=240)
    totals = dataset.manifest.totals
    assert 3 * totals.tokens < totals.logical_tokens
    how: dict[str, Any] = {"pad_seq_to_mult": mult, "pad_id": EOS}
    exported = export("megatron", dataset, tmp_path / "out", **how)
    rows = list(Reader(f"{tmp_path}/out", 240).rows())
    bins = [[b - a - 1 for a, b in pairwise(bounds)] for _, _, bounds in rows]
    sums = [sum(lengths) for lengths in bins]
    assert max(sums) <= 240
    assert len(rows) == exported.facts["rows"] < 1.15 * sum(sums) / 240 + 1
    assert "sequences moved to other rows" not in exported.facts

    stored = [(i[a:b], m[a:b]) for i, m, bounds in rows for a, b in pairwise(bounds)]
    expected = []
    for ids, on in sequences(records):
        rest = -(len(ids) - 1) % mult
        expected.append((ids + [EOS] * rest, on[1:] + [0] * (rest + 1)))
    assert sorted(stored) == sorted(expected)
    (metadata,) = json.loads((tmp_path / "out" / "metadata.json").read_bytes())
    assert metadata["dataset_max_seqlen"] == max(map(max, bins))
    assert metadata["max_samples_per_bin"] == max(map(len, bins))
    assert metadata["min_packed_seqlen"] == min(sums)


@pytest.mark.parametrize(
    ("cp", "tp", "sp"), [(1, 4, True), (1, 4, False), (2, 1, True), (3, 4, 1)]
)
def test_the_multiple_of_the_parallelism(
    cp: int, tp: int, sp: bool, tmp_path: Path, packed: Pack
) -> None:
    multiple = math.lcm(2 * cp if cp > 1 else 1, cp * tp if sp and tp > 1 else 1)
    how: dict[str, Any] = {
        "context_parallel": cp,
        "tensor_parallel": tp,
        "pack_size": 240,
    }
    how["sequence_parallel"] = bool(sp)
    dataset = packed(chats(5))
    exported = export("megatron", dataset, tmp_path / "out", pad_id=EOS, **how)
    assert exported.facts["pad_seq_to_mult"] == multiple
    settings_of_context_parallelism = {
        name: exported.facts[name]
        for name in exported.facts
        if name.startswith(("model.", "ddp."))
    }
    if cp == 1:
        assert settings_of_context_parallelism == {}
    else:
        assert settings_of_context_parallelism == {
            "model.context_parallel_size": cp,
            "model.calculate_per_token_loss": True,
            "ddp.average_in_collective": False,
        }
    if multiple > 1:
        with pytest.raises(ConfigError, match=f"multiple of {multiple}"):
            export("megatron", dataset, tmp_path / "x", pad_seq_to_mult=1, **how)


# ids at the end of a sequence, whether they are supervised, how many of them are lost
TAILS = [
    ([1, EOS, 7], [0, 1, 1], 0),  # a line break after EOS: one more block keeps it
    ([1, 2, EOS, 7], [0, 0, 1, 1], 0),
    ([1, EOS, EOS, 7], [0, 1, 1, 1], 0),
    ([1, EOS, EOS], [0, 1, 1], 1),
    ([1, 2, EOS, EOS, EOS], [0, 1, 1, 1, 1], 2),
    ([1, EOS], [0, 1], 0),
]


@pytest.mark.parametrize("mult", [2, 3, 4])
def test_eos_at_the_end(mult: int, tmp_path: Path, packed: Pack) -> None:
    """Tokens that the reader takes for padding are not supervised; all others stay."""
    for number, (tail, on, lost) in enumerate(TAILS):
        labels = [
            token if weight else -100 for token, weight in zip(tail, on, strict=True)
        ]
        records = [
            {"input_ids": [3] * n + tail, "labels": [-100] * n + labels}
            for n in range(6)
        ]
        out = tmp_path / f"out{number}"
        exported = export(
            "megatron", packed(records), out, pad_seq_to_mult=mult, pad_id=EOS
        )
        assert exported.facts["not supervised any more"] == 6 * lost
        assert supervised(Reader(str(out), 300, mult=mult)) == 6 * (sum(on) - lost)
    # Where a sequence fills its row, there is no room for a block more.
    full = {"input_ids": [3] * 298 + [1, EOS, 7], "labels": [-100] * 299 + [EOS, 7]}
    how: dict[str, Any] = {"pad_seq_to_mult": mult, "pack_size": 300, "pad_id": EOS}
    exported = export(
        "megatron", packed([full], pack_size=301), tmp_path / "full", **how
    )
    assert exported.facts["not supervised any more"] == 1
    assert supervised(Reader(str(tmp_path / "full"), 300, mult=mult)) == 1


def supervised(reader: Reader) -> int:
    """Tokens with a loss, of which none is padding."""
    total = 0
    for batch in reader:
        assert not any(w and p for w, p in zip(batch.mask, batch.padding, strict=True))
        total += sum(batch.mask)
    return total


def test_refusals(
    tmp_path: Path, packed: Pack, capsys: pytest.CaptureFixture[str]
) -> None:
    out, records = tmp_path / "out", chats(9)
    with pytest.raises(CompatibilityError, match="kind"):
        export("megatron", packed(pairs(6)), out)
    dataset, longest = packed(records), max(len(r["input_ids"]) for r in records)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"pad_seq_to_mult": 4}, "pad_id"),
        ({"pad_seq_to_mult": 16, "pad_id": 1}, "pack_size 304"),
        ({"pack_size": longest - 2}, "pack_size"),
        *(
            ({name: n}, name)
            for name, n in {"pad_id": -1, "context_parallel": 0}.items()
        ),
        ({"pad_seq_to_mult": 0}, "pad_seq_to_mult"),
    ]
    for how, text in wrong:
        with pytest.raises(ConfigError, match=text):
            export("megatron", dataset, out, **how)
    assert not out.exists()
    export("megatron", dataset, out, pack_size=longest - 1)
    with pytest.raises(DatasetExistsError):
        export("megatron", dataset, out)
    (out / "mine.parquet").write_text("mine", encoding="utf-8")
    assert main(["export", "megatron", dataset.url, str(out), "--overwrite"]) == 0
    assert "packed_sequence_size" in capsys.readouterr().out
    assert sorted(Files(str(out)).names()) == [
        "metadata.json",
        "mine.parquet",
        "packed_300-00000.idx.parquet",
    ]
    there = export("megatron", dataset, "memory://exchange/bridge", overwrite=True)
    assert there.files[-1] == "memory://exchange/bridge/metadata.json"


def test_an_export_that_ends_half_way_has_no_metadata(
    tmp_path: Path, packed: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first one leaves nothing; a reader who waits for metadata never mixes two
    exports.
    """
    dataset, out = packed(chats(200)), tmp_path / "out"
    monkeypatch.setattr("packstore.exchange.megatron.FILE_BYTES", 600)

    def interrupted(stage: str, done: int, total: int | None, unit: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export("megatron", dataset, out, progress=interrupted)
    assert not out.exists()
    export("megatron", dataset, out)
    before = sorted(Files(str(out)).names())
    assert len(before) > 3
    # A folder in the place of a file that the export puts: the put fails.
    export("megatron", packed(chats(20)), out, overwrite=True)
    assert len(sorted(Files(str(out)).names())) < len(before)
    (out / before[2]).mkdir()
    with pytest.raises(StorageError):
        export("megatron", dataset, out, overwrite=True)
    assert not Files(str(out)).names()
    (out / before[2]).rmdir()
    export("megatron", dataset, out)
    assert sorted(Files(str(out)).names()) == before
    assert len(list(Reader(f"{out}", 300).rows())) == len(dataset)


@pytest.mark.slow
def test_real_chats(shared_data: Path, tmp_path: Path) -> None:
    tokenizer, source = (
        shared_data / "tokenizers/qwen3",
        shared_data / "sft/toolcall_en.jsonl",
    )
    how: dict[str, Any] = {"pack_size": 4096, "kind": "sft", "num_workers": 0}
    dataset = packstore.pack(str(source), tmp_path / "a", str(tokenizer), **how)
    eos = dataset.manifest.provenance["tokenizer"]["eos_id"]
    out = str(tmp_path / "out")
    assert main(["export", "megatron", dataset.url, out, "--context-parallel=2"]) == 0
    reader = Reader(f"{out}/packed_4096-*.idx.parquet", 4096, eos=eos, mult=4)
    assert supervised(reader) == dataset.manifest.totals.supervised_tokens
