"""mosaicml-streaming: MDS shards, raw and compressed."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

from peers_loading.base import DTYPES, PACKS_PER_BATCH, SEED, Reader, Source, collate

_UNUSED = {
    "torchvision": (),
    "torchvision.datasets": ("VisionDataset",),
    "torchvision.transforms": (),
    "torchvision.transforms.functional": ("to_tensor",),
}


def _stand_in_for_torchvision() -> None:
    """Its import asks for torchvision, of which no build fits a torch without CUDA;
    arrays don't.

    Nothing of what is put there is ever called.
    """
    for name, attributes in _UNUSED.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        for attribute in attributes:
            setattr(module, attribute, type(attribute, (), {}))
        sys.modules[name] = module


try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):
    _stand_in_for_torchvision()

import streaming  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402


class Mds(Reader):
    """MDS shards of its default size, 64 MB, which are read in place."""

    def write(self, source: Source, folder: Path) -> None:
        columns = {
            name: f"ndarray:{np.dtype(dtype).name}" for name, dtype in DTYPES.items()
        }
        with streaming.MDSWriter(out=str(folder), columns=columns) as out:
            for sample in source:
                out.write({name: np.array(column) for name, column in sample.items()})

    def open(self, folder: Path, scratch: Path) -> Any:
        clean_stale_shared_memory()
        data = streaming.StreamingDataset(
            local=str(folder),
            shuffle=True,
            shuffle_seed=SEED,
            batch_size=PACKS_PER_BATCH,
        )
        return streaming.StreamingDataLoader(
            data, batch_size=PACKS_PER_BATCH, collate_fn=collate
        )
