"""The example that gives TRL's own DPOTrainer packed pairs without padding: losses and
gradients are those of TRL's padded run on the same texts.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from children import run_python

import packstore

EXAMPLE = Path(__file__).parents[3] / "examples" / "trl_padding_free.py"
NUM_PAIRS = 40
BOUND = 1e-5
"""Relative, in float32; discopop divides by its small tau."""

LAYOUTS = [
    pytest.param("concat", marks=pytest.mark.slow),
    pytest.param("shared_prefix", marks=pytest.mark.slow),
    "trees",
]
SETTINGS: dict[str, dict[str, Any]] = {
    "reference model": {},
    "precomputed": {"precompute_ref_log_probs": True},
    "adapter": {"learning_rate": 1e-2},
    "weighting": {"use_weighting": True, "ld_alpha": 0.5, "bf16": True},
}

METRICS = ("loss", "grad_norm", "num_tokens", "entropy", "logits/chosen")
METRICS += ("logps/chosen", "logps/rejected", "rewards/margins")
"""Of the logged ones; accuracies hang on the last bit while policy and reference agree."""

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def trl() -> Any:
    return pytest.importorskip("trl", reason="TRL's own trainer")


@pytest.fixture(scope="module")
def example(trl: Any) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


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


def random_words(generator: torch.Generator, low: int, high: int) -> str:
    count = int(torch.randint(low, high, (), generator=generator))
    numbers = torch.randint(49, (count,), generator=generator).tolist()
    return " ".join(f"w{number}" for number in numbers)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    """Texts of different lengths: one in eight is long, so that padding is costly. Many
    prompts begin alike.
    """
    generator = torch.Generator().manual_seed(0)
    beginning = random_words(generator, 12, 13)
    rows = []
    for i in range(NUM_PAIRS):
        longest = 40 if i % 8 == 0 else 9
        prompt = random_words(generator, 2, longest)
        row = {
            "prompt": f"{beginning} {prompt}" if i % 2 else prompt,
            "chosen": " " + random_words(generator, 1, longest),
            "rejected": " " + random_words(generator, 1, 9),
        }
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def model_folder(
    trl: Any, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any
) -> str:
    """A tiny model with its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    folder = str(tmp_path_factory.mktemp("model"))
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def packed(
    tmp_path_factory: pytest.TempPathFactory, model_folder: str, rows: Any
) -> dict[str, str]:
    """Layout -> the folder of the pairs, packed; the last with prompts shared by pairs."""
    folder = tmp_path_factory.mktemp("packed")
    settings: dict[str, dict[str, Any]] = {
        "concat": {"layout": "concat"},
        "shared_prefix": {},
        "trees": {"share_prefixes": "pack"},
    }
    for name, values in settings.items():
        packstore.pack(rows, folder / name, model_folder, pack_size=128, **values)
    sizes = [
        packstore.open(str(folder / name)).manifest.totals.tokens for name in settings
    ]
    assert sizes[0] > sizes[1] > sizes[2]
    return {name: str(folder / name) for name in settings}


def make_config(trl: Any, out: Path, **settings: Any) -> Any:
    defaults = {
        "output_dir": str(out),
        "per_device_train_batch_size": NUM_PAIRS,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "logging_steps": 1,
        "model_init_kwargs": {"dtype": "float32"},
        "dataloader_pin_memory": False,
    }
    return trl.DPOConfig(**{**defaults, **settings})


def padded_trainer(
    trl: Any, model_folder: str, rows: Any, out: Path, adapter: Any = None,
    **settings: Any,
) -> Any:  # fmt: skip
    from datasets import Dataset

    return trl.DPOTrainer(
        model_folder,
        args=make_config(trl, out, **settings),
        train_dataset=Dataset.from_list(rows),
        peft_config=adapter,
    )


def loss_and_gradients(trainer: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Return them for all pairs as one batch."""
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch))
    loss.backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter.grad is not None
    }
    return float(loss), gradients


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two gradients, over the largest entry of `b`."""
    differences = [float((a[name] - b[name]).abs().max()) for name in b]
    sizes = [float(gradient.abs().max()) for gradient in b.values()]
    return max(differences) / max(sizes)


def perturb(trainer: Any) -> None:
    """Move the policy away from the reference: at the same place many losses agree."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.02 * noise)


@pytest.mark.parametrize(
    "changes", [{"features": ["of-a-later-release"]}, {"format_version": 2}], ids=repr
)
def test_a_dataset_of_a_later_release_is_refused(
    example: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    pair = {"prompt": [5], "chosen": [6], "rejected": [7]}
    dataset = packstore.pack([pair], tmp_path / "ds", pack_size=16)
    (path,) = Path(dataset.url, "_packstore").glob("manifest-*.json")
    manifest = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(manifest | changes), encoding="utf-8")
    with pytest.raises(ValueError, match="newer"):
        example.load_pairs(dataset.url)


def test_it_does_not_import_packstore() -> None:
    tree = ast.parse(EXAMPLE.read_text(encoding="utf-8"))
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
    assert not any(name.startswith("packstore") for name in modules)


def loss_types(trl: Any) -> list[str]:
    """Return the losses that the help of TRL's setting names."""
    (field,) = (f for f in dataclasses.fields(trl.DPOConfig) if f.name == "loss_type")
    return re.findall(r"`'(\w+)'`", field.metadata["help"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_loss_is_that_of_padded_batches(
    trl: Any, example: Any, model_folder: str, packed: Any, rows: Any, layout: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    padded = padded_trainer(trl, model_folder, rows, tmp_path, label_smoothing=0.1)
    unpadded = example.PaddingFreeDPOTrainer(
        model_folder,
        make_config(trl, tmp_path, label_smoothing=0.1),
        train_dataset=example.load_pairs(packed[layout]),
    )
    perturb(padded)
    perturb(unpadded)
    names = loss_types(trl)
    assert len(names) >= 15
    for name in names:
        padded.loss_types = unpadded.loss_types = [name]
        expected_loss, expected_gradients = loss_and_gradients(padded)
        loss, gradients = loss_and_gradients(unpadded)
        assert gradients.keys() == expected_gradients.keys()
        difference = largest_difference(gradients, expected_gradients)
        print(f"{name}: loss {loss - expected_loss:g}, gradients {difference:g}")
        assert loss == pytest.approx(expected_loss, rel=BOUND), name
        assert difference < BOUND, name


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("reference model", marks=pytest.mark.slow),
        pytest.param("precomputed", marks=pytest.mark.slow),
        pytest.param("adapter", marks=pytest.mark.slow),
        pytest.param("weighting", marks=pytest.mark.slow),
    ],
)
def test_it_trains_as_with_padding(
    trl: Any, example: Any, model_folder: str, packed: Any, rows: Any, name: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    """With the reference of each setting: a second model, stored log-probs, or the model
    without its adapter.
    """
    settings = {**SETTINGS[name], "max_steps": 4}
    adapter = None
    if name == "adapter":
        peft = pytest.importorskip("peft", reason="adapters")
        adapter = peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        )
    torch.manual_seed(3)
    padded = padded_trainer(
        trl, model_folder, rows, tmp_path, adapter=adapter, **settings
    )
    torch.manual_seed(3)
    unpadded = example.PaddingFreeDPOTrainer(
        model_folder,
        make_config(trl, tmp_path, **settings),
        train_dataset=example.load_pairs(packed["shared_prefix"]),
        peft_config=adapter,
    )
    model_tokens = count_model_tokens(unpadded)
    padded.train()
    unpadded.train()

    expected_records = [line for line in padded.state.log_history if "loss" in line]
    records = [line for line in unpadded.state.log_history if "loss" in line]
    assert len(records) == len(expected_records) == 4
    for record, expected in zip(records, expected_records, strict=True):
        assert record.keys() == expected.keys()
        for metric in METRICS:
            value = pytest.approx(expected[metric], rel=1e-3, abs=1e-4)
            assert record[metric] == value, metric
    assert records[-1]["loss"] < records[0]["loss"]
    # The tokens of the sequences, and nothing else, in every pass of the policy.
    assert set(model_tokens) == {int(records[0]["num_tokens"])}
    batch = next(iter(unpadded.get_train_dataloader()))
    assert example.largest_difference(unpadded.model, batch) < 1e-2


def count_model_tokens(trainer: Any) -> list[int]:
    """Return a list to which each pass of the policy adds the tokens of its input."""
    num_tokens: list[int] = []
    embedding = trainer.model.get_input_embeddings()
    embedding.register_forward_hook(
        lambda _, inputs, __: num_tokens.append(inputs[0].numel())
    )
    return num_tokens


def test_the_difference_that_it_prints(
    trl: Any, example: Any, model_folder: str, packed: Any, tmp_path: Path
) -> None:
    """It is near 0 if the model separates sequences, and large if it does not."""
    trainer = example.PaddingFreeDPOTrainer(
        model_folder,
        make_config(trl, tmp_path),
        train_dataset=example.load_pairs(packed["concat"]),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    assert example.largest_difference(trainer.model, batch) < 1e-5

    head_and_backbone = trainer.model.forward.__wrapped__

    def without_positions(**inputs: Any) -> Any:
        inputs.pop("position_ids", None)
        return head_and_backbone(**inputs)

    trainer.model.forward = example.without_padding(without_positions)
    assert example.largest_difference(trainer.model, batch) > 1e-2


@pytest.mark.slow
def test_the_script_runs(model_folder: str, packed: Any, tmp_path: Path) -> None:
    command = [EXAMPLE, model_folder, packed["shared_prefix"], str(tmp_path / "run")]
    environment = {"ACCELERATE_USE_CPU": "true"}
    done = run_python(*map(str, command), cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "largest difference:" in done.stdout
    assert (tmp_path / "run" / "model.safetensors").exists()
