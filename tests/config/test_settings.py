"""Settings that cannot be followed are refused by name; what was meant is
understood.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_jobs import trained_tokenizer
from tokenizers import Tokenizer

import packstore
from packstore.config import REASONS, PackConfig
from packstore.errors import ConfigError, UnknownNameError
from packstore.torch.losses.named import make_loss

PAIRS: list[dict[str, Any]] = [
    {
        "prompt": f"What is {i}? ",
        "chosen": f"It is {i}.",
        "rejected": "No idea.",
        "id": i,
    }
    for i in range(20)
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return trained_tokenizer([p["prompt"] + p["chosen"] for p in PAIRS])


NEED_RECORDS: dict[str, Any] = {
    "fields": {"prompt": "x"},
    "carry": ("lang",),
    "chat_template": "chatml",
    "as_chat": True,
    "append_eos": True,
    "add_bos": True,
    "supervised_turns": "last",
    "thinking": "strip",
    "on": {"special_tokens": "control"},
}


def test_a_dataset_is_packed_anew_without_tokenizing(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    packed = packstore.pack(PAIRS, str(tmp_path / "packed"), tokenizer)
    for name, value in NEED_RECORDS.items():
        with pytest.raises(ConfigError, match=name):
            packstore.pack(packed, str(tmp_path / "anew"), **{name: value})
    assert not (tmp_path / "anew").exists()


def test_given_at_its_default_it_is_no_setting(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    packed = packstore.pack(PAIRS, str(tmp_path / "packed"), tokenizer, add_bos=False)
    usual = PackConfig()
    given = {name: getattr(usual, name) for name in NEED_RECORDS}
    anew = packstore.pack(packed, str(tmp_path / "anew"), pack_size=512, **given)
    assert anew.manifest.provenance["settings"]["add_bos"] is False
    others = [{**p, "prompt": "Another. "} for p in PAIRS]
    other = packstore.pack(others, str(tmp_path / "other"), tokenizer, add_bos=False)
    longer = packstore.append(
        packed, other
    )  # whose settings are not given but recorded
    assert longer.manifest.totals.examples == 40


def test_bpe_dropout_is_switched_off(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wild = Tokenizer.from_str(tokenizer.to_str())
    wild.model.dropout = 0.5
    ids = []
    for name, given in (("plain", tokenizer), ("wild", wild), ("again", wild)):
        caplog.clear()
        (group,) = packstore.pack(PAIRS, str(tmp_path / name), given).iter_packs()
        ids.append(group.input_ids.tolist())
        assert ("BPE dropout of 0.5 is switched off" in caplog.text) == (given is wild)
    assert ids == [ids[0]] * 3
    assert wild.model.dropout == 0.5  # the caller's own stays as it is


@pytest.mark.parametrize(
    ("values", "type_"),
    [
        ([3, 4], "int64"),
        ([3, 4.5], "float64"),
        ([True, False], "bool"),
        (["a", "b"], "string"),
        ([None, 4], "int64"),
    ],
)
def test_carried_columns_have_the_type_of_their_values(
    values: list[Any], type_: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    records = [{**p, "n": v} for p, v in zip(PAIRS, values * 10, strict=True)]
    packed = packstore.pack(
        records,
        str(tmp_path / "ds"),
        tokenizer,
        carry=["n"],
        on={"missing_field": "drop"},
        max_drop_rate=0.9,
    )
    assert dict(packed.manifest.carry) == {"n": type_}
    (group,) = packed.iter_packs()
    told = dict(
        zip(group.example_ids.tolist(), group.columns["n"].tolist(), strict=True)
    )
    assert told == {i: r["n"] for i, r in enumerate(records) if r["n"] is not None}


def test_an_unknown_reason_or_loss_parameter_is_answered_with_all_names() -> None:
    with pytest.raises(UnknownNameError) as caught:
        PackConfig.of(on={"nonsense": "drop"})
    assert all(name in str(caught.value) for name in REASONS)
    with pytest.raises(UnknownNameError) as caught:
        make_loss("distill", {"temperature": 2})
    for name in ("direction", "rest", "average"):
        assert name in str(caught.value)
