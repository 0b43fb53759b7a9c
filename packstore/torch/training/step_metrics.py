"""Metrics and work of optimizer steps between two records of the log."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from packstore.torch.batch.batch import PackedBatch
from packstore.torch.losses.step_loss import sequence_weights
from packstore.torch.metrics import Metrics, all_reduce_sums, wide_dtype
from packstore.torch.training.step_loader import Steps

FIRST = 10
"""The first steps, each of which is logged."""


class StepMetrics:
    """Sums of metrics and work between two records; without `steps`, of metrics and tokens."""

    def __init__(self, steps: Steps | None = None) -> None:
        self.steps, self.metrics = steps, Metrics()
        self._restart()

    def _restart(self) -> None:
        self._since, self._of_steps = time.perf_counter(), list[list[float]]()
        self._examples, self._packs = 0, 0
        self._tokens: Tensor | float = 0.0
        self._waited = self.steps.waited if self.steps else 0.0

    def add(self, batches: list[PackedBatch]) -> None:
        """Adds the batches of this rank in one step."""
        for batch in batches:  # fillers do not count
            self._tokens = self._tokens + (batch.lengths * (sequence_weights(batch) > 0)).sum()
        if self.steps is None or (info := batches[0].step) is None:
            return
        self._examples += info.examples
        self._packs += sum(batch.num_packs for batch in batches)
        tokens = sum(batch.num_tokens for batch in batches)
        squares = sum(float(batch.cu_seqlens.diff().double().square().sum()) for batch in batches)
        self._of_steps.append([tokens, squares])

    def close(self, accelerator: Any) -> dict[str, float]:
        """Returns means and rates over all ranks, and starts anew; a collective call.

        `num_tokens` is the number of tokens of the sequences, each with its prompt, as TRL counts.
        """
        record = self.metrics.means()
        if not record:  # no step since
            return {}
        device = accelerator.device
        record["num_tokens"] = all_reduce_sums([self._tokens], device=device)[0]
        if self.steps is not None:
            record |= self._rates(self.steps, accelerator)
        self._restart()
        return record

    def _rates(self, steps: Steps, accelerator: Any) -> dict[str, float]:
        seconds = max(time.perf_counter() - self._since, 1e-9)
        waited = (steps.waited - self._waited) / seconds
        own = [self._packs, waited, *(x for step in self._of_steps for x in step)]
        device = accelerator.device
        here = torch.tensor([own], dtype=wide_dtype(device), device=device)
        ranks = accelerator.gather(here).cpu()
        work = ranks[:, 2:].unflatten(1, (-1, 2))  # [ranks, steps, tokens and squares]
        (packs, waited), tokens = ranks[:, :2].sum(0).tolist(), float(work[..., 0].sum())
        size = max(dataset.manifest.pack_size for dataset in steps.loader.data.stream.datasets)
        record = {
            "examples": self._examples,
            "tokens": tokens,
            "examples_per_second": self._examples / seconds,
            "tokens_per_second": tokens / seconds,
            "fill": tokens / (packs * size),
            "data_wait": waited / len(ranks),
        }
        if len(ranks) > 1:  # each step waits for the rank with the most work
            over = (work.amax(0).sum(0) / work.mean(0).sum(0)).tolist()
            record |= zip(("slowest/tokens", "slowest/squares"), over, strict=True)
            record["slowest/data_wait"] = float(ranks[:, 1].max())
        return record


class LogFirstSteps(TrainerCallback):  # type: ignore[misc]
    """Logs the first steps, the last, and before whatever is evaluated or saved."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Follows the Trainer's own, which decides what is saved and evaluated."""
        if self.trainer._steps is None:  # batches that another collator packs
            return control
        state.epoch = self.trainer.through
        due = control.should_save or control.should_evaluate
        if due or state.global_step <= FIRST or state.global_step >= state.max_steps:
            control.should_log = True
        return control
