"""Tokenizes blocks of records in worker processes.

A file of its own that imports little, as each process loads it anew. A faster engine of
a tokenizer is watched: a few records of each block are tokenized by it in the worker,
and then by the reference engine in the process of the job, which compares the ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from packstore.etl.engines import Run
from packstore.format.arrays import Examples, Rows
from packstore.io.inputs.files import Block
from packstore.tokenizer.fastest import EngineWatch
from packstore.tokenizer.record_tokenizer import Encoded, RecordTokenizer
from packstore.tokenizer.tally import Tally

TokenizedBlock = tuple[Examples, Tally]
"""The examples of a block, and the tally of all its records."""


class BlockTokenizer:
    """Parses and tokenizes a block, and samples it for the comparison of engines.

    Picklable. The local engine reads `in_threads` and `seconds_alone`.

    Args:
        record_tokenizer: tokenizes records.
        watch: draws the sample, and compares it.
        in_threads: True if threads suffice, where the user sets no number of workers.
        seconds_alone: seconds for which one worker works, before others are started.

    Attributes:
        tokenizer: the tokenizer; None: the records hold token ids.
    """

    def __init__(
        self,
        record_tokenizer: RecordTokenizer,
        watch: EngineWatch,
        *,
        in_threads: bool,
        seconds_alone: float,
    ) -> None:
        self._record_tokenizer = record_tokenizer
        self._watch = watch
        self.tokenizer = record_tokenizer.tokenizer
        self.in_threads = in_threads
        self.seconds_alone = seconds_alone

    def load(self) -> None:
        """Load the tokenizer, which a pickle holds as text."""
        if self.tokenizer is not None:
            self.tokenizer.engine.encode_batch([""], control=False)

    def tokenize(self, run: Run, blocks: Iterable[Block]) -> Iterator[TokenizedBlock]:
        """Yield the examples and the tally of each block, computed by `run`.

        This process compares the samples, so no worker has to load the reference.
        """
        items: Iterable[Block | Rows] = blocks
        if self._record_tokenizer.applies_adapter_here:
            items = self._apply_adapter(blocks)
        for tokenized, sample in run(self, items):
            self._watch.compare(sample)
            yield tokenized

    def _apply_adapter(self, blocks: Iterable[Block]) -> Iterator[Rows]:
        """Yield records with the results of an adapter that workers cannot import."""
        for block in blocks:
            yield self._record_tokenizer.adapted(block.parse())

    def __call__(self, block: Block | Rows) -> tuple[TokenizedBlock, list[Encoded]]:
        """Return the examples and the tally of a block, and its sample to compare."""
        rows = block if isinstance(block, Rows) else block.parse()
        sampled_indices = self._watch.sample(rows)
        examples, tally, encoded_sample = self._record_tokenizer(rows, sampled_indices)
        return (examples, tally), encoded_sample
