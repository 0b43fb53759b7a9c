"""A tree of token sequences by their beginnings (a radix tree), to find shared ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from packstore.format.arrays import Int32


@dataclass(slots=True)
class _Branch:
    """Tokens that follow one another in every sequence below this branch.

    Attributes:
        sequence: the earliest sequence that has them.
        origin: where that sequence begins in the ids.
        start, end: the places of the tokens in that sequence.
        children: first token of a branch that goes on from here -> the branch.
    """

    sequence: int
    origin: int
    start: int
    end: int
    children: dict[int, _Branch] = field(default_factory=dict)


class PrefixTree:
    """Sequences of one array of ids, added one after another.

    Args:
        ids: int32 `[N]`, the token ids of all sequences.
    """

    def __init__(self, ids: Int32) -> None:
        self._ids = ids
        # Bytes compare several times as fast as slices of arrays, and beginnings are
        # mostly equal.
        self._bytes = ids.tobytes()
        self._roots: dict[int, _Branch] = {}

    def clear(self) -> None:
        """Remove all sequences."""
        self._roots = {}

    def common(self, a: int, b: int, limit: int) -> int:
        """Return how many tokens from `a` on equal those from `b` on, at most
        `limit`.
        """
        width = self._ids.itemsize
        if (
            self._bytes[a * width : (a + limit) * width]
            == self._bytes[b * width : (b + limit) * width]
        ):
            return limit
        differs = self._ids[a : a + limit] != self._ids[b : b + limit]
        return int(differs.argmax())  # tokens before the first difference

    def add(self, start: int, end: int, limit: int, sequence: int) -> tuple[int, int]:
        """Add the sequence ``ids[start:end]``.

        Args:
            start, end: its place in the ids.
            limit: number of its leading tokens that may be shared.
            sequence: its number.

        Returns:
            The number of leading tokens, at most `limit`, that it shares with a
            sequence added before; and the number of the earliest that shares them, -1
            if there is none.
        """
        length = end - start
        shared = 0
        parent = -1
        depth = 0
        branches = self._roots
        while depth < length:
            token = int(self._ids[start + depth])
            branch = branches.get(token)
            if branch is None:
                branches[token] = _Branch(sequence, start, depth, length)
                break
            max_equal = min(branch.end, length) - depth
            equal = self.common(branch.origin + depth, start + depth, max_equal)
            if depth < limit:
                shared = min(depth + equal, limit)
                parent = branch.sequence
            depth += equal
            if depth < branch.end and depth < length:
                self._split(branch, depth)
            branches = branch.children
        return shared, parent

    def _split(self, branch: _Branch, depth: int) -> None:
        """Cut a branch in two at a place of its sequence."""
        lower_branch = _Branch(
            branch.sequence, branch.origin, depth, branch.end, branch.children
        )
        branch.end = depth
        branch.children = {int(self._ids[branch.origin + depth]): lower_branch}
