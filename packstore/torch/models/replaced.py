"""Methods of a prepared model that packstore replaces: once, by objects that copy and
pickle.

A module has at most one replaced forward call, which all uses of the module share. A
second trainer, a copy or a loaded file thus has one, too, and none calls another.
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
    """The forward call of one module, in place of the original; copied and pickled with
    the module.

    Not a hook, as PEFT calls `forward` directly, past the hooks. `before` is a forward
    call that was set on the module earlier, such as Accelerate's, or None.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before: Callable[..., Any] | None = vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the module's forward call."""
        raise NotImplementedError

    def original_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the earlier forward, else the one of the class, which FSDP2 changes."""
        if self.before is not None:
            return self.before(*args, **kwargs)
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
    """A replaced forward call that takes the module first, as functions of classes do.

    A wrapper that is bound to a module thus follows a copy of the module. One around
    the bound object would run the original's weights in the copy.
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
    """Set the replaced forward call again where the module has lost it.

    A wrapped one is pickled by the name of the method: the loaded module has its
    class's.
    """
    current = vars(module).get("forward")
    is_lost = (
        current is None or getattr(current, "__func__", None) is type(module).forward
    )
    if is_lost and replaced_forward(module) is not None:
        release(module)


def release(module: Any) -> None:
    """Remove Accelerate's wrapper around the forward call of a module, and its mark.

    Else its precision would stay on a model that is used again, and the next
    Accelerator would take the model for prepared, and do nothing.
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
    """Set the earlier forward call of a module: its class's, or one of an object."""
    del module.forward
    if getattr(original, "__func__", None) is not type(module).forward:
        module.forward = original
