"""Measures models that run per sequence on a CPU: their mixers alone, or whole, beside padding.

    python benchmarks/mixers.py            # --quick: fewer pairs, one round, to see that it runs

A batch of 16 pairs with log-normal lengths like those of hh, forward and backward, in small random
Qwen3-Next, Bamba (Mamba-2 and attention) and LFM2 models: `padded`, with the model's own attention
and a mask; `packed`, one row without padding, whose mixers run once per sequence, in both layouts;
`whole`, the whole model once per sequence. The pairs are the same in each. Each way runs in a fork
with one thread, the ways in turns; least CPU seconds, and largest peak of memory above that before
the call. Mixers are those of transformers in plain PyTorch, as their kernels need a GPU.
`attention tokens` go through attention, MLPs and head, `mixer tokens` through the mixers.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import platform
import re
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from gpu.sizes import batch_of, lengths, make_model, tokens_of
from rich.console import Console
from rich.table import Table

from packstore.torch import segment_logps, use_packed_attention

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "mixers.json"
PAIRS, LONGEST, ROUNDS = 16, 512, 2

SHARED = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-Next": (
        "Qwen3Next",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
        },
    ),
    "Bamba": (
        "Bamba",
        {
            "num_hidden_layers": 4,
            "attn_layer_indices": [3],
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_chunk_size": 64,
        },
    ),
    "LFM2": (
        "Lfm2",
        {"num_hidden_layers": 4, "layer_types": ["conv"] * 3 + ["full_attention"]},
    ),
}
"""As many mixers for each attention layer as the real ones of Qwen3-Next: three."""

WAYS = ("padded", "packed, concat", "packed, shared_prefix", "whole")


def logps(model: Any, way: str, batch: Any) -> torch.Tensor:
    """Log-probs of the segments, by the model's logits."""
    if way == "padded":
        logits = batch.unpad(model(**batch.model_inputs(style="padded")).logits)
    else:
        logits = model(**batch.model_inputs()).logits
    return segment_logps(batch, logits=logits)


def run(model: Any, way: str, batches: list[Any], send: Any) -> None:
    """Sends CPU seconds, bytes of memory at the peak above the start, and the log-probs."""
    torch.set_num_threads(1)
    if way != "padded":
        use_packed_attention(model, "per_sequence" if way == "whole" else "auto")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
    before, start = resident("VmRSS"), time.process_time()
    found = []
    for batch in batches:
        out = logps(model, way, batch)
        (out * torch.tensor([1.0, -1.0]).repeat(len(out) // 2)).sum().backward()
        found += out.tolist()
    send.send((time.process_time() - start, resident("VmHWM") - before, found))


def resident(name: str) -> int:
    """Bytes of memory of this process: now (`VmRSS`) or at its peak (`VmHWM`)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"{name}:\s+(\d+) kB", status)
    return 1024 * int(found[1]) if found else 0


def in_a_fork(*args: Any) -> Any:
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(*args, send))
    process.start()
    send.close()
    try:
        return receive.recv()
    finally:
        process.join()


def tokens(way: str, batches: list[np.ndarray]) -> dict[str, int]:
    """Tokens that go through attention and MLPs, and through the mixers."""
    layout = {"padded": "padded", "packed, shared_prefix": "shared_prefix"}.get(way, "concat")
    mixer = "padded" if way == "padded" else "concat"
    return {
        "attention_tokens": sum(tokens_of(rows, layout) for rows in batches),
        "mixer_tokens": sum(tokens_of(rows, mixer) for rows in batches),
    }


def measure(name: str, batches: list[np.ndarray], rounds: int) -> list[dict[str, Any]]:
    """A row of figures for each way."""
    family, settings = MODELS[name]
    where: Any = SimpleNamespace(device="cpu", dtype=torch.float32)
    model = make_model(family, {**SHARED, **settings}, where)
    use_packed_attention(copy.deepcopy(model))  # imports what the forks then have
    vocab = SHARED["vocab_size"]
    made = {
        layout: [batch_of(rows, layout, vocab) for rows in batches]
        for layout in ("concat", "shared_prefix")
    }
    runs: dict[str, list[Any]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            layout = "shared_prefix" if "shared_prefix" in way else "concat"
            runs[way].append(in_a_fork(model, way, made[layout]))
    expected = np.array(runs["padded"][0][2])
    rows = []
    for way, found in runs.items():
        gap = float(np.abs(np.array(found[0][2]) - expected).max() / np.abs(expected).max())
        assert gap < 1e-3, (name, way, gap)
        row = {"model": name, "way": way, **tokens(way, batches)}
        seconds, memory = min(each[0] for each in found), max(each[1] for each in found)
        rows.append({**row, "cpu_seconds": seconds, "peak_mib": memory / 2**20, "difference": gap})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # kernels that are not installed
    pairs = lengths("hh", 4 if args.quick else PAIRS, LONGEST)
    batches = [pairs[i : i + PAIRS] for i in range(0, len(pairs), PAIRS)]
    rows = [
        row for name in args.models for row in measure(name, batches, 1 if args.quick else ROUNDS)
    ]
    table = Table("model", "way", "attention tokens", "mixer tokens", "CPU s", "peak MiB")
    for row in rows:
        table.add_row(
            row["model"], row["way"], f"{row['attention_tokens']:,}", f"{row['mixer_tokens']:,}",
            f"{row['cpu_seconds']:.2f}", f"{row['peak_mib']:.0f}",
        )  # fmt: skip
    Console().print(table)
    if args.quick or len(args.models) < len(MODELS):
        return
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    result = {
        "machine": f"{platform.machine()} {platform.platform()}",
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "commit": commit,
        "settings": {"pairs": len(pairs), "batch": PAIRS, "longest": LONGEST, "rounds": ROUNDS},
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
