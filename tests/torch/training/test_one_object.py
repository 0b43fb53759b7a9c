"""One dataset object, used by several: each does what it does on a fresh object."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from amounts import slow_except
from transformers import TrainingArguments

import packstore
from packstore.errors import ConfigError
from packstore.torch import (
    PackedDataLoader,
    PackedDataset,
    PackedTrainer,
    evaluate,
)
from packstore.torch.models.load import load_model

EPOCHS = 2
STEP = 9

pytestmark = pytest.mark.filterwarnings("ignore")


def ids_of(packs: Any) -> list[list[int]]:
    return [x.example_ids.tolist() for x in packs]


def losses_of(trainer: Any) -> list[tuple[int, float]]:
    history = trainer.state.log_history
    return [(record["step"], record["loss"]) for record in history if "loss" in record]


def weights_of(trainer: Any) -> dict[str, bytes]:
    state = trainer.model.state_dict()
    return {name: value.numpy().tobytes() for name, value in state.items()}


def tokenizer() -> Any:
    """One that nothing uses: the data is packed."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(50)}, unk_token="w0"))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w49", pad_token="w49"
    )


class Users:
    """Whoever uses a dataset: functions of a dataset object that return all that they
    saw.
    """

    def __init__(self, stored: SimpleNamespace, folder: Path) -> None:
        self.stored, self.folder = stored, folder
        self.fresh_dataset = cache(lambda: packstore.open(stored.data))

    def fresh(self) -> PackedDataset:
        return PackedDataset(self.fresh_dataset(), seed=4)

    def arguments(self, **more: Any) -> dict[str, Any]:
        return {
            "output_dir": str(self.folder / "run"),
            "num_train_epochs": EPOCHS,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            **more,
        }

    def trainer(self, data: Any, held_out: Any = None, **more: Any) -> PackedTrainer:
        return PackedTrainer(
            self.stored.model,
            TrainingArguments(**self.arguments(**more)),
            data,
            held_out,
            examples_per_step=STEP,
            loss="simpo",
            dtype="float64",
        )

    def dpo_trainer(self, data: Any, held_out: Any = None, **more: Any) -> Any:
        trl = pytest.importorskip("trl", reason="TRL's own trainer")
        from packstore.torch import PackedDPOTrainer

        args = trl.DPOConfig(
            **self.arguments(**more),
            per_device_train_batch_size=STEP,
            model_init_kwargs={"dtype": "float32"},
            bf16=False,
            max_length=None,
        )
        return PackedDPOTrainer(
            self.stored.model,
            args=args,
            train_dataset=data,
            eval_dataset=held_out,
            processing_class=tokenizer(),
        )

    # The rows of the closed table.

    def packed_trainer(self, data: PackedDataset) -> Any:
        trainer = self.trainer(data)
        trainer.train()
        return losses_of(trainer)

    def packed_dpo_trainer(self, data: PackedDataset) -> Any:
        trainer = self.dpo_trainer(data)
        trainer.train()
        return losses_of(trainer)

    def trainer_with_evaluation(self, data: PackedDataset) -> Any:
        how = {"eval_strategy": "steps", "eval_steps": 3}
        trainer = self.trainer(data, data, **how)
        trainer.train()
        history = trainer.state.log_history
        return losses_of(trainer), [r["eval_loss"] for r in history if "eval_loss" in r]

    def evaluation(self, data: PackedDataset) -> Any:
        trainer = self.trainer(None, data)
        rows = trainer.predict(data).predictions
        model = load_model(self.stored.model, dtype="float64")
        figures = evaluate(model, data.stream.datasets[0], loss="simpo")
        return (
            trainer.evaluate()["eval_loss"],
            rows["example_id"].to_pylist(),
            figures["metrics"],
        )

    def two_loaders(self, data: PackedDataset) -> Any:
        one = PackedDataLoader(data, examples_per_step=STEP)
        other = PackedDataLoader(data, packs_per_batch=2)
        first = ids_of(itertools.islice(one, 3))
        whole = ids_of(other)
        other.set_epoch(1)
        return (
            first,
            whole,
            ids_of(other),
            one.state_dict(),
            other.state_dict(),
            len(one),
        )

    def loop_of_the_loader(self, data: PackedDataset) -> Any:
        loader, seen = PackedDataLoader(data, examples_per_step=STEP), []
        for epoch in range(EPOCHS):
            loader.set_epoch(epoch)
            seen += ids_of(loader)
        return seen, loader.state_dict()

    def half_a_loop(self, data: PackedDataset) -> Any:
        """A run that ends inside its second epoch, and one that goes on from there."""
        loader = PackedDataLoader(data, examples_per_step=STEP)
        loader.set_epoch(1)
        seen = ids_of(itertools.islice(loader, 2))
        resumed = PackedDataLoader(data, examples_per_step=STEP)
        resumed.load_state_dict(loader.state_dict())
        return seen, ids_of(resumed), resumed.epoch

    def packs_themselves(self, data: PackedDataset) -> Any:
        return ids_of(itertools.islice(data, 3)), ids_of(data)

    def mix(self, data: PackedDataset) -> Any:
        mixed = PackedDataset.mix({data: 2, self.stored.held: 1}, seed=4)
        loader = PackedDataLoader(mixed, examples_per_step=STEP)
        loader.set_epoch(1)
        trainer = self.trainer(mixed)
        trainer.train()
        return ids_of(loader), ids_of(mixed), losses_of(trainer), len(loader)


NAMES = [
    "packed_trainer",
    "packed_dpo_trainer",
    "trainer_with_evaluation",
    "evaluation",
    "two_loaders",
    "loop_of_the_loader",
    "half_a_loop",
    "packs_themselves",
    "mix",
]
ALONE: dict[str, Any] = {}
"""What each of them sees on a fresh object."""


@pytest.fixture
def users(stored: SimpleNamespace, tmp_path: Path) -> Users:
    return Users(stored, tmp_path)


def on_fresh_object(users: Users, name: str) -> Any:
    if name not in ALONE:
        ALONE[name] = getattr(users, name)(users.fresh())
    return ALONE[name]


@pytest.mark.parametrize("name", slow_except(NAMES, *NAMES[2:]))
def test_nobody_moves_the_object_or_is_moved_by_others(users: Users, name: str) -> None:
    """Whoever used it before; and twice."""
    use: Callable[[Any], Any] = getattr(users, name)
    expected, data = on_fresh_object(users, name), users.fresh()
    for other in ("loop_of_the_loader", "half_a_loop", "packs_themselves", name):
        getattr(users, other)(data)
    before = data.state_dict()
    assert use(data) == expected
    if name != "packs_themselves":
        assert data.state_dict() == before


@pytest.mark.slow
@pytest.mark.parametrize("second", NAMES)
@pytest.mark.parametrize("first", NAMES)
def test_every_pair_on_one_object(users: Users, first: str, second: str) -> None:
    expected = on_fresh_object(users, first), on_fresh_object(users, second)
    data = users.fresh()
    assert (getattr(users, first)(data), getattr(users, second)(data)) == expected


@pytest.mark.slow
def test_more_and_more_epochs(users: Users) -> None:
    """Runs of 3, 2, 1 and 3 epochs train as many steps as on fresh objects."""
    data = users.fresh()

    def steps(data: PackedDataset, epochs: int) -> int:
        trainer = users.trainer(data, num_train_epochs=epochs)
        trainer.train()
        return int(trainer.state.global_step)

    plans = [
        data.plan(examples_per_step=STEP, epochs=epochs).steps
        for epochs in (3, 2, 1, 3)
    ]
    assert [steps(data, epochs) for epochs in (3, 2, 1, 3)] == plans


def test_training_twice(users: Users) -> None:
    """The second training, of the same trainer, sees the same examples."""
    trainer = users.trainer(users.fresh(), learning_rate=0.0)
    trainer.train()
    first = losses_of(trainer)
    trainer.train()
    assert losses_of(trainer) == first


@pytest.mark.parametrize("kind", slow_except(["trainer", "dpo_trainer"], "trainer"))
def test_resuming_with_one_object_for_training_and_evaluation(
    users: Users, kind: str
) -> None:
    """From each checkpoint, to the bit; evaluations between them leave the position
    alone.
    """
    make, data = getattr(users, kind), users.fresh()
    how = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 4,
    }
    trainer = make(data, data, **how)
    trainer.train()
    expected, steps = (
        (losses_of(trainer), weights_of(trainer)),
        trainer.state.global_step,
    )
    saved = [f"checkpoint-{step}" for step in range(4, steps, 4)]
    assert len(saved) > 1
    for name in saved:
        again = make(data, data, **how)
        again.train(resume_from_checkpoint=str(users.folder / "run" / name))
        assert (losses_of(again), weights_of(again)) == expected


def test_whoever_moves_the_dataset_moves_its_loaders(users: Users) -> None:
    """In a loop that sets the epoch of the dataset; a loader that moves itself moves no
    other.
    """
    data, alone = users.fresh(), PackedDataLoader(users.fresh(), examples_per_step=STEP)
    one, other = (PackedDataLoader(data, examples_per_step=STEP) for _ in range(2))
    for epoch in (0, 1, 2, 0):
        data.set_epoch(epoch)
        alone.set_epoch(epoch)
        assert ids_of(one) == ids_of(alone)
        assert (one.epoch, other.epoch, data.epoch) == (epoch, epoch, epoch)
    one.set_epoch(1)
    assert (one.epoch, other.epoch, data.epoch) == (1, 0, 0)
    next(iter(one))
    data.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict() == data.state_dict()
    alone.load_state_dict(one.state_dict())
    assert (
        ids_of(other)
        == ids_of(PackedDataLoader(data, examples_per_step=STEP))
        == ids_of(alone)
    )


def test_a_loaded_position_that_is_given_up_is_warned_of(
    users: Users, caplog: pytest.LogCaptureFixture
) -> None:
    """As by a loop over ``range(data.epoch, …)``: the loader's own epoch is the one to
    begin at.
    """
    data = users.fresh()
    loader = PackedDataLoader(data, examples_per_step=STEP)
    loader.set_epoch(1)
    next(iter(loader))
    resumed = PackedDataLoader(data, examples_per_step=STEP)
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(resumed.epoch)
    assert "loader.epoch" not in caplog.text
    resumed.set_epoch(data.epoch)
    assert "loader.epoch" in caplog.text


def test_two_datasets_of_one_stream(users: Users) -> None:
    """A stream that somebody gives to several datasets is in the epoch of none
    of them.
    """
    stream = users.fresh().stream
    one, other = PackedDataset(stream), PackedDataset(stream)
    first = ids_of(other)
    one.set_epoch(1)
    assert ids_of(other) == first
    assert ids_of(PackedDataset(stream)) == first


def test_a_run_without_steps_is_refused(users: Users) -> None:
    class AtItsEnd(PackedTrainer):
        def get_train_dataloader(self) -> Any:
            steps = super().get_train_dataloader()
            steps.set_epoch(EPOCHS)
            return steps

    args = TrainingArguments(**users.arguments())
    trainer = AtItsEnd(
        users.stored.model, args, users.fresh(), loss="simpo", dtype="float64"
    )
    with pytest.raises(ConfigError, match="epoch"):
        trainer.train()
