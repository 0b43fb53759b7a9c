"""Measures attention kernels on a GPU: correctness, speed, memory, with and without packs.

    python benchmarks/attention_gpu.py                  # one CUDA GPU, torch 2.11 or newer
    python benchmarks/attention_gpu.py --quick          # fewer repetitions
    python benchmarks/attention_gpu.py --cpu-dry-run --out /tmp/dry.json    # every path, tiny

Part 1, correctness: each backend that is there, in bfloat16, forward and backward, against float32
on the same inputs. The error counts relative to that of plain bfloat16 attention (matmuls in
bfloat16, softmax in float32); up to twice that is right. Both layouts, grouped queries, windows,
and key runs longer than their queries, in which causal masks must be aligned at the end.

Part 2, speed and memory: forward and backward of a random Llama of about 1.2 billion parameters
(vocabulary 128256) in bfloat16, no optimizer, on pairs of an hh-like distribution (log-normal;
median prompt 94 tokens, median response 32, sigma 0.9, both cut at 1024) or on --data, a text file
with three numbers a line: tokens of prompt, chosen and rejected. Compared are

- `padded`: [2B, longest] rows with a mask, transformers' sdpa, logits of all tokens;
- `padding_free`: packs in layout concat, the same kernel as ours, logits of all tokens, as a
  plain TRL-style trainer would have it;
- `concat` and `shared_prefix`: ours, log-probs from hidden states without logits;
- `concat_logits`: ours with logits, for the memory that they take.

All give the same loss on the same pairs up to rounding, which is checked. Pairs a second over
several packs after a warm-up, and the peak of memory above weights and gradients.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from attention_kernels import (
    DRY,
    GPU,
    Setting,
    batch_of,
    batches_of,
    correctness,
    isolation,
    lengths,
    make_model,
    native_groups,
)
from torch import Tensor
from torch.nn.functional import logsigmoid

RESULTS = Path(__file__).parent / "results" / "attention_gpu.json"
BETA = 0.1


def dpo(logps: Tensor, batch: Any) -> Tensor:
    """The mean loss of the pairs, from log-probs of the supervised tokens; the reference is 0."""
    sums = logps.new_zeros(batch.num_segments)
    sums = sums.index_add(0, batch.segment_ids[batch.target_index], logps)
    return -logsigmoid(BETA * (sums[0::2] - sums[1::2])).mean()


def padded_loss(model: Any, batch: Any) -> Tensor:
    rows = batch.target_index - 1
    logps = model(**batch.model_inputs("padded")).logits.float().log_softmax(-1)
    logps = logps[batch.segment_ids[rows], batch.position_ids[rows]]
    return dpo(logps.gather(-1, batch.labels[batch.target_index, None]).squeeze(-1), batch)


def padding_free_loss(model: Any, batch: Any) -> Tensor:
    logps = model(**batch.model_inputs()).logits[0].float().log_softmax(-1)
    logps = logps[batch.target_index - 1]
    return dpo(logps.gather(-1, batch.labels[batch.target_index, None]).squeeze(-1), batch)


def logits_loss(model: Any, batch: Any) -> Tensor:
    from packstore.torch import PreferenceLoss, segment_logps

    logps = segment_logps(batch, logits=model(**batch.model_inputs()).logits)
    return PreferenceLoss("dpo", beta=BETA)(logps, batch, torch.zeros_like(logps)).loss


def hidden_loss(model: Any, batch: Any) -> Tensor:
    from packstore.torch import PreferenceLoss, segment_logps

    hidden = model.model(**batch.model_inputs()).last_hidden_state
    logps = segment_logps(batch, hidden=hidden, weight=model.lm_head.weight)
    return PreferenceLoss("dpo", beta=BETA)(logps, batch, torch.zeros_like(logps)).loss


WAYS: dict[str, tuple[str, Callable[[Any, Any], Tensor]]] = {
    "padded": ("padded", padded_loss),
    "padding_free": ("concat", padding_free_loss),
    "concat_logits": ("concat", logits_loss),
    "concat": ("concat", hidden_loss),
    "shared_prefix": ("shared_prefix", hidden_loss),
}


def speed(setting: Setting, data: str | None) -> dict[str, Any]:
    """Pairs a second and peak memory of each way."""
    from packstore.torch import use_packed_attention

    rows = lengths(4000 if setting.cuda else 60, 1024 if setting.cuda else 30, data)
    vocab = setting.model["vocab_size"]
    model = make_model(setting)
    results: dict[str, dict[str, Any]] = {}
    for name, (way, loss) in WAYS.items():
        if way == "padded":
            model.set_attn_implementation("sdpa")
        else:
            use_packed_attention(model, setting.backends[0])
        few = batch_of(rows[:8], way.replace("padded", "concat"), vocab).to(setting.device)
        with torch.no_grad():
            value = float(loss(model, few))
        made = batches_of(rows, way, setting.pack_size, vocab)
        batches = [batch.to(setting.device) for batch in islice(made, setting.packs)]
        results[name] = {"loss_of_the_same_pairs": value, **timed(model, loss, batches, setting)}
        print(name, json.dumps(results[name]), flush=True)
    losses = [result["loss_of_the_same_pairs"] for result in results.values()]
    rate = {name: result["pairs_per_second"] for name, result in results.items()}
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "ways": results,
        "spread_of_losses": max(losses) - min(losses),
        "over_padded": {n: rate[n] / rate["padded"] for n in ("concat", "shared_prefix")},
        "over_padding_free": {
            n: rate[n] / rate["padding_free"] for n in ("concat", "shared_prefix")
        },
    }


def timed(model: Any, loss: Any, batches: list[Any], setting: Setting) -> dict[str, Any]:
    """Pairs a second (the best repetition) and the peak of memory above weights and gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for batch in batches[: setting.warmup]:
        loss(model, batch).backward()
    clock = time.perf_counter if setting.cuda else time.process_time
    best, peak = float("inf"), 0
    for _ in range(setting.repeats):
        if setting.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = clock()
        for batch in batches:
            loss(model, batch).backward()
        if setting.cuda:
            torch.cuda.synchronize()
            peak = max(peak, torch.cuda.max_memory_allocated() - before)
        best = min(best, clock() - start)
    pairs = sum(batch.num_examples for batch in batches)
    return {
        "pairs_per_second": pairs / best,
        "pairs": pairs,
        "batches": len(batches),
        "tokens": sum(batch.num_tokens for batch in batches),
        "peak_mib": peak / 2**20 if setting.cuda else None,
    }


def about(args: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    """Machine, versions and command."""
    import transformers

    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "device": torch.cuda.get_device_name() if setting.cuda else platform.processor() or "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit,
        "settings": {k: str(v) for k, v in vars(setting).items()},
        "data": args.data or "synthetic, see the script",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cpu-dry-run", action="store_true", help="every path, tiny, on CPU")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--data", help="text file: tokens of prompt, chosen, rejected")
    parser.add_argument("--out", help=f"default: {RESULTS.name} in benchmarks/results")
    args = parser.parse_args()
    setting = DRY if args.cpu_dry_run else GPU
    if setting.cuda and not torch.cuda.is_available():
        sys.exit("attention_gpu.py needs a CUDA GPU; --cpu-dry-run tries the script without one.")
    if args.quick:
        setting = replace(setting, packs=2, repeats=1)
    results: dict[str, Any] = about(args, setting)
    out = Path(args.out) if args.out else RESULTS
    parts: dict[str, Callable[[], Any]] = {
        "isolation": lambda: isolation(setting),
        "native_grouped_queries": lambda: native_groups(setting),
        "correctness": lambda: list(correctness(setting)),
        "speed": lambda: speed(setting, args.data),
    }
    for name, part in parts.items():
        results[name] = part()
        out.write_text(json.dumps(results, indent=1) + "\n")  # what was measured outlives a crash
        if name != "speed":
            print(name, json.dumps(results[name], indent=1), flush=True)
    wrong = [case for case in results["correctness"] if case.get("right") is False]
    print(f"{len(wrong)} of {len(results['correctness'])} cases beyond twice the plain error")
    print("over padded", results["speed"]["over_padded"])
    print("over padding-free", results["speed"]["over_padding_free"])


if __name__ == "__main__":
    main()
