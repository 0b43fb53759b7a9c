"""Correctness of whole models: packed equals padded, host waits, CUDA graphs,
resume.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu.end_to_end import run_process, saved_model, settings_of
from gpu.graphs import graphed_step, pad_to_one_shape
from gpu.right_kernels import LIMIT, distance
from gpu.session import Figures, Session
from gpu.sizes import batch_of, cut, lengths, make_model

BETA = 0.1
LAYOUTS = ("concat", "shared_prefix")

PADDING_LIMIT = 5e-2
"""Largest error that padding may add: gradients of 16 bits are off by 0.02 on an H200.
"""


def _rows(session: Session) -> np.ndarray:
    row = session.sizes.row
    return cut(lengths("hh", 200, row // 4), "concat", row)[0]


def _config(session: Session, family: str) -> dict[str, Any]:
    family_config = (
        {"sliding_window": session.sizes.window} if family == "Gemma2" else {}
    )
    return {**session.sizes.small, **family_config}


def packed_is_padded(
    session: Session, families: Iterable[str], compiled: bool = False
) -> None:
    """Logits, loss and gradients of packs and of padded rows, on random weights."""
    for family in families:
        for layout in LAYOUTS:
            case = partial(_packed_is_padded, session, family, layout, compiled)
            end = "/compiled" if compiled else ""
            session.case(f"packed = padded/{family}/{layout}{end}", case, seconds=10)


def _packed_is_padded(
    session: Session, family: str, layout: str, compiled: bool
) -> Figures:
    """Against padded rows in float32; right up to twice the error of padded rows in 16
    bits.
    """
    from packstore.torch import PreferenceLoss, compile_layers, use_packed_attention
    from packstore.torch.logprobs.head import PackedPolicy

    sizes, config = session.sizes, _config(session, family)
    rows, vocab = _rows(session), config["vocab_size"]
    concat_batch = batch_of(rows, "concat", vocab).to(sizes.device)
    batch = batch_of(rows, layout, vocab).to(sizes.device)
    results: dict[str, dict[str, Tensor]] = {}
    for name, dtype in (
        ("exact", torch.float32),
        ("padded", sizes.dtype),
        ("ours", sizes.dtype),
    ):
        model = make_model(family, config, sizes, dtype)
        if name == "ours":
            use_packed_attention(model)
            if compiled:
                compile_layers(model, **({} if sizes.cuda else {"backend": "eager"}))
            logps = PackedPolicy(model)(batch)
            with torch.no_grad():
                logits = model(**batch.model_inputs()).logits[0]
            logits = logits if batch.kv_index is None else logits[batch.kv_index]
        else:
            model.set_attn_implementation("eager")
            padded_logits = model(**concat_batch.model_inputs("padded")).logits
            logits = concat_batch.unpad(padded_logits)
            logps = _sums(logits, concat_batch)
        loss = PreferenceLoss("dpo", beta=BETA)(
            logps, concat_batch, torch.zeros_like(logps)
        ).loss
        loss.backward()
        grads = torch.cat([p.grad.flatten().float() for p in model.parameters()])
        results[name] = {
            "logits": logits.detach().float(),
            "logps": logps.detach().float(),
            "loss": loss.detach().float()[None],
            "gradient": grads,
        }
    errors = {n: distance(x, results["exact"][n]) for n, x in results["ours"].items()}
    plain = {n: distance(x, results["exact"][n]) for n, x in results["padded"].items()}
    floor = {"loss": 2e-3, "logps": 2e-3}
    right = all(e <= max(2 * plain[n], floor.get(n, 1e-3)) for n, e in errors.items())
    return {"right": right, "errors": errors, "errors_of_padded": plain}


def _sums(logits: Tensor, batch: Any) -> Tensor:
    """Log-probs of the segments from the logits of a whole row, `[S]`."""
    logps = logits[batch.target_index - 1].float().log_softmax(-1)
    chosen = logps.gather(-1, batch.labels[batch.target_index, None]).squeeze(-1)
    sums = chosen.new_zeros(batch.num_segments)
    return sums.index_add(0, batch.segment_ids[batch.target_index], chosen)


def waits(session: Session) -> None:
    """Host waits in a planned step: forward, loss, backward, metrics; only CUDA reports
    them.
    """
    for family in ("Llama", "Qwen3"):
        for layout in LAYOUTS:
            case = partial(_waits, session, family, layout)
            session.case(f"host waits/{family}/{layout}", case)


def _waits(session: Session, family: str, layout: str) -> Figures:
    from packstore.torch import (
        Metrics,
        PreferenceLoss,
        StepDivisor,
        use_packed_attention,
    )
    from packstore.torch.logprobs.head import PackedPolicy

    sizes, config = session.sizes, _config(session, family)
    model = use_packed_attention(make_model(family, config, sizes))
    policy, loss_fn, metrics = PackedPolicy(model), PreferenceLoss("dpo"), Metrics()
    batch = batch_of(_rows(session), layout, config["vocab_size"])
    batch = batch.pin_memory() if sizes.cuda else batch

    def step() -> None:
        device_batch = batch.to(sizes.device, non_blocking=True)
        with torch.no_grad():
            reference = policy(device_batch)
        divisor = StepDivisor(float(device_batch.num_examples))
        out = loss_fn(policy(device_batch), device_batch, reference, divisor=divisor)
        out.loss.backward()
        metrics.add(out.metrics)

    step()  # kernels are chosen, and the head is proved
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if sizes.cuda:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            if sizes.cuda:
                torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in caught if "called a synchronizing" in str(w.message)]
    places = [f"{Path(w.filename).name}:{w.lineno}" for w in waits]
    return {"right": not waits, "waits": len(waits), "places": sorted(set(places))}


def cuda_graph(session: Session) -> None:
    """A step as a CUDA graph, replayed on another batch with another divisor: loss and
    gradients are those of a step without a graph.
    """
    for layout in LAYOUTS:
        case = partial(_cuda_graph, session, layout)
        session.case(f"CUDA graph of a step/{layout}", case, seconds=20)


def _cuda_graph(session: Session, layout: str) -> Figures:
    """Compare two replays with calls; right if they differ by rounding.

    The calls have the padded batches, as other products round 16 bits otherwise; how
    far they are from those of the batches before is recorded, and may be more.
    """
    from packstore.torch import (
        PackedPolicy,
        PreferenceLoss,
        StepDivisor,
        use_packed_attention,
    )

    sizes, config = session.sizes, _config(session, "Llama")
    model = use_packed_attention(make_model("Llama", config, sizes))
    policy, loss_fn = PackedPolicy(model), PreferenceLoss("dpo", beta=BETA)
    runs = cut(lengths("hh", 400, sizes.row // 4), layout, sizes.row)[:2]
    batches = [batch_of(rows, layout, config["vocab_size"]) for rows in runs]
    divisors = [StepDivisor(10.0), StepDivisor(20.0)]
    padded = pad_to_one_shape(batches, sizes.row + 100)

    def state(loss: Tensor) -> Tensor:
        """Return loss and gradients as one vector."""
        grads = [p.grad.flatten().float() for p in model.parameters()]
        return torch.cat([loss.detach()[None], *grads])

    def call(batch: Any, divisor: Any) -> Tensor:
        """Return loss and gradients without a graph."""
        model.zero_grad()
        device_batch = batch.to(sizes.device)
        logps = policy(device_batch)
        reference = torch.zeros_like(logps)
        loss = loss_fn(logps, device_batch, reference, divisor=divisor).loss
        loss.backward()
        return state(loss)

    expected = [call(*step) for step in zip(padded, divisors, strict=True)]
    unpadded = [call(*step) for step in zip(batches, divisors, strict=True)]

    graph = graphed_step(model, loss_fn, sizes.cuda)
    errors = []
    for i, (batch, divisor) in enumerate(zip(padded, divisors, strict=True)):
        model.zero_grad()
        loss = graph(batch, divisor=divisor).loss
        errors.append(distance(state(loss), expected[i]))
    padding_errors = [
        distance(*states) for states in zip(expected, unpadded, strict=True)
    ]
    is_right = max(errors) <= LIMIT and max(padding_errors) <= PADDING_LIMIT
    return {
        "right": is_right,
        "captured": sizes.cuda,
        "errors": errors,
        "padding_errors": padding_errors,
    }


def resumed(session: Session, data: Path, scratch: Path) -> None:
    """Five steps of ``train``, killed after three, resumed: the losses of an
    undisturbed run.
    """

    def compare() -> Figures:
        steps, cut_at = 5, 3
        config = {
            **session.sizes.small,
            "hidden_size": 64,
            "vocab_size": session.sizes.vocab,
        }
        model = saved_model(session, "Llama", config, scratch / "small")
        base = settings_of(session, model, data, steps)
        base |= {"save_steps": 2, "examples_per_step": 4, "compile": "none"}
        base |= {"dtype": "bfloat16"}
        undisturbed, killed = (
            base | {"output_dir": str(scratch / name)}
            for name in ("undisturbed", "killed")
        )
        run_process({"settings": killed, "exact": True, "kill_at": cut_at})
        results = [
            run_process({"settings": settings, "exact": True})
            for settings in (undisturbed, killed)
        ]
        losses = [[record["loss"] for record in r["records"]] for r in results]
        return {
            "right": losses[0] == losses[1] and len(losses[0]) == steps,
            "losses": losses,
        }

    session.case(
        "killed and resumed", compare, seconds=45 if session.sizes.cuda else 10
    )
