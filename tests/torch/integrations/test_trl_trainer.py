"""PackedDPOTrainer beside TRL's own DPOTrainer: same config, same data, same curves."""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import packstore
from packstore.config import PackConfig
from packstore.errors import CompatibilityError, ConfigError
from packstore.torch import (
    PackCollator,
    PackedDataset,
    PackedTrainer,
)

STEPS, RATE = 30, 1e-3
DOCS = Path(__file__).parents[3] / "docs" / "from-trl.md"

pytestmark = pytest.mark.filterwarnings("ignore")


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
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token="</s>", pad_token="</s>"
    )


@pytest.fixture(scope="module")
def rows() -> Any:
    """Pairs of texts of different lengths."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(0)

    def words(low: int, high: int) -> str:
        n = int(torch.randint(low, high, (), generator=generator))
        return " ".join(
            f"w{i}" for i in torch.randint(49, (n,), generator=generator).tolist()
        )

    pairs = [
        {
            "prompt": words(2, 9),
            "chosen": " " + words(1, 20),
            "rejected": " " + words(1, 9),
        }
        for _ in range(40)
    ]
    return Dataset.from_list(pairs)


@pytest.fixture(scope="module")
def folder(kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model, stored: TRL loads the reference from there, too."""
    place = str(tmp_path_factory.mktemp("model"))
    kit.tiny_model(dtype=torch.float32).save_pretrained(place)
    return place


@pytest.fixture
def packed(tmp_path: Path, tokenizer: Any, rows: Any) -> str:
    """The folder of the same pairs, packed."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    folder = str(tmp_path / "packed")
    packstore.pack(rows, folder, tokenizer=str(tmp_path / "tokenizer"), pack_size=64)
    return folder


def config_of(trl: Any, out: Path, **settings: Any) -> Any:
    defaults = {
        "output_dir": str(out), "learning_rate": RATE, "max_steps": STEPS, "logging_steps": 1,
        "per_device_train_batch_size": 4, "save_strategy": "no", "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "bf16": False, "model_init_kwargs": {"dtype": "float32"},
        "dataloader_pin_memory": False,
    }  # fmt: skip
    return trl.DPOConfig(**{**defaults, **settings})


def packed_trainer(*args: Any, **kwargs: Any) -> Any:
    from packstore.torch import PackedDPOTrainer

    return PackedDPOTrainer(*args, **kwargs)


@pytest.fixture
def compare(trl: Any, tmp_path: Path, tokenizer: Any, rows: Any) -> Callable[..., Any]:
    """Trains a model, or that of a call, by TRL's trainer and by ours; returns TRL's
    curves.
    """

    def run(
        model: Any, peft_config: Any = None, collator: Any = None, **settings: Any
    ) -> dict[str, list[float]]:
        found = []
        for trainer_class in (trl.DPOTrainer, packed_trainer):
            torch.manual_seed(3)
            trainer = trainer_class(
                model() if callable(model) else model,
                args=config_of(trl, tmp_path / "run", **settings),
                train_dataset=rows,
                processing_class=tokenizer,
                peft_config=copy.deepcopy(peft_config),
                data_collator=collator if trainer_class is packed_trainer else None,
            )
            found.append(curves(trainer, NAMES))
        expected, ours = found
        for name, values in expected.items():
            # Of the others, rounding in float32 grows with the steps.
            bound = 2e-5 if name == "loss" else 3e-4
            assert ours[name] == pytest.approx(values, rel=bound, abs=bound), name
        return expected

    return run


def curves(trainer: Any, names: tuple[str, ...]) -> dict[str, list[float]]:
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return {name: [line[name] for line in lines] for name in names}


NAMES = ("loss", "grad_norm", "rewards/margins", "rewards/chosen", "logps/rejected")


CONFIGS: dict[str, dict[str, Any]] = {
    "truncation": {"max_length": 12, "beta": 0.5},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "ipo": {"loss_type": "ipo", "beta": 0.4},
    "robust": {"loss_type": ["robust"], "label_smoothing": 0.2},
    "mix": {"loss_type": ["sigmoid", "bco_pair", "exo_pair"], "loss_weights": [0.8, 0.2, 0.1],
            "label_smoothing": 0.01},
    "divergence": {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
    "discopop": {"loss_type": "discopop", "discopop_tau": 0.1},
    "norm": {"loss_type": "sigmoid_norm", "beta": 2.0},
    "precomputed": {"precompute_ref_log_probs": True},
    "moving reference": {"sync_ref_model": True, "ref_model_sync_steps": 7},
}  # fmt: skip
LEAST = {"truncation"}
"""Runs that `make test` has, too."""


@pytest.mark.parametrize(
    "layout", ["concat", pytest.param("shared_prefix", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in LEAST))
        for name in CONFIGS
    ],
)
def test_its_config_decides(compare: Any, folder: str, name: str, layout: Any) -> None:
    """Thirty steps: loss, gradient and rewards of every step are those of TRL's
    trainer.
    """
    collator = PackCollator("preference", PackConfig(layout=layout))
    losses = compare(folder, collator=collator, **CONFIGS[name])["loss"]
    assert max(losses) - min(losses) > 1e-2


@pytest.mark.parametrize(
    "given", ["config", pytest.param("model", marks=pytest.mark.slow)]
)
def test_adapters(compare: Any, folder: str, given: str) -> None:
    """LoRA by the trainer's `peft_config`, or a model with an adapter, is its own
    reference.
    """
    peft = pytest.importorskip("peft", reason="adapters")
    from transformers import AutoModelForCausalLM

    lora = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )

    def adapted() -> Any:
        return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora)

    how = (folder, lora) if given == "config" else (adapted,)
    assert (
        max(compare(*how, learning_rate=1e-2, max_steps=10)["rewards/margins"]) > 1e-3
    )


@pytest.mark.parametrize("has_adapter", [False, True])
def test_it_adds_no_warning_of_a_deprecation(
    trl: Any, folder: str, packed: str, rows: Any, tokenizer: Any, tmp_path: Path, has_adapter: bool
) -> None:  # fmt: skip
    """TRL's own config and PEFT warn with some releases of transformers."""
    from packstore.torch import PackedDPOTrainer

    peft_config = None
    if has_adapter:
        peft = pytest.importorskip("peft", reason="adapters")
        peft_config = peft.LoraConfig(r=2, task_type="CAUSAL_LM")
    deprecations: list[set[str]] = []
    for trainer_class, data in ((trl.DPOTrainer, rows), (PackedDPOTrainer, packed)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            args = config_of(trl, tmp_path / "run", max_steps=1, save_strategy="steps")
            trainer_class(
                folder,
                args=args,
                train_dataset=data,
                processing_class=tokenizer,
                peft_config=copy.deepcopy(peft_config),
            ).train()
        texts = {
            str(warning.message)
            for warning in caught
            if issubclass(warning.category, FutureWarning | DeprecationWarning)
        }
        deprecations.append(texts)
    own, packstores = deprecations
    assert packstores <= own


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_reference_pass_leaves_the_policy_as_it_was(
    trl: Any, folder: str, rows: Any, tokenizer: Any, tmp_path: Path, checkpointing: bool
) -> None:  # fmt: skip
    """Frozen parts of its adapter stay frozen, as in LoRA-FA."""
    peft = pytest.importorskip("peft", reason="adapters")
    from transformers import AutoModelForCausalLM

    lora = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora)
    frozen = {
        n: p for n, p in model.named_parameters() if "lora_A" in n and "default" in n
    }
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    before = {name: parameter.clone() for name, parameter in frozen.items()}
    settings = {
        "max_steps": 3,
        "learning_rate": 1e-2,
        "gradient_checkpointing": checkpointing,
    }
    args = config_of(trl, tmp_path / "run", **settings)
    trainer = packed_trainer(
        model, args=args, train_dataset=rows, processing_class=tokenizer
    )
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    assert not any(trained[name] for name in frozen)
    trainer.train()
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trained
    assert all(
        torch.equal(before[name], parameter) for name, parameter in frozen.items()
    )
    assert model.active_adapters == ["default"]


def test_reference_log_probs_are_those_of_the_records(
    trl: Any, folder: str, rows: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """In their order: the collator puts a record before those that extend it."""
    ids = [i % 40 for i in range(60)]
    records = [
        {"prompt_ids": ids[:n], "chosen_ids": ids[n : n + 6], "rejected_ids": [n % 40]}
        for n in (50, 20, 35, 5)
    ]
    config = PackConfig(layout="shared_prefix")
    batch = PackCollator("preference", config)(records)
    assert batch.example_ids.tolist() == [3, 1, 2, 0]
    args = config_of(trl, tmp_path / "run")
    trainer = packed_trainer(
        folder, args=args, train_dataset=rows, processing_class=tokenizer
    )
    found = trainer.compute_ref_log_probs(trainer.ref_model, batch)
    for i, record in enumerate(records):
        alone = PackCollator("preference", config)([record])
        expected = trainer.compute_ref_log_probs(trainer.ref_model, alone)
        for side in (0, 1):
            torch.testing.assert_close(found[side][i], expected[side][0])


@pytest.mark.parametrize(("logging_steps", "records"), [(10, 1), (4, 3)])
def test_the_last_record_has_the_metrics_since_the_one_before(
    trl: Any, folder: str, rows: Any, tokenizer: Any, tmp_path: Path, logging_steps: int,
    records: int,
) -> None:  # fmt: skip
    """Nine steps: as in TRL's trainer, nothing of the last ones is dropped."""
    found = []
    for trainer_class in (trl.DPOTrainer, packed_trainer):
        args = config_of(
            trl, tmp_path / "run", max_steps=9, logging_steps=logging_steps
        )
        trainer = trainer_class(
            folder, args=args, train_dataset=rows, processing_class=tokenizer
        )
        trainer.train()
        found.append([h for h in trainer.state.log_history if "rewards/margins" in h])
    expected, ours = found
    assert len(ours) == len(expected) == records
    for theirs, mine in zip(expected, ours, strict=True):
        for name in ("rewards/margins", "logps/chosen", "num_tokens"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), name


def test_rows_resume_from_the_next_whole_checkpoint(
    trl: Any, folder: str, rows: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """Of TRL's rows, too: a killed run left half a state, and transformers would read
    it.
    """
    found = []
    for resume in (None, True):
        args = config_of(
            trl, tmp_path, max_steps=6, save_strategy="steps", save_steps=2
        )
        trainer = packed_trainer(
            folder, args=args, train_dataset=rows, processing_class=tokenizer
        )
        trainer.train(resume_from_checkpoint=resume)
        found.append(
            [line["loss"] for line in trainer.state.log_history if "loss" in line]
        )
        state = tmp_path / "checkpoint-6" / "trainer_state.json"
        state.write_text(state.read_text(encoding="utf-8")[:99], encoding="utf-8")
    assert found[0] == found[1]


def test_its_default_precision(
    trl: Any, folder: str, rows: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """bf16 by autocast: policy and reference are rounded alike, and begin exactly
    equal.
    """
    args = config_of(trl, tmp_path, max_steps=4, bf16=True)
    trainer = packed_trainer(
        folder, args=args, train_dataset=rows, processing_class=tokenizer
    )
    found = curves(trainer, ("loss", "rewards/chosen", "rewards/margins"))
    assert trainer.accelerator.mixed_precision == "bf16"
    assert found["loss"][0] == pytest.approx(0.6931472, abs=1e-6)
    assert found["rewards/chosen"][0] == found["rewards/margins"][0] == 0
    assert found["rewards/margins"][-1] != 0


@pytest.mark.slow
def test_a_model_that_runs_whole_by_sequence(compare: Any, tmp_path: Path) -> None:
    """Falcon's own forward call takes no packed attention: it runs once a sequence, as
    in TRL.
    """
    from transformers import FalconConfig, FalconForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = FalconForCausalLM(FalconConfig(vocab_size=50, eos_token_id=49, **shape))
    model.save_pretrained(tmp_path / "falcon")
    compare(str(tmp_path / "falcon"), max_steps=4)


def test_a_packed_dataset(
    trl: Any, folder: str, tmp_path: Path, tokenizer: Any, packed: str
) -> None:
    """By its path, for training and evaluation: the first loss is ln 2, and it
    falls.
    """
    args = config_of(
        trl, tmp_path / "run", max_length=64, eval_strategy="epoch", max_steps=24
    )
    trainer = packed_trainer(
        folder, args=args, train_dataset=packed, eval_dataset=packstore.open(packed),
        processing_class=tokenizer,
    )  # fmt: skip
    losses = curves(trainer, ("loss",))["loss"]
    assert losses[0] == pytest.approx(0.6931, abs=1e-4)
    assert losses[-1] < 0.6
    assert any("eval_rewards/margins" in line for line in trainer.state.log_history)
    too_long = config_of(trl, tmp_path / "run", max_length=8)
    with pytest.raises(CompatibilityError, match="max_length"):
        packed_trainer(
            folder, args=too_long, train_dataset=packed, processing_class=tokenizer
        )
    early = config_of(
        trl, tmp_path / "run", max_length=64, precompute_ref_log_probs=True
    )
    with pytest.raises(ConfigError, match="packstore ref-logps"):
        packed_trainer(
            folder, args=early, train_dataset=packed, processing_class=tokenizer
        )


def test_weights_of_a_loss_that_is_named_twice_are_added(
    trl: Any, folder: str, tmp_path: Path, tokenizer: Any, packed: str
) -> None:
    mix: dict[str, Any] = {
        "loss_type": ["sigmoid", "ipo", "sigmoid"],
        "loss_weights": [1, 2, 3],
    }
    args = config_of(trl, tmp_path, max_length=64, **mix)
    trainer = packed_trainer(
        folder, args=args, train_dataset=packed, processing_class=tokenizer
    )
    terms = [(term.name, term.weight) for term in trainer.loss_fn.terms]
    assert terms == [("dpo", 4), ("ipo", 2)]


@pytest.mark.parametrize(
    ("settings", "mentioned"),
    [
        ({"use_weighting": True}, "use_weighting"),
        ({"ld_alpha": 0.5}, "ld_alpha"),
        ({"pad_to_multiple_of": 8}, "pad_to_multiple_of"),
        ({"truncation_mode": "keep_end"}, "truncation_mode"),
        ({"label_smoothing": 0.1}, "label_smoothing"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        (
            {"average_tokens_across_devices": False},
            "average_tokens_across_devices",
        ),
        ({"loss_type": ["sft"]}, "loss_type"),
        ({"loss_type": ["aot"]}, "'aot"),
        ({"loss_type": ["sigmod"]}, "'sigmoid'"),
        (
            {"loss_type": ["hinge"], "f_divergence_type": "js_divergence"},
            "f_divergence_type",
        ),
    ],
)
def test_settings_that_packs_do_not_go_with(
    trl: Any, folder: str, tmp_path: Path, settings: dict[str, Any], mentioned: str
) -> None:
    with pytest.raises((ConfigError, LookupError), match=mentioned):
        packed_trainer(folder, args=config_of(trl, tmp_path, **settings))


def test_every_setting_of_its_config_is_in_the_table(trl: Any) -> None:
    """A field that TRL adds fails here, and not at a user's."""
    from transformers import TrainingArguments

    own = {f.name for f in dataclasses.fields(trl.DPOConfig)}
    own -= {f.name for f in dataclasses.fields(TrainingArguments)}
    table = (
        DOCS.read_text(encoding="utf-8").split("## `DPOConfig`")[1].split("\n## ")[0]
    )
    named = set(
        re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]+)\|", table, re.M)))
    )
    assert own <= named, f"say in docs/from-trl.md what becomes of {own - named}"
    assert named <= own | {"use_liger_kernel"}, f"TRL has no {named - own}"


def test_doors_that_do_not_lead_to_packs(
    trl: Any, folder: str, tmp_path: Path, tokenizer: Any, rows: Any, packed: str
) -> None:
    from transformers import AutoModelForCausalLM, TrainingArguments

    args = config_of(trl, tmp_path)
    collator = trl.trainer.dpo_trainer.DataCollatorForPreference(pad_token_id=0)
    with pytest.raises(ConfigError, match="data_collator"):
        packed_trainer(folder, args=args, train_dataset=rows, data_collator=collator)
    with pytest.raises(ConfigError, match="compute_metrics"):
        packed_trainer(folder, args=args, train_dataset=rows, compute_metrics=print)
    model = AutoModelForCausalLM.from_pretrained(folder)
    other = config_of(trl, tmp_path, model_init_kwargs={"dtype": "bfloat16"})
    with pytest.raises(ConfigError, match="dtype"):
        packed_trainer(
            model, args=other, train_dataset=rows, processing_class=tokenizer
        )
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(CompatibilityError, match="reference"):
        PackedTrainer(model, arguments, packed, reference=model)
    dealt = PackedDataset(packed, rank=0, world_size=2)
    with pytest.raises(ConfigError, match="world_size"):
        PackedTrainer(folder, arguments, dealt).train()


def test_completions_are_logged_in_mid_training(
    trl: Any, tmp_path: Path, tokenizer: Any, rows: Any, folder: str
) -> None:
    """TRL's callback generates after each step; the steps are those without it."""

    def trainer(place: str) -> Any:
        settings = {"max_steps": 3, "gradient_checkpointing": True}
        return packed_trainer(
            folder,
            args=config_of(trl, tmp_path / place, **settings),
            train_dataset=rows,
            eval_dataset=rows.select(range(4)),
            processing_class=tokenizer,
        )

    expected = curves(trainer("without"), NAMES)
    logging = trainer("with")
    generation = transformers.GenerationConfig(
        max_new_tokens=3, do_sample=False, pad_token_id=49
    )
    callback = trl.LogCompletionsCallback(logging, generation, num_prompts=2, freq=1)
    logging.add_callback(callback)
    assert curves(logging, NAMES) == expected
    assert len(callback.table) == 2 * 3
