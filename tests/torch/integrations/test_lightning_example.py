"""examples/lightning_datamodule.py: runs, resumes inside an epoch, and is exact."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from train_runs import losses

from packstore import open as open_dataset
from packstore.testing import random_examples
from packstore.torch import PreferenceLoss, train, write_ref_logps

EXAMPLE = Path(__file__).parents[3] / "examples" / "lightning_datamodule.py"
NAMES = ("DPO", "PackedData", "load_model")
DPO, PackedData, load_model = (runpy.run_path(str(EXAMPLE))[name] for name in NAMES)
PER_STEP, RATE = 8, 1e-3

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def made(
    kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("lightning")
    kit.tiny_model(dtype=torch.float32).save_pretrained(folder / "model")
    packs = kit.packed(
        random_examples(36, seed=3), [1, 4, 2, 3, 2] * 3, "shared_prefix"
    )
    kit.write(str(folder / "data"), packs, layout="shared_prefix")
    model = load_model(folder / "model")
    write_ref_logps(model, open_dataset(str(folder / "data")), str(folder / "ref"))
    return {name: str(folder / name) for name in ("model", "data", "ref")}


class Log(lightning.pytorch.loggers.logger.DummyLogger):  # type: ignore[misc, name-defined]
    """Keeps the losses of training, and what validation says."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.held_out: dict[str, float] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "loss" in metrics:
            self.losses.append(metrics["loss"])
        self.held_out.update(
            {n: v for n, v in metrics.items() if n.startswith("eval/")}
        )


def fit(
    made: dict[str, str],
    stop: int | None = None,
    save: Path | None = None,
    path: Path | None = None,
) -> tuple[Log, list[int]]:
    """Two epochs, or until so many steps, where a checkpoint is saved; ids as
    consumed.
    """
    seen: list[int] = []

    class Watch(lightning.Callback):  # type: ignore[misc, name-defined]
        steps = 0

        def on_train_batch_end(
            self, trainer: Any, module: Any, out: Any, batch: Any, index: int
        ) -> None:
            seen.extend(batch.example_ids[batch.weights > 0].tolist())
            self.steps += batch.step.last
            if self.steps == stop:
                trainer.save_checkpoint(save)
                trainer.should_stop = True
                raise KeyboardInterrupt

    data = PackedData(
        made["data"],
        made["ref"],
        validation=made["data"],
        validation_ref_logps=made["ref"],
        examples_per_step=PER_STEP,
        packs_per_batch=1,
    )
    module = DPO(load_model(made["model"], trainable=True), PreferenceLoss("dpo"), RATE)
    module.configure_optimizers = lambda: torch.optim.AdamW(
        module.parameters(), lr=RATE, weight_decay=0.0
    )
    log = Log()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=log,
        reload_dataloaders_every_n_epochs=1,
        callbacks=[Watch()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    try:
        trainer.fit(module, data, ckpt_path=path, weights_only=False)
    except (KeyboardInterrupt, SystemExit):
        assert stop is not None
    return log, seen


def test_it_is_the_run_of_packstore_train(made: dict[str, str], tmp_path: Path) -> None:
    """The same steps, losses and validation, from two loops."""
    log, _ = fit(made)
    result = train(
        model=made["model"],
        train_dataset=made["data"],
        ref_logps=made["ref"],
        eval_dataset=made["data"],
        eval_ref_logps=made["ref"],
        output_dir=str(tmp_path),
        examples_per_step=PER_STEP,
        num_train_epochs=2,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        warmup_steps=0,
        logging_steps=1,
        data_seed=0,
    )
    expected = losses(tmp_path)
    assert log.losses == pytest.approx(expected, abs=1e-5)
    assert len(expected) >= 6
    assert log.held_out["eval/loss"] == pytest.approx(
        result.evaluation["eval_loss"], abs=1e-5
    )


@pytest.mark.parametrize("stop", [2, 6])
def test_it_goes_on_inside_an_epoch(
    made: dict[str, str], tmp_path: Path, stop: int
) -> None:
    whole, ids = fit(made)
    first, before = fit(made, stop, tmp_path / "some.ckpt")
    rest, after = fit(made, path=tmp_path / "some.ckpt")
    assert before + after == ids
    assert 0 < len(before) < len(ids)
    assert rest.losses == pytest.approx(whole.losses[len(first.losses) :], abs=1e-6)
