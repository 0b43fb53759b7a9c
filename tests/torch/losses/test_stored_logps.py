"""PolicyLoss on log-probs from side data: as on the same values passed as arguments."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from packstore.errors import ConfigError
from packstore.format import to_offsets
from packstore.testing import random_examples
from packstore.torch import (
    LossOutput,
    PackedBatch,
    PackedDataLoader,
    PackedDataset,
    PolicyLoss,
    SideWriter,
    TopK,
    pad_batch,
)

EXAMPLES = random_examples(9, seed=2, kind="scored")
STARTS = to_offsets(EXAMPLES.supervised)[EXAMPLES.sequence_offsets][
    EXAMPLES.example_offsets
]
"""Where the supervised tokens of each example begin, int64 `[E + 1]`."""

NAMES = {"old_logps": "old_logps", "ref_logps": "ref_token_logps"}
"""Argument of the loss -> column of tokens."""

SETTINGS: list[dict[str, Any]] = [
    {"average": "token", "clip_low": 0.1},
    {"average": "sequence", "kl_weight": 0.2},
    {"average": "group", "ratio": "sequence", "kl_weight": 0.2},
]


def sampled() -> dict[str, np.ndarray]:
    """Log-probs of all supervised tokens under the names of the columns."""
    rng = np.random.default_rng(0)
    draws = -rng.random((2, STARTS[-1]), np.float32)
    return dict(zip(NAMES.values(), draws, strict=True))


def of_batch(batch: PackedBatch, values: np.ndarray) -> Tensor:
    parts = [values[STARTS[e] : STARTS[e + 1]] for e in batch.example_ids.tolist()]
    return torch.from_numpy(np.concatenate(parts))


def stored_batches(kit: Any, folder: Path, layout: str, type_: str) -> Any:
    packs = kit.packed(EXAMPLES, [4, 3, 2], layout)
    dataset = kit.write(str(folder / "data"), packs, "scored", layout)
    side = str(folder / "side")
    with SideWriter(side, dataset, dict.fromkeys(NAMES.values(), type_)) as writer:
        counts = np.diff(STARTS)
        ids = EXAMPLES.example_ids
        writer.write(ids, sampled(), EXAMPLES.num_responses, counts)
    data = PackedDataset(dataset, shuffle=False, side=side)
    return PackedDataLoader(data, packs_per_batch=2)


def assert_equal(left: LossOutput, right: LossOutput) -> None:
    assert torch.equal(left.loss, right.loss)
    assert torch.equal(left.loss_sum, right.loss_sum)
    assert left.metrics.keys() == right.metrics.keys()
    for name, (total, count) in left.metrics.items():
        assert torch.equal(total, right.metrics[name][0]), name
        assert torch.equal(count, right.metrics[name][1]), name


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize("type_", ["token<float32>", "token<float16>"])
def test_stored_is_as_passed(
    kit: SimpleNamespace, tmp_path: Path, layout: str, type_: str
) -> None:
    dtype = np.float16 if "16" in type_ else np.float32
    rounded = {name: values.astype(dtype) for name, values in sampled().items()}
    for batch in stored_batches(kit, tmp_path, layout, type_):
        n = len(batch.target_index)
        padded = pad_batch(batch, num_tokens=400, num_targets=n + 5)
        bare = batch.replace(token_columns={})
        for settings in SETTINGS:
            loss_fn = PolicyLoss(**settings)
            arguments = {
                name: of_batch(batch, rounded[column]).float()
                for name, column in NAMES.items()
                if name == "old_logps" or loss_fn.kl_weight
            }
            logps = -torch.rand(n + 5)
            gradients = []
            outputs = []
            for one, passed in ((batch, {}), (bare, arguments), (padded, {})):
                leaf = logps[: len(one.target_index)].clone().requires_grad_()
                output = loss_fn(leaf, one, **passed)
                output.loss.backward()
                outputs.append(output)
                assert leaf.grad is not None
                gradients.append(leaf.grad)
            assert_equal(outputs[0], outputs[1])
            assert torch.equal(gradients[0], gradients[1])
            assert abs(outputs[2].loss - outputs[0].loss) < 1e-5
            assert (gradients[2][:n] - gradients[0]).abs().max() < 1e-6
            assert not gradients[2][n:].any()
            fresh = loss_fn(logps[:n], bare, **{**arguments, "old_logps": None})
            assert fresh.loss != outputs[0].loss


def test_arguments_come_before_columns_and_a_top_k_is_refused(
    kit: SimpleNamespace,
) -> None:
    batch = kit.row()
    zeros = torch.zeros(len(batch.target_index))
    stored = batch.replace(token_columns=dict.fromkeys(NAMES.values(), zeros - 1))
    loss_fn = PolicyLoss(kl_weight=0.1)
    passed = loss_fn(zeros, stored, old_logps=zeros, ref_logps=zeros)
    assert_equal(passed, loss_fn(zeros, batch, old_logps=zeros, ref_logps=zeros))

    top = TopK(zeros[:, None].int(), zeros[:, None])
    for column in NAMES.values():
        wrong = batch.replace(token_columns={**stored.token_columns, column: top})
        with pytest.raises(ConfigError, match=f"{column}.*top 1"):
            loss_fn(zeros, wrong)
    with pytest.raises(ConfigError, match=r"ref_logps.*ref_token_logps"):
        loss_fn(zeros, batch)
