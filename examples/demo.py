"""``make demo``: preference pairs in, packed shards, and DPO steps out, in under two
minutes.

Packs the project's own sample of pairs (examples/sample) with a tokenizer trained on
it, shows one pack, then aligns a tiny random model with DPO and watches a held-out set.
CPU only; everything is written to ./demo, which is made anew.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import time
import warnings
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

import packstore
from packstore.cli import main as command_line
from packstore.torch import (
    PackedDataLoader,
    PackedDataset,
    PreferenceLoss,
    segment_logps,
    use_packed_attention,
)

HERE = Path(__file__).parent
OUT = Path("demo")
PACK_SIZE = 512
EPOCHS = 5
console = Console(highlight=False, soft_wrap=True)


def split_sample() -> tuple[Path, Path]:
    """Every eighth pair is held out."""
    lines = (
        (HERE / "sample" / "pairs.jsonl").read_text(encoding="utf-8").splitlines(True)
    )
    train, held_out = OUT / "train.jsonl", OUT / "held-out.jsonl"
    train.write_text("".join(x for i, x in enumerate(lines) if i % 8), encoding="utf-8")
    held_out.write_text("".join(lines[::8]), encoding="utf-8")
    return train, held_out


def train_tokenizer(pairs: Path) -> Path:
    """A small byte-level BPE, saved as Hugging Face saves one."""
    texts = []
    for line in pairs.read_text(encoding="utf-8").splitlines():
        pair = json.loads(line)
        texts += [
            pair["chosen"],
            pair["rejected"],
            *(turn["content"] for turn in pair["prompt"]),
        ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder = OUT / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>"}), encoding="utf-8"
    )
    return folder


def tiny_model(vocab_size: int) -> LlamaForCausalLM:
    """A random Llama of about 150,000 parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return use_packed_attention(LlamaForCausalLM(config))


def evaluate(policy: LlamaForCausalLM, reference: LlamaForCausalLM, url: str) -> float:
    """Share of held-out pairs whose chosen response gained more than the
    rejected one.
    """
    right = pairs = 0.0
    loss_fn = PreferenceLoss("dpo", beta=0.1)
    with torch.no_grad():
        for batch in PackedDataLoader(PackedDataset(url, shuffle=False)):
            logps = segment_logps(batch, logits=policy(**batch.model_inputs()).logits)
            ref = segment_logps(batch, logits=reference(**batch.model_inputs()).logits)
            total, count = loss_fn(logps, batch, ref_logps=ref).metrics[
                "rewards/accuracies"
            ]
            right, pairs = right + float(total), pairs + float(count)
    return right / pairs


def align(train: str, held_out: str, vocab_size: int) -> None:
    """DPO steps; prints loss and accuracy of each epoch."""
    policy = tiny_model(vocab_size)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4)
    loss_fn = PreferenceLoss("dpo", beta=0.1)
    data = PackedDataset(train, seed=0)
    console.print("epoch  steps    loss  accuracy  held-out accuracy", style="bold")
    for epoch in range(EPOCHS):
        data.set_epoch(epoch)
        loss_sum = right = pairs = 0.0
        steps = 0
        for batch in PackedDataLoader(data, packs_per_batch=2):
            with torch.no_grad():
                ref = segment_logps(
                    batch, logits=reference(**batch.model_inputs()).logits
                )
            logps = segment_logps(batch, logits=policy(**batch.model_inputs()).logits)
            out = loss_fn(logps, batch, ref_logps=ref)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            loss_sum += float(out.loss_sum)
            pairs += float(out.count)
            right += float(out.metrics["rewards/accuracies"][0])
        score = evaluate(policy, reference, held_out)
        console.print(
            f"{epoch + 1:5} {steps:6} {loss_sum / pairs:7.4f} {right / pairs:9.1%} "
            f"{score:18.1%}"
        )


def main() -> None:
    """The whole way."""
    start = time.perf_counter()
    logging.getLogger("packstore").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    train, held_out = split_sample()
    tokenizer = train_tokenizer(train)
    settings = {
        "tokenizer": tokenizer,
        "chat_template": "chatml",
        "pack_size": PACK_SIZE,
    }

    console.rule("1. pack", align="left")
    data = packstore.pack(train, OUT / "pairs", **settings)
    packstore.pack(held_out, OUT / "pairs-held-out", **settings)
    m = data.manifest
    console.print(
        f"{m.pairs} pairs in {len(data)} packs of {PACK_SIZE} tokens: fill rate "
        f"{m.fill_rate:.2%}"
    )

    console.rule("2. look", align="left")
    command_line(["show", str(OUT / "pairs"), "--tokenizer", str(tokenizer)])

    console.rule("3. align", align="left")
    vocab_size = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).get_vocab_size()
    align(str(OUT / "pairs"), str(OUT / "pairs-held-out"), vocab_size)
    console.print(
        f"\ndone in {time.perf_counter() - start:.0f} s; the dataset is in {OUT}/pairs"
    )


if __name__ == "__main__":
    main()
