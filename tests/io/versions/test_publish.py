"""`packstore publish`, to a hub on this machine: what is uploaded, and what
reads it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from children import run_python
from hub import Hubs, served
from places import edit_manifest
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
    return json.loads(
        run(env, "-c", PUBLISH, *(dataset.url for dataset in datasets))[0]
    )


@pytest.mark.slow
def test_the_newest_version_is_what_the_hub_reads(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="the reader of the hub's viewer")
    pytest.importorskip("torch", reason="reads the packs that were uploaded")
    repos: Hubs = {}
    first = pack(tmp_path / "prefs")
    with served(repos) as (env, commits):
        env |= {"HF_HOME": str(tmp_path / "cache")}
        out, err = run(
            env, "-m", "packstore", "publish", first.url, "me/prefs", "--json"
        )
        assert json.loads(out)["version"] == 1
        assert f"publish: upload {len(first.manifest.files)} files" in err
        card = repos[REPO]["README.md"].decode()
        repos[REPO]["README.md"] = f"{card}\nMade by me.\n".encode()
        second = pack(tmp_path / "prefs", pairs(90), overwrite=True)
        assert published(env, second, second) == [
            2,
            2,
        ]  # the second time nothing changes
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


def test_a_commit_of_somebody_else_is_not_overwritten(tmp_path: Path) -> None:
    """It comes after the card was read, into which ours is written."""
    dataset = pack(tmp_path / "prefs")
    repos: Hubs = {}
    with served(repos, meanwhile={"README.md": b"theirs"}) as (env, _):
        env |= {"HF_HOME": str(tmp_path / "cache")}
        done = run_python(
            "-m", "packstore", "publish", dataset.url, "me/prefs", env=env
        )
    assert done.returncode == 1
    assert "hf://datasets/me/prefs" in done.stderr
    assert repos[REPO] == {"README.md": b"theirs"}


def test_a_hub_that_refuses_is_one_line(tmp_path: Path) -> None:
    dataset = pack(tmp_path / "prefs")
    env = {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path),
    }
    done = run_python("-m", "packstore", "publish", dataset.url, "me/prefs", env=env)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("packstore: error: hf://datasets/me/prefs: ")


# the card of a repository -> the tags that it has afterwards; None: it is refused
CARDS = {
    "no tags": (
        b"---\nlicense: mit\n---\nText of mine.\n",
        ["packstore", "preference"],
    ),
    "no head": (b"Text of mine.\n", ["packstore", "preference"]),
    "one tag": (
        b"---\ntags: abc\n---\nText of mine.\n",
        ["abc", "packstore", "preference"],
    ),
    "mixed": (
        b"---\ntags: [x, 1, null, packstore]\n---\nText of mine.\n",
        ["x", 1, None, "packstore", "preference"],
    ),
    "no list": (b"---\ntags: {a: b}\n---\nText of mine.\n", None),
    "broken": (b"---\nlicense: [mit\n---\nText of mine.\n", None),
    "no mapping": (b"---\n- a\n- b\n---\nText of mine.\n", None),
    "Latin-1": (b"---\nlicense: mit\n---\nText of m\xefne.\n", None),
}
PUBLISH_ALL = """
import json, packstore, sys
outcomes = {}
for repo in json.loads(sys.argv[2]):
    try:
        outcomes[repo] = packstore.publish(sys.argv[1], repo).version
    except packstore.errors.FormatError as error:
        outcomes[repo] = str(error)
print(json.dumps(outcomes))
"""


def test_any_card_is_kept_or_refused(tmp_path: Path) -> None:
    """As the hub's own page makes them, and people."""
    dataset = pack(tmp_path / "prefs")
    names = {name: f"me/{name.replace(' ', '-')}" for name in CARDS}
    repos: Hubs = {
        f"datasets/{names[n]}": {"README.md": card} for n, (card, _) in CARDS.items()
    }
    with served(repos) as (env, _):
        env |= {"HF_HOME": str(tmp_path / "cache")}
        asked = json.dumps([*names.values()])
        outcomes = json.loads(run(env, "-c", PUBLISH_ALL, dataset.url, asked)[0])
    for name, (card, tags) in CARDS.items():
        files, outcome = repos[f"datasets/{names[name]}"], outcomes[names[name]]
        if tags is None:
            assert f"{names[name]}/README.md" in outcome
            assert files == {"README.md": card}
        else:
            assert outcome == 1
            head, text = files["README.md"].decode().split("---\n")[1:]
            assert yaml.safe_load(head)["tags"] == tags
            assert "Text of mine." in text
            assert ("license: mit" in head) == (b"license" in card)


def test_a_manifest_writes_only_text_into_the_card(tmp_path: Path) -> None:
    """Also a chat template that holds the marks of our part, which grew the card each
    time.
    """
    template = (
        "<!-- packstore --> <img src=x> ![p](http://x) | a <!-- /packstore --> ```"
    )
    dataset = pack(tmp_path / "prefs")

    def set_template(manifest: Any) -> None:
        manifest["provenance"]["settings"]["chat_template"] = template

    edit_manifest(dataset.url, set_template)
    repos: Hubs = {REPO: {"README.md": b"<!-- packstore --> begun by me\n"}}
    with served(repos) as (env, _):
        env |= {"HF_HOME": str(tmp_path / "cache")}
        published(env, dataset)
        first = repos[REPO]["README.md"].decode()
        published(env, dataset, dataset)
    assert repos[REPO]["README.md"].decode() == first
    assert first.count("<!-- /packstore -->") == 1
    assert "begun by me" in first
    for markup in ("<img", "![", "```\n|"):
        assert markup not in first
    (row,) = [line for line in first.splitlines() if "chat template" in line]
    assert len(re.findall(r"(?<!\\)\|", row)) == 3
