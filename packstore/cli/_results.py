"""The result of a command as JSON, for programs: ``--json``."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from packstore.cli.common import print_json

if TYPE_CHECKING:
    from packstore.io.dataset.dataset import Dataset


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json``."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def print_result(found: Any) -> None:
    """Prints one JSON value; dataclasses become objects, and other values text."""
    print_json(json.dumps(found, indent=1, default=_plain) + "\n")


def dataset_result(dataset: Dataset) -> dict[str, Any]:
    """Returns what a job reports of the dataset that it has committed."""
    m = dataset.manifest
    return {
        "url": dataset.url,
        "version": dataset.version,
        "kind": m.kind,
        "layout": m.layout,
        "pack_size": m.pack_size,
        "fill_rate": m.fill_rate,
        "records": m.records,
        "totals": m.totals,
        "shards": len(m.shards),
        "fingerprint": m.fingerprint,
    }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return dict(value) if isinstance(value, Mapping) else str(value)
