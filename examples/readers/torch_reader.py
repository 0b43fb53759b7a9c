"""Pairs of a packstore dataset in plain PyTorch, without packstore.

    loader = DataLoader(Pairs("prefs-8k"), batch_size=None, num_workers=2)
    for chosen, rejected in loader:
        margin = log_prob(model, chosen) - log_prob(model, rejected)

It reads a local folder in both layouts, trees of prefixes too: sequences come back
whole. `schemas/format.md` is the reference; sections are named below. It trusts the
files, so use it for data of your own.
"""

import itertools
import json
from pathlib import Path

import pyarrow.parquet as pq
import torch
from torch.utils.data import IterableDataset, get_worker_info


class Pairs(IterableDataset):
    """Pairs (chosen, rejected) in file order; each pack goes to one worker.

    A sequence is a dict: `input_ids` and `labels`, int64 tensors, and `reward`. Labels
    are -100 where a token is not supervised, and not shifted.
    """

    def __init__(self, folder):
        manifests = (Path(folder) / "_packstore").glob("manifest-*.json")
        newest = max(manifests, key=lambda path: int(path.stem.split("-")[1]))
        manifest = json.loads(newest.read_bytes())  # section 6
        if manifest["format_version"] != 1 or manifest["features"]:
            raise ValueError(f"{folder} needs a newer reader")
        if manifest["kind"] != "preference":
            raise ValueError(f"{folder} must hold pairs; found {manifest['kind']}")
        self.files = [Path(folder) / shard["path"] for shard in manifest["shards"]]

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for pack in itertools.islice(self.read_packs(), first, None, step):
            sequences = read_sequences(pack)
            yield from zip(sequences[0::2], sequences[1::2], strict=True)  # section 3

    def read_packs(self):
        for file in self.files:
            for batch in pq.ParquetFile(file).iter_batches(batch_size=16):
                yield from batch.to_pylist()


def read_sequences(pack):
    """Return the whole sequences of a pack (section 4)."""
    sequences = []
    for i, (start, end) in enumerate(itertools.pairwise(pack["seq_boundaries"])):
        ids = torch.tensor(pack["input_ids"][start:end])
        labels = torch.tensor(pack["labels"][start:end])
        num_shared = pack["lengths"][i] - len(ids)  # tokens that the segment leaves out
        if num_shared > 0:
            parent = sequences[i - pack["parent_distances"][i]]
            ids = torch.cat([parent["input_ids"][:num_shared], ids])
            labels = torch.cat([torch.full((num_shared,), -100), labels])
        sequences.append(
            {"input_ids": ids, "labels": labels, "reward": pack["reward"][i]}
        )
    return sequences


def log_prob(model, sequence):
    """Return the log-probability of the supervised tokens, summed (section 5)."""
    logits = model(input_ids=sequence["input_ids"][None]).logits[0, :-1]
    labels = sequence["labels"][1:]  # the token before predicts each
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    return -losses
