"""Frameworks that run the training loop: refused where they interfere.

A framework that divides each loss by its own number of batches, or deals the packs of a
dataset to the ranks a second time, would silently change the training. Frameworks give
the code that they call no sign of it, so their methods are looked up on the call stack.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NoReturn

from packstore.errors import ConfigError, sentence


@dataclass(frozen=True)
class Method:
    """A method of a framework."""

    framework: str
    module: str
    name: str  # a function, or a class and its method

    @property
    def code(self) -> CodeType | None:
        """Its code object; None if the framework is not loaded."""
        value: Any = sys.modules.get(self.module)
        for part in self.name.split("."):
            value = getattr(value, part, None)
        return getattr(value, "__code__", None)


def check_steps(batches: int, last: bool, *, divided: bool) -> None:
    """Raise ConfigError if a running framework makes other steps than the loader.

    Args:
        batches: number of batches of the loader's step.
        last: True if the step ends with this batch.
        divided: True if the caller passed a divisor, which may allow for the division
            by the framework.
    """
    for method, trainer in _find_running(_STEPS_OF_TRAINERS):
        framework_batches = _STEPS_OF_TRAINERS[method](trainer)
        if framework_batches is None:
            continue
        agrees = framework_batches == batches and (batches == 1 or divided)
        if not agrees:
            _refuse_steps(
                method.framework,
                actual=f"steps of {framework_batches} batches, and losses divided by "
                f"that number, for {batches}",
                remedy="Let the loader make steps of one batch, or step by hand (page "
                "Loaders)",
            )
    _check_accelerator(last=last, divided=divided)


def _steps_of_transformers(trainer: Any) -> int | None:
    """Return the number that a Trainer divides losses by; None if it does not."""
    if getattr(trainer, "runs_whole_steps", False):
        return None
    return int(trainer.args.gradient_accumulation_steps)


def _steps_of_lightning(trainer: Any) -> int | None:
    """Return the number that a Trainer divides losses by; None if it does not."""
    if not trainer.lightning_module.automatic_optimization:
        return None
    return int(trainer.accumulate_grad_batches)


_STEPS_OF_TRAINERS: dict[Method, Callable[[Any], int | None]] = {
    Method(
        "transformers' Trainer", "transformers.trainer", "Trainer.training_step"
    ): _steps_of_transformers,
    Method(
        "Lightning", "lightning.pytorch.trainer.trainer", "Trainer.fit"
    ): _steps_of_lightning,
    Method(
        "Lightning", "pytorch_lightning.trainer.trainer", "Trainer.fit"
    ): _steps_of_lightning,
}


def _check_accelerator(*, last: bool, divided: bool) -> None:
    """Raise ConfigError if an Accelerator accumulates gradients by itself.

    Accelerate keeps its state for the whole process.
    """
    accelerate: Any = sys.modules.get("accelerate.state")
    if accelerate is None or not accelerate.GradientState._shared_state:
        return
    state = accelerate.GradientState()
    if state.num_steps == 1:
        return
    agrees = divided and state.sync_gradients == last
    if not agrees:
        _refuse_steps(
            "Accelerate",
            actual=f"gradient_accumulation_steps={state.num_steps}, which sets both",
            remedy="Make the Accelerator without it; until batch.step.last use "
            "no_sync, then step",
        )


def _refuse_steps(framework: str, *, actual: str, remedy: str) -> NoReturn:
    rule = "optimizer steps and the division of losses must follow the loader"
    raise ConfigError(sentence(framework, rule=rule, found=actual, remedy=remedy))


_SHARDERS = (
    Method("Accelerate", "accelerate.data_loader", "IterableDatasetShard.__iter__"),
    Method("Accelerate", "accelerate.data_loader", "prepare_data_loader"),
)
"""Methods that deal the items of a dataset to the ranks."""

_DISPATCHER = Method(
    "Accelerate", "accelerate.data_loader", "DataLoaderDispatcher.__iter__"
)
"""Deals slices of each batch: it cuts every tensor to the length of the first."""


def check_dealt_once(world_size: int) -> None:
    """Raise ConfigError if a running framework deals packs to the ranks again.

    Args:
        world_size: number of ranks that the dataset deals packs to. For one rank, only
            the dispatcher is refused, which damages batches there, too.
    """
    methods = [_DISPATCHER]
    if world_size > 1:
        methods += _SHARDERS
    for method, _ in _find_running(methods):
        raise ConfigError(
            sentence(
                method.framework,
                rule="packs must be dealt to the ranks once; PackedDataset does so",
                found="a second deal",
                remedy="Pass PackedDataLoader(data) to prepare, which leaves it as it "
                "is; or make the dataset with rank=0, world_size=1, its DataLoader "
                "with a batch_size, and the Accelerator with dispatch_batches=False",
            )
        )


def _find_running(methods: Iterable[Method]) -> list[tuple[Method, Any]]:
    """Return the methods that are on the call stack, each with its instance."""
    methods_by_code = {method.code: method for method in methods}
    methods_by_code.pop(None, None)
    if not methods_by_code:
        return []

    running = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        method = methods_by_code.get(frame.f_code)
        if method is not None:
            running.append((method, frame.f_locals.get("self")))
        frame = frame.f_back
    return running
