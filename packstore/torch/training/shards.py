"""Tensors of checkpoints by torch's distributed checkpoint, in safetensors: nothing is pickled.

Of a sharded run each rank writes its share, in the background. Any number of ranks reads shares or
whole files, each rank its part.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from packstore.errors import FormatError, sentence

FILES = 16
"""Files of each rank, of about one size; one at a time is in memory three times."""

_THREAD = ThreadPoolExecutor(1, "checkpoint")


class Writer(HuggingFaceStorageWriter):
    """Writes files of each rank, and calls `finished` on rank 0 when all ranks have theirs."""

    def __init__(self, folder: Path, names: Mapping[str, int], finished: Callable[[], None]):
        super().__init__(str(folder), dict(names), save_distributed=True)
        self._finished = finished

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Ends the writing; torch calls it on rank 0."""
        self._finished()


def write_shards(
    tensors: Mapping[str, Tensor], folder: Path, group: Any, finished: Callable[[], None]
) -> Future[Any]:
    """Copies this rank's share of `tensors` and begins to write it; collective over `group`."""
    ends = list(accumulate(tensor.numel() for tensor in tensors.values()))
    files = {n: 1 + FILES * (end - 1) // ends[-1] for n, end in zip(tensors, ends, strict=True)}
    writer = Writer(folder, files, finished)
    # torch's async_save would take the memory of a second copy.
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    return _THREAD.submit(save, copies, storage_writer=writer, process_group=group)


def read_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fills `tensors`, whole or sharded, from the files in a folder; a collective call."""
    reader = HuggingFaceStorageReader(str(folder))
    try:
        stored = reader.read_metadata().state_dict_metadata
        for name, tensor in tensors.items():
            chunks = getattr(stored.get(name), "chunks", ())
            found = sum(chunk.sizes.numel() for chunk in chunks)
            if found != tensor.numel():
                raise ValueError(f"{found} of {tensor.numel()} values of {name}")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    except (OSError, ValueError, SafetensorError, CheckpointException) as error:
        rule = "its files must hold the state of every weight"
        remedy = "Remove this checkpoint, to go on from the one before"
        where = f"checkpoint {folder}"
        raise FormatError(sentence(where, rule, cause(error), remedy)) from error


def cause(error: BaseException) -> str:
    """Describes an error, of several ranks by the first."""
    failures = getattr(error, "failures", None)
    return str(next(iter(failures.values()))[0] if failures else error)
