"""Examples that are too long: what is cut fits, by the least that fits, and keeps its
ends.
"""

from __future__ import annotations

import random

import pytest

BOS, EOS = 256, 257


def segments(sequences, layout):
    """Lengths of an example's segments, by the definition of the layouts, token by
    token.
    """
    (first, on), *others = sequences
    lengths = [len(first)]
    for ids, other in others:
        shared = 0
        for a, b, on_a, on_b in zip(first, ids, on, other, strict=False):
            if a != b or on_a or on_b:
                break
            shared += 1
        lengths.append(
            len(ids) - (max(shared - 1, 0) if layout == "shared_prefix" else 0)
        )
    return lengths


def padded(lengths, multiple):
    return sum(-(-n // multiple) * multiple for n in lengths)


def pair(draw):
    """Whole sequences with labels: the second prompt may part from the first at some
    token.
    """
    size = draw.randint(1, 30)
    prompts = [[draw.choice([0, BOS]), *range(1, size)]] * 2
    if (parts := draw.randint(0, 40)) < size:
        prompts[1] = [77 if i == parts else token for i, token in enumerate(prompts[1])]
    answers = [draw.choices(range(100, 104), k=draw.randint(1, 8)) for _ in "cr"]
    return [
        ([*p, *answer, EOS], [False] * size + [True] * (len(answer) + 1))
        for p, answer in zip(prompts, answers, strict=True)
    ]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize("policy", ["drop", "truncate_prompt", "truncate_response"])
def test_what_comes_back_fits_and_is_part_of_what_went_in(
    pack, byte_level, layout, multiple, policy, seed
):
    draw = random.Random(seed)
    size, length = draw.randint(20, 70), draw.randint(15, 40)
    befores = [pair(draw) for _ in range(100)]
    records = [
        dict(zip(("chosen", "chosen_labels", "rejected", "rejected_labels"), [
            part for ids, on in before
            for part in (ids, [i if s else -100 for i, s in zip(ids, on, strict=True)])
        ], strict=True))
        for before in befores
    ]  # fmt: skip
    chosen = {"pack_size": size, "max_length": length, "layout": layout}
    chosen |= {
        "pad_to_multiple": multiple,
        "on": {"identical_sides": "keep", "overlong": policy},
    }
    packed = pack(byte_level(bos=True), *records, **chosen)
    limit = min(length, size)
    for number, before in enumerate(befores):
        needed = padded(segments(before, layout), multiple)
        fitted = max(len(ids) for ids, _ in before) <= limit and needed <= size
        if (after := packed.examples.get(number)) is None:
            assert not fitted
            continue
        assert (after == before) == fitted
        lengths = segments(after, layout)
        assert padded(lengths, multiple) <= size
        head = before[0][0][0] == before[1][0][0] == BOS
        for (ids, on), (new, new_on) in zip(before, after, strict=True):
            assert len(new) <= limit
            assert any(new_on)
            assert not new_on[0]
            assert new[-1] == EOS
            start = on.index(True)
            if policy == "truncate_prompt":
                assert new[new_on.index(True) :] == ids[start:]
                assert new[:head] == ids[:head]
            else:
                assert new[:start] == ids[:start]
        if (
            not fitted and policy == "truncate_prompt"
        ):  # a token less would not have fitted
            cuts = {
                len(ids) - len(new)
                for (ids, _), (new, _) in zip(before, after, strict=True)
            }
            assert len(cuts) == 1
            longer = [n + (i == 0 or layout == "concat") for i, n in enumerate(lengths)]
            full = max(len(ids) for ids, _ in after) == limit
            assert full or padded(longer, multiple) > size


@pytest.mark.parametrize("shared", range(5, 13))
def test_a_cut_response_fits_with_a_prompt_that_repeats_it(pack, byte_level, shared):
    """The second prompt begins like the first response, whose end moves forward."""
    line_break = 98
    chosen = [*range(20, 40), EOS, line_break]
    record = {
        "chosen": chosen,
        "chosen_labels": [-100] * 4 + chosen[4:],
        "rejected": [*chosen[:shared], 77],
        "rejected_labels": [-100] * shared + [77],
    }
    settings = {"layout": "shared_prefix", "on": {"overlong": "truncate_response"}}
    num_packed = 0
    for pack_size in range(10, 20):
        packed = pack(byte_level(), record, pack_size=pack_size, **settings)
        if not packed.examples:
            continue
        num_packed += 1
        assert packed.dataset.verify().ok
        (cut, _), (rejected, _) = packed.examples[0]
        assert cut == [*chosen[: len(cut) - 2], EOS, line_break]
        assert rejected == record["rejected"]
    assert num_packed >= 2
