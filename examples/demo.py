"""``make demo``: from preference pairs to a trained model, in less than a minute.

Packs the pairs of ``examples/sample`` with a tokenizer that is trained on them, shows a
pair of the first pack, and trains a tiny random model with DPO. It runs on a CPU and
downloads nothing. Everything is written to ./demo, which is made anew.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import sys
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

import packstore
import packstore.torch as pt
from packstore.cli import main as command_line

SAMPLE = Path(__file__).parent / "sample" / "pairs.jsonl"
OUT = Path("demo")
PACK_SIZE = 512
EPOCHS = 4
console = Console(highlight=False, soft_wrap=True)

TRAIN_CONFIG = f"""\
# packstore train {OUT}/dpo.yaml --learning-rate 5e-4
model: {OUT}/model
train_dataset: {OUT}/pairs
eval_dataset: {OUT}/pairs-held-out
output_dir: {OUT}/run

loss: dpo
loss_parameters: {{beta: 0.1}}
examples_per_step: 16
num_train_epochs: 4
learning_rate: 1e-3
"""

NEXT_STEPS = """\
Look at the packs in a browser:
  {packstore} view {out}/pairs

See what is in them, by source:
  {packstore} stats {out}/pairs --by source

Train on them by a file of settings:
  {packstore} train {out}/dpo.yaml

Then your own data: docs/quickstart.md\
"""


def split_sample() -> tuple[Path, Path]:
    """Write the pairs to train on, and every eighth, which is held out."""
    lines = SAMPLE.read_text(encoding="utf-8").splitlines(keepends=True)
    held_out_lines = lines[::8]
    train_lines = [line for number, line in enumerate(lines) if number % 8]
    train, held_out = OUT / "train.jsonl", OUT / "held-out.jsonl"
    train.write_text("".join(train_lines), encoding="utf-8")
    held_out.write_text("".join(held_out_lines), encoding="utf-8")
    return train, held_out


def train_tokenizer(pairs: Path) -> Path:
    """Train a small byte-level BPE; return the folder that it is saved in."""
    texts = []
    for line in pairs.read_text(encoding="utf-8").splitlines():
        pair = json.loads(line)
        texts += [pair["chosen"], pair["rejected"]]
        texts += [turn["content"] for turn in pair["prompt"]]
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
    """Return a random Llama of about 150,000 parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=1,
    )
    return pt.use_packed_attention(LlamaForCausalLM(config))


def align(
    policy: LlamaForCausalLM, train: packstore.Dataset, held_out: packstore.Dataset
) -> None:
    """Train with DPO; print the loss and the accuracies of each epoch."""
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4)
    loss_fn = pt.PreferenceLoss("dpo", beta=0.1)
    loader = pt.PackedDataLoader(pt.PackedDataset(train, seed=0), examples_per_step=16)
    console.print("epoch    loss  accuracy  held-out pairs", style="bold")
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        metrics = pt.Metrics()
        for batch in loader:
            with torch.no_grad():
                ref_logps = pt.packed_logps(reference, batch)
            logps = pt.packed_logps(policy, batch)
            output = loss_fn(logps, batch, ref_logps=ref_logps)
            output.loss.backward()
            metrics.add(output.metrics)
            if batch.step.last:
                optimizer.step()
                optimizer.zero_grad()
        means = metrics.means()
        figures = pt.evaluate(policy, held_out, loss=loss_fn, reference=reference)
        accuracy = figures["metrics"]["rewards/accuracies"]
        console.print(
            f"{epoch + 1:5} {means['loss']:7.4f} {means['rewards/accuracies']:9.1%} "
            f"{accuracy:15.1%}"
        )


def main() -> None:
    """Pack, show a pair, train, and print what to do next."""
    start = time.perf_counter()
    # The matrices are so small that threads would mostly wait for each other.
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    logging.getLogger("packstore").setLevel(logging.ERROR)
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    train_file, held_out_file = split_sample()
    tokenizer = train_tokenizer(train_file)
    settings = {
        "tokenizer": tokenizer,
        "chat_template": "chatml",
        "pack_size": PACK_SIZE,
        "carry": ("source:string",),
    }

    console.rule("1. Pack", align="left")
    train = packstore.pack(train_file, OUT / "pairs", **settings)
    held_out = packstore.pack(held_out_file, OUT / "pairs-held-out", **settings)
    m = train.manifest
    console.print(
        f"{m.pairs} pairs are now {len(train)} packs of {PACK_SIZE} tokens, "
        f"{m.fill_rate:.1%} full."
    )
    console.print(
        f"Each prompt is stored once: {m.totals.tokens:,} tokens instead of "
        f"{m.totals.logical_tokens:,}."
    )

    console.rule("2. Look at the first pair", align="left")
    command_line(["show", str(OUT / "pairs"), "--examples", "1", "--quiet"])

    console.rule("3. Train a tiny random model with DPO", align="left")
    tokenizer_file = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    policy = tiny_model(tokenizer_file.get_vocab_size())
    policy.save_pretrained(OUT / "model")
    (OUT / "dpo.yaml").write_text(TRAIN_CONFIG, encoding="utf-8")
    align(policy, train, held_out)

    console.rule(f"Done in {time.perf_counter() - start:.0f} s. Next", align="left")
    executable = Path(sys.executable).with_name("packstore")
    packstore_command = os.path.relpath(executable)
    console.print(NEXT_STEPS.format(packstore=packstore_command, out=OUT))


if __name__ == "__main__":
    main()
