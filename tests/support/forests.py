"""Random forests of sequences that begin alike, and shared prefixes in plain Python.

The sequences of a forest are paths in trees of turns, in random order or from the
shortest to the longest. They extend each other, fork, repeat each other, learn turns
that others only read, and share turns of a single token.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from packstore.format import KINDS, Examples, Packs, to_offsets

VOCAB = 12
"""Token ids are below it: few, so that unrelated turns also begin alike."""


@dataclass(frozen=True)
class Dialogue:
    """One sequence: its token ids, and for each whether it is supervised."""

    ids: list[int]
    supervised: list[bool]

    @property
    def prompt_length(self) -> int:
        """Tokens before the first supervised one."""
        return self.supervised.index(True)


def random_forest(
    seed: int, *, size: int = 14, depth: int = 8, longest_turn: int = 4
) -> list[Dialogue]:
    """Return `size` sequences of up to `depth` turns."""
    rng = np.random.default_rng(seed)
    paths: list[list[list[int]]] = []
    for _ in range(2 * size):
        parent: list[list[int]] = []
        if paths and rng.random() < 0.9:
            # Mostly one of the last, so that trees grow deep.
            behind = min(int(rng.geometric(0.6)), len(paths))
            parent = paths[-behind]
        if len(parent) == depth:
            parent = parent[: int(rng.integers(depth))]
        is_short = bool(parent) and rng.random() < 0.4
        length = 1 if is_short else int(rng.integers(2, longest_turn + 1))
        turn = rng.integers(0, VOCAB, length).tolist()
        paths.append([*parent, turn])

    chosen = rng.integers(0, len(paths), size)
    dialogues = [_random_dialogue(rng, paths[i]) for i in chosen]
    if rng.random() < 0.3:
        # A row for each turn of the deepest path.
        deepest = max(paths, key=len)
        for end in range(1, min(len(deepest), size) + 1):
            dialogues[end - 1] = _random_dialogue(rng, deepest[:end])
    for i in rng.integers(0, size, size // 6):
        dialogues[i] = dialogues[int(rng.integers(size))]
    if rng.random() < 0.5:
        # Sequences stand before those that extend them: parents have parents.
        dialogues.sort(key=lambda dialogue: len(dialogue.ids))
    return dialogues


def _random_dialogue(rng: np.random.Generator, path: list[list[int]]) -> Dialogue:
    """Learn the last turn, or any others too; never the first token."""
    ids: list[int] = []
    supervised: list[bool] = []
    learns_others = rng.random() < 0.3
    for turn in path:
        is_learned = turn is path[-1] or (learns_others and rng.random() < 0.5)
        ids += turn
        supervised += [is_learned and rng.random() < 0.9 for _ in turn]
    supervised[0] = False
    supervised[-1] = True
    return Dialogue(ids, supervised)


def examples_of(dialogues: list[Dialogue], kind: str, seed: int = 0) -> Examples:
    """Return the sequences as examples of a kind, in their order.

    A sequence that is left over for a kind of fixed K is dropped.
    """
    rng = np.random.default_rng(seed)
    num_responses: list[int] = []
    while (used := sum(num_responses)) < len(dialogues):
        k = KINDS[kind] or int(rng.integers(1, 5))
        if used + k > len(dialogues):
            if KINDS[kind]:
                break
            k = len(dialogues) - used
        num_responses.append(k)

    dialogues = dialogues[: sum(num_responses)]
    ids = [token for dialogue in dialogues for token in dialogue.ids]
    supervised = [is_on for dialogue in dialogues for is_on in dialogue.supervised]
    lengths = np.array([len(dialogue.ids) for dialogue in dialogues])
    return Examples(
        input_ids=np.array(ids, np.int32),
        supervised=np.array(supervised, np.bool_),
        sequence_offsets=to_offsets(lengths),
        example_offsets=to_offsets(np.array(num_responses)),
        reward=rng.normal(size=len(dialogues)).astype(np.float32),
        example_ids=np.arange(len(num_responses)),
    )


def dialogues_of(examples: Examples) -> list[Dialogue]:
    """Return the sequences of examples."""
    edges = examples.sequence_offsets.tolist()
    return [
        Dialogue(
            examples.input_ids[start:end].tolist(),
            examples.supervised[start:end].tolist(),
        )
        for start, end in itertools.pairwise(edges)
    ]


def common(a: list[int], b: list[int]) -> int:
    """Return the number of leading tokens that are equal."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


def prefixes_of(group: list[Dialogue]) -> tuple[list[int], list[int]]:
    """Return offset and parent distance of each sequence, by the definition."""
    offsets: list[int] = []
    distances: list[int] = []
    for i, dialogue in enumerate(group):
        shared = 0
        parent = i
        for j in range(i):
            same = min(common(group[j].ids, dialogue.ids), dialogue.prompt_length)
            if same > shared:
                shared = same
                parent = j
        offset = max(shared - 1, 0)
        offsets.append(offset)
        distances.append(i - parent if offset else 0)
    return offsets, distances


def any_prefixes_of(
    group: list[Dialogue], rng: np.random.Generator
) -> tuple[list[int], list[int]]:
    """Return any offsets and parent distances that the format allows.

    A writer may leave out less than it could, and name another parent.
    """
    offsets: list[int] = []
    distances: list[int] = []
    for i, dialogue in enumerate(group):
        shared = [
            min(common(earlier.ids, dialogue.ids), dialogue.prompt_length)
            for earlier in group[:i]
        ]
        offset = 0
        parent = 0
        choice = rng.random()
        if i and choice < 0.3:
            parent = int(rng.integers(i))
            offset = int(rng.integers(max(shared[parent], 1)))
        elif i and choice < 0.9:
            # The last of those that share most, which may leave out most itself.
            parent = max(range(i), key=lambda j: (shared[j], j))
            offset = max(shared[parent] - 1, 0)
        # The parent stores the last left-out token itself.
        while offset and offsets[parent] >= offset:
            parent -= distances[parent]
        offsets.append(offset)
        distances.append(i - parent if offset else 0)
    return offsets, distances


def forest_packs(
    seed: int, kind: str, *, num_packs: int = 2, size: int = 14, longest_turn: int = 4
) -> tuple[Examples, Packs]:
    """Return the examples of a random forest, and packs of layout ``shared_prefix``
    that share prefixes over all examples of a pack, in any way that the format allows.
    """
    rng = np.random.default_rng(seed)
    parts = [
        examples_of(
            random_forest(seed * num_packs + i, size=size, longest_turn=longest_turn),
            kind,
            seed,
        )
        for i in range(num_packs)
    ]
    examples = Examples.concat(parts)
    offsets: list[int] = []
    distances: list[int] = []
    for part in parts:
        offsets_of_pack, distances_of_pack = any_prefixes_of(dialogues_of(part), rng)
        offsets += offsets_of_pack
        distances += distances_of_pack

    signed_ids: list[int] = []
    segment_lengths: list[int] = []
    for dialogue, offset in zip(dialogues_of(examples), offsets, strict=True):
        pairs = list(zip(dialogue.ids, dialogue.supervised, strict=True))[offset:]
        signed_ids += [token if is_on else ~token for token, is_on in pairs]
        segment_lengths.append(len(pairs))

    sequence_offsets = to_offsets(np.array([part.num_sequences for part in parts]))
    token_edges = to_offsets(np.array(segment_lengths))
    boundaries = [
        token_edges[first : last + 1] - token_edges[first]
        for first, last in itertools.pairwise(sequence_offsets)
    ]
    packs = Packs(
        signed_ids=np.array(signed_ids, np.int32),
        reward=examples.reward,
        lengths=examples.lengths,
        seq_boundaries=np.concatenate(boundaries).astype(np.int32),
        parent_distances=np.array(distances, np.int32),
        example_ids=np.arange(examples.num_examples),
        num_responses=examples.num_responses,
        token_offsets=token_edges[sequence_offsets],
        sequence_offsets=sequence_offsets,
        example_offsets=to_offsets(np.array([part.num_examples for part in parts])),
    )
    return replace(examples, example_ids=packs.example_ids), packs


def places_of(packs: Packs) -> list[list[int]]:
    """Return the place in the row of each token of each logical sequence.

    The row is all packs, one after another.
    """
    places: list[list[int]] = []
    start = 0
    lengths = packs.lengths.tolist()
    distances = packs.parent_distances.tolist()
    for i, own in enumerate(packs.segment_lengths.tolist()):
        shared = places[i - distances[i]][: lengths[i] - own] if distances[i] else []
        places.append([*shared, *range(start, start + own)])
        start += own
    return places
