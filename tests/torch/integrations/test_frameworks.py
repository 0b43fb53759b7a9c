"""The loader inside training frameworks: nothing sharded twice, positions saved with
the rest.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import launch
from torch.utils.data import DataLoader

from packstore import Dataset
from packstore.errors import ConfigError
from packstore.testing import random_examples
from packstore.torch import (
    PackedDataLoader,
    PackedDataset,
    PackedPolicy,
    PreferenceLoss,
    count_step,
    use_packed_attention,
)

N = 17
WORLD = 2


@pytest.fixture(scope="module")
def stored(kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Packs of one example; ids are 0 .. N - 1."""
    packs = kit.packed(random_examples(N, kind="sft"), [1] * N, "concat")
    data: Dataset = kit.write(str(tmp_path_factory.mktemp("data") / "ds"), packs, "sft")
    return data


def ids(batches: Any) -> list[int]:
    return [
        i
        for b in batches
        for i, w in zip(b.example_ids.tolist(), b.weights, strict=True)
        if w
    ]


def gradients_of_steps(accelerator: Any, url: str, weights: Any) -> list[Any]:
    """Of each optimizer step, where the loader says that one ends."""
    model = use_packed_attention(weights)
    policy = accelerator.prepare(PackedPolicy(model))
    found, loss_fn = [], PreferenceLoss("sft")
    for batch in PackedDataLoader(PackedDataset(url), examples_per_step=7):
        with nullcontext() if batch.step.last else accelerator.no_sync(policy):
            accelerator.backward(loss_fn(policy(batch), batch).loss)
        if batch.step.last:
            found.append({name: p.grad.clone() for name, p in model.named_parameters()})
            model.zero_grad()
    return found


def on_rank(task: tuple[str, str, Any]) -> dict[str, Any]:
    """One of two processes under Accelerate."""
    warnings.simplefilter("ignore")
    from accelerate import Accelerator, DataLoaderConfiguration

    url, folder, _ = task
    sharding = DataLoaderConfiguration(dispatch_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=sharding)
    assert accelerator.num_processes == WORLD
    out: dict[str, Any] = {}

    loader = PackedDataLoader(PackedDataset(url))
    prepared = accelerator.prepare(loader)
    out["untouched"] = prepared is loader
    out["ours"] = ids(prepared)

    plain = DataLoader(
        PackedDataset(url, rank=0, world_size=1), collate_fn=lambda packs: packs[0]
    )
    out["refused"] = []
    for dispatch, size in ((False, 2), (True, 2), (False, None), (True, None)):
        accelerator.dataloader_config.dispatch_batches = dispatch
        found = DataLoader(PackedDataset(url), size, collate_fn=list)
        try:
            again = accelerator.prepare(found)
            if not (dispatch and accelerator.process_index):  # one rank reads for all
                next(iter(again))
        except ConfigError as error:
            out["refused"].append(str(error))
    accelerator.dataloader_config.dispatch_batches = False
    out["wrapped"] = [p.example_ids.tolist()[0] for p in accelerator.prepare(plain)]
    out["plain"] = [
        p.example_ids.tolist()[0] for p in DataLoader(PackedDataset(url), None)
    ]

    out["gradients"] = gradients_of_steps(accelerator, url, task[2])

    accelerator.register_for_checkpointing(loader)
    batches = iter(loader)
    out["before"] = ids(itertools.islice(batches, 3))
    accelerator.save_state(folder)  # one rank writes it, as the position is that of all
    accelerator.wait_for_everyone()
    next(batches)
    accelerator.load_state(folder)
    out["after"] = ids(loader)
    return out


@pytest.mark.slow
def test_accelerate(kit: SimpleNamespace, stored: Dataset, tmp_path: Path) -> None:
    """`prepare` leaves our loader as it is; what Accelerate is to shard must be
    whole.
    """
    task = (stored.url, str(tmp_path / "checkpoint"), kit.tiny_model())
    ranks = launch(__file__, task, WORLD, tmp_path)
    assert all(rank["untouched"] for rank in ranks)
    for how in ("ours", "plain"):
        assert sorted(i for rank in ranks for i in rank[how]) == list(range(N))
    for rank in ranks:
        assert all(
            "Pass PackedDataLoader(data) to prepare" in text for text in rank["refused"]
        )
    assert [len(rank["refused"]) for rank in ranks] == [4, 2]
    assert set(ranks[0]["wrapped"] + ranks[1]["wrapped"]) == set(range(N))
    for rank in ranks:
        assert rank["before"] + rank["after"] == rank["ours"]
    model, loss_fn = use_packed_attention(kit.tiny_model()), PreferenceLoss("sft")
    steps = list(PackedDataLoader(PackedDataset(stored), packs_per_batch=7))
    for number, whole in enumerate(steps):  # as one batch on one process
        model.zero_grad()
        loss_fn(PackedPolicy(model)(whole), whole).loss.backward()
        for rank in ranks:
            assert len(rank["gradients"]) == len(steps)
            for name, parameter in model.named_parameters():
                gap = (rank["gradients"][number][name] - parameter.grad).abs().max()
                assert gap < 1e-9, (number, name)


@pytest.fixture
def accumulating() -> Iterator[Any]:
    """An Accelerator that accumulates two batches; what it leaves in the process is
    removed.
    """
    accelerate = pytest.importorskip(
        "accelerate", reason="accelerate is in the extra train"
    )
    yield accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerate.state.GradientState._reset_state()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("size", [None, 2])
def test_accelerate_on_one_rank_cannot_cut_up_packs(
    stored: Dataset, accumulating: Any, size: int | None
) -> None:
    """Tensors of a packed batch differ in length: it would cut all to that of the
    first.
    """
    loader = DataLoader(
        PackedDataset(stored), size, collate_fn=lambda packs: vars(packs[0])
    )
    with pytest.raises(ConfigError, match="dispatch_batches"):
        next(iter(accumulating.prepare(loader)))


def test_accelerate_out_of_phase(stored: Dataset, accumulating: Any) -> None:
    """It counts batches, and divides each loss by them: not the steps of the loader."""
    model = torch.nn.Linear(1, 1)
    loss_fn, seen = PreferenceLoss("sft"), []
    for how in (
        {"examples_per_step": 3},
        {"gradient_accumulation_steps": 2, "drop_last": False},
    ):
        for batch in PackedDataLoader(PackedDataset(stored), **how):
            logps = torch.zeros(batch.num_segments, requires_grad=True)
            with pytest.raises(ConfigError, match="Accelerate"):
                loss_fn(logps, batch)
            with torch.no_grad():
                loss_fn(logps.detach(), batch)  # an evaluation
            with accumulating.accumulate(model):
                divisor = count_step([batch], loss_fn).averaged(2)
                try:
                    loss_fn(logps, batch, divisor=divisor)
                    seen.append(True)
                except ConfigError:
                    seen.append(False)
    assert len(set(seen)) == 2  # in phase here and there, by chance


def test_accelerate_in_phase(stored: Dataset, accumulating: Any) -> None:
    """A loss with its own divisor may be accumulated in the loader's steps."""
    loss_fn = PreferenceLoss("sft")
    for batch in PackedDataLoader(
        PackedDataset(stored), gradient_accumulation_steps=2, drop_last=True
    ):
        logps = torch.zeros(batch.num_segments, requires_grad=True)
        with accumulating.accumulate(torch.nn.Linear(1, 1)):
            assert accumulating.sync_gradients == batch.step.last
            loss_fn(logps, batch, divisor=count_step([batch], loss_fn).averaged(2))


def test_accelerate_skips_by_position(stored: Dataset) -> None:
    """What its examples do on resuming: the error says what to do, and nobody sees
    attributes.
    """
    accelerate = pytest.importorskip(
        "accelerate", reason="accelerate is in the extra train"
    )
    loader = PackedDataLoader(PackedDataset(stored))
    with pytest.raises(ConfigError, match="load_state_dict"):
        accelerate.skip_first_batches(loader, 3)
    assert not any(
        hasattr(loader, name) for name in ("dataset", "batch_size", "nothing")
    )
    assert loader.batch_sampler is None


@pytest.mark.parametrize("name", ["worker_init_fn", "generator"])
def test_ray_would_deal_again(stored: Dataset, name: str) -> None:
    """Its prepare_data_loader makes another loader of these parts, on several
    workers.
    """
    loader = PackedDataLoader(PackedDataset(stored, rank=0, world_size=2))
    with pytest.raises(ConfigError, match="add_dist_sampler"):
        getattr(loader, name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("automatic", "steps", "batches", "taken"),
    [(True, 1, 1, True), (True, 4, 4, False), (True, 1, 4, False), (True, 4, 1, False),
     (False, 1, 4, True)],
)  # fmt: skip
def test_lightning_divides_only_what_it_is_given_by_hand(
    stored: Dataset,
    tmp_path: Path,
    automatic: bool,
    steps: int,
    batches: int,
    taken: bool,
) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = automatic
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any) -> Any:
            logps = self.layer(torch.ones(batch.num_segments, 1))[:, 0]
            loss = PreferenceLoss("sft")(logps, batch).loss
            return loss if automatic else self.manual_backward(loss)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = lightning.Trainer(
        max_epochs=1, accumulate_grad_batches=steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        default_root_dir=tmp_path,
    )  # fmt: skip
    loader = PackedDataLoader(
        PackedDataset(stored), gradient_accumulation_steps=batches, drop_last=True
    )
    with nullcontext() if taken else pytest.raises(ConfigError, match="Lightning"):
        trainer.fit(Module(), loader)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("steps", "batches"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_trainer_of_ones_own_divides_too(
    stored: Dataset, tmp_path: Path, steps: int, batches: int
) -> None:
    """transformers' Trainer with packs and a loss in `compute_loss`, without
    our mixin.
    """
    transformers = pytest.importorskip("transformers", reason="transformers")

    class Own(transformers.Trainer):  # type: ignore[misc, name-defined]
        def get_train_dataloader(self) -> Any:
            return PackedDataLoader(
                PackedDataset(stored),
                gradient_accumulation_steps=batches,
                drop_last=True,
            )

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            logps = model(torch.ones(inputs.num_segments, 1))[:, 0]
            return PreferenceLoss("sft")(logps, inputs).loss

        def floating_point_ops(self, inputs: Any) -> int:
            return 0

        def get_batch_samples(self, batches: Any, number: int, *_: Any) -> Any:
            return list(itertools.islice(batches, number)), None

        def _prepare_inputs(self, inputs: Any) -> Any:
            return inputs

    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, gradient_accumulation_steps=steps, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Own(torch.nn.Linear(1, 1), args, train_dataset=[])
    taken = steps == batches == 1
    with nullcontext() if taken else pytest.raises(ConfigError, match="Trainer"):
        trainer.train()
