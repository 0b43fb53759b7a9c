"""Stage 2: pairs a second of whole models, against what else there is.

Forward and backward of random models in bfloat16. The ways take turns, batch by batch:

- ``padded``, ``padded_grouped``: [2B, longest] rows with a mask, transformers' sdpa, logits of all
  tokens; batches of random pairs, and of pairs of similar length;
- ``padding_free``: packs in layout concat, packstore's attention, logits of all tokens, as a plain
  TRL-style trainer would have it;
- ``concat`` and ``shared_prefix``: log-probs from hidden states without logits.

Each with eager and with compiled layers. The optimizer's step and the forward pass of a reference
model are cases of their own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from gpu.session import Figures, Session
from gpu.sizes import batch_of, cut, grouped_by_length, lengths, make_model

BETA = 0.1
WARM = 3
LEAST = 3
"""Timed rounds for which a model may take the time of the next ones."""

PEAK = 989e12
"""Dense bfloat16 operations a second of an H100 or H200, by its data sheet."""


def _dpo(logps: Tensor, batch: Any) -> Tensor:
    """The mean loss of the pairs, from log-probs of the supervised tokens; the reference is 0."""
    sums = logps.new_zeros(batch.num_segments)
    sums = sums.index_add(0, batch.segment_ids[batch.target_index], logps)
    return -logsigmoid(BETA * (sums[0::2] - sums[1::2])).mean()


def padded_loss(model: Any, inputs: dict[str, Any], batch: Any) -> Tensor:
    rows = batch.target_index - 1
    logps = model(**inputs).logits.float().log_softmax(-1)
    logps = logps[batch.segment_ids[rows], batch.position_ids[rows]]
    return _dpo(logps.gather(-1, batch.labels[batch.target_index, None]).squeeze(-1), batch)


def padding_free_loss(model: Any, inputs: dict[str, Any], batch: Any) -> Tensor:
    logps = model(**inputs).logits[0].float().log_softmax(-1)[batch.target_index - 1]
    return _dpo(logps.gather(-1, batch.labels[batch.target_index, None]).squeeze(-1), batch)


def packed_loss(model: Any, inputs: dict[str, Any], batch: Any) -> Tensor:
    from packstore.torch import PreferenceLoss, StepDivisor, packed_logps

    logps = packed_logps(model, batch)
    loss_fn, divisor = PreferenceLoss("dpo", beta=BETA), StepDivisor(float(batch.num_examples))
    return loss_fn(logps, batch, torch.zeros_like(logps), divisor=divisor).loss


Loss = Callable[[Any, dict[str, Any], Any], Tensor]
WAYS: dict[str, tuple[str, Loss]] = {
    "shared_prefix": ("shared_prefix", packed_loss),
    "concat": ("concat", packed_loss),
    "padding_free": ("concat", padding_free_loss),
    "padded_grouped": ("padded", padded_loss),
    "padded": ("padded", padded_loss),
}


class Way:
    """One way to train a model: its batches, how attention and layers are set, its times."""

    def __init__(self, name: str, compiled: bool, batches: list[Any], longest: Any) -> None:
        self.name, self.compiled = name, compiled
        self.layout, self.loss = WAYS[name]
        self.padded = self.layout == "padded"
        self.batches, self.longest = batches, longest
        self.seconds: list[float] = []
        self.pairs = self.tokens = self.work = 0.0

    def inputs(self, batch: Any) -> dict[str, Any]:
        return batch.model_inputs("padded" if self.padded else "hf")


def stage(session: Session) -> None:
    """Every model, length profile and number of tokens; the most telling first."""
    sizes = session.sizes
    profiles = sizes.profiles if sizes.cuda else sizes.profiles[:1]
    plans = [(m, p, t) for t in sizes.tokens for p in profiles for m in sizes.models]
    for number, (model_name, profile, tokens) in enumerate(plans):
        share = session.left / (len(plans) - number)
        name = f"{model_name}/{profile}/{tokens}"
        try:
            _group(session, name, model_name, profile, tokens, share)
        except Exception as error:  # the cases inside are guarded; this is the model itself
            session.case(name, lambda e=error: _raise(e))


def _raise(error: Exception) -> Figures:
    raise error


def _group(
    session: Session, name: str, model_name: str, profile: str, tokens: int, share: float
) -> None:
    from packstore.torch import use_packed_attention

    sizes, until = session.sizes, session.left - share
    if session.left < 20 and sizes.cuda:
        session.case(name, lambda: None, seconds=20)
        return
    family, config = sizes.models[model_name]
    model = make_model(family, config, sizes)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    use_packed_attention(model)
    ours = model.config._attn_implementation
    rows = lengths(profile, 40 * tokens // 300 + 200, sizes.longest)
    same = rows[:8] if sizes.cuda else rows[:3]
    ready: list[Way] = []
    first = name.startswith(next(iter(sizes.models)))
    for compiled in (False, True) if sizes.cuda or first else (False,):
        for way_name in WAYS:
            way = Way(way_name, compiled, _batches(rows, way_name, tokens, session), same)
            told = f"{name}/{way_name}" + ("/compiled" if compiled else "")
            if session.left < until and sizes.cuda:
                session.case(told, lambda: None, seconds=session.left + 1)  # this group's share
            elif session.case(told, lambda w=way: _warm(session, model, w, ours), seconds=8):
                ready.append(way)
    for number in range(sizes.rounds):
        if sizes.cuda and session.left < until and number >= LEAST:
            break
        for way in list(ready):
            try:
                _timed(session, model, way, ours)
            except Exception as error:  # out of memory, mostly: the other ways go on
                print(f"{name}/{way.name}: {error}"[:300], flush=True)
                ready.remove(way)
    for way in ready:
        told = f"{name}/{way.name}" + ("/compiled" if way.compiled else "")
        if way.seconds and told in session.cases:
            session.update(told, _figures(way, session))
    _same_loss(session, name, ready)
    for extra, work in (("optimizer", _optimizer), ("reference", _reference)):
        session.case(
            f"{name}/{extra}", lambda w=work: w(session, model, rows, tokens, ours), seconds=8
        )


def _batches(rows: np.ndarray, way: str, tokens: int, session: Session) -> list[Any]:
    """Batches on the device, as many as are timed, and those to warm up with."""
    layout, most = WAYS[way][0], session.sizes.rounds
    runs = cut(rows, layout, tokens)
    if way == "padded_grouped":
        runs = iter(grouped_by_length(rows, tokens))
    vocab = min(config["vocab_size"] for _, config in session.sizes.models.values())
    made = [
        batch_of(r, layout.replace("padded", "concat"), vocab) for r in islice(runs, most) if len(r)
    ]
    return [batch.to(session.sizes.device) for batch in made]


def _set(model: Any, way: Way, ours: str, cuda: bool) -> None:
    """Sets the attention of a way, and turns the compiled layers on or off."""
    from packstore.torch import compile_layers

    wanted = "sdpa" if way.padded else ours
    if model.config._attn_implementation != wanted:
        model.set_attn_implementation(wanted)
    for layer in model.model.layers:
        layer._compiled_call_impl = None
    if way.compiled:  # its graphs are those of the class, and compiled once
        compile_layers(model, **({} if cuda else {"backend": "eager"}))


def _step(model: Any, way: Way, batch: Any, inputs: dict[str, Any]) -> Tensor:
    loss = way.loss(model, inputs, batch)
    loss.backward()
    return loss.detach()


def _warm(session: Session, model: Any, way: Way, ours: str) -> Figures:
    """The loss of the same few pairs; steps to warm up, and their peak of memory."""
    cuda = session.sizes.cuda
    _set(model, way, ours, cuda)
    vocab = min(config["vocab_size"] for _, config in session.sizes.models.values())
    few = batch_of(way.longest, way.layout.replace("padded", "concat"), vocab)
    few = few.to(session.sizes.device)
    with torch.no_grad():
        loss = float(way.loss(model, way.inputs(few), few))
    if not cuda:
        _step(model, way, way.batches[0], way.inputs(way.batches[0]))
        return {"loss": loss}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, peak = torch.cuda.memory_allocated(), 0
    for i in range(WARM):
        batch = way.batches[i % len(way.batches)]
        _step(model, way, batch, way.inputs(batch))
        torch.cuda.synchronize()
        peak = max(peak, torch.cuda.max_memory_allocated() - before)
    return {"loss": loss, "peak_gib": peak / 2**30}


def _timed(session: Session, model: Any, way: Way, ours: str) -> None:
    """One step on the next batch; its time counts from an idle device to an idle device."""
    _set(model, way, ours, session.sizes.cuda)
    batch = way.batches[len(way.seconds) % len(way.batches)]
    inputs = way.inputs(batch)
    if session.sizes.cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    _step(model, way, batch, inputs)
    if session.sizes.cuda:
        torch.cuda.synchronize()
    way.seconds.append(time.perf_counter() - start)
    way.pairs += batch.num_examples
    way.tokens += int(batch.lengths.sum())
    way.work += operations(model.config, batch, way)


def operations(config: Any, batch: Any, way: Way) -> float:
    """Operations of the products and of causal attention that a step does, forward and backward.

    Tiles of the head that packstore computes twice count once.
    """
    q_width = config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    width, layers = config.hidden_size, config.num_hidden_layers
    layer = width * (2 * q_width + 2 * kv_width + 3 * config.intermediate_size)
    keys = batch.cu_seqlens_k.diff().double()
    queries = batch.cu_seqlens.diff().double()
    tokens, rows = float(batch.num_tokens), float(len(batch.target_index))
    if way.padded:
        keys = queries = torch.full_like(keys, float(batch.max_seqlen_k))
        tokens = rows = float(len(keys)) * batch.max_seqlen_k
    elif way.name == "padding_free":
        rows = tokens
    pairs = float((queries * keys - queries * (queries - 1) / 2).sum())
    head = rows * width * config.vocab_size
    return 6 * (tokens * layers * layer + head) + 12 * layers * pairs * q_width


def _figures(way: Way, session: Session) -> Figures:
    total = sum(way.seconds)
    return {
        "pairs_per_second": way.pairs / total,
        "tokens_per_second": way.tokens / total,
        "ms": 1e3 * statistics.median(way.seconds),
        "mfu": way.work / total / PEAK if session.sizes.cuda else None,
        "rounds": len(way.seconds),
    }


def _same_loss(session: Session, name: str, ready: list[Way]) -> None:
    """All ways give the same loss on the same pairs, up to rounding."""

    def compare() -> Figures:
        own = {
            n: c["loss"]
            for n, c in session.cases.items()
            if n.startswith(name + "/") and "loss" in c
        }
        spread = max(own.values()) - min(own.values())
        return {"right": spread < 0.01, "spread": spread, "ways": len(own)}

    if ready:
        session.case(f"{name}/same loss", compare, seconds=0)


def _optimizer(session: Session, model: Any, rows: np.ndarray, tokens: int, ours: str) -> Figures:
    """A step of AdamW, fused on a GPU as ``train`` has it."""
    from gpu.right import seconds_of

    cuda = session.sizes.cuda
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=cuda)
    return {"ms": 1e3 * seconds_of(optimizer.step, cuda, times=5)}


def _reference(session: Session, model: Any, rows: np.ndarray, tokens: int, ours: str) -> Figures:
    """The forward pass that an online reference adds to each step; stored log-probs add none."""
    from gpu.right import seconds_of
    from packstore.torch import packed_logps

    found = {}
    for layout in ("concat", "shared_prefix"):
        way = Way(layout, False, _batches(rows, layout, tokens, session)[:1], rows[:1])
        _set(model, way, ours, session.sizes.cuda)
        with torch.no_grad():
            work = lambda w=way: packed_logps(model, w.batches[0])  # noqa: E731
            found[f"{layout}_ms"] = 1e3 * seconds_of(work, session.sizes.cuda, times=5)
    return found
