"""`packstore publish`, to a hub on this machine: what is uploaded, and what reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from children import run_python
from hub import Hubs, served
from small_jobs import pack, pairs

import packstore

REPO = "datasets/me/prefs"
READ = """
import datasets, json, packstore
from packstore.torch import PackedDataLoader, PackedDataset
rows = datasets.load_dataset("me/prefs", split="train")
url = "hf://datasets/me/prefs"
epoch = sum(batch.num_examples for batch in PackedDataLoader(PackedDataset(url)))
fingerprint = packstore.open(url).manifest.fingerprint
print(json.dumps([len(rows), sum(map(len, rows["reward"])), epoch, fingerprint]))
"""


def run(env: dict[str, str], *arguments: object) -> tuple[str, str]:
    done = run_python(*arguments, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


PUBLISH = """
import json, packstore, sys
print(json.dumps([packstore.publish(url, "me/prefs").version for url in sys.argv[1:]]))
"""


def published(env: dict[str, str], *datasets: packstore.Dataset) -> Any:
    """The versions as which they are published, one after another."""
    return json.loads(run(env, "-c", PUBLISH, *(dataset.url for dataset in datasets))[0])


@pytest.mark.slow
def test_the_newest_version_is_what_the_hub_reads(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="the reader of the hub's viewer")
    pytest.importorskip("torch", reason="reads the packs that were uploaded")
    repos: Hubs = {}
    first = pack(tmp_path / "prefs")
    with served(repos) as (env, commits):
        env |= {"HF_HOME": str(tmp_path / "cache")}
        out, err = run(env, "-m", "packstore", "publish", first.url, "me/prefs", "--json")
        assert json.loads(out)["version"] == 1
        assert f"publish: upload {len(first.manifest.files)} files" in err
        card = repos[REPO]["README.md"].decode()
        repos[REPO]["README.md"] = f"{card}\nMade by me.\n".encode()
        second = pack(tmp_path / "prefs", pairs(90), overwrite=True)
        assert published(env, second, second) == [2, 2]  # the second time nothing changes
        sizes = [len(made.manifest.files) + 2 for made in (first, second, second)]
        assert [len(added) for _, added, _ in commits] == sizes
        rows, pairs_read, in_epoch, fingerprint = json.loads(run(env, "-c", READ)[0])
    assert (rows, fingerprint) == (len(second), second.manifest.fingerprint)
    assert pairs_read == 2 * 90
    assert in_epoch == 90
    files, card = repos[REPO], repos[REPO]["README.md"].decode()
    assert set(first.manifest.files) | set(second.manifest.files) < files.keys()
    assert all(shard.path in card for shard in second.manifest.shards)
    assert not any(shard.path in card for shard in first.manifest.shards)
    assert card.count("| examples | 90 |") == 1
    assert "Made by me." in card


def test_another_dataset_is_the_next_version(tmp_path: Path) -> None:
    """Also one whose own versions begin anew."""
    repos: Hubs = {}
    with served(repos) as (env, _):
        env |= {"HF_HOME": str(tmp_path / "cache")}
        made = [pack(tmp_path / name, pairs(n)) for name, n in (("a", 20), ("b", 30))]
        assert published(env, *made) == [1, 2]


def test_a_hub_that_refuses_is_one_line(tmp_path: Path) -> None:
    dataset = pack(tmp_path / "prefs")
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    done = run_python("-m", "packstore", "publish", dataset.url, "me/prefs", env=env)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("packstore: error: hf://datasets/me/prefs: the hub must take it; found")
