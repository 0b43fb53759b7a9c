"""Frameworks that run the training: found on the call stack, refused where they
interfere.

A framework that divides each loss by its own number of batches, or deals the packs of a
dataset to the ranks again, would train on something else without a word. None of them
says so to the code that it calls, so the functions that call are looked up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType
from typing import Any

from packstore.errors import ConfigError, sentence


@dataclass(frozen=True)
class Running:
    """A method of a framework that is on the call stack while it runs the training."""

    framework: str
    module: str
    method: str  # a class and its method

    @property
    def code(self) -> CodeType | None:
        """Its code; None: the framework is not loaded."""
        found: Any = sys.modules.get(self.module)
        for name in self.method.split("."):
            found = getattr(found, name, None)
        return getattr(found, "__code__", None)


DIVIDERS: dict[Running, Callable[[Any], int]] = {
    Running("transformers' Trainer", "transformers.trainer", "Trainer.training_step"): (
        lambda trainer: (
            0
            if getattr(trainer, "runs_whole_steps", False)
            else int(trainer.args.gradient_accumulation_steps)
        )
    ),
    **{
        Running("Lightning", f"{package}.trainer.trainer", "Trainer.fit"): (
            lambda trainer: (
                trainer.accumulate_grad_batches
                if trainer.lightning_module.automatic_optimization
                else 0
            )
        )
        for package in ("lightning.pytorch", "pytorch_lightning")
    },
}
"""What divides each loss and steps by itself -> batches of its steps; 0: its user does
both.
"""

DEALERS = (
    Running("Accelerate", "accelerate.data_loader", "IterableDatasetShard.__iter__"),
    Running("Accelerate", "accelerate.data_loader", "DataLoaderDispatcher.__iter__"),
    Running("Accelerate", "accelerate.data_loader", "prepare_data_loader"),
)
"""What deals the items of a dataset to the ranks."""


def check_steps(batches: int, last: bool, *, divided: bool) -> None:
    """Refuses steps of `batches` that a framework, which is running, takes and divides
    otherwise.

    `last`: the step ends with this batch. `divided`: the caller gave a divisor, which
    may allow for what the framework does.
    """
    rule = "optimizer steps and the division of losses must be those of the loader"
    for running, instance in _found(DIVIDERS):
        number = DIVIDERS[running](instance)
        if not number or (number == batches and (batches == 1 or divided)):
            continue
        found = (
            f"steps of {number} batches, by which it divides each loss, for {batches}"
        )
        remedy = (
            "Let the loader make steps of one batch, or step by hand (page Loaders)"
        )
        raise ConfigError(sentence(running.framework, rule, found, remedy))
    accelerate: Any = sys.modules.get("accelerate.state")
    if accelerate is None or not accelerate.GradientState._shared_state:
        return
    state = accelerate.GradientState()
    if state.num_steps != 1 and not (divided and state.sync_gradients == last):
        found = f"gradient_accumulation_steps={state.num_steps}, by which it does both"
        remedy = (
            "Make the Accelerator without it; until batch.step.last use no_sync, "
            "then step"
        )
        raise ConfigError(sentence("Accelerate", rule, found, remedy))


def check_dealt_once(world_size: int) -> None:
    """Refuses a framework that deals packs of one of several ranks to the ranks again.

    Accelerate's dispatcher is refused on one rank, too: it cuts each tensor of a batch
    to the length of the first.
    """
    for running, _ in _found(DEALERS):
        if world_size > 1 or "Dispatcher" in running.method:
            rule = "packs must be dealt to the ranks once; PackedDataset does so"
            remedy = (
                "Pass PackedDataLoader(data) to prepare, which leaves it as it "
                "is; or make "
            )
            remedy += (
                "the dataset with rank=0, world_size=1, its DataLoader with a "
                "batch_size, "
            )
            remedy += "and the Accelerator with dispatch_batches=False"
            raise ConfigError(
                sentence(running.framework, rule, "that it deals, too", remedy)
            )


def _found(methods: Iterable[Running]) -> list[tuple[Running, Any]]:
    """Returns the methods that are on the call stack, with the instances that they run
    for.
    """
    codes = {method.code: method for method in methods}
    codes.pop(None, None)
    frame, found = sys._getframe(1) if codes else None, []
    while frame is not None:
        if (method := codes.get(frame.f_code)) is not None:
            found.append((method, frame.f_locals.get("self")))
        frame = frame.f_back
    return found
