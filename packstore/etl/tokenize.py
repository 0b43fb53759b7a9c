"""The work of a worker process, in a file that imports little: each process loads it anew."""

from __future__ import annotations

from packstore.format.arrays import Examples, Rows, Tally
from packstore.io.inputs.files import Block
from packstore.tokenizer.fastest import EngineWatch
from packstore.tokenizer.record_tokenizer import Encoded, RecordTokenizer

Part = tuple[Examples, Tally]


class Tokenize:
    """Parses and tokenizes a block, in a worker or here. Picklable."""

    def __init__(self, stage: RecordTokenizer, alone: float | None, watch: EngineWatch) -> None:
        self._stage, self._watch = stage, watch
        self.tokenizer = stage.tokenizer
        self.alone = alone

    def load(self) -> None:
        """Loads the tokenizer, which a pickle holds as text."""
        if self.tokenizer is not None:
            self.tokenizer.engine.encode_batch([""], control=False)

    def __call__(self, block: Block) -> Part:
        """Returns the examples of a block, and the tally of its records."""
        return self.check_result(self.run_in_worker(block))

    def run_in_worker(self, block: Block | Rows) -> tuple[Part, list[Encoded]]:
        """Returns the result for a block, and the sample of it to compare."""
        rows = block if isinstance(block, Rows) else block.parse()
        examples, tally, encoded = self._stage(rows, self._watch.sample(rows))
        return (examples, tally), encoded

    def check_result(self, unchecked: tuple[Part, list[Encoded]]) -> Part:
        """Compares the sample with the reference, which no worker loads; returns the result."""
        part, sample = unchecked
        self._watch.compare(sample)
        return part
