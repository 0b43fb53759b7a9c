"""Replaces the forward call of modules, so that copies and pickles of them work.

``module.forward`` becomes a :class:`ReplacedForward`: an object, as a closure could not
be pickled. A module has at most one, which the attribute `REPLACED` also holds. So
preparing a model twice, or a copy of a prepared model, or one loaded from a file, never
puts one replacement around another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

REPLACED = "_packstore_forward"
"""Attribute of a module that holds its :class:`ReplacedForward`, also if another
library has wrapped its forward call since.
"""


class ReplacedForward:
    """The forward call of one module, in place of its class's.

    It is not a hook, as PEFT calls `forward` directly, which runs no hooks.

    Attributes:
        module: the module.
        before: the forward call that had been set on the module, such as Accelerate's;
            None if it was the class's.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before: Callable[..., Any] | None = vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the module's forward call."""
        raise NotImplementedError

    def original_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward that this object replaces."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        # Looked up at each call, as FSDP2 changes the class of the module.
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __func__(self) -> UnboundForward:
        """The function behind the method: Accelerate wraps it and binds the wrapper."""
        return UnboundForward(inspect.signature(type(self.module).forward))

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(
            self.before or type(self.module).forward.__get__(self.module)
        )


class UnboundForward:
    """The function that Accelerate finds as ``module.forward.__func__``, and wraps.

    Like a function of a class, it takes the module as its first argument, and runs the
    replaced forward call of that module. In a copy of a module, Accelerate's wrapper
    thus runs the copy; around a bound object it would run the original's weights.
    """

    __name__ = "forward"  # a method of it is pickled by this name

    def __init__(self, signature: inspect.Signature) -> None:
        self.__signature__ = signature

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the replaced forward call of `module`."""
        return vars(module)[REPLACED](*args, **kwargs)


def replaced_forward(module: Any) -> Any:
    """Return the :class:`ReplacedForward` of a module, or None."""
    return vars(module).get(REPLACED)


def replace_forward(module: nn.Module, replacement: ReplacedForward) -> None:
    """Set the replaced forward call of a module that has none."""
    setattr(module, REPLACED, replacement)
    module.forward = replacement


def put_back_forward(module: Any) -> None:
    """Set the replaced forward call again if the module has its class's.

    A module that Accelerate had wrapped loses it in a pickle, which stores the wrapper
    as a method, by name: the loaded module looks that up in its class.
    """
    current = vars(module).get("forward")
    is_lost = (
        current is None or getattr(current, "__func__", None) is type(module).forward
    )
    if is_lost and replaced_forward(module) is not None:
        release(module)


def release(module: Any) -> None:
    """Remove Accelerate's wrapper around the forward call of a module, and its mark.

    With the wrapper, a model that is used again would still run in the precision of the
    old Accelerator. With the mark, a new Accelerator would not prepare it.
    """
    attributes = vars(module)
    attributes.pop("_is_accelerate_prepared", None)
    original = attributes.pop("_original_forward", None)
    replacement = replaced_forward(module)
    if replacement is not None:
        module.forward = replacement
    elif original is not None:
        restore_forward(module, original)


def restore_forward(module: Any, original: Any) -> None:
    """Set `original` as forward call of a module, or its class's if it is that."""
    del module.forward
    if getattr(original, "__func__", None) is not type(module).forward:
        module.forward = original
