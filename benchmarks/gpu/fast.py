"""Pairs a second of whole models, against what else there is.

Forward and backward of random models in bfloat16, by the ways of ``rounds.py``. All
ways train on the same pairs in turns, with the same loss.
"""

from __future__ import annotations

import math
import statistics
import time
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from logprobs import trl
from torch import Tensor

from gpu.graphs import graphed_step, pad_to_one_shape
from gpu.predictions import PEAK
from gpu.rounds import OURS, Group, Round, Way, parse_way
from gpu.session import Figures, Session, check_backend, failure
from gpu.sizes import Lengths, batch_of, make_model

LORA_RANK = 16

REPLAY_TOLERANCE = 1e-3
"""Accepted difference of the loss of a replay and of a step, a share of it."""


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
    ready: dict[str, str] = {}
    for group_of_cases in (list(cases)[:2], list(cases)[2:]):
        for case in group_of_cases:
            way = cases[case]
            was_measured = not session.should_run(case)
            seconds = 15 if ready else 40
            if not (group.is_compiled and session.sizes.cuda):
                seconds = 8
            if session.case(case, partial(trial.warm, way), seconds):
                ready[case] = way
                if was_measured:  # by a process before this one
                    trial.warm(way)
        trial.seconds.clear()
        for _ in range(session.sizes.rounds if group_of_cases else 0):
            for case, way in list(ready.items()):
                if session.seconds_left < 3:
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
            if session.only.search(group.ratio_case):
                session.update(group.ratio_case, trial.ratios())
    losses = [session.cases[case]["loss"] for case in ready]
    if len(losses) > 1:
        spread = max(losses) - min(losses)
        same = {"right": spread < 0.01, "spread": spread, "ways": len(losses)}
        case = f"{group.name}/same loss{group.end}"
        session.case(case, lambda: same, seconds=-60)


class MicroBatch(NamedTuple):
    """A batch on the device, and its number of pairs; those of padding do not count."""

    batch: Any
    num_pairs: int


class Trial(Round):
    """A model, the pairs of a round, and the times of each way."""

    def __init__(self, session: Session, group: Group) -> None:
        from packstore.torch import PreferenceLoss

        super().__init__(session.sizes, group)
        self.ceilings = session.ceilings
        self.seconds: dict[str, list[float]] = {}
        self._micro_batches: dict[tuple[str, bool], list[MicroBatch]] = {}
        self._graphed_steps: dict[str, Any] = {}
        self.loss_fn = PreferenceLoss("dpo", beta=0.1)
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
        check_backend(name, self.sizes)
        if way.is_padded:
            self.model.set_attn_implementation("sdpa")
        else:
            use_packed_attention(self.model, way.attention)
        self._attention = name

    def micro_batches(self, way: str) -> list[MicroBatch]:
        """Return the pairs of a round on the device, in one shape for CUDA graphs."""
        packing, *_, has_graphs = parse_way(way)
        key = (packing, has_graphs)
        if key not in self._micro_batches:
            runs = self.batch_rows(packing)
            batches = [self._batch(rows, packing) for rows in runs]
            if has_graphs:
                most_tokens = max(batch.num_tokens for batch in batches)
                batches = pad_to_one_shape(batches, most_tokens)
            self._micro_batches[key] = [
                MicroBatch(batch.to(self.sizes.device), rows.size // 3)
                for batch, rows in zip(batches, runs, strict=True)
            ]
        return self._micro_batches[key]

    def _batch(self, rows: Lengths, packing: str) -> Any:
        layout = "shared_prefix" if packing == "shared_prefix" else "concat"
        return batch_of(rows, layout, self.config["vocab_size"])

    def loss(self, way: Way, micro_batch: MicroBatch) -> Tensor:
        """Return the DPO loss, with a reference of log-probs 0."""
        from packstore.torch import StepDivisor, packed_logps

        batch = micro_batch.batch
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
        divisor = StepDivisor(float(micro_batch.num_pairs))
        reference = torch.zeros_like(sums)
        loss: Tensor = self.loss_fn(sums, batch, reference, divisor=divisor).loss
        return loss

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

    def backward(self, way: str, micro_batch: MicroBatch) -> Tensor:
        """Queue forward and backward pass; returns the loss."""
        parsed_way = parse_way(way)
        if parsed_way.has_graphs:
            return self._replay(way, micro_batch)
        loss = self.loss(parsed_way, micro_batch)
        loss.backward()
        return loss.detach()

    def _replay(self, way: str, micro_batch: MicroBatch) -> Tensor:
        """Queue the CUDA graph of a way, which its first call captures."""
        from packstore.torch import StepDivisor

        parsed_way = parse_way(way)
        self.set_attention(parsed_way)
        if way not in self._graphed_steps:
            cuda = self.sizes.cuda
            backend = parsed_way.head if cuda else "eager"
            step = graphed_step(self.model, self.loss_fn, cuda, backend)
            self._graphed_steps[way] = step
        divisor = StepDivisor(float(micro_batch.num_pairs))
        loss: Tensor = self._graphed_steps[way](micro_batch.batch, divisor=divisor).loss
        return loss

    def warm(self, way: str) -> Figures:
        """Return the loss of the same few pairs, and the peak of memory of a round,
        which warms up.
        """
        parsed_way = parse_way(way)
        rows = self.rows[:4]
        batch = self._batch(rows, parsed_way.packing).to(self.sizes.device)
        loss = float(self.loss(parsed_way, MicroBatch(batch, rows.size // 3)).detach())
        if self.sizes.cuda:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.round(way)
        del self.seconds[way]
        peak = torch.cuda.max_memory_allocated() - before
        if parsed_way.has_graphs:
            self._check_replay(way)
        return {"loss": loss, "peak_gib": peak / 2**30, **self._compiled()}

    def _check_replay(self, way: str) -> None:
        """Raise if the graph does not repeat the loss of a batch that it did not
        capture.
        """
        micro_batch = self.micro_batches(way)[-1]
        expected = float(self.loss(parse_way(way), micro_batch).detach())
        actual = float(self._replay(way, micro_batch))
        if not math.isclose(actual, expected, rel_tol=REPLAY_TOLERANCE):
            raise RuntimeError(f"a replay has loss {actual}, and a step {expected}")

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
        micro_batches = self.micro_batches(way)
        start = time.perf_counter()
        for micro_batch in micro_batches:
            loss = self.backward(way, micro_batch)
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
            "ms": 1e3 * seconds / len(self.micro_batches(way)),
            "mfu": operations / seconds / PEAK if self.sizes.cuda else None,
            "rounds": len(self.seconds[way]),
            "expected": self.expected(way),
        }
