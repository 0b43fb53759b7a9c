"""The tiles of the fused head cover all logits once and are aligned."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from packstore.torch.logprobs import tiles
from packstore.torch.models.probe import ieee_products

SIZES = (1, 7, 127, 2047, 4105, 8192, 8193, 22369)
VOCABS = (5, 128, 50257, 128256, 151936)


CASES = [
    (n, vocab, chunk)
    for n, vocab in itertools.product(SIZES, VOCABS)
    for chunk in (1, 64, tiles.CPU_CHUNK, tiles.GPU_CHUNK)
    if n * vocab <= 10**5 * chunk  # else millions of tiles
]


@pytest.mark.parametrize(("n", "vocab", "chunk"), CASES)
def test_tiles_cover_all_logits_and_are_aligned(n: int, vocab: int, chunk: int) -> None:
    found = list(tiles.tiles(n, vocab, chunk))
    columns = [c for c, _ in found]
    rows = found[0][1]
    assert all(each == rows for _, each in found)
    for slices, size in ((columns, vocab), (rows, n)):
        assert slices[0].start == 0
        assert slices[-1].stop == size
        assert all(a.stop == b.start for a, b in itertools.pairwise(slices))
        assert all(s.start < s.stop for s in slices)
    widths = np.array([c.stop - c.start for c in columns])
    heights = np.array([r.stop - r.start for r in rows])
    assert widths.max() * heights.max() <= max(chunk, tiles.ALIGNED)
    if chunk >= tiles.CPU_CHUNK:  # every tile but a last one of less than 16 columns
        assert not (widths[widths >= 16] % 16).any()
        assert not (widths[:-2] % 128).any()
        assert heights.max() - heights.min() <= 16 * len(heights)  # evenly split
        assert heights.min() * 2 >= min(n, heights.max())


@pytest.mark.parametrize("chosen", ["high", "highest"])
def test_probe_multiplies_in_float32_and_restores_the_setting(chosen: str) -> None:
    before = torch.get_float32_matmul_precision()
    matmul = torch.backends.cuda.matmul
    try:
        torch.set_float32_matmul_precision(chosen)
        outside = matmul.fp32_precision
        with ieee_products():
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == outside
        assert torch.get_float32_matmul_precision() == chosen
    finally:
        torch.set_float32_matmul_precision(before)
