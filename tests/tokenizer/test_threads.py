"""The reference library in threads: one object, two modes, and never an error of a race."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np


def test_both_modes_at_once(tokenizer):
    engine = tokenizer("qwen3", engine="tokenizers").engine
    texts = [f"x{special}y {n}" for n, special in enumerate(list(engine.specials) * 20)]
    expected = {control: engine.encode_batch(texts, control=control) for control in (False, True)}
    assert len(expected[False][0]) > len(expected[True][0])
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(
                lambda i: engine.encode_batch(texts, control=i % 3 == 0), range(40), timeout=120
            )
        )
    for i, (ids, offsets) in enumerate(found):
        np.testing.assert_array_equal(ids, expected[i % 3 == 0][0])
        np.testing.assert_array_equal(offsets, expected[i % 3 == 0][1])
