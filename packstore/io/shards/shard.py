"""Properties of shards and packs that a manifest records."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from packstore.errors import IntegrityError
from packstore.format.arrays import Int64
from packstore.format.typed_json import Checksums, Count, Positive, Sha256


@dataclass(frozen=True, kw_only=True)
class PackShape:
    """Properties shared by all packs of a dataset.

    Attributes:
        kind: ``preference``, ``sft`` or ``ranked``.
        layout: ``concat`` or ``shared_prefix``.
        pack_size: maximum tokens of a pack.
        carry: carried columns, name -> a name in ``schema.CARRY_TYPES``.
        vocab_size: exclusive upper bound of token ids, if known.
    """

    kind: str
    layout: str
    pack_size: int
    carry: Mapping[str, str]
    vocab_size: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class RowGroups:
    """The row groups of a shard: int64 `[G]` each, checksums uint32.

    Attributes:
        rows, examples, tokens: counts of the row group.
        longest: tokens of its longest segment.
        crc32: of its column chunks (Parquet) or buffers (Arrow).
    """

    rows: Int64
    examples: Int64
    tokens: Int64
    longest: Int64
    crc32: Checksums

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardInfo:
    """One shard file.

    Attributes:
        path: relative to the dataset.
        sha256: of the file, hexadecimal.
        footer_bytes: bytes at the end of the file that a reader needs before any row group.
        footer_sha256: of those bytes; page checksums do not cover them.
        example_id_base: added to the example ids in the file.
    """

    path: str
    rows: Count
    examples: Count
    sequences: Count
    tokens: Count
    supervised_tokens: Count
    bytes: Count
    sha256: Sha256
    footer_bytes: Positive
    footer_sha256: Sha256
    example_id_base: Count
    row_groups: RowGroups


@dataclass(frozen=True, kw_only=True)
class FileHashes:
    """Hashes of a shard file and its footer; see :class:`ShardInfo`."""

    bytes: int
    sha256: str
    footer_bytes: int
    footer_sha256: str

    @classmethod
    def of(cls, file: io.BufferedIOBase) -> FileHashes:
        """Hashes a file, which ends with a footer, its length in four bytes, and a magic word."""
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 10, 0))
        end = file.read()
        magic = next((m for m in (b"PAR1", b"ARROW1") if end.endswith(m)), b"")
        footer = int.from_bytes(end.removesuffix(magic)[-4:], "little") + 4 + len(magic)
        if not magic or footer > size:
            raise IntegrityError("a shard must end with the footer of a Parquet or Arrow file.")
        file.seek(size - footer)
        sha256 = hashlib.sha256(file.read()).hexdigest()
        return cls(bytes=size, sha256=digest, footer_bytes=footer, footer_sha256=sha256)


def describe_shard(
    path: str, figures: Sequence[Int64], hashes: FileHashes, crc32: Int64 | Checksums
) -> ShardInfo:
    """Builds the manifest's entry of a shard from `pack_figures` and crc32 of each row group."""
    groups = [[len(f), *f[:, :4].sum(axis=0), f[:, 4].max()] for f in figures]
    table = np.ascontiguousarray(np.array(groups, np.int64).reshape(-1, 6).T)
    rows, examples, sequences, tokens, supervised, longest = table
    return ShardInfo(
        path=path,
        rows=int(rows.sum()),
        examples=int(examples.sum()),
        sequences=int(sequences.sum()),
        tokens=int(tokens.sum()),
        supervised_tokens=int(supervised.sum()),
        **asdict(hashes),
        example_id_base=0,
        row_groups=RowGroups(
            rows=rows,
            examples=examples,
            tokens=tokens,
            longest=longest,
            crc32=crc32.astype(np.uint32),
        ),
    )
