"""Runs ``packstore.torch.train`` in this process: ``python run_training.py TASK``, a JSON object.

The process kills itself after the record of step ``kill_at``, if there is one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch


def main(task: dict[str, Any]) -> None:
    from packstore.torch.training.sinks import JsonLines
    from packstore.torch.training.train import train

    if task["exact"]:
        torch.use_deterministic_algorithms(True, warn_only=True)
    cuda = torch.cuda.is_available()
    write = JsonLines.__call__

    def write_or_die(self: JsonLines, record: Any) -> None:
        write(self, record)
        if record["step"] == task["kill_at"]:
            peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
            print(json.dumps({"peak_gib": peak}), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    JsonLines.__call__ = write_or_die  # type: ignore[method-assign]
    train(**task["settings"])
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    print(json.dumps({"peak_gib": peak}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
