"""Computes log-probs of supervised tokens and all gradients by each route, on a CPU.

    pip install trl; pip install --no-deps liger-kernel      # the peers
    python benchmarks/logprobs.py                            # --quick: small, to see that it runs

Peak memory above the inputs, and CPU seconds of forward and backward, of 4096 tokens
(half of them supervised) over a vocabulary of 32768 from 512 features, in float32 and
bfloat16. Each route runs in a fresh process with one thread, the routes in turn,
several rounds; the least time and the largest memory count. Every route gets the same
upstream gradient for each token, except Liger's, which has the DPO loss inside. `error`
is the largest difference of a log-prob from float64, `error_dW` that of the head's
gradient as a share of its largest entry; routes with a frozen head have none, and
compute the gradient of the features alone. With bfloat16 inputs, plain routes round the
logits to it; the one "in float32" does not, as ours. A peer that is absent is reported
as such.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import RESULTS, memory, parser, provenance, save, show

TRL_COLUMNS = 32768
"""Columns of a tile of TRL's head, as TRL sets it."""

BASE = "log_softmax, supervised rows"
OURS = "packstore"
COLUMNS = ("dtype", "route", "extra_mib", "memory_of_base", "seconds", "time_of_base")
COLUMNS += ("error", "error_dW", "absent")


def inputs(sizes: dict[str, int], dtype: str) -> tuple[Any, ...]:
    """hidden [T, H], weight [V, H], labels [T] (each run begins with -100), upstream
    [T].
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    tokens, vocab, width = sizes["tokens"], sizes["vocab"], sizes["width"]
    kind = getattr(torch, dtype)
    hidden = torch.randn(tokens, width, generator=generator).to(kind).requires_grad_()
    weight = (
        (0.05 * torch.randn(vocab, width, generator=generator))
        .to(kind)
        .requires_grad_()
    )
    labels = torch.randint(vocab, (tokens,), generator=generator)
    run = tokens // 4
    labels[torch.arange(tokens) % run < run // 2] = -100
    upstream = torch.rand(tokens, generator=generator) / tokens
    return hidden, weight, labels, upstream


def log_softmax(hidden: Any, weight: Any, labels: Any) -> Any:
    rows = (hidden @ weight.T).float().log_softmax(-1)
    return rows.gather(-1, labels.clamp(min=0)[:, None]).squeeze(-1)


def frozen_log_softmax(hidden: Any, weight: Any, labels: Any) -> Any:
    return log_softmax(hidden, weight.detach(), labels)


def in_float32(hidden: Any, weight: Any, labels: Any) -> Any:
    return log_softmax(hidden.float(), weight.float(), labels)


def logsumexp(hidden: Any, weight: Any, labels: Any) -> Any:
    logits = (hidden @ weight.T).float()
    return logits.gather(-1, labels[:, None]).squeeze(-1) - logits.logsumexp(-1)


def checkpointed(hidden: Any, weight: Any, labels: Any) -> Any:
    import torch
    from torch.utils.checkpoint import checkpoint

    parts = [
        checkpoint(
            log_softmax,
            hidden[i : i + 512],
            weight,
            labels[i : i + 512],
            use_reentrant=False,
        )
        for i in range(0, len(hidden), 512)
    ]
    return torch.cat(parts)


def packstore(
    chunk_size: int, frozen: bool = False, **settings: Any
) -> Callable[..., Any]:
    def route(hidden: Any, weight: Any, labels: Any) -> Any:
        from packstore.torch.logprobs.logprobs import HeadLogProbs
        from packstore.torch.logprobs.tiles import Projection

        head = weight.detach() if frozen else weight
        how = Projection(chunk_size=chunk_size, **settings)
        return HeadLogProbs.apply(hidden, head, None, labels, how)

    return route


def trl(hidden: Any, weight: Any, labels: Any) -> Any:
    from trl.kernels import ChunkedLogProbFunction

    settings = (1.0, TRL_COLUMNS, None, 1.0, ())
    return ChunkedLogProbFunction.apply(hidden, weight, None, labels, *settings)[0]


def torch_linear_cross_entropy(hidden: Any, weight: Any, labels: Any) -> Any:
    import torch
    import torch.nn.functional as F

    options = torch.nn.LinearCrossEntropyOptions()
    return -F.linear_cross_entropy(
        hidden, weight, labels, reduction="none", options=options
    )


def liger(hidden: Any, weight: Any, labels: Any) -> Any:
    """Two pairs, chosen first; its own loss, whose gradients it makes in the forward
    pass.
    """
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

    loss = LigerFusedLinearDPOLoss(use_ref_model=False, compiled=False)
    return loss(weight, hidden.view(4, -1, hidden.shape[-1]), labels.view(4, -1))[0]


ROUTES: dict[
    str, tuple[Callable[..., Any], bool]
] = {  # and whether it sees supervised rows only
    "log_softmax, all rows": (log_softmax, False),
    BASE: (log_softmax, True),
    "the same, in float32": (in_float32, True),
    "gather - logsumexp": (logsumexp, True),
    "torch checkpoint, 512 tokens": (checkpointed, True),
    "packstore 2^19": (packstore(2**19), True),
    "packstore 2^20": (packstore(2**20), True),
    OURS: (packstore(2**21), True),
    "packstore, logits kept": (packstore(2**21, keep_logits=True), True),
    "log_softmax, frozen head": (frozen_log_softmax, True),
    "packstore, frozen head": (packstore(2**21, frozen=True), True),
    "packstore 2^22": (packstore(2**22), True),
    "packstore 2^24": (packstore(2**24), True),
    "TRL ChunkedLogProbFunction": (trl, True),
    "torch linear_cross_entropy": (torch_linear_cross_entropy, True),
    "Liger fused DPO": (liger, False),
}


def work(route: str, sizes: dict[str, int], dtype: str, repeat: int) -> dict[str, Any]:
    """Measures one route, in this process."""
    import torch

    torch.set_num_threads(1)
    function, supervised_only = ROUTES[route]

    def step(given: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, weight, labels, upstream = given
        rows = labels != -100
        seen = hidden[rows] if supervised_only else hidden
        out = function(seen, weight, labels[rows] if supervised_only else labels)
        if out.ndim == 0:
            out.backward()
        elif supervised_only:
            (out * upstream[rows]).sum().backward()
        else:
            (out * upstream * rows).sum().backward()
        return out.detach(), weight.grad, rows

    step(inputs({**sizes, "tokens": 32, "vocab": 64}, dtype))  # libraries are loaded
    given = inputs(sizes, dtype)
    Path("/proc/self/clear_refs").write_text(
        "5", encoding="utf-8"
    )  # the peak begins anew
    before = memory()["VmRSS"]
    out, d_weight, rows = step(given)
    extra = memory()["VmHWM"] - before
    result: dict[str, Any] = {"extra_mib": extra / 2**20}
    if out.ndim:
        result |= errors(given, out if supervised_only else out[rows], d_weight, rows)
    del out, d_weight
    seconds = []
    for _ in range(repeat):
        given[0].grad = given[1].grad = None
        start = time.process_time()
        step(given)
        seconds.append(time.process_time() - start)
    return {**result, "seconds": min(seconds)}


def errors(
    given: tuple[Any, ...], out: Any, d_weight: Any, rows: Any
) -> dict[str, float]:
    """Against float64, from the same (rounded) inputs; the head's gradient on its first
    columns.
    """
    import torch

    hidden, weight, labels, upstream = given
    some = 256
    with torch.no_grad():
        x, w = hidden[rows].double(), weight.double()
        logits = x @ w.T
        total = logits.logsumexp(-1)
        exact = logits.gather(-1, labels[rows, None]).squeeze(-1) - total
        delta = -(logits[:, :some] - total[:, None]).exp()
        hit = labels[rows, None] == torch.arange(some)
        d_exact = ((delta + hit) * upstream[rows, None].double()).T @ x
        found = {"error": float((out - exact).abs().max())}
        if d_weight is not None:
            gap = (d_weight[:some].double() - d_exact).abs().max() / d_exact.abs().max()
            found["error_dW"] = float(gap)
        return found


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    sizes = {name: getattr(args, name) for name in ("tokens", "vocab", "width")}
    for _ in range(args.rounds):
        for dtype in args.dtypes:
            for route in args.routes:
                order = json.dumps([route, sizes, dtype, args.repeat])
                command = [sys.executable, __file__, "--worker", order]
                done = subprocess.run(
                    command, capture_output=True, text=True, check=False
                )
                key = {"dtype": dtype, "route": route}
                if done.returncode:
                    last = done.stderr.strip().splitlines()[-1:]
                    rows.setdefault((dtype, route), {**key, "absent": "".join(last)})
                    continue
                new = json.loads(done.stdout)
                old = rows.get((dtype, route), new)
                new["extra_mib"] = max(old["extra_mib"], new["extra_mib"])
                new["seconds"] = min(old["seconds"], new["seconds"])
                rows[dtype, route] = {**key, **new}
    for (dtype, _), row in rows.items():
        base = rows.get((dtype, BASE), {})
        if "seconds" in row and "seconds" in base:
            row["memory_of_base"] = row["extra_mib"] / base["extra_mib"]
            row["time_of_base"] = row["seconds"] / base["seconds"]
    return list(rows.values())


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--tokens", type=int, default=4096)
    command.add_argument("--vocab", type=int, default=32_768)
    command.add_argument("--width", type=int, default=512)
    command.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    command.add_argument(
        "--routes", nargs="+", default=list(ROUTES), choices=list(ROUTES)
    )
    command.add_argument(
        "--repeat", type=int, default=3, help="timed repeats in a process"
    )
    command.add_argument(
        "--rounds", type=int, default=3, help="processes of each route"
    )
    command.add_argument(
        "--quick", action="store_true", help="small, one round, nothing written"
    )
    command.add_argument("--out", type=Path, default=RESULTS / "logprobs.json")
    command.add_argument("--worker", help=argparse.SUPPRESS)
    args = command.parse_args()
    if args.worker:
        print(json.dumps(work(*json.loads(args.worker))))
        return
    if args.quick:
        args.tokens, args.vocab, args.width, args.repeat, args.rounds = (
            512,
            4096,
            128,
            1,
            1,
        )
    os.environ["OMP_NUM_THREADS"] = "1"
    before = provenance("torch", "transformers", "trl", "liger-kernel")
    rows = measure(args)
    show(COLUMNS, [[row.get(name, "-") for name in COLUMNS] for row in rows])
    settings = {
        k: v for k, v in vars(args).items() if k not in ("out", "worker", "quick")
    }
    found = {"environment": before, "settings": settings, "rows": rows}
    save(None if args.quick else args.out, found)


if __name__ == "__main__":
    main()
