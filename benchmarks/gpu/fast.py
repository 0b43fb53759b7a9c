"""Pairs a second of whole models, against what else there is.

Forward and backward of random models in bfloat16. A way is a packing and a head,
``packing/head``:

- ``shared_prefix`` and ``padding_free``: flat rows in packstore's layouts, with its
  attention;
- ``padded_grouped`` and ``padded``: `[2B, longest]` rows with a mask, transformers'
  sdpa; of pairs of similar length, and of random ones;
- ``triton`` and ``eager``: packstore's head, log-probs of supervised tokens without
  logits;
- ``trl``: the head that TRL 1.16 fuses into models; ``logits``: float32 logits of all
  tokens.

All ways train on the same pairs in turns, with the same loss. ``padded/trl`` is what
TRL 1.16 does.
"""

from __future__ import annotations

import statistics
import time
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from logprobs import trl
from torch import Tensor

from gpu.predictions import Work, work
from gpu.session import Figures, Session, failure
from gpu.sizes import batch_of, cut, lengths, make_model

OURS = "shared_prefix/triton"
SAME_HEAD = "padding_free/triton"
WAYS = (
    *(OURS, SAME_HEAD, "padding_free/trl", "padded_grouped/trl", "padded/trl"),
    *(
        "shared_prefix/eager",
        "padding_free/eager",
        "padding_free/logits",
        "padded_grouped/logits",
    ),
)
PEAK = 989e12
"""Dense bfloat16 operations a second of an H100 or H200, by its data sheet."""


def group(
    session: Session,
    model: str,
    profile: str,
    tokens: int,
    ways: tuple[str, ...] = WAYS,
    compiled: bool = False,
) -> None:
    """Measures ways to train a model on pairs of a length profile, `tokens` in a
    micro-batch.

    The first two, which decide, are timed before the others are tried; then all in
    turns. Those with compiled layers need a process that has compiled for no other
    model: beyond a number of graphs torch runs layers without the compiler.
    """
    name, end = f"{model}/{profile}/{tokens}", "/compiled" if compiled else ""
    cases = {f"{name}/{way}{end}": way for way in ways}
    cases = {case: way for case, way in cases.items() if session.only.search(case)}
    if not cases or all("ms" in session.cases.get(case, {}) for case in cases):
        return  # nothing was asked for, or a process before this one has done it
    trial = Trial(session, model, profile, tokens, compiled)
    least = 40 if compiled and session.sizes.cuda else 8
    ready: dict[str, str] = {}
    for group_of_cases in (list(cases)[:2], list(cases)[2:]):
        for case in group_of_cases:
            was_measured = not session.wants(case)
            if session.case(case, partial(trial.warm, way := cases[case]), least):
                ready[case] = way
                if was_measured:  # by a process before this one
                    trial.warm(way)
        trial.seconds.clear()
        for _ in range(session.sizes.rounds if group_of_cases else 0):
            for case, way in list(ready.items()):
                if session.left < 3:
                    break
                try:
                    trial.round(way)
                except Exception as error:  # the other ways go on
                    session.update(case, failure(error))
                    del ready[case]
        timed = {case: way for case, way in ready.items() if way in trial.seconds}
        for case, way in timed.items():
            session.update(case, trial.figures(way))
        if {OURS, SAME_HEAD} <= set(timed.values()):
            ratio = f"{name}/ratio to padding-free{end}"
            session.case(ratio, trial.ratios, seconds=-60)
            session.update(ratio, trial.ratios())
    losses = [session.cases[case]["loss"] for case in ready]
    if len(losses) > 1:
        spread = max(losses) - min(losses)
        same = {"right": spread < 0.01, "spread": spread, "ways": len(losses)}
        session.case(f"{name}/same loss{end}", lambda: same, seconds=-60)


class Trial:
    """A model, the pairs of a round, and the times of each way."""

    def __init__(
        self, session: Session, model: str, profile: str, tokens: int, compiled: bool
    ) -> None:
        self.sizes, self.ceilings = session.sizes, session.ceilings
        self.family, self.config = self.sizes.models[model]
        self.tokens, self.compiled = tokens, compiled
        rows = lengths(profile, 4000, self.sizes.longest[profile])
        volume = (
            self.sizes.micro_batches * self.sizes.tokens[0]
        )  # full micro-batches of ours
        runs = cut(rows, "shared_prefix", tokens)[: -(-volume // tokens)]
        self.rows = np.concatenate(runs)
        self.seconds: dict[str, list[float]] = {}
        self._batches: dict[str, list[Any]] = {}

    @cached_property
    def model(self) -> Any:
        from packstore.torch import compile_layers, use_packed_attention

        model = use_packed_attention(make_model(self.family, self.config, self.sizes))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.packed = model.config._attn_implementation
        if self.compiled:
            compile_layers(model, **({} if self.sizes.cuda else {"backend": "eager"}))
        return model

    def batches(self, way: str) -> list[Any]:
        """The pairs of a round as batches on the device."""
        packing = way.partition("/")[0]
        if packing not in self._batches:
            runs = cut(self.rows, packing, self.tokens)
            self._batches[packing] = [self._batch(run, packing) for run in runs]
        return self._batches[packing]

    def _batch(self, rows: np.ndarray, packing: str) -> Any:
        layout = "shared_prefix" if packing == "shared_prefix" else "concat"
        return batch_of(rows, layout, self.config["vocab_size"]).to(self.sizes.device)

    def loss(self, way: str, batch: Any) -> Tensor:
        """The DPO loss of a batch, with a reference of log-probs 0."""
        from packstore.torch import PreferenceLoss, StepDivisor, packed_logps

        packing, _, head = way.partition("/")
        padded = packing.startswith("padded")
        model = self.model
        implementation = "sdpa" if padded else self.packed
        if model.config._attn_implementation != implementation:
            model.set_attn_implementation(implementation)
        if head in ("triton", "eager"):
            backend = head if self.sizes.cuda else "eager"
            sums = packed_logps(model, batch, backend=backend)
        else:
            rows, ids = batch.targets.rows, batch.targets.ids
            owners = batch.segment_ids[rows]
            inputs = batch.model_inputs("padded" if padded else "hf")
            seen = (owners, batch.position_ids[rows]) if padded else (0, rows)
            logps = self._head(head, inputs, seen, ids)
            sums = logps.new_zeros(batch.num_segments).index_add(0, owners, logps)
        divisor = StepDivisor(float(batch.num_examples))
        loss_fn = PreferenceLoss("dpo", beta=0.1)
        return loss_fn(sums, batch, torch.zeros_like(sums), divisor=divisor).loss

    def _head(
        self, head: str, inputs: dict[str, Any], seen: Any, ids: Tensor
    ) -> Tensor:
        if head == "logits":
            logps = self.model(**inputs).logits.float().log_softmax(-1)[seen]
            return logps.gather(-1, ids[:, None]).squeeze(-1)
        hidden = self.model.model(**inputs).last_hidden_state[seen]
        return trl(hidden, self.model.lm_head.weight, ids)

    def backward(self, way: str, batch: Any) -> Tensor:
        """Queue forward and backward pass of a batch; returns the loss."""
        loss = self.loss(way, batch)
        loss.backward()
        return loss.detach()

    def warm(self, way: str) -> Figures:
        """The loss of the same few pairs; a round to warm up, and its peak of
        memory.
        """
        batch = self._batch(self.rows[:4], way.partition("/")[0])
        loss = float(self.backward(way, batch))
        if self.sizes.cuda:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.round(way)
        del self.seconds[way]
        peak = torch.cuda.max_memory_allocated() - before
        return {"loss": loss, "peak_gib": peak / 2**30, **self._compiled()}

    def _compiled(self) -> Figures:
        """Counts the compiled frames; raises if one was left to run without the
        compiler.
        """
        if not self.compiled:
            return {}
        from torch._dynamo.utils import counters

        frames, breaks = counters["frames"], sum(counters["graph_break"].values())
        if not 0 < frames["total"] == frames["ok"]:
            raise RuntimeError(
                f"{frames['ok']} of {frames['total']} frames were compiled"
            )
        return {"frames": frames["total"], "graph_breaks": breaks}

    def round(self, way: str) -> None:
        """Time a round, all pairs in micro-batches.

        As in training, the host waits for the device at the end only: a wait in each
        micro-batch would count the launches of its first kernels.
        """
        batches = self.batches(way)
        start = time.perf_counter()
        for batch in batches:
            loss = self.backward(way, batch)
        float(loss)  # waits
        self.seconds.setdefault(way, []).append(time.perf_counter() - start)
        self._compiled()

    def rate(self, way: str) -> float:
        """Return pairs a second, by the median of the rounds."""
        return len(self.rows) / statistics.median(self.seconds[way])

    def work(self, way: str) -> list[Work]:
        """Returns the work of each batch."""
        packing, _, head = way.partition("/")
        counted = []
        for batch in self.batches(way):
            queries, keys = (
                x.diff().cpu() for x in (batch.cu_seqlens, batch.cu_seqlens_k)
            )
            if packing.startswith("padded"):
                queries = keys = torch.full_like(keys, batch.max_seqlen_k)
            counts = (queries, keys, len(batch.targets.ids), head, self.compiled)
            counted.append(work(self.config, *counts))
        return counted

    def expected(self, way: str) -> float:
        """Pairs a second, by counting, at the measured ceilings."""
        return len(self.rows) / sum(w.seconds(self.ceilings) for w in self.work(way))

    def ratios(self) -> Figures:
        """The rate of shared prefixes over that of every other way; the one with its
        head first.
        """
        others = [way for way in self.seconds if way != OURS]
        measured = {f"over {way}": self.rate(OURS) / self.rate(way) for way in others}
        same = {f"over {SAME_HEAD}": self.expected(OURS) / self.expected(SAME_HEAD)}
        return {**measured, "expected": same}

    def figures(self, way: str) -> Figures:
        """Return rates by the median of the rounds; ``ms`` is of a micro-batch."""
        seconds = statistics.median(self.seconds[way])
        needed = sum(w.needed for w in self.work(way))
        measured = {
            "pairs_per_second": self.rate(way),
            "ms": 1e3 * seconds / len(self.batches(way)),
            "mfu": needed / seconds / PEAK if self.sizes.cuda else None,
            "rounds": len(self.seconds[way]),
        }
        if way.startswith("padded"):
            return measured
        return {**measured, "expected": {"pairs_per_second": self.expected(way)}}
