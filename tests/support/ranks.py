"""Runs the function `on_rank` of a test file in several processes, which gloo
connects.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: see packstore.cli._model

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [  # what each rank would import for seconds; what is absent is passed over
        "torch.distributed.nn",
        "packstore.torch",
        "accelerate",
        "peft",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.llama.modeling_llama",
    ]
)


def launch(
    script: str, task: Any, size: int, folder: Path, timeout: float = 300
) -> list[Any]:
    """Runs ``on_rank(task)`` of `script` on `size` ranks; returns the result of each.

    If the first of them is killed, so are the others, and there are no results.
    """
    # A store of its own: ranks that leave early do not remove theirs, and who meets
    # there what earlier ranks left waits for ever.
    folder = Path(tempfile.mkdtemp(dir=folder))
    torch.save(task, folder / "task.pt")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        FORKS.Process(target=main, args=(script, folder, size, rank, environment))
        for rank in range(size)
    ]
    try:
        for rank in ranks:
            rank.start()
        ranks[0].join(timeout)
        killed = ranks[0].exitcode == -signal.SIGKILL
        for rank in ranks[1:]:
            if killed:
                rank.kill()
            rank.join(timeout)
    finally:
        for rank in ranks:
            rank.kill()
    if killed:
        return []
    said = [
        (folder / f"{rank}.txt").read_text(encoding="utf-8") for rank in range(size)
    ]
    assert not any(rank.exitcode for rank in ranks), "\n".join(said)
    return [
        torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)
    ]


def main(
    script: str, folder: Path, size: int, rank: int, environment: dict[str, str]
) -> None:
    """One of the processes."""
    with (folder / f"{rank}.txt").open("wb") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())
    os.environ.clear()
    os.environ.update(environment)
    # As a launcher tells Accelerate; gloo is connected already.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "ACCELERATE_USE_CPU": "1",
    }
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    on_rank = runpy.run_path(script)["on_rank"]
    task = torch.load(folder / "task.pt", weights_only=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(on_rank(task), folder / f"{rank}.pt")
    if dist.is_initialized():  # a training run ends with its group
        dist.barrier()
        dist.destroy_process_group()
