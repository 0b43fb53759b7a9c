"""Pack, stream, train, verify: the same bytes and the same loss on every store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from places import Files
from stores import Store
from tokenizers import Tokenizer

import packstore
from packstore.torch import (
    PackedDataLoader,
    PackedDataset,
    PreferenceLoss,
    segment_logps,
)

Result = tuple[dict[str, bytes], list[float]]


def whole_path(
    url: str, options: dict[str, Any], pairs: Path, tokenizer: Tokenizer
) -> Result:
    """All files of the dataset, and the loss of every step of an epoch."""
    small = {"pack_size": 256, "row_group_tokens": 1000, "shard_tokens": 2000}
    packstore.pack(str(pairs), url, tokenizer, storage_options=options, **small)
    data = packstore.open(url, storage_options=options)
    assert len(data.manifest.shards) > 1
    report = data.verify()
    assert report.ok, report.problems
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(300, 8), torch.nn.Linear(8, 300))
    optimizer, loss_of, losses = (
        torch.optim.SGD(model.parameters(), 0.1),
        PreferenceLoss("simpo"),
        [],
    )
    for batch in PackedDataLoader(PackedDataset(data, seed=1), packs_per_batch=2):
        optimizer.zero_grad()
        out = loss_of(segment_logps(batch, logits=model(batch.input_ids)), batch)
        out.loss.backward()
        optimizer.step()
        losses.append(float(out.loss.detach()))
    return Files(url, **options).all(), losses


@pytest.fixture(scope="session")
def local(
    tmp_path_factory: pytest.TempPathFactory, pairs: Path, tokenizer: Tokenizer
) -> Result:
    """The dataset and the loss on a local disk."""
    return whole_path(
        str(tmp_path_factory.mktemp("local") / "ds"), {}, pairs, tokenizer
    )


def test_every_store_gives_what_the_disk_gives(
    store: Store, local: Result, pairs: Path, tokenizer: Tokenizer
) -> None:
    files, losses = whole_path(store.url, store.options, pairs, tokenizer)
    assert files == local[0]
    assert losses == local[1]
    text = files["_packstore/manifest-000001.json"]
    for secret in (v for v in store.options.values() if len(v) > 8):
        assert secret.encode() not in text
