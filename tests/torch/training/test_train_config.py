"""Settings of a training run: keywords, YAML and flags are one thing."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from packstore.cli import main
from packstore.cli import train as command
from packstore.cli.common import read_settings as read_flags
from packstore.config.training import TrainConfig, lora_settings, read_settings
from packstore.errors import ConfigError
from packstore.torch.training.setup import warmup_steps
from packstore.torch.training.sinks import ConsoleLines, JsonLines

yaml = pytest.importorskip("yaml", reason="config files need PyYAML")

MUST = {"model": "m", "dataset": "d", "output": "o"}
OTHER: dict[str, Any] = {
    "loss": {"dpo": 0.8, "bco_pair": {"weight": 0.2, "beta": 0.3}},
    "loss_parameters": {"label_smoothing": 0.1},
    "lora": {"rank": 8, "targets": ["q_proj", "v_proj"]},
    "storage_options": {"endpoint_url": "http://localhost"},
    "validation": "v",
    "learning_rate": 3e-7,
    "max_steps": 7,
    "gradient_checkpointing": True,
}


def test_round_trip_through_json_and_yaml(tmp_path: Path) -> None:
    config = TrainConfig.of(**MUST, **OTHER)
    for dump in (json.dumps, yaml.safe_dump):
        file = tmp_path / "config.yaml"
        file.write_text(dump(config.recorded()))
        assert TrainConfig.of(**read_settings(file)) == config
    assert TrainConfig.of(config, seed=1) == dataclasses.replace(config, seed=1)


@pytest.mark.parametrize("name", ["dpo", "sft"])
def test_examples_are_valid(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The configs that `packstore train --example` prints, from the installed package."""
    assert main(["train", "--example", name]) == 0
    file = tmp_path / "config.yaml"
    file.write_text(capsys.readouterr().out)
    config = TrainConfig.of(**read_settings(file))
    assert isinstance(config.learning_rate, float)
    assert config.loss == name


def test_every_setting_has_a_flag() -> None:
    parser = argparse.ArgumentParser()
    command._configure(parser)
    flags = ["--model", "m", "--dataset", "d", "--output", "o", "--learning-rate", "3e-7"]
    flags += ["--lora", "rank=4", "--lora", "targets=q,v", "--loss-parameter", "beta=0.3"]
    flags += ["--loss-parameter", "pairs=all", "--gradient-checkpointing"]
    given = read_flags(parser.parse_args(flags), TrainConfig)
    assert given == {
        **MUST,
        "learning_rate": 3e-7,
        "lora": {"rank": 4, "targets": "q,v"},
        "loss_parameters": {"beta": 0.3, "pairs": "all"},
        "gradient_checkpointing": True,
    }
    assert lora_settings(given["lora"])["targets"] == ["q", "v"]
    known = {action.dest for action in parser._actions}
    assert {field.name for field in dataclasses.fields(TrainConfig)} <= known
    assert len(TrainConfig.names()) <= 32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "m"}, "setting dataset must be given: folder or URL of the packed"),
        ({**MUST, "examples_per_step": 0}, "examples_per_step must be at least 1; found 0"),
        ({**MUST, "epochs": 1.5}, "setting epochs must be a whole number; found 1.5"),
        ({**MUST, "dtype": "fp8"}, "setting dtype must be one of: float32, bfloat16, float64"),
        ({**MUST, "lora": {"alpha": 2}}, "setting lora: rank must be a whole number .* found None"),
        ({**MUST, "lora": {"rank": 2, "dropout": 1}}, "lora: dropout must be .* below 1; found 1"),
        ({**MUST, "lora": {"rnk": 2}}, "unknown setting 'rnk'.*mean 'rank'"),
        ({**MUST, "loss": {"dpo": "x"}}, "setting loss must be a string or a mapping"),
        ({**MUST, "eval_every": 5}, "setting eval_every: it needs a validation set"),
    ],
)
def test_wrong_values(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig.of(**settings)


def test_warmup_is_steps_or_a_share() -> None:
    config = TrainConfig.of(**MUST)
    counts = {0.0: 0, 0.1: 20, 0.999: 199, 1: 1, 30.0: 30}
    for warmup, steps in counts.items():
        assert warmup_steps(dataclasses.replace(config, warmup=warmup), 200) == steps


def test_json_lines_forget_what_comes_after_the_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    sink = JsonLines(file, 0)
    for step in range(1, 6):
        sink.write({"step": step, "loss": float("nan") if step == 2 else 0.5})
    sink.close()
    file.write_text(file.read_text(encoding="utf-8") + '{"step": 6, "lo')
    JsonLines(file, 3).close()
    assert file.read_text(encoding="utf-8") == "".join(
        f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in ((1, 0.5), (2, "null"), (3, 0.5))
    )


@pytest.mark.parametrize("terminal", [True, False])
def test_lines_on_the_console(terminal: bool, caplog: pytest.LogCaptureFixture) -> None:
    text = StringIO()
    with caplog.at_level(logging.INFO, "packstore"):
        sink = ConsoleLines(10, 1_040, Console(file=text, force_terminal=terminal, width=120))
        sink.write({"step": 30, "loss": 30 / 7, "fill": 0.5, "rewards/accuracies": 0.75})
        sink.write({"step": 30, "eval/loss": 0.25, "eval/rewards/accuracies": 0.875})
        sink.close()
    expected = [
        "step 30/1,040  loss 4.2857  accuracy 75.0%  fill 50.0%",
        "validation after step 30: loss 0.2500, accuracy 0.8750",
    ]
    assert caplog.messages == ([] if terminal else expected)
    printed = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.getvalue())
    assert [line in printed for line in expected] == [terminal, terminal]
    assert ("30/1040" in printed) == terminal
