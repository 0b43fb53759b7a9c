"""The Ray engine on a local cluster: the bytes of the local engine, also when a worker dies."""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from small_jobs import write_tokenizer

import packstore
from packstore.errors import DatasetNotFoundError, MissingExtraError, PackstoreError, StorageError
from packstore.io.store.location import Location
from packstore.io.store.staging import Staging

if TYPE_CHECKING:  # workers import this file, and find a folder of that name
    from stores import Store

ray = pytest.importorskip("ray", reason="ray is not installed (extra: ray)")

from packstore.etl.engines.ray import run  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

EXAMPLE = Path(__file__).parents[3] / "examples" / "ray_on_object_storage.py"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    tests = Path(__file__).parents[2]
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        runtime_env={"env_vars": {"PYTHONPATH": f"{tests}:{tests / 'support'}"}},
    )
    yield
    ray.shutdown()
    gc.collect()  # processes that Ray has left open warn here, and not in a later test


def square(x: int) -> int:
    time.sleep(0.01 * (x % 3))  # results arrive out of order
    return x * x


class DieOnce:
    """Kills its process at one item, if no process did so before."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __call__(self, x: int) -> int:
        if x == 5 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return x * x


def fail_at_7(x: int) -> int:
    if x == 7:
        raise ValueError("seven")
    return x


def die(x: int) -> int:
    os._exit(9)


def test_results_keep_the_order_of_the_items() -> None:
    assert list(run(square, range(20), None)) == [x * x for x in range(20)]
    assert list(run(square, [], 2)) == []


def test_items_are_taken_as_they_are_needed() -> None:
    taken: list[int] = []
    results = run(square, (taken.append(i) or i for i in range(1000)), 2)  # type: ignore[func-returns-value]
    next(results)
    assert len(taken) <= 5
    results.close()  # type: ignore[attr-defined]


def test_a_lost_task_is_run_again(tmp_path: Path) -> None:
    mark = tmp_path / "died"
    assert list(run(DieOnce(mark), range(20), 2)) == [x * x for x in range(20)]
    assert mark.exists()


def test_an_error_of_the_work_arrives_unchanged() -> None:
    with pytest.raises(ValueError, match="seven"):
        list(run(fail_at_7, range(20), 2))


def test_what_is_lost_every_time_is_an_error() -> None:
    with pytest.raises(PackstoreError, match="lost 4 times"):
        list(run(die, range(2), 2))


def test_the_dataset_is_that_of_the_local_engine(tmp_path: Path) -> None:
    sources = []
    for i in range(6):
        path = tmp_path / f"{i}.jsonl"
        line = '{{"prompt": [{0}, 1, 2], "chosen": [{1}, 4], "rejected": [5, {0}]}}\n'
        path.write_text("".join(line.format(i, j) for j in range(50)))
        sources.append(str(path))
    found = [
        packstore.pack(sources, tmp_path / engine, pack_size=64, engine=engine, num_workers=2)
        for engine in ("local", "ray")
    ]
    assert found[0].manifest.fingerprint == found[1].manifest.fingerprint
    assert found[1].verify().ok


class DieAtAShard:
    """Kills its process when partition 1 has put its first shard, if no process did so before."""

    def __init__(self, work: Callable[[Any], Any], mark: Path) -> None:
        self.work, self.mark = work, mark

    def __call__(self, item: tuple[int, Any]) -> Any:
        if item[0] == 1 and not self.mark.exists():
            put = Staging.store

            def put_and_die(staging: Staging, local_path: str, path: str) -> None:
                put(staging, local_path, path)
                self.mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

            Staging.store = put_and_die  # type: ignore[method-assign]
        return self.work(item)


def test_partitions_survive_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes as in this process, though a task dies with a shard put and others to come."""
    sources = []
    for i in range(4):
        path = tmp_path / f"{i}.jsonl"
        line = '{{"prompt": [{0}, 1, 2], "chosen": [{1}, 4], "rejected": [5, {0}]}}\n'
        path.write_text("".join(line.format(i, j) for j in range(900)))
        sources.append(str(path))
    settings: dict[str, Any] = {
        "pack_size": 64, "partitions": 3, "shard_tokens": 2000, "row_group_tokens": 512,
    }  # fmt: skip
    calm = packstore.pack(sources, tmp_path / "calm", num_workers=0, **settings)
    mark, out = tmp_path / "died", tmp_path / "out"
    seen: list[tuple[str, int]] = []

    def dying(work: Any, items: Any, num_workers: int | None) -> Any:
        return run(DieAtAShard(work, mark), items, num_workers)

    def progress(stage: str, done: int, total: int | None, unit: str) -> None:
        seen.append((stage, done))
        with pytest.raises(DatasetNotFoundError):
            packstore.open(str(out))

    monkeypatch.setattr("packstore.etl.engines.ray.run", dying)
    made = packstore.pack(sources, out, engine="ray", progress=progress, **settings)
    assert mark.exists()
    packs = [done for stage, done in seen if stage == "write"]
    assert len(packs) == 4  # of each partition, and all at the end
    assert packs == sorted(packs)
    assert packs[-1] == len(made)
    assert len({s.path for s in made.manifest.shards}) > 6
    assert made.manifest.to_json() == calm.manifest.to_json()
    assert made.verify().ok
    files = {
        name: {str(p.relative_to(tmp_path / name)) for p in (tmp_path / name).rglob("*")}
        for name in ("calm", "out")
    }
    assert files["calm"] == files["out"]


@pytest.mark.parametrize("engines", [("ray", "ray"), ("local", "ray"), ("ray", "local")])
def test_a_rerun_takes_over_the_finished_partitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: tuple[str, str]
) -> None:
    """Whatever made them: here the driver ends before its commit, and one partition is lost."""
    source = tmp_path / "pairs.jsonl"
    line = '{{"prompt": [{0}, 1, 2], "chosen": [{1}, 4], "rejected": [5, {0}]}}\n'
    source.write_text("".join(line.format(i % 99, i) for i in range(900)))
    settings: dict[str, Any] = {"pack_size": 64, "partitions": 4, "num_workers": 2}

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    whole = packstore.pack(str(source), tmp_path / "whole", **settings)
    out = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        patch.setattr("packstore.etl.pipeline.commit", stop)
        packstore.pack(str(source), out, engine=engines[0], **settings)
    (note,) = (out / "_packstore" / "partitions").glob("*-00002.json")
    note.unlink()
    before = {path: path.stat().st_ino for path in (out / "data").iterdir()}
    made = packstore.pack(str(source), out, engine=engines[1], **settings)
    again = {p for p, node in before.items() if p.stat().st_ino != node}
    assert again == {p for p in before if "-p00002-" in p.name}
    assert made.manifest.to_json() == whole.manifest.to_json()
    assert not (out / "_packstore" / "partitions").exists()


def test_on_an_object_store(s3: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From S3 to S3, with duplicates left out and a validation part, though a worker is killed."""
    place = Location(s3.url, s3.options)
    for i in range(3):
        line = '{{"prompt": [{0}, 1, 2], "chosen": [{1}, 4], "rejected": [5, {0}]}}\n'
        text = "".join(line.format(j % 250, (i + j) % 7) for j in range(600))
        place.create_bytes(f"in/{i}.jsonl", text.encode())
    settings: dict[str, Any] = {
        "pack_size": 64, "partitions": 3, "shard_tokens": 2000, "row_group_tokens": 512,
        "dedup": "pair", "validation_fraction": 0.2, "storage_options": s3.options,
    }  # fmt: skip
    source = f"{s3.url}/in/*.jsonl"
    packstore.pack(source, f"{s3.url}/calm", num_workers=0, **settings)
    mark = tmp_path / "died"

    def dying(work: Any, items: Any, num_workers: int | None) -> Any:
        return run(DieAtAShard(work, mark), items, num_workers)

    monkeypatch.setattr("packstore.etl.engines.ray.run", dying)
    packstore.pack(source, f"{s3.url}/out", engine="ray", **settings)
    assert mark.exists()
    fs, root = place.filesystem()
    fs.invalidate_cache()
    calm, out = (
        {
            path.removeprefix(f"{root}/{name}"): fs.cat_file(path)
            for path in fs.find(f"{root}/{name}")
        }
        for name in ("calm", "out")
    )
    assert len(calm) > 6
    assert calm == out
    for part in ("train", "validation"):
        made = packstore.open(f"{s3.url}/out/{part}", storage_options=s3.options)
        assert made.manifest.records.dropped["duplicate_pair"] > 100
        assert len(made.manifest.shards) > 2
        assert made.verify().ok


def test_the_example_may_be_run_again(
    s3: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that ends before its commit, the one that goes on, and one more."""
    place = Location(s3.url, s3.options)
    record = {"prompt": "Question? ", "chosen": "Answer.", "rejected": "No."}
    for i in range(3):
        place.create_bytes(f"in/{i}.jsonl", 300 * (json.dumps(record) + "\n").encode())
    tokenizer = str(write_tokenizer(tmp_path / "t.json"))
    words = [f"{s3.url}/in/*.jsonl", f"{s3.url}/out", tokenizer, "--partitions", "3"]
    monkeypatch.setattr(sys, "argv", ["example", *words, "--pack-size", "64"])
    monkeypatch.setenv("STORAGE_OPTIONS", json.dumps(s3.options))
    fs, root = place.filesystem()

    def stored() -> dict[str, str]:
        """Path and ETag of each object."""
        fs.invalidate_cache()
        return {path: entry["ETag"] for path, entry in fs.find(f"{root}/out", detail=True).items()}

    def fail(*_: object) -> None:
        raise StorageError("the store is down")

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="store is down"):  # noqa: PT012
        patch.setattr("packstore.etl.pipeline.commit", fail)
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    before = stored()
    assert sum("/partitions/" in path for path in before) == 3
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    after = stored()
    assert {p: tag for p, tag in before.items() if "/data/" in p}.items() <= after.items()
    monkeypatch.setitem(sys.modules, "packstore.etl.engines.ray", None)  # no tasks any more
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert stored() == after
    assert capsys.readouterr().out == "1\n1\n"
    made = packstore.open(f"{s3.url}/out", storage_options=s3.options)
    assert made.manifest.records.packed == 900
    assert made.manifest.provenance["settings"]["partitions"] == 3


class Unpickled:
    """Returns in how many processes and how often it was loaded."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")

    def __call__(self, x: int) -> int:
        return os.getpid()


def test_a_worker_loads_the_work_once(tmp_path: Path) -> None:
    """For each call, as a later one may have the same tokenizer with other settings."""
    for call in ("first", "second"):
        used = set(run(Unpickled(tmp_path / call), range(20), 2))
        loads = [int(line) for line in (tmp_path / call).read_text().splitlines()]
        assert sorted(loads) == sorted(used)


def test_without_ray_the_install_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "packstore.etl.engines.ray")
    records = [{"prompt": [1], "chosen": [2], "rejected": [3]}]
    with pytest.raises(MissingExtraError, match=r"packstore\[ray\]"):
        packstore.pack(records, tmp_path / "out", engine="ray")
