"""TRL's DPOTrainer on a packstore dataset, without padding and without packstore.

    python examples/trl_padding_free.py MODEL DATASET OUTPUT_DIR

MODEL is a folder or a name on the hub, with its tokenizer, and DATASET a local folder
of pairs, in either layout. `datasets` reads the Parquet files, and TRL 1.16 does all
else: losses, reference, LoRA, metrics and checkpoints. A batch keeps TRL's shape, but
its padding is dropped before the model, and per-token values are put back behind it.

Limits:
- Prompts pass through the model once for each side: `packstore train` can store and
  compute them once.
- Position ids tell the sequences of a row apart. Attention in transformers heeds them
  (`sdpa`, `eager`, FlashAttention). Mamba and other recurrent layers may not: the script
  prints how far log-probs are from those of a padded pass, which must be near 0.
- `max_length` has no effect: sequences were cut, or not, when they were packed.
- With `precompute_ref_log_probs`, the passes before the training are padded.
- Tried in one process. FSDP and DeepSpeed wrap models in other ways.
"""

import functools
import itertools
import json
import sys
from pathlib import Path

import torch
from datasets import load_dataset
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from trl import DPOConfig, DPOTrainer

TOKEN_VALUES = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def load_pairs(folder):
    """Return the pairs of a dataset: `input_ids` and `labels`, chosen before rejected."""
    manifests = (Path(folder) / "_packstore").glob("manifest-*.json")
    newest = max(manifests, key=lambda path: int(path.stem.split("-")[1]))
    manifest = json.loads(newest.read_bytes())
    if manifest["format_version"] != 1 or manifest["features"]:
        raise ValueError(f"{folder} needs a newer reader")
    if manifest["kind"] != "preference":
        raise ValueError(f"{folder} must hold pairs; found {manifest['kind']}")

    files = [f"{folder}/{shard['path']}" for shard in manifest["shards"]]
    packs = load_dataset("parquet", data_files=files, split="train")
    # One pack a call: a Parquet row with many pairs becomes as many rows.
    return packs.map(
        split_pack, batched=True, batch_size=1, remove_columns=packs.column_names
    )


def split_pack(columns):
    """Return the pairs of one pack, as columns; see section 4 of `schemas/format.md`."""
    pack = {name: values[0] for name, values in columns.items()}
    ids, labels = [], []
    for i, (start, end) in enumerate(itertools.pairwise(pack["seq_boundaries"])):
        num_shared = pack["lengths"][i] - (end - start)
        shared_ids = []
        if num_shared > 0:
            parent = i - pack["parent_distances"][i]
            shared_ids = ids[parent][:num_shared]
        ids.append(shared_ids + pack["input_ids"][start:end])
        labels.append([-100] * num_shared + pack["labels"][start:end])
    return {
        "input_ids": list(zip(ids[0::2], ids[1::2], strict=True)),
        "labels": list(zip(labels[0::2], labels[1::2], strict=True)),
    }


def collate(pairs):
    """Return pairs as TRL's collator does: all chosen sequences, then all rejected."""
    sides = [(pair, side) for side in (0, 1) for pair in pairs]
    ids = [torch.tensor(pair["input_ids"][side]) for pair, side in sides]
    labels = [torch.tensor(pair["labels"][side]) for pair, side in sides]
    batch = {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence(map(torch.ones_like, ids), batch_first=True),
        "completion_mask": (pad_sequence(labels, True, -100) != -100).long(),
    }
    for name in ("ref_chosen_logps", "ref_rejected_logps"):
        if name in pairs[0]:
            batch[name] = torch.tensor([pair[name] for pair in pairs])
    return batch


def without_padding(forward):
    """Return the forward call of a model with TRL's head, run on one row of tokens."""

    @functools.wraps(forward)
    def run(*args, fused_lm_head=False, **kwargs):
        if not fused_lm_head:
            return forward(*args, **kwargs)
        is_token = kwargs.pop("attention_mask").bool()
        positions = is_token.cumsum(dim=1) - 1
        kwargs["position_ids"] = positions[is_token][None]
        kwargs["input_ids"] = kwargs["input_ids"][is_token][None]
        kwargs["labels"] = kwargs["labels"][is_token][None]
        outputs = forward(fused_lm_head=True, **kwargs)
        for name in TOKEN_VALUES:
            row = outputs.get(name)
            if row is not None:  # it has no value for the first token of the row
                padded = row.new_zeros(is_token.shape)
                padded = padded.masked_scatter(is_token, pad(row, (1, 0)))
                outputs[name] = padded[:, 1:]
        return outputs

    return run


def without_adapter(model):
    """Return the model inside PEFT's wrapper, whose layers have the adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class PaddingFreeDPOTrainer(DPOTrainer):
    """DPOTrainer on pairs of :func:`load_pairs`; its models see no padding."""

    def __init__(self, model, args, **kwargs):
        args.remove_unused_columns = False
        super().__init__(model, args=args, data_collator=collate, **kwargs)
        policy = without_adapter(self.model)
        policy.forward = without_padding(policy.forward)
        if self.ref_model is not None:
            self.ref_model.forward = without_padding(self.ref_model.forward)

    def _prepare_dataset(self, dataset, *args):
        """Return the dataset as it is: its pairs are token ids."""
        return dataset


def largest_difference(model, batch):
    """Return how far a log-prob is from the padded pass; near 0 if packing is invisible.

    Args:
        model: of a :class:`PaddingFreeDPOTrainer`.
        batch: from :func:`collate`, on the device of the model.
    """
    model = without_adapter(model)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    labels = inputs["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
    padded_forward = model.forward.__wrapped__
    with torch.no_grad():
        row = model(**inputs, labels=labels, fused_lm_head=True)
        padded = padded_forward(**inputs, labels=labels, fused_lm_head=True)
    return (row.log_probs - padded.log_probs).abs().max().item()


def main():
    model, folder, output_dir = sys.argv[1:]
    args = DPOConfig(output_dir=output_dir, use_cpu=not torch.cuda.is_available())
    trainer = PaddingFreeDPOTrainer(model, args, train_dataset=load_pairs(folder))
    first_batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    print("largest difference:", largest_difference(trainer.model, first_batch))
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
