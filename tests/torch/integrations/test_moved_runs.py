"""The runs that pages for users of other trainers show: every key of the other trainer
is in the table, and packstore's files train a tiny model with the same settings.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from amounts import slow_except
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import packstore
from packstore.cli import main

DOCS = Path(__file__).parents[3] / "docs"
FENCE = re.compile(r"^```(?:yaml|sh)\n# ([\w.-]+)\n(.*?)^```$", re.M | re.S)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass(frozen=True)
class Trainer:
    """Names of another trainer, and a record of the dataset that its page packs."""

    page: str
    record: Mapping[str, Any]
    learning_rate: str
    epochs: str
    scheduler: str
    batch: tuple[str, ...]
    rank: str
    alpha: str | None = None  # None: twice the rank
    default_scheduler: str = "linear"
    gpus: Mapping[str, int] = field(default_factory=dict)  # lora or full -> number


USER = {"role": "user", "content": "Add {i} and 2."}
GOOD = {"role": "assistant", "content": "It is {i} + 2. " * 16}
BAD = {"role": "assistant", "content": "I do not know {i}. " * 12}

TRAINERS = [
    Trainer(
        page="from-llama-factory.md",
        record={
            "conversations": [{"from": "human", "value": USER["content"]}],
            "chosen": {"from": "gpt", "value": GOOD["content"]},
            "rejected": {"from": "gpt", "value": BAD["content"]},
        },
        learning_rate="learning_rate",
        epochs="num_train_epochs",
        scheduler="lr_scheduler_type",
        batch=("per_device_train_batch_size", "gradient_accumulation_steps"),
        rank="lora_rank",
    ),
    Trainer(
        page="from-axolotl.md",
        record={"conversation": [USER], "chosen": GOOD, "rejected": BAD},
        learning_rate="learning_rate",
        epochs="num_epochs",
        scheduler="lr_scheduler",
        batch=("micro_batch_size", "gradient_accumulation_steps"),
        rank="lora_r",
        alpha="lora_alpha",
    ),
    Trainer(
        page="from-ms-swift.md",
        record={"messages": [USER, GOOD], "rejected_response": BAD["content"]},
        learning_rate="learning_rate",
        epochs="num_train_epochs",
        scheduler="lr_scheduler_type",
        batch=("per_device_train_batch_size", "gradient_accumulation_steps"),
        default_scheduler="cosine",
        rank="lora_rank",
        alpha="lora_alpha",
        gpus={"full": 4},
    ),
    Trainer(
        page="from-trl.md",
        record={"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        learning_rate="learning_rate",
        epochs="num_train_epochs",
        scheduler="lr_scheduler_type",
        batch=("per_device_train_batch_size", "gradient_accumulation_steps"),
        rank="lora_r",
        alpha="lora_alpha",
    ),
]


def blocks(page: str) -> dict[str, str]:
    """Return the blocks of a page whose first line is a file name: name -> text."""
    return dict(FENCE.findall((DOCS / page).read_text(encoding="utf-8")))


def theirs(page: str, name: str) -> dict[str, Any]:
    """Return the settings of the other trainer, of a YAML file or of a command."""
    text = blocks(page)
    if f"{name}.yaml" in text:
        return yaml.safe_load(text[f"{name}.yaml"])
    words = shlex.split(text[f"{name}.sh"].replace("\\\n", " "))
    flags = [i for i, word in enumerate(words) if word.startswith("--")]
    return {words[i].removeprefix("--"): yaml.safe_load(words[i + 1]) for i in flags}


def keys_of(settings: Any) -> Iterator[str]:
    """Yield the names of settings, also of nested ones."""
    if isinstance(settings, dict):
        for name, value in settings.items():
            yield name
            yield from keys_of(value)
    elif isinstance(settings, list):
        for value in settings:
            yield from keys_of(value)


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda t: Path(t.page).stem)
def test_the_table_has_every_key(trainer: Trainer) -> None:
    page = (DOCS / trainer.page).read_text(encoding="utf-8")
    table = page.partition("### Every key\n")[2].partition("\n## ")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    lora, full = theirs(trainer.page, "dpo-lora"), theirs(trainer.page, "dpo-full")
    assert named == {*keys_of(lora), *keys_of(full)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama with a tokenizer of bytes that has a chat template."""
    folder = str(tmp_path_factory.mktemp("model"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {letter: i for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def filled(value: Any, i: int) -> Any:
    """Return a record with a number in its texts."""
    if isinstance(value, str):
        return value.replace("{i}", str(i))
    if isinstance(value, list):
        return [filled(item, i) for item in value]
    return {name: filled(item, i) for name, item in value.items()}


def write_changed(path: Path, text: str, changed: Mapping[str, Any]) -> str:
    """Write a YAML file of a page with other values of some settings."""
    for name, value in changed.items():
        text = re.sub(rf"^{name}: .*$", f"{name}: {value}", text, flags=re.M)
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def data(
    request: pytest.FixtureRequest, model: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Trainer, dict[str, str]]:
    """The trainer, and the datasets that its page packs: name on the page -> folder."""
    trainer: Trainer = request.param
    folder = tmp_path_factory.mktemp("data")
    source = folder / "pairs.jsonl"
    lines = [json.dumps(filled(trainer.record, i)) for i in range(200)]
    source.write_text("\n".join(lines), encoding="utf-8")

    text = blocks(trainer.page)["pack.yaml"]
    job = yaml.safe_load(text)
    out = folder / "packed"
    changed = {"source": source, "out": out, "tokenizer": model, "num_workers": 0}
    config = write_changed(folder / "pack.yaml", text, changed)
    assert main(["pack", "--config", config, "--quiet"]) == 0
    if "validation_fraction" in job:
        parts = {part: str(out / part) for part in ("train", "validation")}
        return trainer, {f"{job['out']}/{part}": parts[part] for part in parts}
    return trainer, {job["out"]: str(out)}


CUSTOMER = {"from": "customer", "value": "Add 1 and 2."}
ANSWER = {"from": "bot", "value": "It is 3."}
REFUSAL = {"from": "bot", "value": "I do not know."}
QUESTION = {"from": "human", "value": "Add 1 and 2."}
REPLY = {"from": "gpt", "value": "It is 3."}
OWN_ROLES = ["--role=customer=user", "--role=bot=assistant"]

MAPPED: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "columns of a prompt": (
        {"question": "Add 1 and 2.", "chosen": "3", "rejected": "4"},
        ["--field=prompt=question", "--as-chat"],
        "preference",
    ),
    "columns of messages": (
        {"dialogue": [QUESTION, REPLY]},
        ["--field=messages=dialogue"],
        "sft",
    ),
    "kto_tag": (
        {"conversations": [QUESTION, REPLY], "good": True},
        ["--field=score=good"],
        "scored",
    ),
    "tags of chats": ({"conversations": [CUSTOMER, ANSWER]}, OWN_ROLES, "sft"),
    "tags of pairs": (
        {"conversations": [CUSTOMER], "chosen": ANSWER, "rejected": REFUSAL},
        [*OWN_ROLES, "--field=prompt=conversations"],
        "preference",
    ),
}
"""Entry of dataset_info.json -> record, the flags that its page names, and the kind."""


@pytest.mark.parametrize("name", MAPPED)
def test_mapped_fields_are_packed(name: str, model: str, tmp_path: Path) -> None:
    record, flags, kind = MAPPED[name]
    source, out = tmp_path / "records.jsonl", tmp_path / "out"
    source.write_text(f"{json.dumps(record)}\n" * 5, encoding="utf-8")
    settings = ["--tokenizer", model, "--num-workers=0", "--quiet"]
    assert main(["pack", str(source), str(out), *settings, *flags]) == 0
    manifest = packstore.open(str(out)).manifest
    assert (manifest.kind, manifest.totals.examples) == (kind, 5)

    page = (DOCS / "from-llama-factory.md").read_text(encoding="utf-8")
    for flag in flags:
        assert flag.replace("=", " ", 1) in page


def check_trl_arguments(args: Any, settings: Mapping[str, Any]) -> None:
    """Compare a run with TRL's configuration, and so with defaults of TRL."""
    trl = pytest.importorskip("trl", reason="TRL's own configuration")
    names = {f.name for f in fields(trl.DPOConfig)}
    given = {name: settings[name] for name in settings if name in names}
    config = trl.DPOConfig(**given, use_cpu=True, bf16=False)
    for name in (
        "activation_checkpointing",
        "adam_beta1",
        "adam_beta2",
        "learning_rate",
        "logging_steps",
        "lr_scheduler_type",
        "max_grad_norm",
        "optim",
        "seed",
        "warmup_steps",
        "weight_decay",
    ):
        assert getattr(args, name) == getattr(config, name), name


@pytest.mark.parametrize("kind", slow_except(["lora", "full"], "lora"))
@pytest.mark.parametrize(
    "data",
    slow_except(TRAINERS, TRAINERS[0]),
    indirect=True,
    ids=lambda t: Path(t.page).stem,
)
def test_the_same_settings_train(
    data: tuple[Trainer, dict[str, str]], kind: str, model: str, tmp_path: Path
) -> None:
    trainer, folders = data
    text = blocks(trainer.page)[f"train-{kind}.yaml"]
    run = yaml.safe_load(text)
    output = tmp_path / "run"
    train_dataset = folders[run["train_dataset"]]
    changed = {
        "model": model,
        "output_dir": output,
        "train_dataset": train_dataset,
        "eval_dataset": folders.get(run["eval_dataset"], train_dataset),
        "max_steps": 3,
        "num_train_epochs": 1,
    }
    config = write_changed(tmp_path / "train.yaml", text, changed)
    assert main(["train", config, "--quiet"]) == 0

    settings = theirs(trainer.page, "dpo-lora")
    if kind == "full":
        settings |= theirs(trainer.page, "dpo-full")
    args = torch.load(output / "training_args.bin", weights_only=False)
    assert args.learning_rate == pytest.approx(settings[trainer.learning_rate])
    assert args.lr_scheduler_type == settings.get(
        trainer.scheduler, trainer.default_scheduler
    )
    assert args.warmup_steps == settings.get("warmup_ratio", 0)

    if trainer.page == "from-trl.md":
        check_trl_arguments(args, settings)

    state = json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))
    batch = math.prod(settings[name] for name in trainer.batch)
    assert run["examples_per_step"] == batch * trainer.gpus.get(kind, 1)
    if "max_steps" not in run:
        assert run["num_train_epochs"] == settings[trainer.epochs]
        pairs = packstore.open(train_dataset).manifest.pairs
        steps = pairs / run["examples_per_step"]
        assert state["global_step"] == pytest.approx(steps, rel=0.1)

    adapter = output / "adapter_config.json"
    assert adapter.exists() == (kind == "lora")
    if kind == "lora":
        lora = json.loads(adapter.read_text(encoding="utf-8"))
        assert lora["r"] == settings[trainer.rank]
        alpha = 2 * lora["r"] if trainer.alpha is None else settings[trainer.alpha]
        assert lora["lora_alpha"] == alpha
