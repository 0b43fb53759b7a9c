"""Checkpoints as folders: damaged ones, those that go, those of others, foreign
pickles, tokens.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from amounts import slow_except, slow_products
from train_runs import arguments_of
from transformers import TrainingArguments

from packstore.errors import FormatError
from packstore.torch import PackedTrainer
from packstore.torch.training.checkpoint_files import (
    finish_checkpoint,
    newest_checkpoint,
)

STEPS = 8


def packed_trainer(stored: SimpleNamespace, output: Path, **more: Any) -> PackedTrainer:
    usual = {"save_steps": 2, "max_steps": STEPS, "lr_scheduler_type": "constant"}
    arguments = arguments_of(output, **{**usual, **more})
    args = TrainingArguments(**arguments)
    return PackedTrainer(
        stored.model, args, stored.data, stored.held, examples_per_step=9
    )


def losses(trainer: Any) -> list[float]:
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def names(output: Path) -> list[str]:
    return sorted(path.name for path in output.iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def finished(
    stored: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory
) -> SimpleNamespace:
    """A run of six steps with checkpoints 2, 4 and 6; the losses of one of eight."""
    output = tmp_path_factory.mktemp("finished")
    packed_trainer(stored, output / "six", max_steps=6).train()
    trainer = packed_trainer(stored, output / "eight")
    trainer.train()
    return SimpleNamespace(output=output / "six", losses=losses(trainer))


@pytest.fixture
def output(finished: SimpleNamespace, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished.output, tmp_path / "run"))


def text(name: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / name
        file.write_text(change(file.read_text(encoding="utf-8")), encoding="utf-8")

    return damage


def state(**values: Any) -> Callable[[Path], None]:
    return text(
        "trainer_state.json", lambda old: json.dumps({**json.loads(old), **values})
    )


def removed(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def flipped(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 255
        (folder / name).write_bytes(content)

    return damage


DAMAGES = {
    "a state that is a list": text("trainer_state.json", lambda _: "[1]"),
    "a state that is a number": text("trainer_state.json", lambda _: "1"),
    "half a state": text("trainer_state.json", lambda old: old[: len(old) // 2]),
    "no state": removed("trainer_state.json"),
    "no step": state(global_step=None),
    "no interval": state(logging_steps=None),
    "steps as text": state(global_step="6"),
    "records that are none": state(log_history=[1]),
    "an unknown field": state(unknown=1),
    "random states of other bytes": flipped("rng_state.pth"),
    "random states that are empty": lambda folder: (
        folder / "rng_state.pth"
    ).write_bytes(b""),
    "a schedule of other bytes": flipped("scheduler.pt"),
    "no optimizer": removed("optimizer.pt"),
    "no arguments": removed("training_args.bin"),
    "no position": removed("packstore.json"),
    "half a position": text("packstore.json", lambda old: old[: len(old) // 2]),
    "a position that is a list": text("packstore.json", lambda _: "[1]"),
    "another name": lambda folder: folder.rename(folder.with_name("checkpoint-7")),
}


@pytest.mark.parametrize(
    "name", slow_except(DAMAGES, "half a state", "no optimizer", "half a position")
)
def test_the_next_whole_checkpoint_takes_the_place_of_a_damaged_one(
    stored: SimpleNamespace, finished: SimpleNamespace, output: Path, name: str
) -> None:
    DAMAGES[name](output / "checkpoint-6")
    assert newest_checkpoint(str(output)) == str(output / "checkpoint-4")
    trainer = packed_trainer(stored, output)
    trainer.train(resume_from_checkpoint=True)
    assert losses(trainer) == finished.losses
    for step in (2, 4, 6, 8):
        assert (output / f"checkpoint-{step}" / "packstore.json").is_file()


@pytest.mark.parametrize("name", [name for name in DAMAGES if name != "another name"])
def test_a_damaged_checkpoint_that_is_asked_for_is_refused(
    stored: SimpleNamespace, output: Path, name: str
) -> None:
    DAMAGES[name](output / "checkpoint-6")
    with pytest.raises(FormatError, match="checkpoint-6"):
        packed_trainer(stored, output, save_total_limit=1).train(
            str(output / "checkpoint-6")
        )
    assert {"checkpoint-2", "checkpoint-4"} <= {*names(output)}


def test_torn_checkpoints_go_at_the_start_and_spare_ones_stay(
    stored: SimpleNamespace, output: Path
) -> None:
    """A removal that was killed renews the time of its folder, by which transformers
    rotates.
    """
    removed("training_args.bin")(output / "checkpoint-2")
    trainer = packed_trainer(stored, output, save_total_limit=2)
    trainer.train(resume_from_checkpoint=True)
    assert names(output) == ["checkpoint-6", "checkpoint-8"]


@pytest.mark.parametrize("name", ["half a state", "no state"])
@pytest.mark.parametrize("resume", [True, False])
def test_what_a_kill_interrupted_goes_at_any_start(
    stored: SimpleNamespace, output: Path, name: str, resume: bool
) -> None:
    DAMAGES[name](output / "checkpoint-6")
    (output / "checkpoint-1.removed").mkdir()
    packed_trainer(stored, output, max_steps=5, save_strategy="no").train(resume)
    assert names(output) == ["checkpoint-2", "checkpoint-4"]


def test_what_lacks_files_stays_without_a_limit(
    stored: SimpleNamespace, output: Path
) -> None:
    """Its owner may have removed them, to keep the weights."""
    removed("optimizer.pt")(output / "checkpoint-2")
    packed_trainer(stored, output).train(resume_from_checkpoint=True)
    assert names(output) == [f"checkpoint-{step}" for step in (2, 4, 6, 8)]


@pytest.mark.parametrize("only_model", [False, True])
def test_checkpoints_go_by_their_steps(
    stored: SimpleNamespace, tmp_path: Path, only_model: bool
) -> None:
    class Renewed(PackedTrainer):
        def save_model(self, *args: Any, **kwargs: Any) -> None:
            for age, path in enumerate(sorted(tmp_path.glob("checkpoint-*"))):
                os.utime(path, (2e9 - age * 1e6,) * 2)
            super().save_model(*args, **kwargs)

    more = {
        "save_steps": 1,
        "max_steps": 5,
        "save_total_limit": 2,
        "save_only_model": only_model,
    }
    args = TrainingArguments(**arguments_of(tmp_path, **more))
    Renewed(stored.model, args, stored.data, examples_per_step=9).train()
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-5"]


@pytest.mark.parametrize("limit", [1, 2])
def test_a_run_over_the_folder_of_another_keeps_its_own(
    stored: SimpleNamespace, output: Path, limit: int
) -> None:
    """Although those of the other one are of later steps."""
    packed_trainer(
        stored, output, max_steps=3, save_steps=1, save_total_limit=limit
    ).train()
    assert names(output) == ["checkpoint-2", "checkpoint-3"][-limit:]


def test_the_best_checkpoint_stays(stored: SimpleNamespace, tmp_path: Path) -> None:
    how = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    how |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer = packed_trainer(
        stored, tmp_path, save_total_limit=1, learning_rate=0.0, **how
    )
    trainer.train()
    assert names(tmp_path) == ["checkpoint-2"]
    assert str(trainer.state.best_model_checkpoint).endswith("checkpoint-2")


def test_nothing_that_packstore_did_not_make_is_removed(
    stored: SimpleNamespace, output: Path, tmp_path: Path
) -> None:
    for name in ("checkpoint-notes", "checkpoint-1-mine", "checkpoint-1", "x.removed"):
        (output / name).mkdir()
        (output / name / "model.safetensors").write_bytes(b"")
    shutil.copytree(output / "checkpoint-2", output / "checkpoint-3")
    shutil.copytree(output / "checkpoint-2", tmp_path / "elsewhere")
    (output / "checkpoint-0").symlink_to(
        tmp_path / "elsewhere", target_is_directory=True
    )
    before = {*names(output)} - {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    how = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "eval_loss",
    }
    trainer = packed_trainer(stored, output, save_total_limit=1, **how)
    trainer.train(resume_from_checkpoint=True)
    assert {*names(output)} == before | {"checkpoint-8"}
    assert (tmp_path / "elsewhere" / "model.safetensors").is_file()


class Foreign:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


PICKLES = (
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "training_args.bin",
    "scaler.pt",
    "pytorch_model.bin",
    "adapter_model.bin",
    "pytorch_model_fsdp.bin",
    "pytorch_model_fsdp_0/.metadata",
    "optimizer_0/.metadata",
)


@pytest.mark.parametrize(("name", "is_listed"), slow_products(PICKLES, [False, True]))
def test_no_pickle_of_others_runs(
    stored: SimpleNamespace, output: Path, tmp_path: Path, name: str, is_listed: bool
) -> None:
    """Also where the file of packstore lists it: anybody can write hashes."""
    mark = tmp_path / "mark"
    folder = output / "checkpoint-6"
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    if name in ("pytorch_model.bin", "pytorch_model_fsdp_0/.metadata"):
        (folder / "model.safetensors").unlink()
    if file.name == ".metadata":
        file.write_bytes(pickle.dumps(Foreign(mark)))
    else:
        torch.save(Foreign(mark), file)
    if is_listed:
        content = read_json(folder)
        finish_checkpoint(
            folder, {part: content[part] for part in ("loader", "run", "settings")}
        )
    try:
        packed_trainer(stored, output).train(str(folder))
    except FormatError as error:
        assert "checkpoint-6" in str(error)  # noqa: PT017 (a file that is not read is no error)
    assert not mark.exists()


def read_json(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(
        (folder / "packstore.json").read_text(encoding="utf-8")
    )
    return content


def sharded_folder(folder: Path, **values: Any) -> Path:
    """A folder of shards with a weight, and values that are no tensors."""
    import torch.distributed.checkpoint as checkpoint

    weights = {"model": {"weight": torch.ones(3, dtype=torch.bfloat16), **values}}
    checkpoint.save(weights, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_shards_of_torch_are_read_and_values_of_others_are_not(tmp_path: Path) -> None:
    from packstore.torch.training.shards import check_shards

    check_shards(sharded_folder(tmp_path / "own", rate=0.5, betas=(0.9, 0.99)))
    mark = tmp_path / "mark"
    folder = sharded_folder(tmp_path / "foreign", value=Foreign(mark))
    with pytest.raises(FormatError, match="foreign"):
        check_shards(folder)
    assert not mark.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_shards_that_lack_weights_are_refused(
    stored: SimpleNamespace, output: Path
) -> None:
    """torch's error of them is no Exception, and would end a program in a traceback."""
    folder = output / "checkpoint-6"
    sharded_folder(folder / "pytorch_model_fsdp_0")
    content = read_json(folder)
    finish_checkpoint(
        folder, {part: content[part] for part in ("loader", "run", "settings")}
    )
    with pytest.raises(FormatError, match="checkpoint-6"):
        packed_trainer(stored, output).train(str(folder))


TOKEN = "hf_secretsecretsecret"


def dpo_trainer(stored: SimpleNamespace, output: Path, **more: Any) -> Any:
    trl = pytest.importorskip("trl", reason="TRL's own trainer")
    from packstore.torch import PackedDPOTrainer

    kwargs = {"token": TOKEN, "dtype": "float32"}
    arguments = arguments_of(
        output, bf16=False, max_length=None, model_init_kwargs=kwargs, **more
    )
    return PackedDPOTrainer(
        stored.model, args=trl.DPOConfig(**arguments), train_dataset=stored.data
    )


@pytest.mark.parametrize("make", [packed_trainer, dpo_trainer])
def test_no_file_of_a_run_holds_a_token(
    stored: SimpleNamespace, tmp_path: Path, make: Callable[..., Any]
) -> None:
    trainer = make(stored, tmp_path, hub_token=TOKEN, max_steps=2)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    trainer.create_model_card()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "training_args.bin" for path in files)
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
    assert TOKEN not in trainer.args.to_json_string()
    assert (
        copy.deepcopy(trainer.args).hub_token == TOKEN
    )  # the hub's client still has it
    saved = torch.load(
        tmp_path / "checkpoint-2" / "training_args.bin", weights_only=False
    )
    assert saved.hub_token is None


def test_the_settings_of_the_user_keep_their_token(
    stored: SimpleNamespace, tmp_path: Path
) -> None:
    args = TrainingArguments(**arguments_of(tmp_path, hub_token=TOKEN))
    PackedTrainer(stored.model, args, stored.data, examples_per_step=9)
    assert pickle.loads(pickle.dumps(args)).hub_token == TOKEN
