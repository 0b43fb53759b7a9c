"""The loader inside training frameworks: nothing sharded twice, positions saved with the rest."""

from __future__ import annotations

import itertools
import os
import runpy
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from packstore.io.dataset import Dataset
from packstore.testing import random_examples
from packstore.torch import PackedDataLoader, PackedDataset

launch = runpy.run_path(str(Path(__file__).with_name("ranks.py")))["launch"]
N = 17
WORLD = 2


@pytest.fixture(scope="module")
def stored(kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Packs of one example; ids are 0 .. N - 1."""
    packs = kit.packed(random_examples(N, kind="sft"), [1] * N, "concat")
    data: Dataset = kit.write(str(tmp_path_factory.mktemp("data") / "ds"), packs, "sft")
    return data


def ids(batches: Any) -> list[int]:
    return [i for b in batches for i, w in zip(b.example_ids.tolist(), b.weights, strict=True) if w]


def on_rank(task: tuple[str, str]) -> dict[str, Any]:
    """One of two processes under Accelerate."""
    warnings.simplefilter("ignore")
    from accelerate import Accelerator, DataLoaderConfiguration

    url, folder = task
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # gloo is connected already
    sharding = DataLoaderConfiguration(dispatch_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=sharding)
    assert accelerator.num_processes == world
    out: dict[str, Any] = {}

    loader = PackedDataLoader(PackedDataset(url), tail="pad")
    prepared = accelerator.prepare(loader)
    out["untouched"] = prepared is loader
    out["ours"] = ids(prepared)

    plain = DataLoader(PackedDataset(url, rank=0, world_size=1), collate_fn=lambda packs: packs[0])
    out["wrapped"] = [p.example_ids.tolist()[0] for p in accelerator.prepare(plain)]
    out["plain"] = [p.example_ids.tolist()[0] for p in DataLoader(PackedDataset(url), None)]

    accelerator.register_for_checkpointing(loader)
    batches = iter(loader)
    out["before"] = ids(itertools.islice(batches, 3))
    accelerator.save_state(folder)  # one rank writes it, as the position is that of all
    accelerator.wait_for_everyone()
    next(batches)
    accelerator.load_state(folder)
    out["after"] = ids(loader)
    return out


@pytest.mark.slow
def test_accelerate(stored: Dataset, tmp_path: Path) -> None:
    """`prepare` leaves our loader as it is; what Accelerate is to shard must be whole."""
    pytest.importorskip("accelerate", reason="accelerate is in the extra train")
    task = (stored.url, str(tmp_path / "checkpoint"))
    ranks = launch(__file__, task, WORLD, tmp_path)
    assert all(rank["untouched"] for rank in ranks)
    for how in ("ours", "plain"):
        assert sorted(i for rank in ranks for i in rank[how]) == list(range(N))
    assert set(ranks[0]["wrapped"] + ranks[1]["wrapped"]) == set(range(N))
    for rank in ranks:
        assert rank["before"] + rank["after"] == rank["ours"]


@pytest.mark.filterwarnings("ignore")
def test_lightning(stored: Dataset, tmp_path: Path) -> None:
    """A Trainer saves the position in its checkpoint, in the middle of a step, and resumes."""
    lightning = pytest.importorskip("lightning", reason="lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, stop: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))
            self.seen: list[int] = []
            self.stop = stop

        def training_step(self, batch: Any, index: int) -> Any:
            self.seen += ids([batch])
            return self.weight * batch.num_tokens

        def on_train_epoch_start(self) -> None:
            self.trainer.train_dataloader.set_epoch(self.current_epoch)

        def on_train_batch_end(self, *_: Any) -> None:
            if len(self.seen) == self.stop != N:
                self.trainer.save_checkpoint(tmp_path / "some.ckpt")

        def on_train_epoch_end(self) -> None:
            if len(self.seen) == self.stop:
                self.trainer.save_checkpoint(tmp_path / "some.ckpt")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.0)

    def fit(stop: int, checkpoint: Path | None = None) -> list[int]:
        loader = PackedDataLoader(PackedDataset(stored), accumulation=2, tail="pad")
        module = Module(stop)
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=2,
            accumulate_grad_batches=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader, ckpt_path=checkpoint, weights_only=False)
        assert trainer.train_dataloader is loader
        return module.seen

    for stop in (5, N, N + 4):
        whole = fit(stop)
        assert sorted(whole) == sorted(2 * [*range(N)])
        assert whole[:N] != whole[N:]
        assert fit(0, tmp_path / "some.ckpt") == whole[stop:]


def test_a_hugging_face_loop_of_plain_torch(stored: Dataset) -> None:
    """A DataLoader with a collate function of the user sees packs as records."""
    loader = DataLoader(PackedDataset(stored), 3, collate_fn=lambda packs: [len(p) for p in packs])
    assert [sum(batch) for batch in loader] == [3] * (N // 3) + [N % 3]
