"""The setting ``attention: auto``: which backend it becomes, and who follows whom.

There is no GPU: the trial has stand-in results, and kernels compute by definition.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import range_kernels
import torch
import torch.distributed as dist
import varlen_kernels
from ranks import launch
from train_runs import checkpoints
from transformers import TrainerCallback, TrainingArguments

from packstore.cli import main
from packstore.torch import PackedTrainer, open_side, train
from packstore.torch.attention import flash
from packstore.torch.attention.auto import Call
from packstore.torch.models import load_model
from packstore.torch.reference.provenance import attention_setting
from packstore.torch.training import attention_choice, attention_trial
from packstore.torch.training.attention_trial import Trial, run_trial

CPU = torch.device("cpu")
FASTER = Trial(varlen_seconds=2e-3, ranges_seconds=1e-3, difference=5e-3)
SLOWER = Trial(varlen_seconds=1e-3, ranges_seconds=2e-3, difference=5e-3)


@pytest.mark.parametrize(
    ("varlen", "ranges", "difference", "expected"),
    [
        (1.0, 0.5, 0.005, "auto_ranges"),
        (1.0, 0.96, 0.005, "auto_ranges"),
        (1.0, 0.98, 0.005, "auto_varlen"),  # by chance
        (1.0, 1.0, 0.005, "auto_varlen"),
        (1.0, 2.0, 0.005, "auto_varlen"),
        (1.0, 0.5, 0.5, "auto_varlen"),
        (1.0, 0.5, math.nan, "auto_varlen"),
        (1.0, math.nan, 0.005, "auto_varlen"),
    ],
)
def test_ranges_must_be_right_and_faster(
    varlen: float, ranges: float, difference: float, expected: str
) -> None:
    assert Trial(varlen, ranges, difference).choice == expected


@pytest.mark.parametrize("wrong", range(4))
@pytest.mark.parametrize("value", [0.0, math.nan, 1.5])
def test_one_wrong_tensor_shows(value: float, wrong: int) -> None:
    """Of the output and three gradients, of which others are larger."""
    expected = tuple(scale * torch.linspace(1, 2, 5) for scale in (1, 9, 1e-3, 99))
    actual = [1.001 * values for values in expected]
    assert attention_trial.largest_difference(tuple(actual), expected) == pytest.approx(
        1e-3, 0.1
    )
    actual[wrong] = actual[wrong] * value
    difference = attention_trial.largest_difference(tuple(actual), expected)
    assert not Trial(1.0, 0.5, difference).is_equal


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine seems to have a GPU with Triton, whose trial says that `ranges` is
    faster.
    """
    monkeypatch.setattr(flash, "runs_on", lambda _: True)
    monkeypatch.setattr(attention_choice, "find_spec", lambda name: name)
    monkeypatch.setattr(attention_trial, "run_trial", lambda *_: FASTER)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    with (
        varlen_kernels.backend_on_cpu(monkeypatch),
        range_kernels.backend_on_cpu(monkeypatch),
    ):
        pretend_gpu(monkeypatch)
        yield monkeypatch


@pytest.mark.parametrize("broken", [None, "attend_forward", "attend_backward"])
@pytest.mark.parametrize("window", [None, 5])
def test_both_backends_run_forward_and_backward(
    kit: SimpleNamespace, gpu: pytest.MonkeyPatch, broken: str, window: int
) -> None:
    """Wrong kernels show, in either direction; a trial draws no random number of the
    training.
    """
    seconds = iter([2e-3, 1e-3])
    gpu.setattr(attention_trial, "median_seconds", lambda run: run() and next(seconds))
    if broken is not None:
        module = sys.modules[range_kernels.MODULE]
        right = getattr(module, broken)
        gpu.setattr(module, broken, lambda *args: [1.1 * x for x in right(*args)])
    call = Call("torch_varlen", 4, 2, 8, torch.float64, 0.3, window)
    state = torch.get_rng_state()
    result = run_trial(call, kit.row(3, "shared_prefix").layout)
    assert torch.equal(state, torch.get_rng_state())
    assert (result.varlen_seconds, result.ranges_seconds) == (2e-3, 1e-3)
    assert result.is_equal == (broken is None)
    assert result.choice == ("auto_ranges" if broken is None else "auto_varlen")


def choose(stored: SimpleNamespace, attention: str = "auto", **settings: Any) -> str:
    from packstore import open as open_dataset

    dtype = settings.pop("dtype", "float64")
    model = load_model(stored.model, dtype=dtype, attention=attention)
    dataset = open_dataset(stored.data)
    return attention_choice.choose_attention(model, CPU, dataset, **settings)


def raise_out_of_registers(*_: Any) -> None:
    raise RuntimeError("out of registers")


@pytest.mark.parametrize(
    ("result", "expected", "level", "message"),
    [
        (FASTER, "auto_ranges", "INFO", "1.000 ms with 'ranges', 2.000 ms with"),
        (SLOWER, "auto_varlen", "INFO", "2.000 ms with 'ranges', 1.000 ms with"),
        (Trial(2e-3, 1e-3, 0.5), "auto_varlen", "WARNING", "differ by 0.5"),
        (None, "auto_varlen", "WARNING", "out of registers"),
    ],
)
def test_the_trial_decides(
    stored: SimpleNamespace,
    gpu: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    result: Trial | None,
    expected: str,
    level: str,
    message: str,
) -> None:
    run: Callable[..., Any] = lambda *_: result  # noqa: E731
    gpu.setattr(attention_trial, "run_trial", run if result else raise_out_of_registers)
    with caplog.at_level(logging.INFO, logger="packstore"):
        assert choose(stored) == expected
    (record,) = [r for r in caplog.records if "attention 'auto' is" in r.message]
    assert record.levelname == level
    assert f"{expected!r}" in record.message
    assert message in record.message


def test_the_trial_has_the_heads_of_the_model_and_the_first_packs(
    stored: SimpleNamespace, gpu: pytest.MonkeyPatch
) -> None:
    trials: list[Any] = []
    gpu.setattr(
        attention_trial, "run_trial", lambda *args: trials.append(args) or FASTER
    )
    for packs_per_batch in (1, 4):
        choose(stored, batching={"packs_per_batch": packs_per_batch})
    (call, layout), (_, larger) = trials
    assert (call.num_heads, call.num_key_heads, call.head_size) == (4, 4, 8)
    assert (call.dtype, call.window) == (torch.float64, None)
    assert layout.ranges is not None
    assert larger.num_queries > 2 * layout.num_queries > 0


def test_where_there_is_no_choice(
    stored: SimpleNamespace, gpu: pytest.MonkeyPatch
) -> None:
    gpu.setattr(attention_trial, "run_trial", raise_out_of_registers)
    assert choose(stored, "per_sequence") == "auto"
    assert choose(stored, dtype="float32") == "auto"  # flash kernels take 16 bits
    with gpu.context() as changed:
        changed.setattr(flash, "runs_on", lambda _: False)
        assert choose(stored) == "auto"
    gpu.setattr(attention_choice, "find_spec", lambda _: None)
    assert choose(stored) == "auto"


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        ("ranges", "auto_ranges"),
        ("torch_varlen", "auto_varlen"),
        ("flex, ranges", "auto_ranges"),
        ("flex, torch_varlen", "auto_varlen"),
        ("sdpa", "auto_ranges"),  # by the trial
        (None, "auto_ranges"),
    ],
)
def test_the_reference_comes_before_a_trial(
    stored: SimpleNamespace, gpu: pytest.MonkeyPatch, recorded: str, expected: str
) -> None:
    provenance = {} if recorded is None else {"attention": recorded}
    side: Any = SimpleNamespace(manifest=SimpleNamespace(provenance=provenance))
    assert choose(stored, sides=[side]) == expected


def on_rank(task: dict[str, Any]) -> str:
    """The choice on a rank whose own trial depends on the rank."""
    warnings.simplefilter("ignore")
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        varlen_kernels.backend_on_cpu(monkeypatch),
        range_kernels.backend_on_cpu(monkeypatch),
    ):
        pretend_gpu(monkeypatch)
        result = task["results"][dist.get_rank()]
        run = raise_out_of_registers if result is None else lambda *_: result
        monkeypatch.setattr(attention_trial, "run_trial", run)
        return choose(task["stored"])


@pytest.mark.parametrize("first", [FASTER, SLOWER, None])
def test_all_ranks_take_the_choice_of_the_first(
    stored: SimpleNamespace, tmp_path: Path, first: Trial | None
) -> None:
    second = SLOWER if first is FASTER else FASTER
    task = {"stored": stored, "results": [first, second]}
    expected = "auto_ranges" if first is FASTER else "auto_varlen"
    assert launch(__file__, task, 2, tmp_path) == [expected, expected]


def settings_of(stored: SimpleNamespace, folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": stored.model,
        "train_dataset": stored.data,
        "dtype": "float64",
        "examples_per_step": 9,
        "save_steps": 1,
        "max_steps": 1,
        "output_dir": str(folder),
        **more,
    }


def attention_of(folder: Path) -> str:
    """The backend that the newest checkpoint names."""
    text = (checkpoints(folder)[-1] / "packstore.json").read_text(encoding="utf-8")
    return str(json.loads(text)["settings"]["attention"])


class UsedBackends(TrainerCallback):  # type: ignore[misc]
    """Collects the backends that run while a model is trained."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: set[str] = set()
        self.is_training = False
        check = flash.check

        def check_and_collect(backend: str, *args: Any) -> None:
            if self.is_training:
                self.names.add(backend)
            check(backend, *args)

        monkeypatch.setattr(flash, "check", check_and_collect)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Begin."""
        self.is_training = True

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """End."""
        self.is_training = False


def test_a_resumed_run_keeps_its_backend(
    stored: SimpleNamespace, gpu: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Policy and reference, without another trial; unless a setting names one."""
    used = UsedBackends(gpu)
    train(**settings_of(stored, tmp_path), callbacks=[used])
    assert attention_of(tmp_path) == "auto_ranges"
    assert used.names == {"ranges"}

    trials: list[Any] = []
    gpu.setattr(attention_trial, "run_trial", lambda *_: trials.append(1) or SLOWER)
    train(**settings_of(stored, tmp_path, max_steps=2), callbacks=[used])
    assert attention_of(tmp_path) == "auto_ranges"
    assert used.names == {"ranges"}

    named = settings_of(stored, tmp_path, max_steps=3, attention="torch_varlen")
    train(**named, callbacks=[used])
    assert attention_of(tmp_path) == "torch_varlen"
    assert used.names == {"ranges", "torch_varlen"}
    assert not trials


def test_a_trainer_takes_over_the_backend_of_a_checkpoint(
    stored: SimpleNamespace,
    gpu: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It made its choice before it knew the checkpoint."""
    train(**settings_of(stored, tmp_path))
    gpu.setattr(attention_trial, "run_trial", lambda *_: SLOWER)
    args = TrainingArguments(
        str(tmp_path), max_steps=2, save_steps=1, report_to="none", disable_tqdm=True
    )
    model = load_model(stored.model, dtype="float64", trainable=True)
    trainer = PackedTrainer(model, args, stored.data, examples_per_step=9)
    with caplog.at_level(logging.INFO, logger="packstore"):
        trainer.train(resume_from_checkpoint=True)
    assert "attention 'auto' is 'auto_ranges', as of the checkpoint" in caplog.messages
    assert attention_of(tmp_path) == "auto_ranges"


def test_a_checkpoint_that_names_no_backend(
    stored: SimpleNamespace, gpu: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its run had `torch_varlen`: there was nothing else."""
    gpu.setattr(attention_choice, "find_spec", lambda _: None)
    train(**settings_of(stored, tmp_path))
    assert attention_of(tmp_path) == "auto"
    drop_attention(checkpoints(tmp_path)[-1])
    gpu.setattr(attention_choice, "find_spec", lambda name: name)
    train(**settings_of(stored, tmp_path, max_steps=2))
    assert attention_of(tmp_path) == "auto_varlen"


def drop_attention(checkpoint: Path) -> None:
    """Makes a checkpoint one of an earlier release."""
    from packstore.torch.training import checkpoint_files

    content = checkpoint_files.read_content(checkpoint)
    del content["settings"]["attention"]
    for name in ("files", "hashes", "sha256"):  # computed anew
        content.pop(name, None)
    checkpoint_files.finish_checkpoint(checkpoint, content)


def test_training_and_evaluation_follow_the_reference(
    stored: SimpleNamespace,
    gpu: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`ref-logps` chose by its trial; a second one keeps to it. Margins are 0, up to
    the rounding of stored log-probs.
    """
    side = str(tmp_path / "ref")
    model = ["--model", stored.model, "--dtype", "float64", "--use-cpu"]
    assert main(["ref-logps", stored.data, side, *model]) == 0
    assert open_side(side).manifest.provenance["attention"] == "ranges"

    gpu.setattr(attention_trial, "run_trial", lambda *_: SLOWER)
    assert main(["ref-logps", stored.data, side, *model]) == 0
    train(**settings_of(stored, tmp_path / "run", ref_logps=side))
    assert attention_of(tmp_path / "run") == "auto_ranges"
    capsys.readouterr()
    command = ["evaluate", stored.data, *model, "--ref-logps", side, "--json"]
    assert main(command) == 0
    assert "was made with attention" not in caplog.text
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics["rewards/margins"] == pytest.approx(0, abs=1e-6)
    assert metrics["rewards/chosen"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        ("ranges", "ranges"),
        ("sdpa", "sdpa"),
        ("flex, ranges", "auto_ranges"),
        ("flex, torch_varlen", "auto_varlen"),
        ("reference, sdpa", "auto"),
    ],
)
def test_a_setting_for_recorded_backends(recorded: str, expected: str) -> None:
    """Also if layers of several kinds have several."""
    assert attention_setting(recorded) == expected
