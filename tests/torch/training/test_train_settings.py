"""Settings of a run, and mistakes: each is a sentence, and none gives a model without a
word.
"""

from __future__ import annotations

import json
import logging
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from train_runs import checkpoints, losses

from packstore.cli import main
from packstore.errors import ConfigError, DivergedError, FormatError, StorageError
from packstore.torch import train

MUST = {"model": "m", "train_dataset": "d", "output_dir": "o"}


@pytest.fixture(scope="module")
def made(
    kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Settings of a short run."""
    return kit.short_run(tmp_path_factory.mktemp("run"))


@pytest.mark.slow
def test_flags_and_files_make_the_same_run(
    made: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also fields that only transformers knows, with dashes or as transformers spells
    them.
    """
    flags = [
        "--peft-config",
        "r=4",
        "--peft-config",
        'target_modules=["q_proj", "v_proj"]',
    ]
    flags += ["--loss-parameter", "sft_weight=0.1", "--loss-parameter", "beta=0.3"]
    flags += [
        "--activation-checkpointing",
        "--max-steps",
        "1",
        "--learning_rate",
        "3e-3",
    ]
    flags += ["--adam_beta2=0.5", "--weight-decay", "0.1", "--use-cpu", "true"]
    flags += ["--label-names", '["labels"]', "--storage-option", "auto_mkdir=false"]
    for name in ("model", "train_dataset", "examples_per_step"):
        flags += [f"--{name.replace('_', '-')}", str(made[name])]
    assert main(["train", *flags, "--output-dir", str(tmp_path / "run")]) == 0
    settings = {
        **made,
        "output_dir": str(tmp_path / "again"),
        "peft_config": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
        "loss_parameters": {"sft_weight": 0.1, "beta": 0.3},
        "activation_checkpointing": True,
        "max_steps": 1,
        "learning_rate": 3e-3,
        "adam_beta2": 0.5,
        "weight_decay": 0.1,
        "use_cpu": True,
        "label_names": ["labels"],  # the one value that goes with packs
        "storage_options": {"auto_mkdir": False},
    }
    for dump in (json.dumps, yaml.safe_dump):
        (tmp_path / "again.yaml").write_text(dump(settings), encoding="utf-8")
        assert main(["train", str(tmp_path / "again.yaml"), "--json"]) == 0
    weights = [
        tmp_path / name / "adapter_model.safetensors" for name in ("run", "again")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    result = json.loads(
        capsys.readouterr().out.partition("\n{")[2].join(["{", ""]).split("\n}")[0]
        + "}"
    )
    assert result["step"] == 1


def test_help_is_short_and_help_all_lists_every_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    from transformers import TrainingArguments

    pytest.importorskip("transformers", minversion="5.24")
    monkeypatch.setenv("COLUMNS", "100")
    shown = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main(["train", flag])
        shown.append(capsys.readouterr().out)
    names = [f.name for f in dataclasses.fields(TrainingArguments)]
    every = [f"--{name.replace('_', '-')}" for name in names]
    assert [
        flag for flag in every if flag not in re.findall(r"--[\w-]+", shown[1])
    ] == []
    assert sum(flag in re.findall(r"--[\w-]+", shown[0]) for flag in every) < 20
    assert len(shown[0].splitlines()) < 90


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("dpo", "dpo"),
        *(
            pytest.param(*names, marks=pytest.mark.slow)
            for names in (("sft", "sft"), ("reward", "bradley_terry"))
        ),
    ],
)
def test_examples_of_configs_run(
    made: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
    name: str,
    loss: str,
) -> None:
    """Those that `packstore train --example` prints, from the installed package.

    Nothing in them is deprecated; PEFT asks for what is.
    """
    assert main(["train", "--example", name]) == 0
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out, encoding="utf-8")
    flags = [
        "--model",
        made["model"],
        "--output-dir",
        str(tmp_path / "run"),
        "--max-steps",
        "1",
    ]
    data = made["train_dataset"]
    flags += [
        "--train-dataset",
        data,
        "--eval-dataset",
        data,
        "--dtype",
        "float32",
        "--no-bf16",
    ]
    assert main(["train", str(tmp_path / "run.yaml"), *flags]) == 0
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert f"PreferenceLoss({loss}" in card
    told = [str(w.message) for w in recwarn if issubclass(w.category, FutureWarning)]
    assert [text for text in told if "is_gradient_checkpointing" not in text] == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "m"}, "setting train_dataset must be given: folder or URL"),
        (
            {**MUST, "examples_per_step": 0},
            "examples_per_step must be at least 1; found 0",
        ),
        (
            {**MUST, "num_train_epochs": "a"},
            "setting num_train_epochs must be a number",
        ),
        ({**MUST, "seed": -1}, "setting seed must be at least 0; found -1"),
        (
            {**MUST, "dtype": "fp8"},
            "setting dtype must be one of: float32, bfloat16, float64",
        ),
        ({**MUST, "loss": {"dpo": "x"}}, "setting loss must be a string or a mapping"),
        ({**MUST, "eval_steps": 5}, "setting eval_steps: it needs an evaluation set"),
        # An empty output would be the folder that the command runs in.
        *(
            ({**MUST, name: ""}, f"setting {name} must not be empty")
            for name in ("output_dir", "model", "train_dataset", "ref_logps")
        ),
    ],
)
def test_wrong_values(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(**settings)
    with pytest.raises(
        ConfigError, match=r"config: it must be Settings; found dict. Give settings"
    ):
        train(settings)  # type: ignore[arg-type]


def test_lines_of_the_log(
    made: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "packstore")
    train(
        **made,
        eval_dataset=made["train_dataset"],
        max_steps=2,
        output_dir=str(tmp_path),
    )
    for line in (
        r"step 1/2  loss 0\.6931  accuracy \d+\.\d%  margin 0\.000  .*fill \d+\.\d%  data wait",
        r"evaluation after step 2/2  loss 0\.\d{4}  accuracy \d+\.\d%  margin -?\d\.\d{3}",
    ):
        assert re.search(line, caplog.text)
    assert caplog.text.count("24 examples in 3 steps of 8.0 on average") == 1


@pytest.mark.parametrize("clip", [1.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_a_run_that_diverges_ends_with_an_error(
    made: dict[str, Any], tmp_path: Path, clip: float
) -> None:
    """Else it would leave a model of NaN behind, and exit code 0."""
    settings = {
        **made,
        "output_dir": str(tmp_path),
        "learning_rate": 1e30,
        "warmup_steps": 0,
    }
    settings |= {"num_train_epochs": 3, "save_steps": 1, "max_grad_norm": clip}
    with pytest.raises(
        DivergedError,
        match=r"step \d: loss, gradient and weights must be finite; found",
    ):
        train(**settings)
    assert not (tmp_path / "config.json").exists()
    for folder in checkpoints(tmp_path):
        weights = load_file(folder / "model.safetensors")
        assert all(w.isfinite().all() for w in weights.values())


def test_the_output_must_be_a_folder_of_its_own(
    made: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="it must be a folder that can be written"):
        train(**made, max_steps=1, output_dir=str(tmp_path / "file"))
    mine = shutil.copytree(made["model"], tmp_path / "mine")
    with pytest.raises(
        ConfigError, match="it must hold no model without checkpoints; found conf"
    ):
        train(**made, max_steps=1, output_dir=str(mine))
    assert (mine / "config.json").exists()


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """This process writes no file beyond this size, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_what_is_resumed_must_be_there_and_whole(
    made: dict[str, Any], tmp_path: Path
) -> None:
    """A checkpoint that is damaged, or that could not be written."""
    output = tmp_path / "run"
    settings = {**made, "output_dir": str(output)}
    train(**settings, max_steps=1)
    with pytest.raises(FormatError, match="checkpoint nowhere: it must be whole"):
        train(**settings, max_steps=2, resume_from_checkpoint="nowhere")
    (newest,) = checkpoints(output)
    whole = (newest / "optimizer.pt").read_bytes()
    (newest / "optimizer.pt").write_bytes(whole[::-1])
    with pytest.raises(FormatError, match=r"it must be whole.*optimizer\.pt"):
        train(**settings, max_steps=2, resume_from_checkpoint=str(newest))
    with pytest.raises(ConfigError, match="must hold no model without checkpoints"):
        train(**settings, max_steps=2)  # it is passed over, and no other one is there
    (newest / "optimizer.pt").write_bytes(whole)
    with (
        small_files(20_000),
        pytest.raises(StorageError, match="must be possible to write it"),
    ):
        train(**settings, max_steps=2)
    assert [path.name for path in checkpoints(output)] == ["checkpoint-1"]
    for more in ("push_to_hub", "save_only_model"):  # the hub is out of reach
        again = {
            **settings,
            more: True,
            "output_dir": str(tmp_path / more),
            "save_strategy": "no",
        }
        with (
            small_files(20_000),
            pytest.raises(StorageError, match="must take what is written"),
        ):
            train(**again, max_steps=1)
    train(**settings, max_steps=2)
    other = tmp_path / "other"
    train(**{**settings, "output_dir": str(other)}, max_steps=2)
    assert losses(output)[0] == losses(other)[0]
