"""Steps of ``packstore train`` on CUDA tensors that hold nothing: prints what a GPU would be asked.

``python fake_cuda_steps.py LIBRARY CASES``: the compiled ``fake_cuda.cpp``, and a JSON list of
``[family, layout, extra]``. The result is a JSON list of waits of the host, kernel launches,
products with operands that are not aligned to 16 bytes, and the peak of memory.
"""

from __future__ import annotations

import collections
import ctypes
import gc
import json
import sys
import traceback
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)  # torch looks its hooks up once

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from packstore.config.training import TrainConfig  # noqa: E402
from packstore.format.arrays import to_offsets  # noqa: E402
from packstore.pack.fill import fill  # noqa: E402
from packstore.testing import random_examples  # noqa: E402
from packstore.torch import PackedPolicy, PreferenceLoss, collate, use_packed_attention  # noqa: E402
from packstore.torch.batch.batch import StepInfo  # noqa: E402
from packstore.torch.logprobs import head  # noqa: E402
from packstore.torch.training.loop import Loop  # noqa: E402
from packstore.torch.training.optimizer import (  # noqa: E402
    fuse_updates,
    make_optimizer,
    make_schedule,
)
from packstore.torch.training.reference import SecondModel  # noqa: E402

SIZES = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "use_cache": False,
}
PAIRS = 41
WAITS = ("nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim")
VIEWS = frozenset(
    {
        *("view", "_unsafe_view", "_reshape_alias", "t", "transpose", "permute", "expand"),
        *("slice", "narrow", "select", "split", "split_with_sizes", "unbind", "unfold"),
        *("squeeze", "unsqueeze", "unflatten", "detach", "alias", "as_strided", "lift_fresh"),
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "device"),
    }
)
"""Operators that launch no kernel."""


class Watch(TorchDispatchMode):
    """Counts what operators on CUDA tensors would cost."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: collections.Counter[str] = collections.Counter()
        self.misaligned: collections.Counter[str] = collections.Counter()
        self.launches = self.products = self.held = self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func).split(".")[1]
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_gpu = any(x.is_cuda for x in given)
        if on_gpu and self._waits(name, kwargs):
            self.waits[f"{name} {_caller()}"] += 1
        if name == "_local_scalar_dense" and on_gpu:
            return False if args[0].dtype == torch.bool else 1
        out = func(*args, **kwargs)
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.is_cuda]
        for x in made:
            self._hold(x)
        if name not in VIEWS and (on_gpu or made):
            self.launches += 1
        if name in ("mm", "addmm") and on_gpu:
            self.products += 1
            matrices = [x for x in (*given, *made) if x.ndim == 2 and min(x.shape) > 1]
            if any(max(x.stride()) * x.element_size() % 16 for x in matrices):
                self.misaligned[_caller()] += 1
        return out

    def _waits(self, name: str, kwargs: dict[str, Any]) -> bool:
        to_cpu = name == "_to_copy" and str(kwargs.get("device")) == "cpu"
        unsized = name == "repeat_interleave" and kwargs.get("output_size") is None
        return name in (*WAITS, "_local_scalar_dense") or to_cpu or unsized

    def _hold(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            self._live[key] = storage.nbytes()
            self.held += storage.nbytes()
            self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.held -= self._live.pop(key, 0)


def _caller() -> str:
    """The innermost lines of packstore or transformers."""
    own = [
        f"{'/'.join(frame.filename.split('/')[-2:])}:{frame.name}"
        for frame in traceback.extract_stack()
        if "/packstore/" in frame.filename or "/transformers/" in frame.filename
    ]
    return " < ".join(own[:-3:-1])


def batch_of(layout: str, number: int) -> Any:
    """One of the two batches of a planned step; segments have odd lengths."""
    made = random_examples(
        PAIRS,
        seed=number,
        vocab_size=SIZES["vocab_size"],
        max_prompt=90,
        max_response=60,
        edges=False,
    )
    packs = fill(made, to_offsets(np.array([PAIRS])), layout)
    counts = {"best_tokens": 2000}
    info = StepInfo(index=0, batch=number, batches=2, examples=2 * PAIRS, counts=counts)
    batch = collate(packs, "preference", step=info)
    return batch._map(lambda x: x)  # what is derived on the CPU, as before a copy to a GPU


def policy_of(family: str, frozen: bool) -> PackedPolicy:
    """A model whose head is taken as proved, as values cannot be compared."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        config = getattr(transformers, f"{family}Config")(**SIZES, tie_word_embeddings=True)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    torch.set_default_dtype(torch.float32)
    use_packed_attention(model.train(not frozen).requires_grad_(not frozen), "torch_varlen")
    known = head.Head(model.model, model.get_output_embeddings(), 1.0, None)
    head._PROVED[model] = known
    return PackedPolicy(model)


def loop_of(policy: PackedPolicy, frozen: PackedPolicy, sft_weight: float) -> Loop:
    """The loop of ``train`` around these models, without data, trackers and checkpoints."""
    config = TrainConfig(model="none", dataset="none", output="none", dtype="bfloat16")
    optimizer = make_optimizer(policy, config)
    fuse_updates(optimizer)
    accelerator = SimpleNamespace(
        device=torch.device("cuda"),
        num_processes=1,
        no_sync=lambda _: nullcontext(),
        backward=lambda loss: loss.backward(),
        clip_grad_norm_=torch.nn.utils.clip_grad_norm_,
    )
    run: Any = SimpleNamespace(
        config=config,
        accelerator=accelerator,
        loss_fn=PreferenceLoss("dpo", beta=0.1, sft_weight=sft_weight),
        policy=policy,
        optimizer=optimizer,
        schedule=make_schedule(optimizer, config, 10),
        reference=SecondModel(frozen.model),
        start=SimpleNamespace(step=1, examples=0, evaluation=None),  # no check of the first step
        folder=Path("none"),
    )
    return Loop(run, [])


def counted(family: str, layout: str, sft_weight: float) -> dict[str, Any]:
    """Two steps, of which the second, which has the optimizer's state, is counted."""
    fake, watch = FakeTensorMode(allow_non_fake_inputs=True), Watch()
    made = [batch_of(layout, number) for number in (0, 1)]
    with fake, watch:
        loop = loop_of(policy_of(family, False), policy_of(family, True), sft_weight)
        batches = [batch._map(fake.from_tensor) for batch in made]
        loop._train(batches)
        gc.collect()
        before = watch.peak = watch.held
        watch.waits.clear()
        watch.misaligned.clear()
        watch.launches = watch.products = 0
        loop._train(batches)
    return {
        "waits": dict(watch.waits),
        "misaligned": dict(watch.misaligned),
        "launches": watch.launches,
        "products": watch.products,
        "peak_mib": (watch.peak - before) / 2**20,
        "tokens": sum(batch.num_tokens for batch in batches),
    }


if __name__ == "__main__":
    transformers.masking_utils.is_tracing = lambda *_: False  # as on a GPU
    print(json.dumps([counted(*case) for case in json.loads(sys.argv[2])]))
