"""The page that shows packs in a browser, and the reader of packs behind it.

The page holds some packs as JSON (``packstore show --html``), or requests each one from
a server on this machine (``packstore view``).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from packstore.format.arrays import SOURCE_SHIFT, Int32, Packs, TopK, ids_of
from packstore.io.dataset.dataset import Dataset
from packstore.io.inputs.formats import place_of
from packstore.io.manifest.side_manifest import REF_LOGPS, token_type
from packstore.io.side.join import SideColumns
from packstore.pages import frame
from packstore.pages.frame import escape_invisible
from packstore.pages.values import MAX_TOP, Scale, numbers_of, rounded

MAX_PACKS = 300
MAX_BYTES = 20_000_000
"""Bounds of the packs embedded in a page: their number, and the bytes of their JSON."""

CACHED_GROUPS = 4
"""Row groups kept in memory, for steps between neighbouring packs."""

_MAX_VALUE_LENGTH = 300
"""Characters of a carried value that are shown."""

_INCOMPLETE = "\ufffd"
"""Replacement character: a decoder returns it for a token that holds only a part of the
bytes of a character.
"""

_MAX_TOKENS_OF_CHARACTER = 8

Decode = Callable[[list[int]], str]


SIDES = {"preference": ("chosen", "rejected"), "sft": ("response",)}
"""Kind -> names of the sequences of an example; other kinds have numbers."""


class PackReader:
    """Reads single packs of a dataset, with texts. Thread-safe.

    Args:
        dataset: the dataset.
        decode: decodes token ids; None: show the ids.
        side: columns of side datasets to show; None: there are none.

    Attributes:
        token_columns: names of the columns with values of tokens.
    """

    def __init__(
        self,
        dataset: Dataset,
        decode: Decode | None,
        side: SideColumns | None = None,
    ) -> None:
        self.dataset = dataset
        self.decode = decode
        self._side = side
        side_types = {} if side is None else side.types
        self.token_columns = [
            name for name, type_name in side_types.items() if token_type(type_name)
        ]
        self._read_group = functools.lru_cache(CACHED_GROUPS)(dataset.read_packs)
        self._token_texts: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, number: int) -> Packs:
        """Return one pack, with the columns of side datasets.

        Raises:
            CompatibilityError: an example lacks values of a side dataset.
            PackstoreError: as :meth:`packstore.Dataset.read_packs`.
        """
        offsets = self.dataset.group_offsets
        group = int(np.searchsorted(offsets, number, "right")) - 1
        pack = self._read_group(group).row(number - int(offsets[group]))
        if self._side is not None:
            (pack,) = self._side.join([pack])
        return pack

    def pack(self, number: int) -> dict[str, Any]:
        """Return pack `number` as a JSON value for the script of the page.

        Its ``ids`` are signed ids: the bitwise complement where not supervised. A text
        is None for a token that is a further part of the character before. Its
        ``values`` are of supervised tokens, by column.
        """
        pack = self.read(number)
        texts: list[str | None] = []
        for start, stop in itertools.pairwise(pack.seq_boundaries.tolist()):
            # A text must not mix supervised and unsupervised tokens.
            for run in split_by_supervision(pack.signed_ids[start:stop]):
                texts += self.texts(ids_of(run).tolist())
        return {
            "number": number,
            "ids": pack.signed_ids.tolist(),
            "texts": texts,
            "sequences": self.sequences(pack),
            "columns": columns_of(pack),
            "values": {name: self._values(pack, name) for name in self.token_columns},
        }

    def _values(self, pack: Packs, column: str) -> dict[str, Any]:
        """Return the values of the supervised tokens of a pack as a JSON value.

        Its ``numbers`` have colours from ``low`` to ``high``. Of a top k it has for
        each token ``ids`` and ``logps``, at most `MAX_TOP`, and by id their ``texts``.
        """
        numbers = numbers_of(pack, column)
        scale = Scale.of(numbers)
        value: dict[str, Any] = {
            "numbers": rounded(numbers),
            "low": scale.low,
            "high": scale.high,
        }
        top = pack.token_columns[column]
        if isinstance(top, TopK):
            value["k"] = top.ids.shape[1]
            value["ids"] = top.ids[:, :MAX_TOP].tolist()
            value["logps"] = [rounded(logps) for logps in top.logps[:, :MAX_TOP]]
            if self.decode is not None:
                ids = np.unique(top.ids[:, :MAX_TOP]).tolist()
                value["texts"] = {str(token): self._token_text(token) for token in ids}
        return value

    def sequences(self, pack: Packs) -> list[dict[str, Any]]:
        """Return the facts about each sequence of a pack, without its tokens.

        Its tokens ``start`` to ``stop`` stand in the pack. It begins with ``shared``
        further ones of the sequence numbered ``parent``; None: it is stored whole. Its
        ``values`` are of side datasets, by column.
        """
        sequence_columns = dict(pack.sequence_columns)
        if pack.ref_logps is not None:
            sequence_columns[REF_LOGPS] = pack.ref_logps
        sequences: list[dict[str, Any]] = []
        omitted_tokens = pack.segment_offsets.tolist()
        parents = pack.parents.tolist()
        for example, example_id in enumerate(pack.example_ids.tolist()):
            place = self._place(example_id)
            for side in self._sides(int(pack.num_responses[example])):
                i = len(sequences)
                sequences.append(
                    {
                        "example": example,
                        "id": str(example_id),
                        "place": place,
                        "side": side,
                        "start": int(pack.seq_boundaries[i]),
                        "stop": int(pack.seq_boundaries[i + 1]),
                        "length": int(pack.lengths[i]),
                        "shared": omitted_tokens[i],
                        "parent": parents[i] if omitted_tokens[i] else None,
                        "reward": float(f"{pack.reward[i]:.6g}"),
                        "values": {
                            name: float(f"{values[i]:.6g}")
                            for name, values in sequence_columns.items()
                        },
                    }
                )
        return sequences

    def _place(self, example_id: int) -> str:
        """Return the file and line of a record."""
        sources = self.dataset.manifest.provenance.get("sources", ())
        source, ordinal = divmod(example_id, 1 << SOURCE_SHIFT)
        path = sources[source].get("path") if source < len(sources) else None
        return escape_invisible(place_of(path or f"source {source}", ordinal))

    def _sides(self, num_responses: int) -> Sequence[str]:
        """Return the names of the sequences of an example."""
        names = SIDES.get(self.dataset.manifest.kind)
        if names is None:
            return [f"response {i + 1}" for i in range(num_responses)]
        return names[:num_responses]

    def texts(self, ids: Sequence[int]) -> list[str | None]:
        """Return the text of each token.

        If several tokens make one character, the first has its text, and the others
        have None.
        """
        if self.decode is None:
            return [f"{token} " for token in ids]
        texts: list[str | None] = [self._token_text(token) for token in ids]
        start = 0
        while start < len(ids):
            stop = start + 1
            if _INCOMPLETE in (texts[start] or ""):
                stop = self._complete(texts, ids, start)
            start = stop
        return texts

    def _complete(self, texts: list[str | None], ids: Sequence[int], start: int) -> int:
        """Merge the texts of tokens that are parts of one character, in place.

        Args:
            texts: the text of each token.
            ids: the token ids.
            start: index of a token that is only a part of a character.

        Returns:
            The index after its last token; ``start + 1`` if no character is completed.
        """
        assert self.decode is not None
        last_stop = min(start + _MAX_TOKENS_OF_CHARACTER, len(ids))
        for stop in range(start + 2, last_stop + 1):
            text = self.decode(list(ids[start:stop]))
            if _INCOMPLETE not in text:
                following: list[str | None] = [None] * (stop - start - 1)
                texts[start:stop] = [escape_invisible(text), *following]
                return stop
        return start + 1

    def _token_text(self, token: int) -> str:
        assert self.decode is not None
        if token not in self._token_texts:
            text = self.decode([token])
            # Some decoders drop the space before the first word, so the text comes from
            # the second of two.
            repeated = self.decode([token, token])
            if repeated.startswith(text):
                text = repeated[len(text) :]
            self._token_texts[token] = escape_invisible(text)
        return self._token_texts[token]


def split_by_supervision(signed_ids: Int32) -> list[Int32]:
    """Split the tokens of a segment where supervision begins or ends.

    Args:
        signed_ids: `[N]`, complemented where unsupervised.
    """
    edges = np.flatnonzero(np.diff(signed_ids >= 0)) + 1
    return np.split(signed_ids, edges)


def columns_of(pack: Packs) -> list[dict[str, str]]:
    """Return the carried values of each example as text."""
    columns: list[dict[str, str]] = [{} for _ in pack.example_ids]
    for name, values in pack.columns.items():
        for column, value in zip(columns, values, strict=True):
            text = escape_invisible(str(value))
            if len(text) > _MAX_VALUE_LENGTH:
                text = text[: _MAX_VALUE_LENGTH - 1] + "…"
            column[escape_invisible(name)] = text
    return columns


def embedded_page(reader: PackReader, numbers: range) -> tuple[str, str]:
    """Return a page with these packs in it, and a sentence on packs that it leaves out,
    else "".
    """
    packs: list[dict[str, Any]] = []
    omission = ""
    size = 0
    for number in numbers:
        pack = reader.pack(number)
        size += len(frame.embedded(pack))
        if packs and (size > MAX_BYTES or len(packs) == MAX_PACKS):
            omission = (
                f"The page holds packs {packs[0]['number']} to {number - 1} of the "
                f"{len(numbers)} requested: at most {MAX_PACKS} packs, and "
                f"{MAX_BYTES // 1_000_000} MB. `packstore view` shows all of them."
            )
            break
        packs.append(pack)
    return _page(reader, packs, note=omission), omission


def served_page(reader: PackReader) -> str:
    """Return a page that requests packs from its server."""
    return _page(reader, None, note="")


def _page(reader: PackReader, packs: list[dict[str, Any]] | None, note: str) -> str:
    """Return the page of packs; None: it requests them from its server."""
    m = reader.dataset.manifest
    if reader.decode is None:
        note = f"{note} Token ids stand in place of text.".strip()
    return frame.page(
        title=reader.dataset.url,
        subtitle=f"kind {m.kind}, layout {m.layout}, {len(reader):,} packs of "
        f"{m.pack_size:,} tokens, fill {m.fill_rate:.1%}, version "
        f"{reader.dataset.version}",
        sections=[frame.asset("packs.html")],
        style=frame.asset("packs.css"),
        script=frame.asset("packs.js"),
        data={
            "packs": len(reader),
            "packSize": m.pack_size,
            "layout": m.layout,
            "sides": SIDES["preference"] if m.kind == "preference" else (),
            "columns": reader.token_columns,
            "embedded": packs,
            "note": note,
        },
        connect=packs is None,
    )
