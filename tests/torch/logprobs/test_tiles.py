"""The tiles of the fused head cover all logits once and are aligned."""

from __future__ import annotations

import itertools

import numpy as np

from packstore.torch.logprobs import tiles

SIZES = (1, 7, 127, 2047, 4105, 8192, 8193, 22369)
VOCABS = (5, 128, 50257, 128256, 151936)


CASES = [
    (n, vocab, chunk)
    for n, vocab in itertools.product(SIZES, VOCABS)
    for chunk in (1, 64, tiles.CPU_CHUNK, tiles.GPU_CHUNK)
    if n * vocab <= 10**5 * chunk  # else millions of tiles
]


def test_tiles_cover_all_logits_and_are_aligned() -> None:
    for case in CASES:
        check(*case)


def check(n: int, vocab: int, chunk: int) -> None:
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
