"""DeepSpeed's ZeRO on two ranks: the same training as without it, resumed to
the bit.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import launch
from transformers import TrainingArguments

from packstore.errors import ConfigError
from packstore.torch import PackedTrainer

AUTO = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def on_rank(task: dict[str, Any]) -> Any:
    warnings.simplefilter("ignore")
    given = dict(task["given"])
    arguments, stage = given.pop("arguments"), task["stage"]
    if stage is not None:
        import deepspeed
        from accelerate import PartialState
        from accelerate.utils import DistributedType

        del os.environ["ACCELERATE_USE_CPU"]
        # Accelerate runs it on accelerators only; the kind of ranks is all that it asks
        # for.
        state = PartialState(cpu=True)
        state.distributed_type, state._cpu = DistributedType.DEEPSPEED, False
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        config = {
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        config |= dict.fromkeys((*AUTO, "gradient_clipping"), "auto")
        arguments |= {
            "deepspeed": config,
            "accelerator_config": {"use_configured_state": True},
        }
    arguments["use_cpu"] = stage is None
    try:
        if task.get("trl"):
            trainer = by_trl(arguments, **given)
        else:
            trainer = PackedTrainer(args=TrainingArguments(**arguments), **given)
        trainer.train(resume_from_checkpoint=task.get("resume"))
    except ConfigError as error:
        return str(error)
    weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    losses = [
        record["loss"] for record in trainer.state.log_history if "loss" in record
    ]
    return losses, {name: weight.clone() for name, weight in weights.items()}


def by_trl(arguments: dict[str, Any], model: str, train_dataset: str, **_: Any) -> Any:
    """TRL's trainer, with a reference that it prepares, and a tokenizer that nothing
    uses.
    """
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import DPOConfig

    from packstore.torch import PackedDPOTrainer

    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="a", pad_token="a"
    )
    both = [
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        for _ in range(2)
    ]
    own = {"bf16": False, "max_length": None, "per_device_train_batch_size": 4}
    args = DPOConfig(**arguments, **own)
    how = {"train_dataset": train_dataset, "processing_class": tokenizer}
    return PackedDPOTrainer(*both, args=args, **how)


@pytest.mark.slow
def test_zero_trains_the_same(
    stored: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SGD, as Adam makes rounding errors of gradients that are 0 as large as any
    step.
    """
    pytest.importorskip(
        "deepspeed", reason="pip install deepspeed, with DS_BUILD_OPS=0"
    )
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    arguments = {
        "max_steps": 6,
        "save_steps": 3,
        "logging_steps": 1,
        "learning_rate": 0.1,
    }
    arguments |= {
        "optim": "sgd",
        "max_grad_norm": 0.5,
        "report_to": [],
        "disable_tqdm": True,
    }
    given = {
        "model": stored.model,
        "train_dataset": stored.data,
        "examples_per_step": 9,
    }

    def trained(stage: int | None, name: str, **more: Any) -> Any:
        arguments["output_dir"] = str(tmp_path / name)
        task = {"given": {**given, "arguments": arguments}, "stage": stage, **more}
        return launch(__file__, task, 2, tmp_path)[0]

    expected = trained(None, "none")
    for stage in (0, 1, 2):
        whole = trained(stage, str(stage))
        print("gap", stage, np.abs(np.subtract(whole[0], expected[0])).max())
        np.testing.assert_allclose(whole[0], expected[0], atol=1e-6)
        for name, weight in expected[1].items():
            torch.testing.assert_close(whole[1][name], weight, atol=1e-6, rtol=0)
        resumed = trained(
            stage, "again", resume=str(tmp_path / str(stage) / "checkpoint-3")
        )
        assert resumed[0] == whole[0]
        assert all(
            torch.equal(resumed[1][name], weight) for name, weight in whole[1].items()
        )
    pytest.importorskip("trl", reason="trl is in the extra train")
    np.testing.assert_allclose(
        trained(2, "trl-2", trl=True)[0], trained(None, "trl", trl=True)[0], atol=1e-6
    )
    assert "its ZeRO stage must be 0, 1 or 2; found 3" in trained(3, "3")
    for stage, begun in ((None, "1"), (2, "1"), (1, "none")):
        text = trained(stage, "other", resume=str(tmp_path / begun / "checkpoint-3"))
        assert "must keep its optimizer, 'sgd" in text


def test_on_cpus_it_is_refused(stored: SimpleNamespace, tmp_path: Path) -> None:
    """Accelerate would leave it out, in silence."""
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    args.deepspeed = {"zero_optimization": {"stage": 2}}
    with pytest.raises(
        ConfigError, match="deepspeed: Accelerate runs it on accelerators only"
    ):
        PackedTrainer(stored.model, args, stored.data)
