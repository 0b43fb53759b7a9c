"""Packing in partitions: the same bytes whoever makes them, the same examples as in
one.
"""

from __future__ import annotations

import gzip
import json
import logging
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import run_python
from places import Files
from small_jobs import stopping, write_jsonl

import packstore
from packstore.errors import ConfigError, DatasetNotFoundError, InputError

FILES, RECORDS = 5, 400
pytestmark = pytest.mark.usefixtures("own_temporary_folder")
SETTINGS: dict[str, Any] = {
    "pack_size": 256,
    "shard_tokens": 5000,
    "row_group_tokens": 4096,
}


def write(path: Path, seed: int, records: int = RECORDS) -> str:
    rng = np.random.default_rng(seed)
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt") as file:
        for _ in range(records):
            ids = [rng.integers(1, 999, n).tolist() for n in rng.integers(1, 40, 3)]
            record = dict(zip(("prompt", "chosen", "rejected"), ids, strict=True))
            file.write(json.dumps(record) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("in")
    names = [f"{i}.jsonl" + (".gz" if i == 2 else "") for i in range(FILES)]
    return [write(folder / name, i) for i, name in enumerate(names)]


@pytest.fixture(scope="module")
def whole(
    sources: list[str], tmp_path_factory: pytest.TempPathFactory
) -> packstore.Dataset:
    return packstore.pack(
        sources, str(tmp_path_factory.mktemp("one") / "out"), **SETTINGS
    )


def examples(dataset: packstore.Dataset) -> Counter[int]:
    return Counter(
        i for packs in dataset.iter_packs() for i in packs.example_ids.tolist()
    )


def test_partitions_hold_what_one_would(
    sources: list[str], whole: packstore.Dataset, tmp_path: Path
) -> None:
    made = packstore.pack(
        sources, tmp_path / "a", partitions=3, num_workers=0, **SETTINGS
    )
    assert made.verify().ok
    assert examples(made) == examples(whole)
    assert made.manifest.records == whole.manifest.records
    for name in ("sources", "lineage"):
        assert made.manifest.provenance[name] == whole.manifest.provenance[name]
    assert made.manifest.provenance["settings"]["partitions"] == 3
    # Each partition leaves its last packs open: 0.1 % from a thousand packs a partition
    # on.
    assert len(made) - len(whole) <= 2 * 3
    planning, other = (
        made.manifest.statistics.planning,
        whole.manifest.statistics.planning,
    )
    for name in ("num_examples", "tokens", "strategy"):
        assert planning[name] == other[name]
    assert planning["num_packs"] == len(made)
    assert planning["fill_rate"] == pytest.approx(made.manifest.fill_rate)
    sizes = made.pack_index
    assert planning["examples_per_pack"] == {
        "min": sizes.examples.min(),
        "mean": pytest.approx(sizes.examples.mean()),
        "max": sizes.examples.max(),
    }
    bridge = planning["megatron_bridge"]
    assert bridge["max_samples_per_bin"] == sizes.examples.max()
    assert bridge["min_packed_seqlen"] == sizes.tokens.min()
    longest = other["megatron_bridge"]["dataset_max_seqlen"]
    assert bridge["dataset_max_seqlen"] == longest
    assert {s.path.split("-")[1] for s in made.manifest.shards} == {
        "p00000",
        "p00001",
        "p00002",
    }
    again = packstore.pack(
        sources, tmp_path / "b", partitions=3, num_workers=2, **SETTINGS
    )
    assert again.manifest.to_json() == made.manifest.to_json()


@pytest.fixture
def in_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partitions are made as large ones are where there are many cores."""
    monkeypatch.setattr("packstore.etl.pipeline.MIN_TASKS", 2)
    monkeypatch.setattr("packstore.etl.pipeline.MIN_TASK_BYTES", 0)


@pytest.mark.usefixtures("in_tasks")
def test_worker_processes_that_make_whole_partitions_change_no_byte(
    sources: list[str], tmp_path: Path
) -> None:
    settings = {**SETTINGS, "partitions": 4, "dedup": "pair"}
    seen: list[tuple[str, int]] = []
    packstore.pack(
        sources, tmp_path / "a", num_workers=2,
        progress=lambda stage, done, *_: seen.append((stage, done)), **settings,
    )  # fmt: skip
    packstore.pack(sources, tmp_path / "b", num_workers=0, **settings)
    assert Files(tmp_path / "a").all() == Files(tmp_path / "b").all()
    assert [stage for stage, done in seen if done].count(
        "read"
    ) == 4 + 1  # whole ones, and the end


@pytest.mark.usefixtures("in_tasks")
def test_a_partition_that_fails_ends_the_others_and_leaves_no_temporary_files(
    sources: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "TMPDIR", tempfile.gettempdir()
    )  # for the processes that will start
    broken = tmp_path / "broken.jsonl"
    broken.write_text(
        Path(sources[0]).read_text(encoding="utf-8").replace('"prompt"', "prompt", 1),
        encoding="utf-8",
    )
    with pytest.raises(InputError, match=r"broken\.jsonl, line 1: "):
        packstore.pack(
            [*sources, str(broken)],
            tmp_path / "out",
            partitions=4,
            num_workers=2,
            **SETTINGS,
        )
    assert not list(Path(tempfile.gettempdir()).glob("packstore-*"))


@pytest.mark.parametrize("stage", ["read", "write"])
def test_a_job_that_is_stopped_leaves_no_temporary_files(
    sources: list[str], tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(spill))
    with pytest.raises(KeyboardInterrupt):
        packstore.pack(
            sources, tmp_path / "out", partitions=6, num_workers=2,
            progress=stopping(stage, 0), **SETTINGS,
        )  # fmt: skip
    assert not list(spill.iterdir())
    left = (p for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert {p.parent.name for p in left} <= {"data", "partitions"}


@pytest.fixture(scope="module")
def repeating(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Files whose records repeat one another, within a file and across them."""
    folder, rng = tmp_path_factory.mktemp("repeating"), np.random.default_rng(0)
    return [
        write_jsonl(
            folder / f"{i}.jsonl",
            (
                {
                    "prompt": [prompt, 7],
                    "chosen": [n] * n,
                    "rejected": [9] * (prompt % 50),
                }
                for prompt, n in rng.integers(1, [400, 6], (700, 2)).tolist()
            ),
        )
        for i in range(3)
    ]


SELECTING: dict[str, Any] = {
    "pack_size": 64, "shard_tokens": 2000, "row_group_tokens": 1024, "max_drop_rate": 1.0,
    "max_length": 48, "validation_fraction": 0.3,
}  # fmt: skip


@pytest.mark.parametrize("dedup", ["pair", "prompt"])
def test_selecting_takes_what_one_partition_would(
    repeating: list[str], tmp_path: Path, dedup: str
) -> None:
    settings = {**SELECTING, "dedup": dedup, "num_workers": 0}
    for n in (1, 4):
        packstore.pack(repeating, tmp_path / str(n), partitions=n, **settings)
    for part in ("train", "validation"):
        one, four = (packstore.open(tmp_path / n / part) for n in ("1", "4"))
        assert examples(four) == examples(one)
        records = one.manifest.records
        assert records.dropped[f"duplicate_{dedup}"] > 100
        assert four.manifest.records.dropped == records.dropped
        assert four.manifest.records.read == records.read
        assert four.manifest.provenance["part"] == part
        assert four.manifest.provenance["lineage"] == one.manifest.provenance["lineage"]
        assert four.verify().ok


KILLED = """
import json, os, signal, sys
import packstore

def progress(stage, done, total, unit):
    if stage == "write" and done > packs:
        os.kill(os.getpid(), signal.SIGKILL)

sources, out, packs, settings = json.loads(sys.argv[1])
packstore.pack(sources, out, num_workers=2, progress=progress, **settings)
"""


def test_a_killed_run_goes_on(
    repeating: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {**SELECTING, "dedup": "pair", "partitions": 4}
    out, whole = tmp_path / "out", tmp_path / "whole"
    packstore.pack(repeating, whole, num_workers=0, **settings)
    packs = sum(len(packstore.open(whole / part)) for part in ("train", "validation"))
    arguments = json.dumps([repeating, str(out), 0.6 * packs, settings])
    # It returns when all who hold its output have ended: workers do not outlive the
    # job.
    done = run_python("-c", KILLED, arguments, timeout=120)
    assert done.returncode == -9, done.stderr
    with pytest.raises(DatasetNotFoundError):
        packstore.open(out / "train")
    kept = next((out / "train" / "data").glob("*-p00000-00000-*"))
    before = kept.stat().st_ino
    with caplog.at_level(logging.INFO, "packstore"):
        packstore.pack(repeating, out, num_workers=0, **settings)
    assert "took over 2 of 4 partitions of an interrupted run" in caplog.text
    assert kept.stat().st_ino == before
    for part in ("train", "validation"):
        packstore.clean(str(out / part), delete=True, older_than=0, no_writers=True)
    assert Files(out).all() == Files(whole).all()


@pytest.mark.parametrize(
    "lengths", [[20] * 24, [600, *[20] * 23], [300, 5, 300, 5, 300, 5]]
)
def test_partitions_share_the_input_alike(lengths: list[int], tmp_path: Path) -> None:
    """Files smaller than a block, and one or several that hold most of the records."""
    sources = [write(tmp_path / f"{i:02d}.jsonl", i, n) for i, n in enumerate(lengths)]
    made = packstore.pack(
        sources, tmp_path / "out", partitions=4, num_workers=0, **SETTINGS
    )
    tokens: Counter[str] = Counter()
    for shard in made.manifest.shards:
        tokens[shard.path.split("-")[1]] += shard.tokens
    assert len(tokens) == 4
    assert max(tokens.values()) < 1.5 * min(tokens.values())


def test_what_cannot_be_cut_is_refused(
    whole: packstore.Dataset, tmp_path: Path
) -> None:
    for source in ([{"prompt": [1], "chosen": [2], "rejected": [3]}], whole):
        with pytest.raises(ConfigError, match="partitions=2"):
            packstore.pack(source, tmp_path / "out", partitions=2)
