"""Numbers of tokens beside a dataset on real servers: written, read, cleaned."""

from __future__ import annotations

from typing import Any

import numpy as np
from stores import Store

import packstore
from packstore.torch import PackedDataset


def test_pack_append_read_and_clean(store: Store) -> None:
    def records(first: int) -> list[dict[str, Any]]:
        return [
            {"prompt_ids": [5], "response_ids": [6, 7 + i], "logprobs": [-i, -0.5]}
            for i in range(first, first + 10)
        ]

    to_store: dict[str, Any] = {"storage_options": store.options}
    settings: dict[str, Any] = {"pack_size": 16, "token_values": {"old": "logprobs"}}
    packstore.pack(records(0), store.url, **settings, **to_store)
    packstore.append(store.url, records(10), **to_store)

    values = f"{store.url}-values"
    data = PackedDataset(store.url, side=values, shuffle=False, **to_store)
    (packs,) = data.stream.read([np.arange(len(data.stream))])
    found = sorted(x for pack in packs for x in pack.token_columns["old"].tolist())
    assert found == sorted([*range(-19, 1), *[-0.5] * 20])
    assert packstore.clean(values, **to_store).leftovers == []
