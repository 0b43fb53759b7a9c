"""The main job end to end: records in, a committed dataset out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import Files
from small_jobs import trained_tokenizer, write_jsonl
from tokenizers import Tokenizer

import packstore
from packstore.errors import ConfigError, DropRateError
from packstore.pack.algorithms import STRATEGIES

Record = dict[str, Any]

PAIRS: list[Record] = [
    {
        "prompt": f"question {i}: what comes after {i}? " + "please " * (i % 7),
        "chosen": f"After {i} comes {i + 1}." + " Yes." * (i % 5),
        "rejected": f"I do not know what comes after {i}.",
        "source": "even" if i % 2 == 0 else "odd",
        "measure": i / 4,
    }
    for i in range(60)
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = [r["prompt"] + r["chosen"] + r["rejected"] for r in PAIRS]
    return trained_tokenizer(texts, vocab_size=400)


Pack = Callable[..., packstore.Dataset]


@pytest.fixture
def do_pack(tokenizer: Tokenizer, tmp_path: Path) -> Pack:
    """packstore.pack with the small tokenizer, into a fresh folder."""
    count = iter(range(1000))

    def run(
        source: Any, tokenizer_: Any = tokenizer, **settings: Any
    ) -> packstore.Dataset:
        out = tmp_path / f"out-{next(count)}"
        return packstore.pack(source, out, tokenizer_, **{"pack_size": 256, **settings})

    return run


def by_id(dataset: packstore.Dataset) -> dict[int, dict[str, Any]]:
    """Everything of each example, under its id."""
    frame = packstore.scan(dataset, tokens=True).collect().drop("pack", "shard")
    return {row.pop("example_id"): row for row in frame.to_dicts()}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
def test_what_goes_in_comes_out(
    do_pack: Pack,
    tmp_path: Path,
    strategy: str,
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the temporary files of what was read are many, else of 32 MB each."""
    files = [
        write_jsonl(tmp_path / f"{n}.jsonl", PAIRS[n : n + 10])
        for n in range(0, 60, 10)
    ]
    plain = by_id(do_pack(files, strategy="none", carry=("source", "measure:float64")))
    monkeypatch.setattr("packstore.etl.spill.SEGMENT_BYTES", 3000)
    monkeypatch.setattr("packstore.etl.spill.MAX_BUCKETS", 7)
    packed = do_pack(
        files, strategy=strategy, layout=layout, carry=("source", "measure:float64"),
        seed=3,
    )  # fmt: skip
    assert packed.verify().ok
    assert by_id(packed) == plain
    assert (plain[5]["source"], plain[5]["measure"]) == ("odd", 1.25)


@pytest.mark.parametrize(
    ("copies", "most", "workers"),
    [
        (1, 120, (0, 2)),
        pytest.param(50, None, (1, 1, 2, 4, None), marks=pytest.mark.slow),
    ],
)
def test_same_bytes_for_any_number_of_workers(
    do_pack: Pack,
    shared_data: Path,
    tmp_path: Path,
    copies: int,
    most: int | None,
    workers: tuple[int | None, ...],
) -> None:
    """Chats, with a real tokenizer, in more than one block."""
    chats = (
        (shared_data / "pairs" / "chat_zh.jsonl")
        .read_bytes()
        .splitlines(keepends=True)[:most]
    )
    sources = [tmp_path / f"{n}.jsonl" for n in range(4)]
    for n, source in enumerate(sources):
        source.write_bytes(b"".join(chats[n::4]) * copies)
    mistral = shared_data / "tokenizers" / "mistral_v1" / "tokenizer.json"
    do_pack = partial(do_pack, sources, mistral, chat_template="plain", pack_size=4096)
    runs = [do_pack(num_workers=n) for n in workers]
    first = Files(runs[0].url).all()
    assert all(Files(run.url).all() == first for run in runs)
    assert Files(do_pack(num_workers=0, seed=1).url).names() != first.keys()


def test_packing_anew_changes_packs_not_examples(do_pack: Pack) -> None:
    first = do_pack(PAIRS, carry=("source",), layout="concat")
    second = do_pack(first, None, pack_size=512, layout="shared_prefix", seed=9)
    third = do_pack(second, None, pack_size=256, layout="concat", seed=4)
    assert by_id(first) == by_id(second) == by_id(third)
    assert (
        second.manifest.provenance["repacked_from"]["fingerprint"]
        == first.manifest.fingerprint
    )
    assert (
        second.manifest.provenance["tokenizer"]
        == first.manifest.provenance["tokenizer"]
    )
    assert second.verify().ok
    assert third.verify().ok
    small = do_pack(first, None, pack_size=40, layout="concat", max_drop_rate=0.9)
    records = small.manifest.records
    assert records.read == 60 == records.packed + records.dropped["overlong"]
    with pytest.raises(ConfigError, match="tokenizer"):
        do_pack(first, "tokenizer.json")
    with pytest.raises(ConfigError, match="truncate_prompt"):
        do_pack(first, None, on={"overlong": "truncate_prompt"})


def test_counts_add_up_and_too_many_drops_fail(do_pack: Pack) -> None:
    bad = [
        {"prompt": "a", "chosen": "same", "rejected": "same"},
        {"prompt": "a", "chosen": "", "rejected": "b"},
        {"prompt": 3, "chosen": "x", "rejected": "y"},
        {"prompt": "a", "chosen": "word " * 400, "rejected": "b"},
        {"prompt": "lone \ud800", "chosen": "x", "rejected": "y"},
    ]
    records = do_pack(PAIRS + bad).manifest.records
    assert records.dropped == {
        "identical_sides": 1,
        "empty_side": 1,
        "wrong_type": 1,
        "overlong": 1,
        "invalid_unicode": 1,
    }
    assert records.read == 65 == records.packed + sum(records.dropped.values())
    with pytest.raises(DropRateError, match="5 of 65"):
        do_pack(PAIRS + bad, max_drop_rate=0.05)
    with pytest.raises(DropRateError, match="5 of 5"):
        do_pack(bad, max_drop_rate=1.0)
    with pytest.raises(DropRateError, match="pack_size"):
        do_pack(PAIRS, pack_size=8)


def test_nemo_aligner_packs_the_same(shared_data: Path, do_pack: Pack) -> None:
    """All five fields of NeMo-Aligner's own packed file, as a multiset."""
    dataset = do_pack(
        shared_data / "nemo" / "dummy-dpo.jsonl",
        shared_data / "nemo" / "tokenizer.json",
        pack_size=90,
        layout="concat",
        add_bos=False,
        append_eos=False,
    )
    names = ("input_ids", "labels", "reward", "lengths", "seq_boundaries")
    golden = np.load(
        shared_data / "nemo" / "dummy_dpo_packed_90.npy", allow_pickle=True
    )
    expected = Counter(str([list(map(float, row[n])) for n in names]) for row in golden)
    found: Counter[str] = Counter()
    for batch in dataset.iter_batches():
        for row in batch.to_pylist():
            found[str([list(map(float, row[n])) for n in names])] += 1
    assert found == expected
    assert found.total() == 100


def test_duplicates_are_left_out_and_counted(do_pack: Pack, tmp_path: Path) -> None:
    again = [{**PAIRS[3], "chosen": "Another answer."}, PAIRS[5], PAIRS[3], PAIRS[59]]
    source = write_jsonl(tmp_path / "pairs.jsonl", [*PAIRS, *again])
    assert do_pack(source).manifest.pairs == 64
    for dedup, left in (("pair", 61), ("prompt", 60)):
        dataset = do_pack(source, dedup=dedup)
        records = dataset.manifest.records
        assert records.dropped == {f"duplicate_{dedup}": 64 - left}
        assert records.read == 64 == records.packed + sum(records.dropped.values())
        assert sorted(by_id(dataset)) == list(range(left))  # the first one stays
    many = do_pack(
        [PAIRS[0], *PAIRS[:1] * 99, PAIRS[1]], dedup="pair", max_drop_rate=0.1
    )
    assert many.manifest.pairs == 2
    with pytest.raises(ConfigError, match="validation_fraction"):
        do_pack(many, None, dedup="pair")


def test_a_part_for_validation(
    do_pack: Pack, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """By the prompt alone: no prompt is in both parts, whatever else is in the
    input.
    """
    twins = [{**r, "chosen": "Second: " + r["chosen"]} for r in PAIRS]
    split = {"validation_fraction": 0.25, "pack_size": 256, "carry": ("source",)}
    train = packstore.pack([*PAIRS, *twins], tmp_path / "all", tokenizer, **split)
    assert train.url == str(tmp_path / "all" / "train")
    held = packstore.open(str(tmp_path / "all" / "validation"))
    records = train.manifest.records, held.manifest.records
    assert [r.read for r in records] == [120, 120]
    assert records[0].dropped == {"for_validation": held.manifest.pairs}
    assert records[1].dropped == {"for_training": train.manifest.pairs}
    assert train.verify().ok
    assert held.verify().ok
    mine, other = by_id(train), by_id(held)
    assert mine | other == by_id(do_pack([*PAIRS, *twins], carry=("source",)))
    assert {i % 60 for i in mine}.isdisjoint(i % 60 for i in other)
    assert 0.1 < len(other) / 120 < 0.4
    few = packstore.pack(PAIRS[:20], tmp_path / "few", tokenizer, **split)
    assert set(by_id(few)) == {i for i in mine if i < 20}
    drawn = packstore.pack(PAIRS, tmp_path / "drawn", tokenizer, seed=1, **split)
    assert set(by_id(drawn)) != {i for i in mine if i < 60}
    with pytest.raises(DropRateError):
        do_pack(PAIRS[:2], validation_fraction=1e-9)
    with pytest.raises(ConfigError, match="validation_fraction"):
        do_pack(PAIRS, validation_fraction=1.0)
