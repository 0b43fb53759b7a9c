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
from packstore.torch.training.data import Steps

FIRST = 10
"""The first steps, each of which is logged."""


class StepMetrics(TrainerCallback):  # type: ignore[misc]
    """Sums metrics and work between two records, and has the first steps recorded.

    Of batches that another collator packs, metrics and tokens alone.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._restart()

    def _restart(self) -> None:
        self.metrics, self._since = Metrics(), time.perf_counter()
        self._of_steps, self._examples, self._packs = list[list[float]](), 0, 0
        self._tokens: Tensor | float = 0.0
        steps = self.trainer.steps  # bool() of them would call len(), which looks at all packs
        self._waited = 0.0 if steps is None else steps.waited

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Forgets what a training before it left."""
        self._restart()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Follows the Trainer's own callback, which decides what is saved and evaluated."""
        if self.trainer.steps is None:
            return
        state.epoch = self.trainer.steps.epoch_progress
        due = control.should_save or control.should_evaluate
        if due or state.global_step <= FIRST or state.global_step >= state.max_steps:
            control.should_log = True

    def add(self, batches: list[PackedBatch]) -> None:
        """Adds the batches of this rank in one step."""
        for batch in batches:  # fillers do not count
            self._tokens = self._tokens + (batch.lengths * (sequence_weights(batch) > 0)).sum()
        if self.trainer.steps is None or (info := batches[0].step) is None:
            return
        self._examples += info.examples
        self._packs += sum(batch.num_packs for batch in batches)
        tokens = sum(batch.num_tokens for batch in batches)
        squares = sum(float(batch.cu_seqlens.diff().double().square().sum()) for batch in batches)
        self._of_steps.append([tokens, squares])

    def close(self) -> dict[str, float]:
        """Returns means and rates over all ranks, and starts anew; a collective call.

        `num_tokens` is the number of tokens of the sequences, each with its prompt, as TRL counts.
        """
        record = self.metrics.means()
        if not record:  # no step since
            return {}
        device = self.trainer.accelerator.device
        record["num_tokens"] = all_reduce_sums([self._tokens], device=device)[0]
        if self.trainer.steps is not None:
            record |= self._rates(self.trainer.steps)
        self._restart()
        return record

    def _rates(self, steps: Steps) -> dict[str, float]:
        seconds = max(time.perf_counter() - self._since, 1e-9)
        waited = (steps.waited - self._waited) / seconds
        own = [self._packs, waited, *(x for step in self._of_steps for x in step)]
        accelerator = self.trainer.accelerator
        here = torch.tensor([own], dtype=wide_dtype(accelerator.device), device=accelerator.device)
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
