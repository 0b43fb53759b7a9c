"""The work of a worker process, in a file that imports little: each process loads it
anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from packstore.etl.engines import Run
from packstore.format.arrays import Examples, Rows
from packstore.io.inputs.files import Block
from packstore.tokenizer.fastest import EngineWatch
from packstore.tokenizer.record_tokenizer import Encoded, RecordTokenizer
from packstore.tokenizer.tally import Tally

Part = tuple[Examples, Tally]


class Tokenize:
    """Parses and tokenizes a block, and samples it for a comparison. Picklable."""

    def __init__(
        self,
        stage: RecordTokenizer,
        watch: EngineWatch,
        *,
        in_threads: bool,
        alone: float,
    ) -> None:
        self._stage, self._watch = stage, watch
        self.tokenizer = stage.tokenizer
        self.in_threads, self.alone = in_threads, alone  # how engines run it

    def load(self) -> None:
        """Loads the tokenizer, which a pickle holds as text."""
        if self.tokenizer is not None:
            self.tokenizer.engine.encode_batch([""], control=False)

    def parts(self, run: Run, blocks: Iterable[Block]) -> Iterator[Part]:
        """Yields the examples of each block and the tally of its records, made by
        `run`.

        This process compares the samples with the reference, which no worker has to
        load.
        """
        items: Iterable[Block | Rows] = blocks
        if self._stage.applies_adapter_here:
            items = (self._stage.adapted(block.parse()) for block in blocks)
        for part, sample in run(self, items):
            self._watch.compare(sample)
            yield part

    def __call__(self, block: Block | Rows) -> tuple[Part, list[Encoded]]:
        """Returns the part that a block becomes, and the sample of it to compare."""
        rows = block if isinstance(block, Rows) else block.parse()
        examples, tally, encoded = self._stage(rows, self._watch.sample(rows))
        return (examples, tally), encoded
