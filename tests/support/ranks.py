"""Runs the function `on_rank` of a test file in several processes, which gloo connects."""

from __future__ import annotations

import gc
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: see packstore.cli._model


def launch(script: str, task: Any, size: int, folder: Path, timeout: float = 300) -> list[Any]:
    """Runs ``on_rank(task)`` of `script` on `size` ranks; returns the result of each.

    If the first of them is killed, so are the others, and there are no results.
    """
    # A store of its own: ranks that leave early do not remove theirs, and who meets there what
    # earlier ranks left waits for ever.
    folder = Path(tempfile.mkdtemp(dir=folder))
    torch.save(task, folder / "task.pt")
    command = [sys.executable, __file__, script, str(folder), str(size)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank)], env=env, stderr=subprocess.PIPE, encoding="utf-8")
        for rank in range(size)
    ]
    try:
        said = [ranks[0].communicate(timeout=timeout)[1]]
        killed = ranks[0].returncode == -signal.SIGKILL
        for rank in ranks[1:]:
            if killed:
                rank.kill()
            said.append(rank.communicate(timeout=timeout)[1])
    finally:
        for rank in ranks:
            rank.kill()
    if killed:
        return []
    assert not any(rank.returncode for rank in ranks), "\n".join(said)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def main(script: str, folder: str, size: int, rank: int) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    # As a launcher tells Accelerate; gloo is connected already.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "1"}
    on_rank = runpy.run_path(script)["on_rank"]
    task = torch.load(Path(folder, "task.pt"), weights_only=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(on_rank(task), Path(folder, f"{rank}.pt"))
    if dist.is_initialized():  # a training run ends with its group
        dist.barrier()
        dist.destroy_process_group()
    gc.collect()
    tasks = Path("/proc/self/task")
    if tasks.exists() and any(
        "gloo" in (t / "comm").read_text(encoding="utf-8") for t in tasks.iterdir()
    ):
        # DDP and meshes keep the group. Its threads may take the interpreter's lock while that
        # ends, which aborts the process: a matter of torch's, and all is done.
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
