"""The name that was meant by an unknown one: the ecosystem's word for it, else the nearest."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

_THEIRS = {
    "examples_per_step packs_per_batch": "batch_size train_batch_size global_batch_size",
    "packs_per_batch": "per_device_train_batch_size micro_batch_size",
    "accumulation examples_per_step": "gradient_accumulation_steps",
    "pack_size": "max_seq_length max_seq_len seq_length seq_len",
    "max_length": "max_prompt_length",
    "learning_rate": "lr peak_lr",
    "schedule": "lr_scheduler lr_scheduler_type scheduler",
    "warmup": "warmup_steps warmup_ratio lr_warmup_steps",
    "epochs": "num_train_epochs num_epochs",
    "max_grad_norm": "clip_grad grad_clip gradient_clip_val",
    "model": "model_name_or_path model_name model_path",
    "reference_model": "ref_model reference",
    "tokenizer": "tokenizer_name tokenizer_path processing_class",
    "dataset": "train_dataset dataset_name data_path",
    "validation": "eval_dataset val_dataset",
    "output": "output_dir",
    "loss": "loss_type",
    "loss_parameters loss_parameter": "beta label_smoothing",
    "mixed_precision dtype": "bf16 fp16 torch_dtype",
    "attention": "attn_implementation",
    "lora": "use_peft peft_config lora_r lora_rank",
    "resume": "resume_from_checkpoint",
    "log_every": "logging_steps",
    "eval_every": "eval_steps",
    "save_every": "save_steps",
    "trackers tracker": "report_to",
    "num_workers": "num_proc dataset_num_proc dataloader_num_workers",
    "tail": "drop_last dataloader_drop_last",
    "": "shuffle",
}
ELSEWHERE = {name: ours.split() for ours, names in _THEIRS.items() for name in names.split()}
"""A name in torch, transformers, TRL, Megatron or Lightning -> names of settings and flags here."""

DECIDED = {
    "batch_size": "Batches are cut while training: examples_per_step",
    "shuffle": "The dataset decides: PackedDataset(url, shuffle=…)",
}
"""What to say of a name if nothing that it means here is known in this place."""


def meant(name: str, known: Iterable[str], spell: Callable[[str], str] = repr) -> str:
    """Returns a sentence, after a space, on what an unknown name or flag may mean; else nothing."""
    plain = {_plain(each): each for each in known}
    if (theirs := _plain(name)) in ELSEWHERE:
        near = [plain[ours] for ours in ELSEWHERE[theirs] if ours in plain]
    else:
        near = difflib.get_close_matches(name, list(plain.values()), n=1)
    if near:
        return f" Did you mean {' or '.join(map(spell, near))}?"
    return f" {DECIDED[theirs]}." if theirs in DECIDED else ""


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
