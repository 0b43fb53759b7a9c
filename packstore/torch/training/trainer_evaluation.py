"""Evaluation of a Trainer on packs: each example counts once, over all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from packstore.errors import ConfigError, sentence
from packstore.torch.data.loader import PackedDataLoader
from packstore.torch.losses.loss import PreferenceLoss
from packstore.torch.training.evaluate import evaluate_batches


class EvaluationMixin(Trainer):  # type: ignore[misc]
    """Evaluates on packs."""

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Computes metrics of each example once, over all ranks; predictions are a row for each."""
        if not isinstance(self.loss_fn, PreferenceLoss):
            found = repr(self.loss_fn)
            raise ConfigError(sentence("evaluation", "it must be of a PreferenceLoss", found))
        dataset = None
        if isinstance(dataloader, PackedDataLoader):
            dataloader.set_epoch(0)
            dataset = dataloader.data.stream.datasets[0]
        elif prediction_loss_only is not True:
            where, rule = "predict", "it must be asked for rows of a packed dataset"
            raise ConfigError(sentence(where, rule, "another dataset", "Give its folder"))
        if not self.is_in_train and not self.accelerator._models:
            self.model_wrapped = self.accelerator.prepare_model(self.model, evaluation_mode=True)
        if hasattr(self.optimizer, "eval"):  # of schedule-free ones; a step turns it back
            self.optimizer.eval()
        figures = evaluate_batches(
            self.model_wrapped,
            dataloader,
            self.loss_fn,
            partial(self._reference_logps, self.model_wrapped),
            self.args.device,
            dataset,
            rows=prediction_loss_only is not True,
        )
        means = dict(figures["metrics"])
        number = int(means.pop("examples"))
        if self._num_tokens:
            means["num_tokens"] = self._num_tokens
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in means.items()}
        return EvalLoopOutput(figures.get("rows"), None, metrics, number)
