"""What several files train on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from train_runs import save_gpt2

from packstore.testing import random_examples


@pytest.fixture(scope="session")
def stored(
    kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory
) -> SimpleNamespace:
    """Paths of a model, of 60 pairs in packs whose steps hold odd numbers of them, of 9
    others.
    """
    folder = tmp_path_factory.mktemp("stored")
    packs = kit.packed(
        random_examples(60, seed=3), [1, 4, 2, 3, 2] * 5, "shared_prefix"
    )
    kit.write(str(folder / "data"), packs, layout="shared_prefix")
    kit.write(
        str(folder / "held"),
        kit.packed(random_examples(9, seed=4), [2, 3, 4], "concat"),
    )
    urls = {name: str(folder / name) for name in ("data", "held")}
    return SimpleNamespace(model=save_gpt2(folder / "model"), **urls)
