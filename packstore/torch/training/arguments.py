"""The closed table of transformers' TrainingArguments: what packs do not go with."""

from __future__ import annotations

from typing import Any

from packstore.errors import ConfigError, sentence

STEP = "Give examples_per_step and packs_per_batch of PackedTrainer"

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "per_device_train_batch_size": ((8,), STEP),
    "gradient_accumulation_steps": ((1,), STEP),
    "auto_find_batch_size": ((False,), STEP),
    "train_sampling_strategy": (("random",), "PackedDataset(shuffle=…) orders packs"),
    "average_tokens_across_devices": ((True,), "The loss divides by the count of all ranks"),
    "label_smoothing_factor": ((0, 0.0), "Label smoothing is part of the loss: take cdpo"),
    "neftune_noise_alpha": ((None,), "Its noise would depend on the length of the packed row"),
    "parallelism_config": ((None,), "Split rows by packstore.torch.parallel in your own loop"),
    "deepspeed": ((None,), "Run DeepSpeed's engine in a loop of your own: docs/loaders.md"),
    "fp16": ((False,), "Log-probs of a packed row need bf16"),
    "fp16_full_eval": ((False,), "Leave it out"),
    "bf16_full_eval": ((False,), "Use bf16, which is autocast"),
    "torch_compile": ((False,), "packstore.torch.compile_layers compiles its layers"),
    "dataloader_drop_last": ((False,), "No example is left out"),
}
"""Setting -> values that are taken, and what to do for another; all other settings are honoured."""


def check_arguments(args: Any) -> None:
    """Refuses settings that packs do not go with."""
    for name, (taken, remedy) in REFUSED.items():
        value = getattr(args, name, taken[0])
        if value not in taken:
            rule = f"it must be {taken[0]!r} with packs"
            raise ConfigError(sentence(f"setting {name}", rule, repr(value), remedy))
