from __future__ import annotations

import collections

import numpy as np

from packstore.config import TokenizeConfig
from packstore.tokenizer import RecordTokenizer, load_tokenizer


def test_pairs_of_nemo_aligner(shared_data, records, rows, sequences):
    """ids, labels and rewards of all 100 pairs that NeMo-Aligner packed itself."""
    tokenizer = load_tokenizer(shared_data / "nemo/tokenizer.json")
    config = TokenizeConfig(pack_size=90, add_bos=False, append_eos=False)
    examples, tally = RecordTokenizer(tokenizer, config, "preference")(
        rows(records("nemo/dummy-dpo.jsonl"))
    )
    assert (tally.kept, dict(tally.dropped), dict(tally.noted)) == (100, {}, {})
    found = sequences(examples)
    ours = collections.Counter(
        (
            tuple(found[i][0] + found[i + 1][0]),
            tuple(t if on else -100 for s in found[i : i + 2] for t, on in zip(*s, strict=True)),
            tuple(examples.reward[i : i + 2].tolist()),
            (len(found[i][0]), len(found[i + 1][0])),
        )
        for i in range(0, 200, 2)
    )
    packed = np.load(shared_data / "nemo/dummy_dpo_packed_90.npy", allow_pickle=True)
    golden = collections.Counter(
        (
            tuple(row["input_ids"]),
            tuple(row["labels"]),
            tuple(row["reward"]),
            tuple(np.diff(row["seq_boundaries"]).tolist()),
        )
        for row in packed
    )
    assert ours == golden
