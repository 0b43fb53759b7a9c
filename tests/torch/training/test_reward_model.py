"""Reward models: trained on packs, loaded by transformers, and equal to TRL's
RewardTrainer.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gradients import scores_alone
from small_jobs import write_jsonl
from train_runs import losses
from transformers import AutoModelForSequenceClassification

import packstore
from packstore.cli import main
from packstore.errors import CompatibilityError, ConfigError
from packstore.testing import random_examples
from packstore.torch import (
    PackedPolicy,
    PreferenceLoss,
    collate,
    evaluate,
    pad_batch,
    pad_segments,
    segment_scores,
    train,
    use_packed_attention,
)
from packstore.torch.models.load import load_model

END, MARGIN = 49, 0.3
EXAMPLES = random_examples(6, seed=3)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.*:FutureWarning"
)


def record(i: int) -> dict[str, Any]:
    """A pair; each response ends with the end token, which is also the padding of the
    model.
    """
    chosen, rejected = [3 + i % 7] * (1 + i % 7) + [END], [4, 20 + i % 9, END]
    scores = {"chosen_reward": i / 9, "rejected_reward": -0.5}
    text = {"prompt": [1, 2, i % 9], "chosen": chosen, "rejected": rejected}
    return {
        **text,
        **scores,
        "source": ("forum", "wiki")[i % 3 == 0],
        "trust": i % 5 / 4,
    }


@pytest.fixture(scope="module")
def made(
    kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory
) -> SimpleNamespace:
    """A causal LM, and pairs in packs of either layout."""
    folder = tmp_path_factory.mktemp("reward")
    model = kit.tiny_model(eos_token_id=END)
    model.save_pretrained(folder / "model")
    write_jsonl(folder / "rows.jsonl", [record(i) for i in range(40)])
    how: dict[str, Any] = {"pack_size": 60, "carry": ("source:string", "trust:float64")}
    data = [
        packstore.pack(
            str(folder / "rows.jsonl"), str(folder / layout), layout=layout, **how
        )
        for layout in ("concat", "shared_prefix")
    ]
    return SimpleNamespace(model=str(folder / "model"), data=data)


def settings(made: SimpleNamespace, output: Path, **others: Any) -> dict[str, Any]:
    return {
        "model": made.model,
        "train_dataset": made.data[0].url,
        "eval_dataset": made.data[1].url,
        "output_dir": str(output),
        "loss": "bradley_terry",
        "loss_parameters": {"margin": MARGIN, "center": 0.01},
        "dtype": "float64",
        "examples_per_step": 8,
        "learning_rate": 3e-3,
        "warmup_steps": 0,
        **others,
    }


@torch.no_grad()
def scored_by_transformers(folder: Path) -> np.ndarray:
    """Scores `[n, 2]` of the pairs by the exported model, one by one and padded on the
    right.
    """
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float64
    ).eval()
    assert model.config.num_labels == 1
    pad = model.config.pad_token_id
    rows = [
        r["prompt"] + r[side]
        for r in map(record, range(40))
        for side in ("chosen", "rejected")
    ]
    alone = torch.stack([model(torch.tensor([ids])).logits[0, 0] for ids in rows])
    size = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (size - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (size - len(row)) for row in rows])
    padded = model(ids, attention_mask=mask).logits[:, 0]
    assert (alone - padded).abs().max() < 1e-6
    return alone.view(-1, 2).numpy()


def test_a_run_and_its_model_in_transformers(
    made: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scores, metrics and accuracy by column are those of the exported model; it goes
    on.
    """
    result = train(**settings(made, tmp_path / "run", num_train_epochs=4))
    scores = scored_by_transformers(result.model)
    gaps = scores[:, 0] - scores[:, 1]
    by: dict[str, list[float]] = defaultdict(list)
    for i, gap in enumerate(gaps):
        by[record(i)["source"]].append(float(gap > 0))
    loss = PreferenceLoss("bradley_terry", margin=MARGIN, center=0.01)
    for data in made.data:
        model = load_model(result.model, dtype="float64", scores=True)
        found = evaluate(model, data, loss=loss, by="source", rows=True)
        assert (
            np.abs(np.array(found["rows"]["scores"].to_pylist()) - scores).max() < 1e-6
        )
        names = [*found["rows"].column_names, *found["metrics"]]
        assert not [name for name in names if "logps" in name]
        for source, right in by.items():
            assert found["by"][source]["rewards/accuracies"] == pytest.approx(
                mean(right)
            )
        assert found["metrics"]["rewards/margins"] == pytest.approx(
            gaps.mean(), abs=1e-6
        )
    margins = [MARGIN * (i / 9 + 0.5) for i in range(40)]
    expected = np.log1p(np.exp(-(gaps - margins))) + 0.01 * scores.sum(1) ** 2
    assert found["metrics"]["loss"] == pytest.approx(expected.mean(), abs=1e-6)
    assert result.evaluation["eval_loss"] == pytest.approx(expected.mean(), abs=1e-6)
    assert (
        result.evaluation["eval_rewards/accuracies"] == mean(map(float, gaps > 0)) > 0.9
    )
    assert losses(tmp_path / "run")[0] > losses(tmp_path / "run")[-1]
    flags = ["--loss", "bradley_terry", "--dtype", "float64", "--json"]
    capsys.readouterr()
    assert (
        main(["evaluate", made.data[0].url, "--model", str(result.model), *flags]) == 0
    )
    printed = json.loads(capsys.readouterr().out)["metrics"]
    assert printed["rewards/accuracies"] == mean(map(float, gaps > 0))
    still = {"model": str(result.model), "max_steps": 1, "learning_rate": 0.0}
    first = train(**settings(made, tmp_path / "on", **still))
    assert first.evaluation["eval_loss"] == pytest.approx(expected.mean(), abs=1e-6)


@pytest.mark.slow
def test_the_head_is_drawn_by_the_seed(made: SimpleNamespace, tmp_path: Path) -> None:
    first = [
        train(**settings(made, tmp_path / str(i), seed=seed, max_steps=1)).metrics[
            "loss"
        ]
        for i, seed in enumerate((42, 42, 1))
    ]
    assert first[0] == first[1] != first[2]


def test_weights_of_a_column_in_train_and_evaluate(
    made: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sums of weights times losses, over the sum of weights of the step, or of all."""
    still = {"loss_parameters": {"weight_field": "trust"}, "learning_rate": 0.0}
    result = train(**settings(made, tmp_path, examples_per_step=99, **still))
    scores = scored_by_transformers(result.model)
    each = np.log1p(np.exp(scores[:, 1] - scores[:, 0]))
    expected = np.average(each, weights=[record(i)["trust"] for i in range(40)])
    assert abs(expected - each.mean()) > 1e-3
    assert losses(tmp_path) == pytest.approx([expected], abs=1e-6)
    assert result.evaluation["eval_loss"] == pytest.approx(expected, abs=1e-6)
    flags = [
        "--loss",
        "bradley_terry",
        "--loss-parameter",
        "weight_field=trust",
        "--json",
    ]
    capsys.readouterr()
    assert (
        main(["evaluate", made.data[0].url, "--model", str(result.model), *flags]) == 0
    )
    printed = json.loads(capsys.readouterr().out)["metrics"]
    assert printed["loss"] == pytest.approx(expected, abs=1e-5)


def test_an_adapter_holds_the_head(made: SimpleNamespace, tmp_path: Path) -> None:
    given = {"peft_config": {"r": 4}, "learning_rate": 1e-2, "num_train_epochs": 3}
    result = train(**settings(made, tmp_path / "run", **given))
    model = load_model(result.model, dtype="float64", scores=True)
    loss = PreferenceLoss("bradley_terry", margin=MARGIN, center=0.01)
    found = evaluate(model, made.data[1], loss=loss)["metrics"]
    for name in ("loss", "rewards/accuracies"):
        assert found[name] == pytest.approx(result.evaluation[f"eval_{name}"], abs=1e-9)
    assert found["rewards/accuracies"] > 0.8
    more = settings(made, tmp_path / "on", model=str(result.model), max_steps=2)
    assert train(**more).evaluation["eval_loss"] != result.evaluation["eval_loss"]


def test_what_does_not_fit_is_refused(
    made: SimpleNamespace, kit: SimpleNamespace
) -> None:
    causal = use_packed_attention(kit.tiny_model())
    with pytest.raises(
        CompatibilityError, match=r"it is for a reward model; found a causal LM"
    ):
        evaluate(causal, made.data[0], loss="bradley_terry")
    with pytest.raises(
        CompatibilityError, match=r"it is for a causal LM; found a reward model"
    ):
        evaluate(
            use_packed_attention(kit.tiny_model(head="score")), made.data[0], loss="cpo"
        )
    with pytest.raises(CompatibilityError, match=r"LlamaForCausalLM.*score"):
        segment_scores(causal, kit.row())
    two = kit.tiny_model(head="score")
    two.score = torch.nn.Linear(two.score.in_features, 2, bias=False)
    with pytest.raises(CompatibilityError, match=r"shape \(2, "):
        segment_scores(use_packed_attention(two), kit.row())
    with pytest.raises(ConfigError, match="per_token go with a causal LM only"):
        PackedPolicy(kit.tiny_model(head="score"), per_token=True)
    with pytest.raises(ConfigError, match=r"must hold every weight .*score\.weight"):
        load_model(made.model, scores=True)


FAMILIES = [
    "gpt2",
    "gpt_neox",
    "qwen3",
    "gemma3_text",
    "opt",
    "falcon",
    "jamba",
    "mixtral",
]


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_scores_are_those_of_transformers(kit: SimpleNamespace, name: str) -> None:
    """Of sequences alone, whose last token may be padding; with padding of any kind."""
    model = kit.tiny_family(name, head="score")
    for pad in (None, int(EXAMPLES.input_ids[EXAMPLES.sequence_offsets[3] - 1])):
        model.config.pad_token_id = pad
        model.set_attn_implementation("eager")
        expected = torch.stack(list(scores_alone(model, EXAMPLES)))
        use_packed_attention(model)
        for layout in ("concat", "shared_prefix"):
            batch = collate(kit.packed(EXAMPLES, [2, 4], layout), "preference")
            padded = pad_batch(pad_segments(batch, 4), num_tokens=400, num_segments=40)
            for each in (batch, padded):
                scores = segment_scores(model, each)
                assert (scores[:12] - expected).abs().max() < 1e-5
                assert scores.isfinite().all()


@pytest.mark.filterwarnings("ignore")
def test_steps_are_those_of_trls_reward_trainer(
    kit: SimpleNamespace, tmp_path: Path
) -> None:
    """Losses of ten steps, with margins and centering: TRL's pad, ours lie in a
    pack.
    """
    trl = pytest.importorskip("trl", reason="TRL's own trainer")
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(50)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w49", pad_token="w49"
    )
    model = kit.tiny_model(dtype=torch.float32, head="score", pad_token_id=END)
    packed = use_packed_attention(copy.deepcopy(model))
    rows = [record(i) for i in range(40)]
    sides = {
        f"{s}_ids": [r["prompt"] + r[s] for r in rows] for s in ("chosen", "rejected")
    }
    margins = [r["chosen_reward"] - r["rejected_reward"] for r in rows]
    args = trl.RewardConfig(
        output_dir=str(tmp_path), learning_rate=1e-3, max_steps=10, logging_steps=1,
        per_device_train_batch_size=4, save_strategy="no", report_to=[], use_cpu=True, bf16=False,
        disable_tqdm=True, lr_scheduler_type="constant", center_rewards_coefficient=0.01,
        train_sampling_strategy="sequential", dataloader_pin_memory=False, max_grad_norm=0.0,
        gradient_checkpointing=False, weight_decay=0.0,
    )  # fmt: skip
    data = Dataset.from_dict({**sides, "margin": margins})
    trainer = trl.RewardTrainer(
        model, args, train_dataset=data, processing_class=tokenizer
    )
    trainer.train()
    expected = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    loss_fn = PreferenceLoss("bradley_terry", margin=1.0, center=0.01)
    optimizer = torch.optim.AdamW(packed.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(10):
        (batch,) = packstore.torch.pack_in_memory(rows[4 * step : 4 * step + 4], 400)
        loss = loss_fn(segment_scores(packed, batch), batch).loss
        assert float(loss.detach()) == pytest.approx(expected[step], abs=1e-5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert np.ptp(expected) > 0.1
