from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packstore.config import TokenizeConfig
from packstore.tokenizer import RecordTokenizer
from packstore.tokenizer.records.overlong import fit
from packstore.tokenizer.records.sequences import Tokens
from packstore.tokenizer.refusals import Refused

EOS = 900


def pair(prompt, *responses, head=0):
    """Sequences over one prompt: 0, 1, 2, ... then the response's tokens."""
    return [
        Tokens(
            np.concatenate([np.arange(prompt), response]).astype(np.int32),
            np.arange(prompt + len(response)) >= prompt,
            head,
        )
        for response in responses
    ]


def stored(sequences, layout):
    """Tokens that an example takes, by the definition of the layouts, token by token."""
    first = sequences[0]
    total = len(first.ids)
    for other in sequences[1:]:
        shared = 0
        for a, b, on_a, on_b in zip(
            first.ids, other.ids, first.supervised, other.supervised, strict=False
        ):
            if a != b or on_a or on_b:
                break
            shared += 1
        total += len(other.ids) - (max(shared - 1, 0) if layout == "shared_prefix" else 0)
    return total


responses = st.lists(st.integers(100, 103), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(
    prompt=st.integers(1, 12),
    parts=st.none() | st.integers(0, 11),
    answers=st.lists(responses, min_size=1, max_size=4),
    head=st.integers(0, 3),
    size=st.integers(2, 50),
    length=st.integers(2, 50),
    layout=st.sampled_from(["concat", "shared_prefix"]),
    policy=st.sampled_from(["drop", "truncate_prompt", "truncate_response"]),
)
def test_what_comes_back_fits_and_is_part_of_what_went_in(
    prompt, parts, answers, head, size, length, layout, policy
):
    before = pair(prompt, *[[*a, EOS] for a in answers], head=min(head, prompt))
    if parts is not None and parts < prompt:
        before[-1].ids[parts] = 77
    config = TokenizeConfig(pack_size=size, max_length=length, layout=layout, overlong=policy)
    fitted_already = (
        max(len(s.ids) for s in before) <= config.sequence_limit and stored(before, layout) <= size
    )
    try:
        after = fit(before, config, frozenset([EOS]))
    except Refused:
        assert not fitted_already
        return
    assert (after is before) == fitted_already
    assert stored(after, layout) <= size
    for old, new in zip(before, after, strict=True):
        assert len(new.ids) <= config.sequence_limit
        assert len(new.ids) == len(new.supervised)
        assert new.supervised.any()
        assert not new.supervised[0]
        assert new.ids[-1] == EOS
        if policy == "truncate_prompt":
            assert new.ids[new.supervised].tolist() == old.ids[old.supervised].tolist()
            assert new.ids[: old.head].tolist() == old.ids[: old.head].tolist()
        else:
            start = prompt
            assert new.ids[:start].tolist() == old.ids[:start].tolist()
    if after is not before and policy == "truncate_prompt":
        # One token less cut would not have fitted.
        cut = len(before[0].ids) - len(after[0].ids)
        assert {len(o.ids) - len(n.ids) for o, n in zip(before, after, strict=True)} == {cut}
        room = size - stored(after, layout)
        spare = config.sequence_limit - max(len(s.ids) for s in after)
        assert room < (1 if layout == "shared_prefix" else len(after)) or spare < 1


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize("policy", ["drop", "truncate_prompt", "truncate_response"])
def test_real_chats_cut_to_size(tokenizer, records, rows, sequences, layout, policy):
    """Shortened chats still begin with their system turn, and still end as their template ends."""
    qwen = tokenizer("qwen3")
    some = records("pairs/chat_en.jsonl")[:120]
    config = TokenizeConfig(pack_size=700, layout=layout, overlong=policy)
    whole, _ = RecordTokenizer(qwen, TokenizeConfig(pack_size=1 << 20), "preference")(rows(some))
    examples, tally = RecordTokenizer(qwen, config, "preference")(rows(some))
    assert tally.read == tally.kept + tally.dropped["overlong"]
    originals = sequences(whole)
    for n, i in enumerate(examples.example_ids.tolist()):
        record, both = some[i], sequences(examples)[2 * n : 2 * n + 2]
        assert stored([Tokens(np.array(a), np.array(b)) for a, b in both], layout) <= 700
        system = record["prompt"][0] if record["prompt"][0]["role"] == "system" else None
        for side, (ids, on) in enumerate(both):
            text, original = qwen.decode(ids), originals[2 * i + side]
            assert text.endswith("<|im_end|>\n")
            if system:
                start = f"<|im_start|>system\n{system['content']}<|im_end|>\n"
                assert text.startswith(start)
            if policy == "truncate_prompt":
                assert sum(on) == sum(original[1])
            if policy == "truncate_response":
                prompt = original[1].index(True)
                assert ids[:prompt] == original[0][:prompt]
    if policy != "drop":
        assert tally.noted[policy.replace("truncate", "truncated")] > 0
