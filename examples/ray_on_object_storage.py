"""Packs from and to object storage on a Ray cluster, verifies, and prints the version.

    RAY_ADDRESS=ray-head:6379 python examples/ray_on_object_storage.py \\
        's3://raw/prefs/*.jsonl.gz' s3://bucket/prefs-8k tokenizer.json --partitions 256

May be run again after any end. Before the commit, it takes over the partitions that are
finished; after it, it finds the dataset and starts no tasks. Exit codes: 0 done, 1 a
named error.

Nodes should have a role for the store. Otherwise STORAGE_OPTIONS has fsspec's options
as JSON, such as ``{"key": "…", "secret": "…", "endpoint_url": "…"}``; they are sent to
every task.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys

import packstore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", help="URL or glob of the records")
    parser.add_argument("out", help="URL of the dataset")
    parser.add_argument("tokenizer", help="local file; it is sent to the workers")
    parser.add_argument(
        "--partitions", type=int, required=True, help="a few for each core"
    )
    parser.add_argument("--pack-size", type=int, default=8192)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = json.loads(os.environ.get("STORAGE_OPTIONS", "{}"))
    try:
        dataset = packstore.pack(
            args.source,
            args.out,
            args.tokenizer,
            engine="ray",  # the cluster of RAY_ADDRESS; without it, one on this machine
            partitions=args.partitions,
            pack_size=args.pack_size,
            storage_options=options,
        )
        problems = dataset.verify().problems
    except packstore.PackstoreError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    if problems:
        sys.exit("\n".join(problems))
    print(dataset.version)


if __name__ == "__main__":
    main()
