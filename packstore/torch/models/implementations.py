"""The attention implementation that the configs of a model name.

transformers looks up the function of a layer's attention by the name in the layer's
config, ``config._attn_implementation`` (``sdpa``, ``eager``, …). Most layers share the
model's config. Some have a config of their own, or a part of the model's (its
`sub_configs`, such as the text part), so all of them must be read and set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from packstore.torch.models.unwrap import text_config

Implementations = Sequence[tuple[Any, str | None]]
"""Configs, outer ones first, each with the name of its attention implementation."""


def read_implementations(model: Any) -> Implementations:
    """Return each config that a module of the model holds, with its implementation."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        for config in _with_parts(vars(module).get("config")):
            configs.setdefault(id(config), config)
    return [(config, config._attn_implementation) for config in configs.values()]


def write_implementations(implementations: Implementations) -> None:
    """Restore the result of :func:`read_implementations`."""
    # An outer config comes first, as it also sets its parts.
    for config, name in implementations:
        config._attn_implementation = name


@contextmanager
def keeping_implementations(model: Any) -> Iterator[None]:
    """Put the attention of each config back after a block."""
    implementations = read_implementations(model)
    try:
        yield
    finally:
        write_implementations(implementations)


def set_attention(model: Any, name: str) -> None:
    """Set the attention of a model, also of layers that have a config of their own.

    ``set_attn_implementation`` of transformers changes only configs of modules that are
    models. A layer with another config would still run its former attention, on the
    mask of the new one.
    """
    model.set_attn_implementation(name)
    if text_config(model)._attn_implementation != name:
        return  # transformers left it, as the model does not use the registry

    configs_of_models: set[int] = set()
    for module in model.modules():
        if hasattr(module, "set_attn_implementation"):
            parts = _with_parts(module.config)
            configs_of_models.update(id(config) for config in parts)
    for config, _ in read_implementations(model):
        if id(config) not in configs_of_models:
            config._attn_implementation = name


def _with_parts(config: Any) -> Iterator[Any]:
    """Yield a config, then the configs inside it; nothing for any other object."""
    if not hasattr(config, "_attn_implementation"):
        return
    yield config
    for name in getattr(config, "sub_configs", ()):
        yield from _with_parts(getattr(config, name, None))
