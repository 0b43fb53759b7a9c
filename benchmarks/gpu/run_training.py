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
    from transformers import TrainerCallback

    from packstore.torch import train

    if task["exact"]:
        torch.use_deterministic_algorithms(True, warn_only=True)
    cuda = torch.cuda.is_available()
    history: list[dict[str, float]] = []

    def told() -> None:
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
        records = [record for record in history if "loss" in record]
        print(json.dumps({"peak_gib": peak, "records": records}), flush=True)

    class Keep(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            history[:] = state.log_history
            if state.global_step == task["kill_at"]:
                told()
                os.kill(os.getpid(), signal.SIGKILL)

    train(**task["settings"], callbacks=[Keep()])
    told()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
