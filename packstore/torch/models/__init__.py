"""Hugging Face models on packed rows; see ``README.md``."""

from packstore.torch.models.compatibility import check_model, check_tokenizer
from packstore.torch.models.compiled import (
    compile_if_requested,
    compile_layers,
    warn_about_uncompiled,
)
from packstore.torch.models.load import load_model
from packstore.torch.models.model import use_packed_attention
from packstore.torch.models.probe import check_isolation
from packstore.torch.models.unwrap import has_compiled_layers

__all__ = [
    "check_isolation",
    "check_model",
    "check_tokenizer",
    "compile_if_requested",
    "compile_layers",
    "has_compiled_layers",
    "load_model",
    "use_packed_attention",
    "warn_about_uncompiled",
]
