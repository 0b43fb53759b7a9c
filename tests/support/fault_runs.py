"""Runs one pack and one epoch through a failing store, and checks the outcome."""

from __future__ import annotations

import hashlib
import random
import uuid
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from fault_proxy import Faults, faulty
from stores import Store

import packstore
from packstore import Dataset
from packstore.errors import DatasetNotFoundError, PackstoreError
from packstore.torch import PackedDataset

RECORDS = [
    {
        "prompt": [5 + i % 90, 6, 7],
        "chosen": [8, 10 + i % 80, 11 + i % 70],
        "rejected": [9] * (1 + i % 17),
    }
    for i in range(240)
]
SETTINGS: dict[str, Any] = {
    "pack_size": 64,
    "row_group_tokens": 128,
    "shard_tokens": 200,
}
QUICKLY = {"retry_backoff": 0.02, "retry_longest_wait": 0.2, "retry_seconds": 60}


@dataclass(frozen=True)
class Outcome:
    """The error of a run, the faults that it met, and what is wrong; empty if all is
    well.
    """

    error: str
    faults: Counter[str]
    wrong: str


def through(store: Store, endpoint: str) -> dict[str, Any]:
    return {**store.through(endpoint).options, **QUICKLY}


def epoch(
    source: str | Dataset, options: dict[str, Any] | None = None, seed: int = 0
) -> str:
    """A digest of an epoch: opened, ordered, read ahead, checked."""
    digest = hashlib.sha256()
    for pack in PackedDataset(source, seed=seed, storage_options=options):
        for name in (
            "input_ids",
            "labels",
            "reward",
            "lengths",
            "seq_boundaries",
            "example_ids",
        ):
            digest.update(getattr(pack, name).tobytes())
    return digest.hexdigest()


def pack_run(place: Store, rate: float, seed: int, good: Dataset) -> Outcome:
    """Packs through the proxy, then checks the store itself; resumes without
    the proxy.
    """
    place = replace(place, path=f"{place.path}-{uuid.uuid4().hex}")
    error, faults = "", Faults(rate, seed)

    def pack(options: dict[str, Any], **more: Any) -> str:
        try:
            packstore.pack(
                RECORDS, place.url, storage_options=options, **SETTINGS, **more
            )
        except PackstoreError as refused:
            return f"{type(refused).__name__}: {refused}"
        return ""

    with faulty(place.endpoint, faults) as endpoint:
        error = pack(through(place, endpoint))
    try:
        wrong = difference(packstore.open(place.url, place.options), good)
    except DatasetNotFoundError:
        wrong = "" if error else "it said it was done, and nothing is there"
    if error and not wrong:
        wrong = pack(place.options, overwrite=True)
        wrong = wrong or difference(packstore.open(place.url, place.options), good)
    return Outcome(error, faults.counts, wrong)


def difference(there: Dataset, good: Dataset) -> str:
    """Lists the violations of an outcome."""
    if there.manifest.fingerprint != good.manifest.fingerprint:
        return "other packs"
    report = there.verify()
    return "" if report.ok else report.problems[0]


def epoch_run(place: Store, rate: float, seed: int, good: Dataset) -> Outcome:
    """Reads an epoch through the proxy, and one of the same packs on a disk."""
    error = wrong = ""
    faults = Faults(rate, seed)
    with faulty(place.endpoint, faults) as endpoint:
        try:
            if epoch(place.url, through(place, endpoint), seed) != epoch(
                good, seed=seed
            ):
                wrong = "other packs were read"
        except PackstoreError as refused:
            error = f"{type(refused).__name__}: {refused}"
    return Outcome(error, faults.counts, wrong)


def rate_of(seed: int) -> float:
    """Draws the rate of a seeded run: up to a fifth of the requests."""
    return random.Random(seed).choice((0.02, 0.05, 0.1, 0.2))
