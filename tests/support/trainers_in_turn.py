"""Short runs of both trainers on a model that is made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainingArguments

from packstore.torch import PackedTrainer

SHORT = {
    "max_steps": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


def packed_trainer(
    model: Any,
    data: SimpleNamespace,
    bf16: bool = False,
    evaluated: bool = True,
    **more: Any,
) -> Any:
    """Return a PackedTrainer of two steps."""
    arguments = TrainingArguments(data.output, bf16=bf16, **SHORT)
    held = data.held if evaluated else None
    return PackedTrainer(
        model, arguments, data.train, held, examples_per_step=8, **more
    )


def packed_dpo(
    model: Any, data: SimpleNamespace, checkpointing: bool = False, **more: Any
) -> Any:
    """Return a PackedDPOTrainer of two steps, with the stored model as reference."""
    trl = pytest.importorskip("trl", reason="TRL's own trainer")
    from packstore.torch import PackedDPOTrainer

    config = trl.DPOConfig(
        data.output,
        bf16=False,
        max_length=None,
        per_device_train_batch_size=8,
        gradient_checkpointing=checkpointing,
        **SHORT,
    )
    return PackedDPOTrainer(
        model,
        args=config,
        train_dataset=data.train,
        eval_dataset=data.held,
        processing_class=word_tokenizer(),
        **more,
    )


def word_tokenizer() -> Any:
    """Return a tokenizer, which TRL asks for also where the data is packed."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(49)} | {"</s>": 49}
    fast = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token="</s>", pad_token="</s>"
    )
