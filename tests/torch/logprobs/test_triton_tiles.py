"""The Triton kernels: equal to the eager passes under the interpreter, and compiled for
GPUs.

Needs no GPU, and proves no speed. Triton is not among the packages of a CPU build of
torch; ``make kernels`` installs it.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import math
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from children import run_python
from ranks import launch
from torch import Tensor

from packstore.cli import main
from packstore.errors import BackendError, MissingExtraError, UnknownNameError
from packstore.testing import random_examples
from packstore.torch import (
    PackedBatch,
    PackedPolicy,
    collate,
    packed_logps,
    segment_logps,
    train,
    use_packed_attention,
)
from packstore.torch.logprobs import (
    EAGER,
    HEAD_BACKENDS,
    HeadLogProbs,
    HeadLogProbsOfIds,
    Passes,
    Projection,
    Tile,
    logprobs,
    tiles,
)

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed: make kernels",
)
TOLERANCE = 1e-6
WIDTH = 16


class Case(NamedTuple):
    """A head; `trained`: which of hidden states, weight and bias need a gradient.

    With `masked`, the first half of the vocabulary has a bias of -inf; with `ids`,
    each token has so many ids in place of its target.
    """

    tokens: int
    vocab: int
    scale: float = 1.0
    softcap: float | None = None
    biased: bool = False
    trained: str = "hwb"
    keep_logits: bool = False
    half: bool = False
    masked: bool = False
    ids: int = 0


SHAPES = ((1, 5), (1, 301), (7, 1), (7, 301))
HEADS = ((1.0, None, False), (0.3, None, True), (2.0, 1.5, False), (0.5, 30.0, True))
CASES = [
    *(Case(n, vocab, *head) for (n, vocab), head in itertools.product(SHAPES, HEADS)),
    Case(130, 177, 0.3, None, True),
    Case(130, 177, 0.5, 1.5, False, "h"),
    *(
        Case(7, 301, 0.5, *head, "h")
        for head in itertools.product((None, 1.5), (False, True))
    ),
    Case(7, 301, 0.5, 1.5, True, "w"),
    Case(7, 301, 0.5, 1.5, True, "hw", keep_logits=True),
    Case(7, 301, 0.5, 1.5, True, "hwb", keep_logits=True),
    Case(7, 301, 0.5, 1.5, False, "hw", half=True),
    Case(7, 301, 0.5, 1.5, False, "h", half=True),
    *(
        Case(7, 301, biased=True, trained=trained, masked=True)
        for trained in ("h", "hw")
    ),
    Case(7, 301, 0.5, 1.5, True, ids=3),
    Case(130, 177, 0.5, 1.5, False, "h", ids=3),
    Case(7, 301, 0.3, None, True, "hw", keep_logits=True, ids=3),
    Case(7, 301, 0.5, 1.5, False, "hw", half=True, ids=3),
]


@pytest.fixture(scope="module")
def batch(kit: SimpleNamespace) -> PackedBatch:
    return collate(kit.packed(random_examples(1, seed=4), [1], "concat"), "preference")


def step(case: Case, backend: str) -> list[Tensor]:
    """Log-probs and all gradients that the case asks for."""
    made = torch.Generator().manual_seed(case.tokens + case.vocab)
    hidden, weight, bias, upstream = (
        torch.randn(*shape, generator=made)
        for shape in (
            (case.tokens, WIDTH),
            (case.vocab, WIDTH),
            (case.vocab,),
            (case.tokens,),
        )
    )
    lowest = case.vocab // 2 if case.masked else 0
    targets = torch.randint(lowest, case.vocab, (case.tokens,), generator=made)
    function: Any = HeadLogProbs
    if case.ids:
        function = HeadLogProbsOfIds
        shape = (case.tokens, case.ids)
        targets = torch.randint(lowest, case.vocab, shape, generator=made)
        targets[:, -1] = targets[:, 0]
        upstream = torch.randn(shape, generator=made)
    bias[:lowest] = -math.inf
    named = {"h": hidden, "w": weight, **({"b": bias} if case.biased else {})}
    leaves = [x.requires_grad_() for name, x in named.items() if name in case.trained]
    size = max(64, case.tokens * case.vocab // 3)
    how = Projection(case.scale, case.softcap, size, backend, case.keep_logits)
    logps = function.apply(hidden, weight, bias if case.biased else None, targets, how)
    first, again = (
        torch.autograd.grad(logps, leaves, upstream, retain_graph=i < 1) for i in (0, 1)
    )
    assert all(map(torch.equal, first, again)), case
    return [logps.detach(), *again]


def passed(backend: str, stride: int, keep_logits: bool) -> list[Tensor]:
    """What each pass makes of a tile whose rows are `stride` apart."""
    made, columns, rows = torch.Generator().manual_seed(3), 150, 3
    passes = HEAD_BACKENDS.load(backend)
    product = torch.empty(stride * (rows - 1) + columns).as_strided(
        (rows, columns), (stride, 1)
    )
    logits = torch.randn(rows, columns, generator=made)
    tile = Tile(
        product, None, torch.tensor([0, 149, 200]), Projection(keep_logits=keep_logits)
    )
    state, found = torch.randn(3, rows, generator=made).abs(), []
    for name, more in (
        ("update_logsumexp", ()),
        ("update_logsumexp_and_weights", (torch.float32,)),
    ):
        product.copy_(logits)
        found += [
            x.clone()
            for x in (*(getattr(passes, name)(state, tile, *more) or ()), state)
        ]
    for dtype in (torch.float32, torch.bfloat16):
        product.copy_(logits)
        found.append(
            passes.grad_logits(tile, state[0] + 5, state[1], dtype).to(torch.float64)
        )
    return found


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, as a share of the largest value, at least 1."""
    pairs = zip(found, expected, strict=True)
    return max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs
    )


def on_rank(_: Any) -> dict[str, float]:
    """Half of the cases on each rank."""
    from packstore.torch.logprobs import triton_tiles

    assert triton_tiles.INTERPRETED
    triton_tiles.BLOCK = 128  # several blocks in a tile
    errors = {}
    for case in CASES[dist.get_rank() :: dist.get_world_size()]:
        with pytest.MonkeyPatch.context() as patch:
            if (
                case.half
            ):  # as on a GPU: a CPU has no such product of operands of 16 bits
                patch.setattr(logprobs, "operand_dtype", lambda *_: torch.bfloat16)
                for module in (logprobs, tiles):
                    patch.setattr(module, "product", lambda a, b: a.float() @ b.float())
                patch.setattr(
                    logprobs,
                    "_add_product",
                    lambda t, a, b: t.addmm_(a.float(), b.float()),
                )
            errors[str(case)] = error(step(case, "triton"), step(case, "eager"))
            if case in CASES[::6]:
                assert all(
                    map(torch.equal, step(case, "auto"), step(case, "triton"))
                ), case
    for stride, keep in itertools.product((150, 160, 2**30 + 16), (False, True)):
        values = (passed(backend, stride, keep) for backend in ("triton", "eager"))
        errors[f"{stride=}, {keep=}, half=True"] = error(*values)
    return errors


@needs_triton
def test_equal_to_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    results = launch(__file__, None, 2, tmp_path)
    errors: dict[str, float] = results[0] | results[1]
    assert len(errors) == len(CASES) + 6
    # A bfloat16 may be rounded the other way, to its neighbour at 2^-7.
    wrong = {
        c: e
        for c, e in errors.items()
        if not e <= (2**-7 if "half=True" in c else TOLERANCE)
    }
    assert not wrong


POINTERS = {
    **dict.fromkeys(("product", "state", "shifts", "upstream"), "*fp32"),
    **dict.fromkeys(("bias", "out"), "*bf16"),
    "targets": "*i64",
}
INTEGERS = ("stride", "columns", "state_stride", "out_stride")


def compile_for(capability: int) -> None:
    """Compiles each kernel for a GPU of this compute capability, without one."""
    from layer_kernels import usage_for

    from packstore.torch.logprobs import triton_tiles

    for kernel, biased, rest in (
        (triton_tiles.logsumexp_kernel, True, None),
        (triton_tiles.softmax_kernel, True, False),
        (triton_tiles.softmax_kernel, False, True),
    ):
        fixed = {"BIAS": biased, "CAP": True, "BLOCK": triton_tiles.BLOCK}
        if rest is not None:
            fixed["REST"] = rest
        fixed |= {} if biased else {"bias": None}
        fixed |= {"upstream": None} if rest else {}
        types = {
            name: "constexpr"
            if name in fixed
            else POINTERS.get(name, "i32" if name in INTEGERS else "fp32")
            for name in kernel.arg_names
        }
        how = {"num_warps": triton_tiles.WARPS}
        registers, stack = usage_for(capability, kernel, types, fixed, **how)
        assert registers <= 128, registers  # so that a processor runs two programs
        assert stack <= 8  # bytes, of a cap at 9.0; none elsewhere


@needs_triton
@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(c, marks=pytest.mark.slow) for c in (80, 100))]
)
def test_kernels_compile(capability: int, tmp_path: Path) -> None:
    environment = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    environment["PYTHONUTF8"] = (
        "1"  # torch's compiler reads files of its own as the locale's text
    )
    done = run_python(__file__, capability, env=environment)
    assert done.returncode == 0, done.stderr


def test_float64_takes_the_eager_passes(
    kit: SimpleNamespace, batch: PackedBatch
) -> None:
    hidden, weight = torch.zeros(batch.num_tokens, 8), torch.zeros(kit.VOCAB, 8)
    logps = segment_logps(
        batch, hidden=hidden.double(), weight=weight.double(), backend="triton"
    )
    expected = -math.log(kit.VOCAB) * len(batch.targets.ids)
    assert float(logps.sum()) == pytest.approx(expected, rel=1e-12)


@needs_triton
def test_other_devices_are_refused(kit: SimpleNamespace, batch: PackedBatch) -> None:
    hidden, weight = torch.zeros(batch.num_tokens, 8), torch.zeros(kit.VOCAB, 8)
    with pytest.raises(BackendError, match="backend='eager'"):
        segment_logps(batch, hidden=hidden, weight=weight, backend="triton")


def test_refused_names_and_absent_packages(
    kit: SimpleNamespace,
    batch: PackedBatch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = kit.short_run(tmp_path)
    model = use_packed_attention(kit.tiny_model(dtype=torch.float32))
    for call in (
        lambda b: packed_logps(model, batch, backend=b),
        lambda b: PackedPolicy(model, backend=b),
    ):
        with pytest.raises(UnknownNameError, match=r"'tritn'.*'triton'"):
            call("tritn")
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(
        sys.modules, "packstore.torch.logprobs.triton_tiles", raising=False
    )
    missing = "pip install triton"
    with pytest.raises(MissingExtraError, match=missing):
        PackedPolicy(model, backend="triton")
    with pytest.raises(MissingExtraError, match=missing):
        train(**run, head="triton", output_dir=str(tmp_path / "run"))
    more = ["--model", run["model"], "--head", "triton", "--use-cpu"]
    for command in (
        ["ref-logps", run["train_dataset"], str(tmp_path / "side")],
        ["evaluate", run["train_dataset"], "--reference-model", run["model"]],
    ):
        assert main([*command, *more]) != 0
        assert re.search(missing, capsys.readouterr().err)


def times(passes: Passes, name: str, factor: float) -> Passes:
    """The passes, one of which is wrong by a factor."""
    right = getattr(passes, name)

    def wrong(*args: Any) -> Any:
        out = right(*args)
        return (out[0] * factor, out[1]) if isinstance(out, tuple) else out * factor

    return passes._replace(**{name: wrong})


def failing(*_: Any) -> Any:
    raise RuntimeError("no C compiler")


@pytest.mark.parametrize(
    ("passes", "said"),
    [
        (EAGER, "head 'auto' is 'triton'"),
        (
            times(EAGER, "grad_logits", 1.001),
            "head 'auto' is 'eager': its passes differ by 0.001",
        ),
        (
            times(EAGER, "update_logsumexp_and_weights", math.nan),
            "head 'auto' is 'eager': its passes differ by nan",
        ),
        (
            EAGER._replace(update_logsumexp=failing),
            "head 'auto' is 'eager': 'RuntimeError: no C compiler'",
        ),
        (
            None,
            "head 'auto' is 'eager': head backend 'triton' needs .*: pip install "
            "triton",
        ),
    ],
)
def test_auto_takes_what_agrees_and_says_so(
    kit: SimpleNamespace,
    batch: PackedBatch,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    passes: Passes | None,
    said: str,
) -> None:
    """With other passes in the place of Triton's, as where a GPU or its compiler is at
    fault.
    """
    taken: list[str] = []
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(
        sys.modules, "packstore.torch.logprobs.triton_tiles", raising=False
    )
    if passes is not None:
        module: Any = ModuleType("in_its_place")
        right = passes.update_logsumexp
        module.PASSES = passes._replace(
            update_logsumexp=lambda *args: (taken.append("triton"), right(*args))
        )
        monkeypatch.setitem(sys.modules, "in_its_place", module)
        monkeypatch.setitem(HEAD_BACKENDS, "triton", "in_its_place:PASSES")
    monkeypatch.setattr(tiles, "_AUTO_PASSES", {})
    policy = PackedPolicy(use_packed_attention(kit.tiny_model(dtype=torch.float32)))
    with caplog.at_level(logging.INFO, logger="packstore"):
        found = [policy(batch) for _ in range(2)]
    expected = packed_logps(policy.model, batch, backend="eager")
    assert all(torch.equal(logps, expected) for logps in found)
    assert len(re.findall(said, caplog.text)) == caplog.text.count("head 'auto'") == 1
    taken.clear()
    policy(batch)
    assert bool(taken) == ("is 'triton'" in said)


if __name__ == "__main__":
    compile_for(int(sys.argv[1]))
