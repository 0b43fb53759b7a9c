"""TRL's own DPOTrainer on packed batches: every logged loss is that of a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from packstore.config import PackConfig
from packstore.torch import (
    PackCollator,
    PackedLoss,
    PackedTrainerMixin,
    PreferenceLoss,
    use_packed_attention,
)

BETA, RATE, STEPS, PER_STEP = 0.3, 0.5, 4, 6

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def trl() -> Any:
    return pytest.importorskip("trl", reason="TRL's own trainer")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token for each of the 49 words w0 … w48, and an end."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(49)} | {"</s>": 49}
    fast = Tokenizer(models.WordLevel(words, unk_token="w0"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>", pad_token="</s>")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    """Pairs of texts of different lengths."""
    generator = torch.Generator().manual_seed(0)

    def words(low: int, high: int) -> str:
        n = int(torch.randint(low, high, (), generator=generator))
        return " ".join(f"w{i}" for i in torch.randint(49, (n,), generator=generator).tolist())

    n = STEPS * PER_STEP
    return [
        {"prompt": words(2, 9), "chosen": " " + words(1, 20), "rejected": " " + words(1, 9)}
        for _ in range(n)
    ]


def plain_losses(kit: SimpleNamespace, steps: list[list[dict[str, Any]]]) -> list[float]:
    """DPO by plain descent, one unpacked sequence at a time, through the model's own attention."""
    model, ref = kit.tiny_model(), kit.tiny_model()
    for one in (model, ref):
        one.set_attn_implementation("sdpa")

    def logp(of: Any, record: dict[str, Any], name: str) -> Tensor:
        prompt, ids = record["prompt_ids"], record[f"{name}_ids"]
        row = torch.tensor([prompt + ids])
        logps = of(row).logits[0, :-1].log_softmax(-1)
        picked = logps.gather(1, row[0, 1:, None])[len(prompt) - 1 :]
        return picked.sum()

    losses = []
    for step in steps:
        total = torch.zeros((), dtype=torch.float64)
        for record in step:
            with torch.no_grad():
                base = logp(ref, record, "chosen") - logp(ref, record, "rejected")
            margin = logp(model, record, "chosen") - logp(model, record, "rejected")
            total = total - logsigmoid(BETA * (margin - base))
        loss = total / len(step)
        losses.append(float(loss.detach()))
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= RATE * p.grad
    return losses


def trainer_of(
    trl: Any,
    kit: SimpleNamespace,
    folder: Path,
    tokenizer: Any,
    rows: Any,
    **sizes: int,
) -> Any:
    """TRL's trainer with our collator and loss."""
    from datasets import Dataset

    class PackedDPOTrainer(PackedTrainerMixin, trl.DPOTrainer):  # type: ignore[misc, name-defined]
        pass

    model = use_packed_attention(kit.tiny_model())
    reference = use_packed_attention(copy.deepcopy(model)).requires_grad_(False)
    arguments = trl.DPOConfig(
        output_dir=str(folder),
        optim="sgd",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        train_sampling_strategy="sequential",
        **sizes,
    )
    return PackedDPOTrainer(
        model,
        ref_model=reference,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        data_collator=PackCollator("preference", PackConfig(layout="shared_prefix")),
        processing_class=tokenizer,
        packed_loss=PackedLoss(PreferenceLoss("dpo", beta=BETA), reference),
    )


def logged(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def groups(records: list[Any]) -> Iterator[list[Any]]:
    return (records[i : i + PER_STEP] for i in range(0, len(records), PER_STEP))


def test_its_records_through_our_collator(
    trl: Any, kit: SimpleNamespace, tmp_path: Path, tokenizer: Any, rows: Any
) -> None:
    """A micro-batch of 3 records is one packed row; two of them are a step."""
    sizes = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    trainer = trainer_of(trl, kit, tmp_path, tokenizer, rows, **sizes)
    expected = plain_losses(kit, list(groups(list(trainer.train_dataset))))
    assert logged(trainer) == pytest.approx(expected, abs=1e-4)
    assert max(expected) - min(expected) > 0.05
