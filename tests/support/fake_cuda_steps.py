"""Trains on a CUDA device without values, and prints what a step asks of it: ``…
FOLDER``.

FakeTensorMode computes shapes alone; autograd takes its CUDA tensors with the library
preloaded that ``test_fake_cuda_steps.py`` builds. ``PackedTrainer.train`` runs whole:
in its precision on a GPU, with a reference in each step, from a dataset on the disk.
Left out is what needs values or kernels: the proofs of head and isolation, records,
compiled layers, and Triton's passes of the head (torch's are in their place).
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import sys
import traceback
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from gpu.sizes import LLAMA, QWEN3, lengths
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback, TrainingArguments, masking_utils

import packstore
from packstore.torch import PackedTrainer
from packstore.torch.logprobs import head
from packstore.torch.training import checkpoints, trainer, trainer_steps

MODELS = {"Llama": LLAMA, "Qwen3": QWEN3}
CUDA = torch.device("cuda", 0)


class Counter(TorchDispatchMode, TrainerCallback):  # type: ignore[misc]
    """Counts what operators ask of the device; those of the host's tensors run for
    real.

    What the host reads of the device is 1, or False. A step is counted with what comes
    between it and the one before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = 0
        self.seen: set[int] = set()
        self.steps: list[dict[str, Any]] = []
        self.begin()

    def begin(self) -> None:
        """Starts a step, whose bytes are those held and more."""
        self.waits, self.unaligned, self.tokens = list[str](), list[str](), list[int]()
        self.launches = self.products = 0
        self.held_before = self.peak = self.held

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Keeps the counts of the step."""
        names = (
            "waits",
            "unaligned",
            "launches",
            "products",
            "tokens",
            "held_before",
            "peak",
        )
        self.steps.append({name: getattr(self, name) for name in names})
        self.begin()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name, given = func.overloadpacket.__name__, tensors((args, kwargs))
        there, target = (
            any(x.is_cuda for x in given),
            torch.device(kwargs.get("device") or "meta"),
        )
        if not there and target.type != "cuda":
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if name == "_local_scalar_dense" or target.type == "cpu":
            self.waits.append(f"{name}, {place()}")
            with unset_fake_temporarily():
                dtype = kwargs.get("dtype") or args[0].dtype
                read = torch.full(args[0].shape, dtype != torch.bool, dtype=dtype)
                return read.item() if name == "_local_scalar_dense" else read
        copied = name in ("_to_copy", "copy_") and not all(
            x.is_cuda or not x.ndim for x in given
        )
        if copied and not (kwargs.get("non_blocking") or args[2:] == (True,)):
            self.waits.append(f"{name}, {place()}")
        made = func(*args, **kwargs)
        for x in tensors(made):
            self.hold(x.untyped_storage())
        self.launches += not (func.is_view or name == "device" or "empty" in name)
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            self.products += 1
            if not all(map(aligned, (*given, *tensors(made)))):
                self.unaligned.append(f"{name}, {place()}")
        return made

    def hold(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self.seen:
            self.seen.add(storage._cdata)
            self.held += storage.nbytes()
            self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self.drop, storage._cdata, storage.nbytes())

    def drop(self, key: int, size: int) -> None:
        self.seen.remove(key)
        self.held -= size


def tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def aligned(x: Tensor) -> bool:
    """Whether the rows of a matrix begin at multiples of 16 bytes."""
    row = max(x.stride()) if x.ndim > 1 and min(x.shape[-2:]) > 1 else 0
    return x.storage_offset() * x.itemsize % 16 == 0 == row * x.itemsize % 16


def place() -> str:
    """The calls outside of torch that led to an operator; none in a backward pass."""
    frames = [x for x in traceback.extract_stack()[:-2] if "/torch/_" not in x.filename]
    return " < ".join(f"{Path(x.filename).name}:{x.lineno}" for x in frames[:-5:-1])


class Trainer(PackedTrainer):
    """Notes the tokens of batches; its first step waits, and multiplies what is not
    aligned.
    """

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        counter.tokens.append(inputs.num_tokens)
        if self.state.global_step == 0:
            torch.ones(1, device=CUDA).item()
            torch.ones(8, 9, device=CUDA) @ torch.ones(9, 8, device=CUDA)
        return super().compute_loss(model, inputs, *args, **kwargs)


def pretend() -> None:
    """Answers what is asked of a device, and leaves out what needs values."""
    card = SimpleNamespace(name="no GPU", major=9, minor=0, total_memory=80 << 30)
    answers: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "is_bf16_supported": True,
        "device_count": 1, "current_device": 0, "set_device": None, "synchronize": None,
        "get_device_properties": card, "get_device_capability": (9, 0),
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.version.cuda = "13.0"
    FakeTensorMode.avoid_device_init = True
    nn.Module._apply = lambda self, *_, **__: self  # it is on the device
    masking_utils.is_tracing = lambda *_: False  # of tensors without values, it is True
    head._candidate_heads = lambda model: [
        head.Head(model.model, model.lm_head, 1.0, None)
    ]
    head._prove = lambda model, heads: heads[0]
    trainer.probe_model = lambda model: None
    trainer_steps.FIRST_STEPS = 0
    # At the end of a run the weights must be finite; these have no values.
    checkpoints.CheckpointMixin._check_finite_weights = lambda self: None


def run(family: str, data: str, layers: int) -> list[Any]:
    """Trains a model of so many layers for two steps.

    Returns:
        The number of its weights and of those in layers, and the counts of each step.
    """
    config = {**MODELS[family], "num_hidden_layers": layers, "use_cache": False}
    settings = getattr(transformers, f"{family}Config")(**config)
    args = TrainingArguments(
        f"{data}-out", bf16=True, learning_rate=1e-6, max_steps=2, save_strategy="no",
        report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    with torch.device(CUDA):
        model = getattr(transformers, f"{family}ForCausalLM")(settings)
    how: dict[str, Any] = {"head": "eager", "compile": "none", "examples_per_step": 48}
    Trainer(model, args, data, loss="dpo", callbacks=[counter], **how).train()
    weights = [
        sum(p.numel() for p in x.parameters()) for x in (model, model.model.layers)
    ]
    return [weights, *counter.steps[-2:]]


def main(folder: str) -> None:
    logging.disable()
    pretend()
    rng, sides = np.random.default_rng(0), ("prompt", "chosen", "rejected")
    records = [
        {
            side: rng.integers(0, 128000, n).tolist()
            for side, n in zip(sides, row, strict=True)
        }
        for row in lengths("hh", 300, 2048).tolist()
    ]
    layouts = ("concat", "shared_prefix")
    for layout in layouts:
        packstore.pack(records, f"{folder}/{layout}", pack_size=8192, layout=layout)
    cases = []
    with FakeTensorMode(allow_non_fake_inputs=True), counter:
        for family, layout, layers in itertools.product(MODELS, layouts, (1, 2)):
            case = run(family, f"{folder}/{layout}", layers)
            cases.append([(family, layout, layers), *case])
            gc.collect()
    print(json.dumps(cases))


counter = Counter()

if __name__ == "__main__":
    main(sys.argv[1])
