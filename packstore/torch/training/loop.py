"""The training loop: optimizer steps, and metrics, validation and checkpoints when due."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from packstore.errors import DivergedError
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.data.loader import PackedDataLoader
from packstore.torch.losses.figures import GroupedMetrics
from packstore.torch.losses.first_step_check import FirstStepCheck
from packstore.torch.losses.step_loss import count_step
from packstore.torch.metrics import Metrics, wide_dtype
from packstore.torch.models.load import tell_uncompiled
from packstore.torch.training.checkpoint import Checkpoints, best_checkpoint, read_state
from packstore.torch.training.evaluate import evaluate_batches
from packstore.torch.training.setup import Run
from packstore.torch.training.sinks import Sink

FIRST = 10
"""The first steps, each of which is logged."""


class Loop:
    """Runs the remaining steps; `sinks` are empty on ranks that do not write."""

    def __init__(self, run: Run, sinks: list[Sink]) -> None:
        self.run, self.sinks = run, sinks
        start = run.start
        self.step = start.step if start else 0
        self.examples = start.examples if start else 0
        self.metrics: dict[str, float] = {}
        self.evaluation: dict[str, float] = dict((start and start.evaluation) or {})
        best = best_checkpoint(run.folder)
        self._best = read_state(best).score if best else math.inf
        self._guard = None if start else FirstStepCheck(run.loss_fn)
        self._window = _Window(run)
        optimizer = run.optimizer.optimizer
        self._checkpoints = Checkpoints(run.accelerator, run.policy, optimizer, run.folder)

    def __call__(self) -> None:
        """Runs all remaining steps."""
        run = self.run
        run.policy.train()
        for epoch in range(run.loader.data.epoch, run.config.epochs):
            run.loader.set_epoch(epoch)
            steps = _steps(run.loader, self._window)
            while self.step < run.total_steps and (batches := next(steps, None)) is not None:
                self._train(batches)
                self._after_step(epoch, last=self.step == run.total_steps)
        self._checkpoints.wait()

    def _train(self, batches: list[PackedBatch]) -> None:
        """Runs one optimizer step over its batches."""
        run, accelerator = self.run, self.run.accelerator
        device = accelerator.device
        divisor = count_step(batches, run.loss_fn, device=device)
        divisor = divisor.averaged(accelerator.num_processes)
        self._window.add_step(batches)
        batches = [batch.to(device, non_blocking=True) for batch in batches]
        for number, batch in enumerate(batches, start=1):
            # FSDP2 would hold whole gradients between batches that it does not reduce.
            reduced = number == len(batches) or accelerator.is_fsdp2
            with nullcontext() if reduced else accelerator.no_sync(run.policy):
                ref_logps = run.reference(batch)
                logps = run.policy(batch)
                if self._guard is not None:
                    self._guard(logps, batch, ref_logps)
                out = run.loss_fn(logps, batch, ref_logps, divisor=divisor)
                accelerator.backward(out.loss)
            self._window.metrics.add(out.metrics)
        self._window.norm = None
        if run.config.max_grad_norm:
            norm = accelerator.clip_grad_norm_(run.policy.parameters(), run.config.max_grad_norm)
            self._window.norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self._window.rate = float(run.schedule.get_last_lr()[0])
        run.optimizer.step()
        run.schedule.step()
        run.optimizer.zero_grad()
        self.step += 1
        info = batches[0].step
        assert info is not None
        self.examples += info.examples
        self._window.examples += info.examples

    def _after_step(self, epoch: int, *, last: bool) -> None:
        run, config = self.run, self.run.config
        evaluates = run.validation is not None and _due(self.step, config.eval_every, last)
        saves = _due(self.step, config.save_every, last)
        logs = evaluates or saves or self.step <= FIRST or self.step % config.log_every == 0
        if logs and self._window.packs:
            self.metrics = self._window.close()
            self._write({"step": self.step, "epoch": epoch, **self.metrics})
            self._check_finite(self.metrics)
        evaluation = self.evaluate() if evaluates else None
        self._check_finite(evaluation or {})
        score = (evaluation or {}).get("eval/loss", math.inf)
        improved = score < self._best
        self._best = min(score, self._best)
        if saves or improved:
            self._save(evaluation)
        if logs:
            tell_uncompiled()
        if evaluates or saves:
            self._window.restart()

    def evaluate(self) -> dict[str, float]:
        """Computes the metrics on the validation set, named ``eval/…``; a collective call."""
        run = self.run
        assert run.validation is not None
        run.validation.set_epoch(0)
        grouped = GroupedMetrics(run.loss_fn, run.validation.data.stream.datasets[0])
        figures = evaluate_batches(
            run.policy,
            run.validation,
            grouped,
            run.validation_reference,
            run.accelerator.device,
        )
        self.evaluation = {
            f"eval/{name}": value
            for name, value in figures["metrics"].items()
            if name not in ("examples", "perplexity")
        }
        self._write({"step": self.step, **self.evaluation})
        return self.evaluation

    def _save(self, evaluation: dict[str, float] | None) -> None:
        run = self.run
        state = {
            "step": self.step,
            "examples": self.examples,
            "loader": run.loader.state_dict(),
            "evaluation": evaluation,
            "config": run.config.recorded(),
        }
        self._checkpoints.save(state)

    def _check_finite(self, record: dict[str, float]) -> None:
        """Stops a diverged run before it writes its weights; on all ranks, as values are global."""
        for name in ("loss", "grad_norm", "eval/loss"):
            if not math.isfinite(record.get(name, 0.0)):
                raise DivergedError(
                    f"training, step {self.step}: loss and gradient must be finite; found {name} "
                    f"{record[name]}. Lower learning_rate or lengthen warmup; earlier checkpoints "
                    "are unchanged."
                )

    def _write(self, record: dict[str, float]) -> None:
        for sink in self.sinks:
            sink(record)


class _Window:
    """Sums between two metric records."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.metrics = Metrics()
        self.norm: Any = None
        self.rate = 0.0
        self.restart()

    def restart(self) -> None:
        """Starts a new window now."""
        self.examples = self.packs = 0
        self._steps: list[list[float]] = []
        self.waited, self._since = 0.0, time.perf_counter()

    def add_step(self, batches: list[PackedBatch]) -> None:
        """Adds the batches of this rank in one step, which are on the CPU."""
        self.packs += sum(batch.num_packs for batch in batches)
        tokens = sum(batch.num_tokens for batch in batches)
        squares = sum(float(batch.cu_seqlens.diff().double().square().sum()) for batch in batches)
        self._steps.append([tokens, squares])

    def close(self) -> dict[str, float]:
        """Returns means and rates over all ranks, and starts the next window; a collective call."""
        means, accelerator = self.metrics.means(), self.run.accelerator
        seconds = max(time.perf_counter() - self._since, 1e-9)
        own = [self.packs, self.waited / seconds, *(x for step in self._steps for x in step)]
        dtype, device = wide_dtype(accelerator.device), accelerator.device
        ranks = accelerator.gather(torch.tensor([own], dtype=dtype, device=device)).cpu()
        work = ranks[:, 2:].unflatten(1, (-1, 2))  # [ranks, steps, tokens and squares]
        (packs, waited), tokens = ranks[:, :2].sum(0).tolist(), float(work[..., 0].sum())
        size = self.run.dataset.manifest.pack_size
        record = {
            **means,
            "learning_rate": self.rate,
            "pairs": self.examples,
            "tokens": tokens,
            "pairs_per_second": self.examples / seconds,
            "tokens_per_second": tokens / seconds,
            "fill": tokens / (packs * size),
            "data_wait": waited / len(ranks),
        }
        if len(ranks) > 1:  # each step waits for the rank with the most work
            over = (work.amax(0).sum(0) / work.mean(0).sum(0)).tolist()
            record |= zip(("slowest/tokens", "slowest/squares"), over, strict=True)
            record["slowest/data_wait"] = float(ranks[:, 1].max())
        if self.norm is not None:
            record["grad_norm"] = float(self.norm)
        self.restart()
        return record


def _steps(loader: PackedDataLoader, window: _Window) -> Iterator[list[PackedBatch]]:
    """Yields this rank's batches by optimizer step; adds the time spent waiting to `window`."""
    batches: list[PackedBatch] = []
    source = iter(loader)
    while True:
        before = time.perf_counter()
        batch = next(source, None)
        window.waited += time.perf_counter() - before
        if batch is None:
            return
        batches.append(batch)
        if batch.step is not None and batch.step.last:
            yield batches
            batches = []


def _due(step: int, every: int | None, last: bool) -> bool:
    return last or (every is not None and step % every == 0)
