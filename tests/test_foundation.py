"""The lowest layers: errors, registry, config, seeds, records."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packstore import errors
from packstore.config import (
    BatchConfig,
    PackConfig,
    PlanConfig,
    RunConfig,
    SelectConfig,
    TokenizeConfig,
    WriteConfig,
)
from packstore.config.training import TrainConfig
from packstore.errors import ConfigError, UnknownNameError, sentence
from packstore.format import Examples, seeds
from packstore.registry import NAMES_HERE
from packstore.testing import assert_examples_equal, random_examples


def test_the_exception_tree_drawn_is_the_tree_that_is() -> None:
    drawn = dict(re.findall(r"(\w+Error) *(?:\((\w+)\))?", errors.__doc__ or ""))
    classes = {
        name: cls
        for name, cls in vars(errors).items()
        if inspect.isclass(cls) and "Error" in name
    }
    assert set(drawn) - {"ValueError"} == set(classes)
    for name, builtin in drawn.items():
        assert issubclass(classes[name], errors.PackstoreError)
        if builtin:
            assert builtin in {base.__name__ for base in classes[name].__mro__}


@given(st.text(), st.text())
def test_a_sentence_is_one_line(where: str, found: str) -> None:
    text = sentence(where, "must hold", found, "Do this")
    assert text.isprintable()
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"pack_size": "8k"}, "pack_size"),
        ({"pack_size": True}, "pack_size"),
        ({"pack_size": 1}, "pack_size"),
        ({"row_group_tokens": 1 << 30}, "row_group_tokens"),
        ({"max_drop_rate": float("nan")}, "max_drop_rate"),
        ({"seed": 1 << 63}, "seed"),
        ({"seed": -(1 << 63) - 1}, "seed"),
        ({"layout": "padded"}, "layout"),
        ({"max_drop_rate": 1.5}, "max_drop_rate"),
        ({"carry": 3}, "carry"),
        ({"append_eos": "yes"}, "append_eos"),
    ],
)
def test_config_refuses(settings: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        PackConfig.of(**settings)


def test_a_text_in_place_of_a_list_is_its_only_item() -> None:
    assert PackConfig.of(carry="source").carry == ("source",)
    required = {"model": "m", "train_dataset": "d", "output_dir": "o"}
    assert TrainConfig.of(**required, report_to="none").report_to == ("none",)


def test_config_names_the_nearest_setting() -> None:
    with pytest.raises(UnknownNameError, match="'pack_size'"):
        PackConfig.of(packsize=8)
    with pytest.raises(UnknownNameError, match="'examples_per_step'"):
        BatchConfig.of(batch_size=4)
    with pytest.raises(UnknownNameError, match="PackedDataset"):
        BatchConfig.of(shuffle=True)
    with pytest.raises(UnknownNameError, match="'prompt'"):
        PackConfig.of(fields={"promt": "question"})
    with pytest.raises(UnknownNameError, match=r"prompt=task\.body"):
        PackConfig.of(fields={"task.body": "prompt"})


def test_names_of_other_tools_lead_to_settings() -> None:
    from transformers import TrainingArguments

    settings = {
        *PackConfig.names(),
        *TrainConfig.names(),
        *BatchConfig.names(),
        *(field.name for field in fields(TrainingArguments)),
    }
    flags = {"tokenizer", "num_workers", "loss_parameter"}  # of commands, not settings
    assert {name for ours in NAMES_HERE.values() for name in ours} <= settings | flags
    # Settings that a loader, or a training run, does not have.
    assert settings & NAMES_HERE.keys() <= {"shuffle", "adapter"}


def test_every_setting_has_one_home_and_a_help() -> None:
    homes: dict[str, set[str]] = {}
    for stage in (TokenizeConfig, SelectConfig, PlanConfig, WriteConfig, RunConfig):
        for name, field in stage.__dataclass_fields__.items():
            assert field.metadata["help"], name
            homes.setdefault(name, set()).add(stage.__name__)
    shared = {name for name, stages in homes.items() if len(stages) > 1}
    assert shared == {
        "pack_size",
        "layout",
        "share_prefixes",
        "pad_to_multiple",
        "max_keys",
    }
    assert set(homes) == set(PackConfig.__dataclass_fields__)


def test_config_layers_settings_over_a_base() -> None:
    base = PackConfig(pack_size=512, seed=3)
    assert PackConfig.of(base, seed=4) == PackConfig(pack_size=512, seed=4)
    assert "num_workers" not in base.recorded()
    assert base.recorded()["pack_size"] == 512


def test_seeds_are_stable_and_independent() -> None:
    assert seeds.permutation(8, 0, "pack order").tolist() == [1, 6, 7, 4, 5, 3, 2, 0]
    assert seeds.derive(0, "a", "b") != seeds.derive(0, "ab")
    assert sorted(seeds.permutation(1000, 1)) == list(range(1000))
    first = seeds.permutation(1000, 1)
    assert abs(np.corrcoef(first, seeds.permutation(1000, 2))[0, 1]) < 0.1
    assert abs(np.corrcoef(first, np.arange(1000))[0, 1]) < 0.1


@given(st.permutations(range(7)), st.sampled_from(["preference", "sft", "scored"]))
def test_take_and_concat(order: list[int], kind: str) -> None:
    examples = random_examples(7, kind=kind)
    at = np.array(order, np.int64)
    taken = examples.take(at)
    assert_examples_equal(taken.take(np.argsort(at)), examples)
    singles = [examples.take(np.array([i])) for i in order]
    assert_examples_equal(Examples.concat(singles), taken)
