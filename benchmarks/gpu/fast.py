"""Pairs a second of whole models, against what else there is.

Forward and backward of random models in bfloat16, by the ways of ``rounds.py``. All
ways train on the same pairs in turns, with the same loss.
"""

from __future__ import annotations

import statistics
import time
from functools import cached_property, partial
from typing import Any

import torch
from logprobs import trl
from torch import Tensor

from gpu.predictions import PEAK
from gpu.rounds import OURS, Group, Round, Way, parse_way
from gpu.session import Figures, Session, failure
from gpu.sizes import Lengths, batch_of, make_model

LORA_RANK = 16


def measure_group(session: Session, group: Group) -> None:
    """Measure the ways of a group.

    The first two, which decide, are timed before the others are tried; then all in
    turns. Those with compiled layers need a process that has compiled for no other
    model: beyond a number of graphs torch runs layers without the compiler.
    """
    cases = {group.case(way): way for way in group.ways}
    cases = {case: way for case, way in cases.items() if session.only.search(case)}
    if not cases or all("ms" in session.cases.get(case, {}) for case in cases):
        return  # none is requested, or a process before this one has measured all
    trial = Trial(session, group)
    seconds_to_compile = 40 if group.is_compiled and session.sizes.cuda else 8
    ready: dict[str, str] = {}
    for group_of_cases in (list(cases)[:2], list(cases)[2:]):
        for case in group_of_cases:
            way = cases[case]
            was_measured = not session.wants(case)
            if session.case(case, partial(trial.warm, way), seconds_to_compile):
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
        if OURS in timed.values() and len(timed) > 1:
            session.case(group.ratio_case, trial.ratios, seconds=-60)
            session.update(group.ratio_case, trial.ratios())
    losses = [session.cases[case]["loss"] for case in ready]
    if len(losses) > 1:
        spread = max(losses) - min(losses)
        same = {"right": spread < 0.01, "spread": spread, "ways": len(losses)}
        case = f"{group.name}/same loss{group.end}"
        session.case(case, lambda: same, seconds=-60)


class Trial(Round):
    """A model, the pairs of a round, and the times of each way."""

    def __init__(self, session: Session, group: Group) -> None:
        super().__init__(session.sizes, group)
        self.ceilings = session.ceilings
        self.seconds: dict[str, list[float]] = {}
        self._batches: dict[str, list[Any]] = {}
        self._attention = ""

    @cached_property
    def model(self) -> Any:
        """The model, with gradients of zero to which micro-batches add theirs."""
        from packstore.torch import compile_layers, use_packed_attention

        model = make_model(self.family, self.config, self.sizes)
        if self.is_adapted:
            from peft import LoraConfig, get_peft_model

            lora = LoraConfig(r=LORA_RANK, target_modules="all-linear")
            model = get_peft_model(model, lora)
        use_packed_attention(model)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        if self.group.is_compiled:
            compile_layers(model, **({} if self.sizes.cuda else {"backend": "eager"}))
        return model

    def set_attention(self, way: Way) -> None:
        """Give the model the attention of a way."""
        from packstore.torch import use_packed_attention

        name = "padded" if way.is_padded else way.attention
        if name == self._attention:
            return
        if way.is_padded:
            self.model.set_attn_implementation("sdpa")
        else:
            use_packed_attention(self.model, way.attention)
        self._attention = name

    def batches(self, way: str) -> list[Any]:
        """Return the pairs of a round as batches on the device."""
        packing = parse_way(way).packing
        if packing not in self._batches:
            runs = self.batch_rows(packing)
            self._batches[packing] = [self._batch(run, packing) for run in runs]
        return self._batches[packing]

    def _batch(self, rows: Lengths, packing: str) -> Any:
        layout = "shared_prefix" if packing == "shared_prefix" else "concat"
        return batch_of(rows, layout, self.config["vocab_size"]).to(self.sizes.device)

    def loss(self, way: Way, batch: Any) -> Tensor:
        """Return the DPO loss of a batch, with a reference of log-probs 0."""
        from packstore.torch import PreferenceLoss, StepDivisor, packed_logps

        self.set_attention(way)
        if way.head in ("triton", "eager"):
            backend = way.head if self.sizes.cuda else "eager"
            sums = packed_logps(self.model, batch, backend=backend)
        else:
            rows, ids = batch.targets.rows, batch.targets.ids
            owners = batch.segment_ids[rows]
            inputs = batch.model_inputs("padded" if way.is_padded else "hf")
            places = (owners, batch.position_ids[rows]) if way.is_padded else (0, rows)
            logps = self._head(way.head, inputs, places, ids)
            sums = logps.new_zeros(batch.num_segments).index_add(0, owners, logps)
        divisor = StepDivisor(float(batch.num_examples))
        loss_fn = PreferenceLoss("dpo", beta=0.1)
        return loss_fn(sums, batch, torch.zeros_like(sums), divisor=divisor).loss

    def _head(
        self, head: str, inputs: dict[str, Any], places: Any, ids: Tensor
    ) -> Tensor:
        """Return the log-probs of `ids` after the tokens at `places`, of a padded row
        or a flat one.
        """
        if head == "logits":
            logps = self.model(**inputs).logits.float().log_softmax(-1)[places]
            return logps.gather(-1, ids[:, None]).squeeze(-1)
        hidden = self.model.model(**inputs).last_hidden_state[places]
        return trl(hidden, self.model.lm_head.weight, ids)

    def backward(self, way: str, batch: Any) -> Tensor:
        """Queue forward and backward pass of a batch; returns the loss."""
        loss = self.loss(parse_way(way), batch)
        loss.backward()
        return loss.detach()

    def warm(self, way: str) -> Figures:
        """Return the loss of the same few pairs, and the peak of memory of a round,
        which warms up.
        """
        batch = self._batch(self.rows[:4], parse_way(way).packing)
        loss = float(self.backward(way, batch))
        if self.sizes.cuda:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.round(way)
        del self.seconds[way]
        peak = torch.cuda.max_memory_allocated() - before
        return {"loss": loss, "peak_gib": peak / 2**30, **self._compiled()}

    def _compiled(self) -> Figures:
        """Count the compiled frames; raises if one was left to run without the
        compiler.
        """
        if not self.group.is_compiled:
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
        return self.num_pairs / statistics.median(self.seconds[way])

    def expected(self, way: str) -> dict[str, float]:
        """Return the expected pairs a second, if the way can be counted."""
        try:
            rate = self.expected_rate(parse_way(way), self.ceilings)
        except KeyError:  # a backend whose kernels were never counted
            return {}
        return {"pairs_per_second": rate}

    def ratios(self) -> Figures:
        """Return the rate of shared prefixes over that of every other way."""
        measured, expected = {}, {}
        for way in self.seconds:
            if way == OURS:
                continue
            measured[f"over {way}"] = self.rate(OURS) / self.rate(way)
            if rate := self.expected(way):
                ours = self.expected(OURS)["pairs_per_second"]
                expected[f"over {way}"] = ours / rate["pairs_per_second"]
        return {**measured, "expected": expected}

    def figures(self, way: str) -> Figures:
        """Return rates by the median of the rounds; ``ms`` is of a micro-batch."""
        seconds = statistics.median(self.seconds[way])
        operations = self.needed(parse_way(way))
        return {
            "pairs_per_second": self.rate(way),
            "ms": 1e3 * seconds / len(self.batches(way)),
            "mfu": operations / seconds / PEAK if self.sizes.cuda else None,
            "rounds": len(self.seconds[way]),
            "expected": self.expected(way),
        }
