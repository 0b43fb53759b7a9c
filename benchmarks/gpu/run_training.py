"""Train in this process, by packstore or by TRL: ``python run_training.py TASK``, a
JSON object.

The process kills itself after the record of step ``kill_at``, if there is one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))


def main(task: dict[str, Any]) -> None:
    from transformers import TrainerCallback

    if task.get("exact"):
        torch.use_deterministic_algorithms(True)
    cuda = torch.cuda.is_available()
    history: list[dict[str, float]] = []
    times: list[float] = []

    def print_records() -> None:
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
        records = [record for record in history if "loss" in record]
        print(
            json.dumps({"peak_gib": peak, "records": records, "times": times}),
            flush=True,
        )

    class Keep(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter())

        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            history[:] = state.log_history
            if state.global_step == task.get("kill_at"):
                print_records()
                os.kill(os.getpid(), signal.SIGKILL)

    if "pairs" in task:
        trl(**task, cuda=cuda, callbacks=[Keep()])
    else:
        from packstore.torch import train

        train(**task["settings"], callbacks=[Keep()])
    print_records()


def trl(
    model: str,
    pairs: list[list[int]],
    step: int,
    output_dir: str,
    cuda: bool,
    callbacks: list[Any],
) -> None:
    """Train on random pairs of these lengths by TRL's DPOTrainer, `step` pairs a step.

    Its defaults, but without checkpointing of activations and without a limit of
    length, the reference computed beside the policy, and 4 padded pairs at a time: the
    logits of 8, which is its default, do not fit 140 GiB with the longest pairs. A
    token is a word.
    """
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    vocab, rng = policy.config.vocab_size, np.random.default_rng(0)
    words = Tokenizer(
        models.WordLevel({str(i): i for i in range(vocab)}, unk_token="0")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "0", "eos_token": "1", "unk_token": "0"}
    names = ("prompt", "chosen", "rejected")
    texts = [
        [" " + " ".join(map(str, rng.integers(2, vocab, n))) for n in row]
        for row in pairs
    ]
    batch_size = min(4, step)
    settings = DPOConfig(
        output_dir=output_dir, per_device_train_batch_size=batch_size, bf16=cuda, use_cpu=not cuda,
        gradient_accumulation_steps=step // batch_size, max_length=None, gradient_checkpointing=False,
        learning_rate=1e-6, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    DPOTrainer(
        policy,
        args=settings,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, **special),
        train_dataset=Dataset.from_list(
            [dict(zip(names, row, strict=True)) for row in texts]
        ),
        callbacks=callbacks,
    ).train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
