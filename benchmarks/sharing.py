"""Measures what sharing prefixes in a pack saves, and how often a step repeats a prompt.

    python benchmarks/sharing.py --tokenizer ../shared/data/tokenizers/qwen3 \\
        ../shared/data/pairs/*.jsonl*

For each file of records, and for the settings `share_prefixes="example"` and `"pack"`:

    stored     tokens of the packs, over the tokens of all sequences
    fill       tokens of the packs, over their capacity
    repeated   share of a step's examples whose prompt another example of the step has, too; steps
               of 64 examples on average, the mean of five epochs in other orders
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from common import RESULTS, parser, provenance, save, show

import packstore
from packstore.pack.fill import unpack
from packstore.torch import PackedDataLoader, PackedDataset

EXAMPLES_PER_STEP = 64
EPOCHS = 5


def prompts_of(dataset: packstore.Dataset) -> dict[int, bytes]:
    """The prompt of each example's first sequence, by example id."""
    prompts: dict[int, bytes] = {}
    for packs in dataset.iter_packs():
        examples = unpack(packs)
        first_sequences = examples.example_offsets[:-1]
        starts = examples.sequence_offsets[first_sequences]
        ends = examples.sequence_offsets[first_sequences + 1]
        for i, number in enumerate(examples.example_ids.tolist()):
            supervised = examples.supervised[starts[i] : ends[i]]
            prompt = examples.input_ids[starts[i] :][: int(supervised.argmax())]
            prompts[number] = prompt.tobytes()
    return prompts


def repeated(dataset: packstore.Dataset) -> float:
    """Share of the examples of all steps whose prompt is there twice in their step."""
    prompts = prompts_of(dataset)
    num_repeated = 0
    num_examples = 0
    for seed in range(EPOCHS):
        steps: dict[int, list[bytes]] = {}
        loader = PackedDataLoader(
            PackedDataset(dataset.url, seed=seed), examples_per_step=EXAMPLES_PER_STEP
        )
        for batch in loader:
            found = [prompts[number] for number in batch.example_ids.tolist()]
            steps.setdefault(batch.step.index, []).extend(found)
        for found in steps.values():
            counts = Counter(found)
            num_repeated += sum(count for count in counts.values() if count > 1)
            num_examples += len(found)
    return num_repeated / num_examples


def measure(path: str, tokenizer: str, pack_size: int) -> list[dict[str, Any]]:
    """A row for each setting."""
    rows = []
    for share in ("example", "pack"):
        with tempfile.TemporaryDirectory() as folder:
            dataset = packstore.pack(
                path, f"{folder}/out", tokenizer, pack_size=pack_size,
                layout="shared_prefix", share_prefixes=share, max_drop_rate=0.9,
                on={"wrong_type": "drop", "missing_field": "drop", "tie": "drop"},
            )  # fmt: skip
            totals = dataset.manifest.totals
            row = {
                "file": Path(path).name,
                "examples": totals.examples,
                "pack_size": pack_size,
                "share_prefixes": share,
                "stored": totals.tokens / totals.logical_tokens,
                "fill": dataset.manifest.fill_rate,
                "packs": len(dataset),
                "repeated": repeated(dataset),
            }
            rows.append(row)
    return rows


def main() -> None:
    """Pack, count and print."""
    command = parser(__doc__)
    command.add_argument("data", nargs="+", help="files of records")
    command.add_argument("--tokenizer", required=True, help="folder or file")
    command.add_argument("--pack-size", type=int, default=4096)
    command.add_argument("--out", default=RESULTS / "sharing.json", help="-: nowhere")
    args = command.parse_args()
    rows = []
    for path in args.data:
        rows += measure(path, args.tokenizer, args.pack_size)
    show(rows[0], [row.values() for row in rows])
    save(args.out, {"environment": provenance("numpy", "torch"), "rows": rows})


if __name__ == "__main__":
    main()
