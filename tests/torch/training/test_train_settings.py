"""Settings of a run, and mistakes: each is a sentence, and none gives a model without a
word.
"""

from __future__ import annotations

import json
import logging
import re
import resource
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars
import pytest
import torch
import yaml
from safetensors.torch import load_file
from small_jobs import trained_tokenizer
from train_runs import checkpoints, losses

import packstore.cli
from packstore.cli import main
from packstore.errors import ConfigError, DivergedError, FormatError, StorageError
from packstore.tokenizer.dialogue import BUILTIN
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
    last_result = capsys.readouterr().out.rpartition("\n{")[2]
    result = json.loads("{" + last_result)
    assert result["step"] == 1
    assert result["train_datasets"] == [
        {"url": str(made["train_dataset"]), "version": 1}
    ]
    assert result["eval_datasets"] == []


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


EXAMPLES = {
    "dpo": "PreferenceLoss(dpo",
    "kto": "PreferenceLoss(kto",
    "reward": "PreferenceLoss(bradley_terry",
    "sft": "PreferenceLoss(sft",
    "lora": "PreferenceLoss(dpo",
    "distill": "DistillLoss(",
}
"""Name of ``packstore train --example`` -> the loss in the card of its model."""


def hub_rows(dataset: str) -> list[dict[str, Any]]:
    """Records of this project with the columns of a dataset of the hub."""
    path = Path(__file__).parents[3] / "examples" / "sample" / "pairs.jsonl"
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        pair = json.loads(line)
        prompt = [*pair["prompt"], {"role": "user", "content": f"Question {number}."}]
        answers = {
            side: [{"role": "assistant", "content": pair[side]}]
            for side in ("chosen", "rejected")
        }
        of_dataset = {
            "trl-lib/ultrafeedback_binarized": {
                "chosen": prompt + answers["chosen"],
                "rejected": prompt + answers["rejected"],
                "score_chosen": 8.0,
                "score_rejected": 3.5,
            },
            "trl-lib/kto-mix-14k": {
                "prompt": prompt,
                "completion": answers["chosen" if number % 2 else "rejected"],
                "label": bool(number % 2),
            },
            "trl-lib/Capybara": {
                "source": "Know_logic",
                "messages": prompt + answers["chosen"],
                "num_turns": 2,
            },
        }
        rows.append(of_dataset[dataset])
    return rows


@pytest.fixture(scope="module")
def hub(kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny models and short datasets under their names on the hub."""
    folder = tmp_path_factory.mktemp("hub")
    for dataset in ("ultrafeedback_binarized", "kto-mix-14k", "Capybara"):
        path = folder / "trl-lib" / dataset / "data" / "train-0-of-1.parquet"
        path.parent.mkdir(parents=True)
        polars.DataFrame(hub_rows(f"trl-lib/{dataset}")).write_parquet(path)
    tokenizer = trained_tokenizer(["Question 1."])
    for name, layers in (("0.6B", 1), ("0.6B-Base", 1), ("1.7B", 2)):
        model = folder / "Qwen" / f"Qwen3-{name}"
        kit.tiny_model(
            "qwen3", torch.float32, vocab_size=320, num_hidden_layers=layers
        ).save_pretrained(model)
        tokenizer.save(str(model / "tokenizer.json"))
        config = {"eos_token": "</s>", "chat_template": BUILTIN["chatml"]}
        (model / "tokenizer_config.json").write_text(
            json.dumps(config), encoding="utf-8"
        )
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "dpo",
        *(pytest.param(name, marks=pytest.mark.slow) for name in list(EXAMPLES)[1:]),
    ],
)
def test_an_example_trains_on_the_data_that_it_names(
    hub: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
    name: str,
) -> None:
    """By the commands in its comment, with a folder in place of the hub.

    Nothing in it is deprecated.
    """
    monkeypatch.chdir(tmp_path)

    def run(command: str) -> str:
        command = command.replace("hf://datasets/", f"{hub}/")
        command = command.replace(" Qwen/", f" {hub}/Qwen/")
        capsys.readouterr()
        program, *arguments = shlex.split(command)
        assert program == "packstore"
        assert main(arguments) == 0, command
        return capsys.readouterr().out

    example = run(f"packstore train --example {name}")
    comment = "".join(re.findall(r"^#(.*\n)", example, re.M))
    commands = re.findall(r"^ {3}(packstore .*)$", comment.replace("\\\n", " "), re.M)
    *preparations, print_example, train_command = commands
    assert print_example == f"packstore train --example {name} > {name}.yaml"
    assert train_command == f"packstore train {name}.yaml"

    for command in preparations:
        run(command)
    config = example.replace(" Qwen/", f" {hub}/Qwen/")
    Path(f"{name}.yaml").write_text(config, encoding="utf-8")
    run(f"{train_command} --max-steps 2")

    settings = yaml.safe_load(config)
    assert len(losses(Path(settings["output_dir"]))) == 2
    card = Path(settings["output_dir"], "README.md").read_text(encoding="utf-8")
    assert EXAMPLES[name] in card
    assert "eval_loss" in card
    messages = [
        str(w.message) for w in recwarn if issubclass(w.category, FutureWarning)
    ]
    assert messages == []


def test_the_help_names_every_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    help_text = capsys.readouterr().out
    assert [name for name in EXAMPLES if name not in help_text] == []
    files = Path(packstore.cli.__file__).parent.joinpath("examples").iterdir()
    assert sorted(path.stem for path in files) == sorted(EXAMPLES)


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
        r"step 1/2  loss 0\.6931  accuracy – \(each margin is 0\)  margin 0\.000  .*fill \d+\.\d%",
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
