"""How much of transformers' Trainer is replaced: a new release can break each of them."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="the trainers are in the extra train")

from transformers import Trainer

from packstore.torch import PackedTrainer

OVERRIDDEN = {
    "_init_training_state",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_save_checkpoint",
}


def private_overrides(trainer: type) -> set[str]:
    names = {name for name in vars(Trainer) if name.startswith("_")}
    overridden = set()
    for parent in trainer.__mro__:
        if parent.__module__.startswith("packstore."):
            overridden |= names & vars(parent).keys()
    return {name for name in overridden if not name.startswith("__")}


def test_private_methods_of_transformers_that_are_overridden() -> None:
    assert private_overrides(PackedTrainer) == OVERRIDDEN


def test_private_methods_that_trl_s_trainer_on_packs_overrides() -> None:
    pytest.importorskip("trl", reason="TRL's own trainer")
    from packstore.torch import PackedDPOTrainer

    assert private_overrides(PackedDPOTrainer) == OVERRIDDEN
