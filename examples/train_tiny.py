"""``packstore train`` from nothing: a tiny model learns from real chats, then from real
pairs.

A random Llama of half a million parameters is trained by SFT on chats, and then by DPO
on pairs of better and worse answers; a fifth of the pairs is held out. CPU only, a few
minutes. Everything is written to the folder that is named (made anew), and the curves
to ``curves.svg`` in it::

    python examples/train_tiny.py --data ../shared/data [--out train-tiny] [--quick]

The picture needs matplotlib, which is no dependency of packstore.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import packstore
from packstore.cli import main as command_line

PAIRS = ("pairs/chat_en.jsonl", "pairs/chat_zh.jsonl")
PACK_SIZE = 1536


def split_pairs(data: Path, out: Path) -> None:
    """Every fifth pair is held out; the prompts and better answers of the others are
    the chats.
    """
    lines = [
        x
        for name in PAIRS
        for x in (data / name).read_text(encoding="utf-8").splitlines()
    ]
    pairs = [json.loads(line) for line in lines]
    train, held = [p for i, p in enumerate(pairs) if i % 5], pairs[::5]
    chats = [
        {"messages": [*p["prompt"], {"role": "assistant", "content": p["chosen"]}]}
        for p in train
    ]
    for name, records in (("train", train), ("held", held), ("chats", chats)):
        text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
        (out / f"{name}.jsonl").write_text(text, encoding="utf-8")


def pack_all(tokenizer: Path, out: Path) -> None:
    """Three datasets; the validation set in larger packs, which changes nothing."""
    for name, size in (
        ("train", PACK_SIZE),
        ("held", 2 * PACK_SIZE),
        ("chats", PACK_SIZE),
    ):
        ds = packstore.pack(
            str(out / f"{name}.jsonl"),
            str(out / name),
            str(tokenizer),
            chat_template="chatml",
            pack_size=size,
            max_length=PACK_SIZE // 2,
            on={"overlong": "truncate_response"},
            max_drop_rate=0.6,
        )
        m = ds.manifest
        print(
            f"{name}: {m.totals.examples} examples in {m.num_packs} packs",
            dict(m.records.dropped),
        )


def make_model(vocab_size: int, folder: Path) -> None:
    """A random Llama of two layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def train(settings: dict[str, Any]) -> list[dict[str, float]]:
    """One run of the command; gives its records."""
    flags = [x for name, value in settings.items() for x in (f"--{name}", str(value))]
    if command_line(["train", *flags]):
        raise SystemExit(1)
    state = Path(settings["output-dir"], "trainer_state.json").read_text(
        encoding="utf-8"
    )
    history: list[dict[str, float]] = json.loads(state)["log_history"]
    return history


def draw(
    sft: list[dict[str, float]], dpo: list[dict[str, float]], picture: Path
) -> None:
    """Losses of both runs, and the accuracy on held-out pairs."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "packstore", "svg.fonttype": "none"}
    from matplotlib import pyplot

    panels = [
        ("SFT: loss per token", sft, {"loss": "training"}),
        ("DPO: loss", dpo, {"loss": "training", "eval_loss": "held out"}),
        (
            "DPO: accuracy",
            dpo,
            {"rewards/accuracies": "training", "eval_rewards/accuracies": "held out"},
        ),
        (
            "DPO: implicit reward, held out",
            dpo,
            {"eval_rewards/chosen": "chosen", "eval_rewards/rejected": "rejected"},
        ),
    ]
    figure, axes = pyplot.subplots(1, 4, figsize=(14, 3.2), layout="constrained")
    for axis, (title, records, curves) in zip(axes, panels, strict=True):
        for name, label in curves.items():
            points = [(r["step"], r[name]) for r in records if name in r]
            style = "-o" if name.startswith("eval_") else "-"
            axis.plot(*zip(*points, strict=True), style, ms=3, lw=1.2, label=label)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[2].axhline(0.5, color="grey", lw=0.8, ls=":")
    figure.savefig(picture, metadata={"Date": None})
    print(f"picture: {picture}")


def main() -> int:
    """The whole way; 1 if the held-out accuracy did not rise."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("train-tiny"))
    parser.add_argument(
        "--quick", action="store_true", help="an epoch of each, no picture"
    )
    args = parser.parse_args()
    if not args.data.is_dir():
        print(f"skipped: no data at {args.data}")
        return 0
    start = time.perf_counter()
    out: Path = args.out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    tokenizer = args.data / "tokenizers" / "small_bpe" / "tokenizer.json"
    split_pairs(args.data, out)
    pack_all(tokenizer, out)
    make_model(Tokenizer.from_file(str(tokenizer)).get_vocab_size(), out / "start")
    common = {"examples-per-step": 8, "packs-per-batch": 2, "logging-steps": 5}
    sft = train(
        {
            **common,
            "model": out / "start",
            "train-dataset": out / "chats",
            "loss": "sft",
            "learning-rate": 2e-3,
            "num-train-epochs": 1 if args.quick else 3,
            "output-dir": out / "sft",
        }
    )
    dpo = train(
        {
            **common,
            "model": out / "sft",
            "train-dataset": out / "train",
            "eval-dataset": out / "held",
            "loss": "dpo",
            "loss-parameter": "beta=0.1",
            "learning-rate": 3e-4,
            "num-train-epochs": 1 if args.quick else 5,
            "eval-steps": 20,
            "output-dir": out / "dpo",
        }
    )
    if not args.quick:
        draw(sft, dpo, out / "curves.svg")
    last = [r for r in dpo if "eval_loss" in r][-1]
    steps = sft[-1]["step"] + dpo[-1]["step"]
    print(f"{steps} steps in {time.perf_counter() - start:.0f} s: ", end="")
    print(f"held-out accuracy {last['eval_rewards/accuracies']:.1%}, ", end="")
    print(
        f"chosen {last['eval_rewards/chosen']:+.3f}, rejected "
        f"{last['eval_rewards/rejected']:+.3f}"
    )
    return int(last["eval_rewards/accuracies"] < 0.55)


if __name__ == "__main__":
    sys.exit(main())
