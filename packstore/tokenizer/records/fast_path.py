"""Finds text about which no policy has to decide, by the columns of a block."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress, count, repeat
from typing import Any

import numpy as np

from packstore.config import TokenizeConfig
from packstore.config.record_shapes import known
from packstore.tokenizer.control import holds
from packstore.tokenizer.dialogue.messages import HH_BEGINNING, OBJECTS
from packstore.tokenizer.records.fields import LARGEST_REWARD
from packstore.tokenizer.records.parse import Parsed, parse_canonical
from packstore.tokenizer.refusals import Refused


def parse_plain_texts(
    values: Sequence[Any], kind: str, config: TokenizeConfig, hint: str
) -> dict[int, Parsed]:
    """Parses the records, by their indices, that are text which only has to be encoded.

    The others are to be parsed and checked one by one. `hint`: text without it holds no control
    string.
    """
    if config.thinking == "strip":
        return {}
    alike: defaultdict[tuple[tuple[str, type], ...], list[int]] = defaultdict(list)
    for i, value in enumerate(values):
        if type(value) is dict:
            alike[tuple(zip(value, map(type, value.values()), strict=True))].append(i)
    mapped = {*config.fields.values()}
    names, found = mapped | known().accepted, {}
    for types, records in alike.items():
        meant = {name: kind for name, kind in types if name in names and kind is not type(None)}
        if not {str, int, float}.issuperset(meant.values()):
            continue
        try:
            first = parse_canonical(values[records[0]], kind, config)
        except Refused:
            continue
        number = len(first.responses) + 1  # of texts; a field may serve as two of them
        written = [meant[name] for name in first.fields]
        if not (mapped & meant.keys()).issubset(first.fields):  # if not empty, they are refused
            continue
        if not isinstance(first.prompt, str) or len(written) not in (number, number + 2):
            continue
        if written[:number] != [str] * number:  # the prompt of HH text is in no field of its own
            continue
        columns = {name: [values[i][name] for i in records] for name in meant}
        *used, prompts = (columns[name] for name in first.fields[:number])
        rewards = [columns[name] for name in first.fields[number:]]
        texts = [columns[name] for name in meant if meant[name] is str]
        suspects = chain(_suspects(prompts, used, hint), _unusual(rewards))
        suspects = chain(suspects, (map(OBJECTS.match, column) for column in texts))
        left = set(chain.from_iterable(compress(count(), column) for column in suspects))
        given: Iterable[Any] = zip(*rewards, strict=True) if rewards else repeat(first.rewards)
        rows = zip(records, prompts, zip(*used, strict=True), given, strict=False)
        alike_first = first._replace(events=(), is_plain=True)[3:]
        for j, (i, prompt, responses, reward) in enumerate(rows):
            if j not in left:
                found[i] = Parsed(prompt, responses, reward, *alike_first)
    return found


def _suspects(prompts: list[str], sides: list[list[str]], hint: str) -> Iterator[Iterable[object]]:
    """Yields columns that are true where a policy may have to decide about a text."""
    for column in (prompts, *sides):
        yield map(holds, column, repeat(hint))
        try:
            "".join(column).encode()
        except UnicodeEncodeError:
            yield repeat(True, len(column))
    for column in sides:
        yield from (map(operator.not_, column), map(str.isspace, column))
        yield map(HH_BEGINNING.match, column)


def _unusual(rewards: list[list[float]]) -> Iterator[Iterable[object]]:
    """Yields a column that is true unless the first reward is greater, as float32."""
    if rewards:
        try:
            with np.errstate(over="ignore"):
                stored = np.array(rewards, np.float32)
            yield ~((stored[0] > stored[1]) & (np.abs(stored) < LARGEST_REWARD).all(axis=0))
        except OverflowError:  # whole numbers beyond any float
            yield repeat(True, len(rewards[0]))
