"""Numbers of single tokens in records: stored as side data, and refused if they do not
fit.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from places import Files
from small_jobs import trained_tokenizer, write_jsonl

import packstore
from packstore.errors import CompatibilityError, ConfigError, RecordError
from packstore.io.store.location import Location
from packstore.torch import PackedDataset

SETTINGS: dict[str, Any] = {"pack_size": 64, "token_values": {"old": "logprobs"}}
KINDS = ("sft", "scored", "preference")


def rollouts(count: int, seed: int, kind: str = "sft") -> list[dict[str, Any]]:
    """Records of ids, with a number for each id of the responses."""
    random = np.random.default_rng(seed)

    def ids() -> list[int]:
        length = random.integers(1, 9)
        return [int(x) for x in random.integers(5, 90, length)]

    records = []
    for _ in range(count):
        num_responses = {"sft": 1, "preference": 2}.get(kind, random.integers(1, 4))
        responses = [ids() for _ in range(num_responses)]
        numbers = [[float(-random.random()) for _ in x] for x in responses]
        record: dict[str, Any] = {"prompt_ids": ids(), "logprobs": numbers}
        if kind == "sft":
            record |= {"response_ids": responses[0], "logprobs": numbers[0]}
        elif kind == "preference":
            record |= {"chosen_ids": responses[0], "rejected_ids": responses[1]}
        else:
            rewards = [float(x) for x in random.integers(0, 3, num_responses)]
            record |= {"responses": responses, "scores": rewards}
        records.append(record)
    return records


def flat(numbers: Sequence[Any]) -> list[float]:
    lists = numbers if isinstance(numbers[0], list) else [numbers]
    return [float(np.float32(x)) for values in lists for x in values]


def joined(dataset: Any, side: Any, column: str = "old") -> dict[int, list[float]]:
    """Example id -> its numbers, as a batch has them."""
    values = {}
    stream = PackedDataset(dataset, side=side, shuffle=False).stream
    for packs in stream.read([np.arange(len(stream))]):
        for pack in packs:
            ends = np.cumsum(pack.num_targets)[:-1]
            parts = np.split(pack.token_columns[column], ends)
            for number, part in zip(pack.example_ids.tolist(), parts, strict=True):
                values[number] = part.tolist()
    return values


def expected(*parts: Sequence[Mapping[str, Any]]) -> dict[int, list[float]]:
    return {
        (source << 40) + ordinal: flat(record["logprobs"])
        for source, records in enumerate(parts)
        for ordinal, record in enumerate(records)
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
def test_pack_append_and_repack(kind: str, layout: str, tmp_path: Path) -> None:
    first, second = rollouts(40, 1, kind), rollouts(30, 2, kind)
    out, values = str(tmp_path / "ds"), str(tmp_path / "ds-values")
    stages: list[tuple[Any, ...]] = []
    report = lambda *stage: stages.append(stage)  # noqa: E731
    packstore.pack(first, out, layout=layout, progress=report, **SETTINGS)
    assert stages[-1] == ("values", 40, 40, "examples")
    extended = packstore.append(out, write_jsonl(tmp_path / "b.jsonl", second))
    assert joined(out, values) == expected(first, second)
    assert joined(packstore.open(out, version=1), values) == expected(first)
    assert extended.manifest.records.fields_used["logprobs"] == 70

    # Ids stay when a dataset is packed anew, or is a part of another one.
    packstore.pack(out, tmp_path / "again", pack_size=100)
    assert joined(tmp_path / "again", values) == expected(first, second)
    third = rollouts(10, 3, kind)
    packstore.pack(third, tmp_path / "third", layout=layout, **SETTINGS)
    packstore.concat([out, str(tmp_path / "third")], str(tmp_path / "all"))
    both = [values, tmp_path / "third-values"]
    assert joined(tmp_path / "all", both) == expected(first, second, third)
    with pytest.raises(CompatibilityError, match="third-values"):
        joined(out, both[1])


@pytest.mark.parametrize("container", ["parquet", "table", "datasets", "csv"])
def test_containers(container: str, tmp_path: Path) -> None:
    records = rollouts(20, 4)
    source: Any = pa.Table.from_pylist(records)
    if container == "parquet":
        pq.write_table(source, tmp_path / "a.parquet")
        source = tmp_path / "a.parquet"
    elif container == "datasets":
        source = pytest.importorskip("datasets").Dataset.from_list(records)
    elif container == "csv":
        lines = ["input_ids,mask,logprobs"]
        for record in records:
            prompt, response = record["prompt_ids"], record["response_ids"]
            mask = [0] * len(prompt) + [1] * len(response)
            cells = [prompt + response, mask, record["logprobs"]]
            lines.append(",".join(f'"{json.dumps(cell)}"' for cell in cells))
        source = tmp_path / "a.csv"
        source.write_text("\n".join(lines), encoding="utf-8")
    packstore.pack(source, tmp_path / "ds", **SETTINGS)
    assert joined(tmp_path / "ds", tmp_path / "ds-values") == expected(records)


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        ([-1.0], "1 for 2"),
        ([-1.0] * 3, "3 for 2.*EOS"),
        ([[-1.0], [-1.0]], "2 of 1 responses"),
        ([-1.0, float("nan")], "nan for token 2"),
        ([-1.0, 1e39], "1e\\+39 for token 2"),
        ([-1.0, "x"], "'x' for token 2"),
        ([-1.0, True], "True for token 2"),
        ([-1.0, None], "None for token 2"),
        ("high", "'high'"),
        (None, "none"),
    ],
)
def test_numbers_that_do_not_fit(numbers: Any, found: str, tmp_path: Path) -> None:
    record = {"prompt_ids": [5], "response_ids": [6, 7], "logprobs": [-1.0, -2.0]}
    source = write_jsonl(
        tmp_path / "a.jsonl", [record, {**record, "logprobs": numbers}]
    )
    with pytest.raises(RecordError, match=f"a.jsonl, line 2: .*'logprobs'.*{found}"):
        packstore.pack(source, tmp_path / "ds", **SETTINGS)
    assert not (tmp_path / "ds-values").exists()


def test_probabilities_in_place_of_log_probs(tmp_path: Path) -> None:
    record = {"prompt_ids": [5], "response_ids": [6, 7], "logprobs": [-1.0, 0.5]}
    settings = {**SETTINGS, "token_values": {"old_logps": "logprobs"}}
    with pytest.raises(RecordError, match=r"at most 0.*0\.5 for token 2"):
        packstore.pack([record], tmp_path / "ds", **settings)


def test_one_response_of_several(tmp_path: Path) -> None:
    record = rollouts(1, 1, "preference")[0]
    record["logprobs"][1].append(0.0)
    count = len(record["rejected_ids"])
    with pytest.raises(RecordError, match=f"response 2 has {count + 1} for {count}"):
        packstore.pack([record], tmp_path / "ds", **SETTINGS)


def test_settings_that_are_refused(tmp_path: Path) -> None:
    records = rollouts(3, 1)
    for values, found in (
        ({"input_ids": "logprobs"}, "input_ids"),
        ({"a b": "logprobs"}, "a b"),
        ({"ref_logps": "logprobs"}, "ref_token_logps"),
    ):
        with pytest.raises(ConfigError, match=found):
            packstore.pack(records, tmp_path / "ds", token_values=values)
    sides = {"first": "a", "second": "b", "verdict": "best"}
    with pytest.raises(ConfigError, match="chosen, rejected"):
        packstore.pack(records, tmp_path / "ds", fields=sides, **SETTINGS)
    with pytest.raises(ConfigError, match="list_iterator"):
        packstore.pack(iter(records), tmp_path / "ds", **SETTINGS)


def test_a_form_with_a_verdict(tmp_path: Path) -> None:
    """A verdict orders its answers, so numbers could go to the wrong one."""
    record = {"prompt": "a", "response_1": "b", "response_2": "c", "winner": "model_b"}
    record |= {"logprobs": [[-1.0] * 3, [-2.0] * 3]}
    with pytest.raises(RecordError, match=r"ppe_human_preference.*chosen and rejected"):
        packstore.pack([record], tmp_path / "ds", trained_tokenizer(["a"]), **SETTINGS)


def test_the_field_is_not_read(tmp_path: Path) -> None:
    """Neither as an answer nor as a score, whatever its name is."""
    records = rollouts(5, 1)
    for record in records:
        record["score"] = record.pop("logprobs")
    dataset = packstore.pack(
        records, tmp_path / "ds", kind="sft", token_values={"old": "score"}
    )
    assert dataset.manifest.kind == "sft"
    named = [{**record, "logprobs": record["score"]} for record in records]
    assert joined(dataset, tmp_path / "ds-values") == expected(named)


def test_other_choices_of_the_same_records(tmp_path: Path) -> None:
    """Equal lineages share a side dataset, also with drops, splits and overwrites."""
    records = rollouts(60, 5)
    records += records[:20]
    out, values = tmp_path / "ds", tmp_path / "values"
    settings = {**SETTINGS, "values_out": str(values), "on": {"overlong": "drop"}}
    every = expected(records)

    def check(folder: Path, side: Path, version: int | None = None) -> None:
        found = joined(packstore.open(folder, version=version), side)
        assert found == {number: every[number] for number in found}

    for version, more in enumerate(({"max_length": 11}, {"dedup": "pair"}, {}), 1):
        packstore.pack(
            records, out, overwrite=True, max_drop_rate=1, **settings, **more
        )
        for earlier in range(1, version + 1):
            check(out, values, earlier)
    packstore.pack(records, tmp_path / "split", validation_fraction=0.3, **settings)
    for part in ("train", "validation"):
        check(tmp_path / "split" / part, values / part)


def count_targets(dataset: packstore.Dataset) -> dict[int, int]:
    """Example id -> number of its supervised tokens."""
    counts = {}
    for packs in dataset.iter_packs():
        counts |= zip(
            packs.example_ids.tolist(), packs.num_targets.tolist(), strict=True
        )
    return counts


def test_text(tmp_path: Path) -> None:
    """Text becomes tokens and an end, some of it is cut, and some left out."""
    tokenizer = trained_tokenizer(["what comes after this question?"])
    settings: dict[str, Any] = {
        "pack_size": 48,
        "max_length": 24,
        "on": {"overlong": "truncate_response", "missing_field": "drop"},
        "max_drop_rate": 1,
    }
    records: list[dict[str, Any]] = [
        {"prompt": f"what? {i}", "response": "this question " * (1 + i % 4)}
        for i in range(40)
    ]
    records[7]["response"] = None
    plain = packstore.pack(records, tmp_path / "plain", tokenizer, **settings)
    counts = count_targets(plain)
    assert len(counts) == 39
    assert len(set(counts.values())) > 2
    for ordinal, count in counts.items():
        records[ordinal]["logprobs"] = [-ordinal - i / 8 for i in range(count)]
    settings |= SETTINGS | {"pack_size": 48}
    packstore.pack(records, tmp_path / "ds", tokenizer, **settings)
    found = joined(tmp_path / "ds", tmp_path / "ds-values")
    assert found == {i: flat(records[i]["logprobs"]) for i in counts}


@pytest.mark.parametrize(
    "in_tasks", [False, pytest.param(True, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", ["sft", "preference"])
def test_any_workers(
    in_tasks: bool, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many files, in several partitions, with records that are left out."""
    if in_tasks:
        monkeypatch.setattr("packstore.etl.pipeline.MIN_TASKS", 2)
        monkeypatch.setattr("packstore.etl.pipeline.MIN_TASK_BYTES", 0)
    parts = [rollouts(50, seed, kind) for seed in range(4)]
    parts[2][:10] = parts[0][:10]
    sources = [
        write_jsonl(tmp_path / f"{number}.jsonl", part)
        for number, part in enumerate(parts)
    ]
    settings: dict[str, Any] = {
        **SETTINGS,
        "partitions": 3,
        "dedup": "pair",
        "max_length": 13,
        "max_drop_rate": 1,
    }
    for number, num_workers in enumerate((0, 2)):
        folder = tmp_path / str(number)
        packstore.pack(sources, folder / "ds", num_workers=num_workers, **settings)
        found = joined(folder / "ds", folder / "ds-values")
        every = expected(*parts)
        assert found == {example: every[example] for example in found}
        assert 100 < len(found) < 190
    assert Files(tmp_path / "0").all() == Files(tmp_path / "1").all()


class Killed(BaseException):
    """The end of a process, as far as it shows in a store."""


def kill_at(moment: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Lets no write reach the stores from the moment-th on; returns their number."""
    writes = 0
    counting = threading.Lock()

    def killing(write: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(*args: Any, **keywords: Any) -> Any:
            nonlocal writes
            with counting:
                writes += 1
                if writes >= moment:
                    raise Killed
            return write(*args, **keywords)

        return attempt

    for name in ("put_file", "create_bytes", "remove"):
        monkeypatch.setattr(Location, name, killing(getattr(Location, name)))
    return lambda: writes


@pytest.mark.parametrize("partitions", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_killed_at_any_write(
    partitions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version is whole or absent, and a whole one has its values."""
    first, second = rollouts(40, 1), rollouts(30, 2)
    source = write_jsonl(tmp_path / "b.jsonl", second)
    settings: dict[str, Any] = {"partitions": partitions, "num_workers": 0}
    packstore.pack(first, tmp_path / "base" / "ds", **SETTINGS)

    def check(folder: Path, versions: int) -> None:
        parts = [first, second][:versions]
        assert joined(folder / "ds", folder / "ds-values") == expected(*parts)

    moment = 0
    is_killed = True
    while is_killed:
        moment += 1
        folder = tmp_path / str(moment)
        shutil.copytree(tmp_path / "base", folder)
        with monkeypatch.context() as patch:
            kill_at(moment, patch)
            try:
                packstore.append(str(folder / "ds"), source, **settings)
                is_killed = False
            except Killed:
                pass
        for marker in folder.rglob("writers/*.json"):
            marker.unlink()  # of a process that is gone, it would not count
        check(folder, packstore.open(folder / "ds").version)
        packstore.append(str(folder / "ds"), source, **settings)
        check(folder, 2)
        assert len(list(folder.glob("ds-values/*/_packstore/side-*.json"))) == 2
        for name in ("ds", "ds-values"):
            cleaning: dict[str, Any] = {"older_than": 0, "no_writers": True}
            packstore.clean(folder / name, delete=True, **cleaning)
            assert not packstore.clean(folder / name, **cleaning).leftovers
        check(folder, 2)
    assert moment > 8
