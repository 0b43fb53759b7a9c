"""What a step of the trainer asks of a GPU, counted without one: waits, kernels,
memory.

``tests/support/fake_cuda_steps.py`` says what runs and what does not. Operators are
counted, each as one kernel: attention is one, and so is the optimizer's update. No time
is measured.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from children import run_python

ROOT = Path(__file__).parents[3]

DEVICE = r"""
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl {
struct Guard final : NoOpDeviceGuardImpl<kCUDA> {
  Device getDevice() const override { return Device(kCUDA, 0); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}
namespace at {
struct Hooks final : CUDAHooksInterface {
  Hooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}
"""
"""Lets autograd take CUDA tensors in a build of torch without CUDA, if loaded before
torch.
"""

KEPT = {"Llama": 13.3 / 16, "Qwen3": 15.3 / 28}
"""GiB that an eager layer keeps for 8,192 tokens in bfloat16, as in docs/training.md.
"""

AUTOCAST = 1.2
"""Times as much it keeps under autocast."""

HEADS = {"Llama": 128256 * 2048, "Qwen3": 151936 * 1024}
LAUNCHES = {"Llama": (180, 250), "Qwen3": (240, 320)}
"""Fewest and most of a layer and batch: two forward passes and a backward pass."""


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux"
    or shutil.which("g++") is None
    or torch.version.cuda is not None,
    reason="needs Linux, g++ and a build of torch for CPUs",
)
def test_a_step_on_a_gpu(tmp_path: Path) -> None:
    """In a steady step the host waits for nothing, and all products have aligned
    operands.
    """
    source, library = tmp_path / "device.cpp", tmp_path / "device.so"
    source.write_text(DEVICE, encoding="utf-8")
    home = Path(torch.__file__).parent
    flags = f"-std=c++20 -O0 -fPIC -shared -I{home}/include -o {library} {source}"
    link = f"-L{home}/lib -lc10 -ltorch_cpu -Wl,-rpath,{home}/lib"
    subprocess.run(["g++", *flags.split(), *link.split()], check=True)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    env = {
        "LD_PRELOAD": str(library),
        "PYTHONPATH": paths,
        "ACCELERATE_USE_CPU": "false",
    }
    done = run_python(
        ROOT / "tests" / "support" / "fake_cuda_steps.py", tmp_path, env=env
    )
    assert done.returncode == 0, done.stderr
    cases = {
        tuple(name): steps for name, *steps in json.loads(done.stdout.splitlines()[-1])
    }
    assert len(cases) == 8
    for (family, layout, layers), (
        (weights, of_layers),
        first,
        steady,
    ) in cases.items():
        batches = len(steady["tokens"])
        # What the first step does on purpose is seen.
        for found in (first["waits"], first["unaligned"]):
            assert sum(", fake_cuda_steps" in x for x in found) == len(first["tokens"])
        assert steady["waits"] == []
        assert steady["unaligned"] == []
        # Weights, Adam's moments, the reference; and gradients, if a batch came before.
        assert steady["held_before"] == pytest.approx(16 * weights, rel=0.01)
        exact = (16 + 4 * (batches > 1)) * weights
        rounded = 2 * of_layers
        kept = layers * KEPT[family] * AUTOCAST * max(steady["tokens"]) / 8192 * 2**30
        expected = (
            exact + rounded + kept + 4 * HEADS[family] + 2**30
        )  # gradient and tiles of it
        assert steady["peak"] == pytest.approx(expected, rel=0.08)
        if layers == 1:
            *_, more = cases[family, layout, 2]
            fewest, most = LAUNCHES[family]
            layer = (more["launches"] - steady["launches"]) / batches
            assert fewest < layer < most
            assert steady["launches"] / batches - layer < 1000
            # Seven matrices, each in two forward passes, and for two gradients.
            assert more["products"] - steady["products"] == 28 * batches
