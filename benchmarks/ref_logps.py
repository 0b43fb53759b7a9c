"""Times values of single tokens in `packstore ref-logps` on a CPU, beside the log-probs of
sequences alone.

    python benchmarks/ref_logps.py                           # --quick: small, to see that it runs

A Llama with random weights (42 million, of which 17 million are the head of 32,768
tokens) runs over packed pairs of random tokens, with one thread. The columns are
written in turns, several rounds. `seconds` is the least CPU time of a run,
`seconds_of_plain` its share of that of a run with `ref_logps` alone. Bytes are in
`token_values.json`, of real tokens.

`head` times the head alone, for the same tokens: log-probs of the targets, of k ids in
place of each (forward and backward pass, as in distillation), and the top k.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, parser, provenance, save, show

COLUMNS: dict[str, dict[str, Any]] = {
    "ref_logps": {},
    "and of each token": {"per_token": True},
    "and top 16, float16": {"top_k": 16},
    "and top 16, uint8": {"top_k": 16, "top_k_dtype": "uint8"},
    "and top 64, float16": {"top_k": 64},
}


def make_model(args: argparse.Namespace) -> Any:
    """A Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from packstore.torch import use_packed_attention

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.width,
        intermediate_size=args.width * 8 // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        tie_word_embeddings=False,
    )
    return use_packed_attention(LlamaForCausalLM(config))


def make_dataset(args: argparse.Namespace, folder: Path) -> Any:
    """Packed pairs of random tokens, about half of them supervised."""
    import packstore

    generator = np.random.default_rng(0)

    def random_ids(length: int) -> list[int]:
        return generator.integers(args.vocab, size=length).tolist()

    records = [
        {
            "prompt": random_ids(200),
            "chosen": random_ids(100),
            "rejected": random_ids(100),
        }
        for _ in range(args.pairs)
    ]
    return packstore.pack(records, str(folder / "packs"), pack_size=2048)


def run_once(
    model: Any, dataset: Any, folder: Path, settings: dict[str, Any]
) -> dict[str, float]:
    """Write a side dataset; return its CPU seconds."""
    from packstore.torch import write_ref_logps

    with tempfile.TemporaryDirectory(dir=folder) as out:
        start = time.process_time()
        write_ref_logps(model, dataset, f"{out}/side", **settings)
        return {"seconds": time.process_time() - start}


def measure_columns(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Write each choice of columns in turn."""
    model = make_model(args)
    dataset = make_dataset(args, folder)
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(args.rounds):
        for name, settings in COLUMNS.items():
            row = {"columns": name, **run_once(model, dataset, folder, settings)}
            best = rows.get(name, row)
            rows[name] = min(row, best, key=lambda run: run["seconds"])
    plain = rows["ref_logps"]["seconds"]
    for row in rows.values():
        row["seconds_of_plain"] = row["seconds"] / plain
    return list(rows.values())


def head_steps(args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """The computations of the head alone, by name."""
    import torch

    from packstore.torch.logprobs.logprobs import HeadLogProbs, HeadLogProbsOfIds
    from packstore.torch.logprobs.tiles import Projection
    from packstore.torch.logprobs.top_k import head_top_k

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(args.tokens, args.width, generator=generator)
    weight = 0.05 * torch.randn(args.vocab, args.width, generator=generator)
    ids = torch.randint(args.vocab, (args.tokens, 16), generator=generator)
    hidden.requires_grad_()
    weight.requires_grad_()
    targets = ids[:, 0]
    projection = Projection()

    def of_targets() -> None:
        logps = HeadLogProbs.apply(hidden, weight, None, targets, projection)
        logps.sum().backward()

    def of_ids() -> None:
        logps = HeadLogProbsOfIds.apply(hidden, weight, None, ids, projection)
        logps.sum().backward()

    def of_targets_forward() -> None:
        with torch.no_grad():
            HeadLogProbs.apply(hidden, weight, None, targets, projection)

    def top_16() -> None:
        head_top_k(hidden, weight, None, targets, projection, k=16)

    return {
        "targets, forward and backward": of_targets,
        "16 ids, forward and backward": of_ids,
        "targets, forward": of_targets_forward,
        "targets and top 16, forward": top_16,
    }


def measure_head(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run each computation of the head in turn; return the least CPU seconds."""
    steps = head_steps(args)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, step in steps.items():
            start = time.process_time()
            step()
            seconds[name].append(time.process_time() - start)
    return [{"head": name, "seconds": min(times)} for name, times in seconds.items()]


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--pairs", type=int, default=16)
    command.add_argument("--tokens", type=int, default=2048, help="of the head alone")
    command.add_argument("--vocab", type=int, default=32_768)
    command.add_argument("--width", type=int, default=512)
    command.add_argument("--layers", type=int, default=8)
    command.add_argument("--rounds", type=int, default=3)
    command.add_argument("--quick", action="store_true")
    command.add_argument("--out", default=str(RESULTS / "ref_logps.json"))
    args = command.parse_args()
    if args.quick:
        args.pairs, args.tokens, args.vocab, args.layers = 4, 64, 1024, 1
        args.rounds, args.out = 1, "-"

    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        columns = measure_columns(args, Path(name))
    head = measure_head(args)
    sizes = ("pairs", "tokens", "vocab", "width", "layers", "rounds")
    result = {
        "settings": {name: getattr(args, name) for name in sizes},
        "columns": columns,
        "head": head,
        "provenance": provenance("torch", "transformers"),
    }
    show(columns[0], [row.values() for row in columns])
    show(head[0], [row.values() for row in head])
    save(args.out, result)


if __name__ == "__main__":
    main()
