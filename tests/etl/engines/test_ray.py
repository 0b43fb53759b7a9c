"""The Ray engine on a local cluster: the bytes of the local engine, also when a worker
dies.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from places import Files
from small_jobs import pairs, write_jsonl

import packstore
from packstore.errors import DatasetNotFoundError, MissingExtraError, PackstoreError
from packstore.etl.engines import ENGINES
from packstore.io.store import Staging

ray = pytest.importorskip("ray", reason="ray is not installed (extra: ray)")

run = ENGINES.load("ray")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


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


def die(x: int) -> int:
    os._exit(9)


def square_or_die_once(mark: Path, x: int) -> int:
    if x == 5 and not mark.exists():
        mark.touch()
        die(x)
    return square(x)


def test_results_keep_the_order_of_the_items_and_a_lost_task_is_run_again(
    tmp_path: Path,
) -> None:
    mark = tmp_path / "died"
    squares = run(partial(square_or_die_once, mark), range(20), None)
    assert list(squares) == [x * x for x in range(20)]
    assert mark.exists()
    assert list(run(square, [], 2)) == []


def test_what_is_lost_every_time_is_an_error() -> None:
    with pytest.raises(PackstoreError, match="lost"):
        list(run(die, range(2), 2))


class DieAtAShard:
    """Kills its process when partition 1 has put its first shard, if no process did so
    before.

    From outside, nobody can tell that moment.
    """

    def __init__(self, work: Callable[[Any], Any], mark: Path) -> None:
        self.work, self.mark = work, mark

    def __call__(self, assignment: Any) -> Any:
        if assignment.number == 1 and not self.mark.exists():
            put = Staging.store

            def put_and_die(staging: Staging, local_path: str, path: str) -> None:
                put(staging, local_path, path)
                self.mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

            Staging.store = put_and_die  # type: ignore[method-assign]
        return self.work(assignment)


def test_a_cluster_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises a bare Exception if its raylet dies meanwhile."""

    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with pytest.raises(PackstoreError, match="Ray"):
        list(run(square, [1], None))


def test_partitions_survive_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes as in this process, though a task dies with a shard put and others
    to come.
    """
    sources = [
        write_jsonl(tmp_path / f"{i}.jsonl", pairs(900, 900 * i)) for i in range(4)
    ]
    settings: dict[str, Any] = {
        "pack_size": 64, "partitions": 3, "shard_tokens": 2000, "row_group_tokens": 512,
        "share_prefixes": "pack",
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
    packstore.clean(
        str(out), delete=True, older_than=0, no_writers=True
    )  # of the dead worker
    assert Files(out).all() == Files(tmp_path / "calm").all()


def test_without_ray_the_install_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "packstore.etl.engines.ray")
    records = [{"prompt": [1], "chosen": [2], "rejected": [3]}]
    with pytest.raises(MissingExtraError, match=r"packstore\[ray\]"):
        packstore.pack(records, tmp_path / "out", engine="ray")
