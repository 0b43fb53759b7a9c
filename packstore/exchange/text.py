"""Exports examples as text: a JSON object a line, which ``packstore pack`` reads again.

Packing adds BOS and EOS to plain text, so the export leaves them out. An example with
other control tokens, such as a rendered chat, comes back with all of them: packing
takes such text as rendered, and adds none.

The prompt ends where the first learned token begins. A token may join the end of the
prompt and the beginning of a response: its text then belongs to the response, unless
another response of the example shows where the prompt ended.
"""

from __future__ import annotations

import contextlib
import itertools
import lzma
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa

from packstore.config import setting
from packstore.errors import ConfigError, sentence
from packstore.exchange import Exported, Exporter, ExportOptions, exists_error
from packstore.format.arrays import SOURCE_SHIFT
from packstore.format.schema import KINDS
from packstore.io.inputs.formats import format_of
from packstore.io.store.location import Location
from packstore.io.store.staging import BESIDE, Staging
from packstore.tokenizer import Tokenizer, recorded_tokenizer

if TYPE_CHECKING:
    from packstore.format.arrays import Bool, Examples, Int32
    from packstore.io.dataset.dataset import Dataset
    from packstore.io.manifest.manifest import Manifest
    from packstore.progress import Progress

RESERVED_NAMES = frozenset(
    {
        "prompt",
        "chosen",
        "rejected",
        "response",
        "responses",
        "scores",
        "chosen_reward",
        "rejected_reward",
        "example_id",
        "source_file",
        "source_record",
    }
)
"""Fields of a line. A carried column of such a name gets the suffix ``_carried``."""

LINES = 1000
"""Lines that are written at a time."""


@dataclass(frozen=True, kw_only=True)
class TextOptions(ExportOptions):
    """Options of the export to text."""

    tokenizer: str | None = setting(
        None, "path or hub name (default: the dataset's)", metavar="PATH"
    )


@dataclass
class TextFigures:
    """Counts of an export.

    Attributes:
        examples: written examples.
        partly_learned: examples with a response of which a part is not learned, such as
            the question of a later turn. The text does not show it.
    """

    examples: int = 0
    partly_learned: int = 0


class _Text(NamedTuple):
    """A sequence as text.

    Attributes:
        text: prompt and response.
        prompt: text of the tokens before the first learned one, possibly with a part of
            a character at its end.
        has_gaps: True if some tokens after the first learned one are not learned.
    """

    text: str
    prompt: str
    has_gaps: bool


class TextDecoder:
    """Decodes sequences to the text that they were packed from.

    Args:
        tokenizer: the tokenizer of the dataset.
        settings: settings of the dataset, in its manifest.
    """

    def __init__(self, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._control_ids = np.array(sorted(tokenizer.special_ids), np.int32)

        adds_bos = settings.get("add_bos")
        if adds_bos is None:
            adds_bos = tokenizer.adds_bos
        adds_eos = settings.get("append_eos") is not False
        # Ids that packing adds to plain text; None: it adds none.
        self._bos_id = tokenizer.bos_id if adds_bos else None
        self._eos_id = tokenizer.eos_id if adds_eos else None

    def decode(self, sequences: Sequence[tuple[Int32, Bool]]) -> list[_Text]:
        """Return the sequences of an example as texts.

        Args:
            sequences: int32 `[T]` token ids of each, and bool `[T]`, True for learned
                tokens.
        """
        ranges = [self._plain_range(ids) for ids, _ in sequences]
        is_rendered = False
        for (ids, _), (start, stop) in zip(sequences, ranges, strict=True):
            is_rendered |= bool(np.isin(ids[start:stop], self._control_ids).any())
        if is_rendered:
            ranges = [(0, len(ids)) for ids, _ in sequences]

        texts = []
        for (ids, supervised), (start, stop) in zip(sequences, ranges, strict=True):
            first_learned = int(supervised.argmax())
            prompt_ids = ids[start : max(first_learned, start)]
            text = _Text(
                text=self._tokenizer.decode(ids[start:stop].tolist()),
                prompt=self._tokenizer.decode(prompt_ids.tolist()),
                has_gaps=not bool(supervised[first_learned:stop].all()),
            )
            texts.append(text)
        return texts

    def _plain_range(self, ids: Int32) -> tuple[int, int]:
        """Return the range of ids without the BOS and EOS that packing adds."""
        start = 0
        stop = len(ids)
        if self._bos_id is not None and ids[0] == self._bos_id:
            start = 1
        if self._eos_id is not None and ids[-1] == self._eos_id:
            stop = max(start, stop - 1)
        return start, stop


def split_prompt(texts: Sequence[_Text]) -> tuple[str, list[str]]:
    """Return the prompt that the sequences of an example share, and their responses."""
    prompts = sorted({_whole_characters(text) for text in texts}, key=len)
    all_texts = [text.text for text in texts]
    # The longest first: a token that joins prompt and response makes a prompt shorter.
    for prompt in reversed(prompts):
        if all(text.startswith(prompt) for text in all_texts):
            return prompt, [text[len(prompt) :] for text in all_texts]
    prompt = _common_prefix([*all_texts, prompts[0]])
    return prompt, [text[len(prompt) :] for text in all_texts]


def _whole_characters(text: _Text) -> str:
    """Return the prompt of a sequence; a character that is cut at its end is completed
    from the text.
    """
    if text.text.startswith(text.prompt):
        return text.prompt
    common = _common_prefix([text.text, text.prompt])
    return text.text[: len(common) + 1]


def _common_prefix(texts: Sequence[str]) -> str:
    return os.path.commonprefix(texts)  # noqa: RUF071  # of characters


class TextWriter:
    """Turns the examples of a dataset into lines.

    Args:
        dataset: the dataset.
        options: options of the export.
    """

    def __init__(self, dataset: Dataset, options: TextOptions) -> None:
        self._dataset = dataset
        provenance = dataset.manifest.provenance
        tokenizer = recorded_tokenizer(
            provenance, options.tokenizer, dataset.url, "Give --tokenizer PATH or NAME"
        )
        self._decoder = TextDecoder(tokenizer, provenance.get("settings", {}))
        self._sources = [source.get("path") for source in provenance.get("sources", ())]
        self.figures = TextFigures()

    def lines(self, progress: Progress) -> Iterator[bytes]:
        """Yield the line of each example, in the order of the packs."""
        from packstore.pack.fill import unpack

        num_packs = 0
        for packs in self._dataset.iter_packs():
            # Pack by pack: a row group can hold sequences of many times its tokens.
            for i in range(len(packs)):
                examples = unpack(packs.row(i))
                for example in range(examples.num_examples):
                    record = self._record(examples, example)
                    yield orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
            num_packs += len(packs)
            progress("export", num_packs, len(self._dataset), "packs")

    def _record(self, examples: Examples, example: int) -> dict[str, Any]:
        """Return the line of an example as an object."""
        first, end = examples.example_offsets[example : example + 2].tolist()
        sequences = []
        for sequence in range(first, end):
            start, stop = examples.sequence_offsets[sequence : sequence + 2].tolist()
            ids = examples.input_ids[start:stop]
            sequences.append((ids, examples.supervised[start:stop]))
        texts = self._decoder.decode(sequences)
        self.figures.examples += 1
        self.figures.partly_learned += any(text.has_gaps for text in texts)

        prompt, responses = split_prompt(texts)
        rewards = [_shortest(reward) for reward in examples.reward[first:end]]
        record: dict[str, Any] = {"prompt": prompt}
        kind = self._dataset.manifest.kind
        if kind == "preference":
            record["chosen"], record["rejected"] = responses
            record["chosen_reward"], record["rejected_reward"] = rewards
        elif kind == "sft":
            (record["response"],) = responses
        else:
            record["responses"] = responses
            record["scores"] = rewards
        record |= self._origin(int(examples.example_ids[example]))
        for name, values in examples.columns.items():
            column = f"{name}_carried" if name in RESERVED_NAMES else name
            record[column] = _as_json(values[example])
        return record

    def _origin(self, example_id: int) -> dict[str, Any]:
        """Return the fields that say where a record came from."""
        source, ordinal = divmod(example_id, 1 << SOURCE_SHIFT)
        file = self._sources[source] if source < len(self._sources) else None
        return {
            "example_id": example_id,
            "source_file": file,
            "source_record": ordinal + 1,
        }


def _shortest(reward: np.float32) -> float:
    """Return the number of the fewest digits that is the same as float32."""
    return float(str(reward))


def _as_json(value: Any) -> Any:
    """Return a carried value as a type of JSON; orjson writes NaN as null."""
    return value.item() if isinstance(value, np.generic) else value


def _export(
    dataset: Dataset, place: Location, options: TextOptions, progress: Progress
) -> Exported:
    file_format, compression = format_of(place.url)
    if file_format not in (None, "json", "jsonl"):
        raise ConfigError(
            sentence(
                where=place.display,
                rule="a file of JSON lines must not have the suffix of another format",
                found=file_format,
                remedy="Name it FILE.jsonl",
            )
        )
    if place.is_dir():
        raise exists_error(place, "a folder", remedy="Name a file")
    if not options.overwrite and place.exists():
        raise exists_error(place, "a file")

    writer = TextWriter(dataset, options)
    with Staging(place, BESIDE) as staging:
        with staging.file() as file, _compressed(file, compression) as stream:
            lines = writer.lines(progress)
            while block := b"".join(itertools.islice(lines, LINES)):
                stream.write(block)
        if not options.overwrite and place.exists():  # written in the meantime
            raise exists_error(place, "a file")
        staging.store(file.name, "")

    facts: dict[str, object] = {
        "examples": writer.figures.examples,
        "partly learned responses": writer.figures.partly_learned,
        "merged boundaries": count_merged_boundaries(dataset.manifest),
    }
    return Exported(files=[place.display], facts=facts)


def count_merged_boundaries(manifest: Manifest) -> int | None:
    """Return the number of records with a token that joins prompt and response, or None
    for a dataset that was packed from another one, which has no notes of its records.

    The tokens do not show it: a prompt may have ended before or inside such a token.
    """
    if "repacked_from" in manifest.provenance:
        return None
    return manifest.records.noted.get("boundary_merged", 0)


@contextlib.contextmanager
def _compressed(file: IO[bytes], compression: str | None) -> Iterator[Any]:
    """Yield a file that compresses to `file`, or `file` itself."""
    if compression is None:
        yield file
    elif compression == "xz":  # pyarrow has no codec for it
        with lzma.open(file, "wb") as stream:
            yield stream
    else:
        # pyarrow closes the file that it writes to.
        with (
            os.fdopen(os.dup(file.fileno()), "wb") as copy,
            pa.CompressedOutputStream(copy, compression) as stream,
        ):
            yield stream


EXPORTER = Exporter(
    help="text, a JSON object a line (every kind)",
    out_name="FILE.jsonl",
    out_help="the file to write, compressed by its suffix; - is standard output",
    examples="  packstore export text prefs-8k prefs.jsonl\n"
    "  packstore export text s3://bucket/prefs-8k s3://bucket/prefs.jsonl.gz\n"
    "  packstore export text prefs-8k - | jq .chosen\n",
    kinds=tuple(KINDS),
    options=TextOptions,
    run=_export,
)
