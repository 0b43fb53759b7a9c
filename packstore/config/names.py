"""The name that was meant by an unknown one: the ecosystem's word for it, else the nearest."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

ELSEWHERE = {
    **dict.fromkeys(
        ("batch_size", "train_batch_size", "global_batch_size"),
        "examples_per_step packs_per_batch",
    ),
    **dict.fromkeys(("per_device_train_batch_size", "micro_batch_size"), "packs_per_batch"),
    "gradient_accumulation_steps": "accumulation examples_per_step",
    **dict.fromkeys(("max_seq_length", "max_seq_len", "seq_length", "seq_len"), "pack_size"),
    "max_prompt_length": "max_length on",
    **dict.fromkeys(("overlong", "truncation", "truncation_mode"), "on"),
    **dict.fromkeys(("lr", "peak_lr"), "learning_rate"),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type", "scheduler"), "schedule"),
    **dict.fromkeys(("warmup_steps", "warmup_ratio", "lr_warmup_steps"), "warmup"),
    **dict.fromkeys(("num_train_epochs", "num_epochs"), "epochs"),
    **dict.fromkeys(("clip_grad", "grad_clip", "gradient_clip_val"), "max_grad_norm"),
    **dict.fromkeys(("model_name_or_path", "model_name", "model_path"), "model"),
    **dict.fromkeys(("ref_model", "reference"), "reference_model"),
    **dict.fromkeys(("tokenizer_name", "tokenizer_path", "processing_class"), "tokenizer"),
    **dict.fromkeys(("train_dataset", "dataset_name", "data_path"), "dataset"),
    **dict.fromkeys(("eval_dataset", "val_dataset"), "validation"),
    "output_dir": "output",
    "loss_type": "loss",
    **dict.fromkeys(("beta", "label_smoothing"), "loss_parameters loss_parameter"),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype"), "mixed_precision dtype"),
    "attn_implementation": "attention",
    **dict.fromkeys(("use_peft", "peft_config", "lora_r", "lora_rank"), "lora"),
    "resume_from_checkpoint": "resume",
    "logging_steps": "log_every",
    "eval_steps": "eval_every",
    "save_steps": "save_every",
    "report_to": "trackers tracker",
    **dict.fromkeys(("num_proc", "dataset_num_proc", "dataloader_num_workers"), "num_workers"),
    **dict.fromkeys(("drop_last", "dataloader_drop_last"), "tail"),
    "shuffle": "",
}
"""A name in torch, transformers, TRL, Megatron or Lightning -> names of settings and flags here."""

DECIDED = {
    "batch_size": "Batches are cut while training: examples_per_step",
    "shuffle": "The dataset decides: PackedDataset(url, shuffle=…)",
}
"""What to say of a name if nothing that it means here is known in this place."""


def meant(name: str, known: Iterable[str], spell: Callable[[str], str] = repr) -> str:
    """Returns a sentence, after a space, of what an unknown name may mean; empty if nothing.

    `name` and `known` may be flags: ``--learning-rate`` is ``learning_rate``.
    """
    plain = {_plain(each): each for each in known}
    if (theirs := _plain(name)) in ELSEWHERE:
        near = [plain[ours] for ours in ELSEWHERE[theirs].split() if ours in plain]
        otherwise = f" {DECIDED[theirs]}." if theirs in DECIDED else ""
    else:
        near = difflib.get_close_matches(name, list(plain.values()), n=1)
        otherwise = ""
    return f" Did you mean {' or '.join(map(spell, near))}?" if near else otherwise


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
