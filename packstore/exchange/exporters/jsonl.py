"""Plain records, one JSON object per line, which other trainers and ``packstore pack`` read.

One line per example, in the order of the packs, a row group at a time:

    preference  prompt, chosen, rejected, chosen_reward, rejected_reward
    sft         input_ids, labels                 as text: prompt, response
    ranked      prompt, responses, scores

and `example_id` and the carried columns. As ids, the prompt is the common prefix of the example's
sequences before their first supervised token. Where a response is only partly supervised, its
labels are added (`chosen_labels`, `rejected_labels`, `response_labels`).
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from packstore.config import setting
from packstore.errors import CompatibilityError, ConfigError, quote, sentence
from packstore.exchange.exporters import Exported, Exporter, ExportOptions
from packstore.exchange.output import OutputFile
from packstore.format.arrays import IGNORE_INDEX, Bool, Examples, Float32, Int32
from packstore.io.inputs.formats import COMPRESSIONS
from packstore.io.store.location import Location

if TYPE_CHECKING:
    from packstore.etl.pipeline import Progress
    from packstore.io.dataset.dataset import Dataset
    from packstore.tokenizer import Tokenizer

log = logging.getLogger("packstore")

OWN = (
    *("prompt", "chosen", "rejected", "chosen_reward", "rejected_reward", "chosen_labels"),
    *("rejected_labels", "input_ids", "labels", "response", "responses", "scores"),
    *("response_labels", "example_id"),
)
"""Reserved field names, which a carried column must not have."""

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE


@dataclass(frozen=True, kw_only=True)
class JsonlOptions(ExportOptions):
    """Options of this format."""

    text: bool = setting(False, "write text instead of token ids")
    tokenizer: str | None = setting(
        None, "with --text, the tokenizer; default: the dataset's, at its recorded path"
    )


@dataclass(frozen=True, slots=True)
class _Example:
    """One example.

    Attributes:
        ids: token ids of each sequence.
        supervised: supervision mask of each sequence.
        rewards: float32 `[K]`.
        others: example id and carried values.
    """

    ids: list[Int32]
    supervised: list[Bool]
    rewards: Float32
    others: dict[str, Any]

    @property
    def cut(self) -> int:
        """Length of the common unsupervised prefix of all sequences, in tokens."""
        most = min(int(np.argmax(on)) for on in self.supervised)
        heads = np.stack([ids[:most] for ids in self.ids])
        same = (heads == heads[0]).all(axis=0)
        return most if same.all() else int(np.argmin(same))

    @property
    def partly(self) -> bool:
        """True if a token after the prompt is not supervised."""
        return not all(on[self.cut :].all() for on in self.supervised)

    def labels(self, first: int) -> list[Int32]:
        """Returns the labels of each sequence from token `first` on."""
        ignored = np.int32(IGNORE_INDEX)
        pairs = zip(self.ids, self.supervised, strict=True)
        return [np.where(on[first:], ids[first:], ignored) for ids, on in pairs]


class _Text:
    """Decodes ids to text, without BOS and the last EOS, which readers add themselves."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, ids: Int32, cut: int) -> tuple[str, str]:
        """Returns the text before token `cut`, and the text from there on."""
        decode = self._tokenizer.decode
        start = int(ids[0] == self._tokenizer.bos_id)
        stop = len(ids) - int(ids[-1] == self._tokenizer.eos_id)
        prompt, whole = decode(ids[start:cut].tolist()), decode(ids[start:stop].tolist())
        # Decoders drop a leading space of their input: keep that of the response.
        if whole.startswith(prompt):
            return prompt, whole[len(prompt) :]
        return prompt, decode(ids[cut:stop].tolist())


class _Sink(io.RawIOBase):
    """The file under a compressor, which must not close it."""

    def __init__(self, out: OutputFile) -> None:
        self._out = out

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._out.write(data)
        return len(data)


def _run(dataset: Dataset, place: Location, options: JsonlOptions, progress: Progress) -> Exported:
    from packstore.pack.fill import unpack
    from packstore.tokenizer import recorded_tokenizer

    compression = _compression(place)
    taken = [name for name in dataset.manifest.carry if name in OWN]
    if taken:
        must = "a carried column must not have the name of a field of the record"
        raise CompatibilityError(sentence(dataset.url, must, quote(taken[0])))
    if options.tokenizer and not options.text:
        raise ConfigError("a tokenizer is needed for text only: set text too, or leave it out.")
    text = None
    if options.text:
        provenance, do = dataset.manifest.provenance, "Give a tokenizer (--tokenizer PATH)"
        text = _Text(recorded_tokenizer(provenance, options.tokenizer, dataset.url, do))
    kind, done, unlike = dataset.manifest.kind, 0, 0
    with OutputFile(place, options.overwrite) as out, _compressed(out, compression) as write:
        for packs in dataset.iter_packs():
            examples = unpack(packs)
            for example in _examples(examples):
                record = _as_text(kind, example, text) if text else _as_ids(kind, example)
                unlike += example.partly and (text is not None or kind != "sft")
                write(orjson.dumps({**record, **example.others}, option=_OPTIONS))
            done += examples.num_examples
            progress("export", done, dataset.manifest.totals.examples, "examples")
    facts: dict[str, object] = {"examples": done, "order": "of the packs"}
    if unlike:
        facts["supervised in part of a response"] = unlike
        log.warning(
            "%s examples are supervised in part of a response: readers of prompt and response "
            "alone supervise all of it",
            f"{unlike:,}",
        )
    return Exported(files=[place.display], facts=facts)


def _examples(examples: Examples) -> Iterator[_Example]:
    columns = {"example_id": examples.example_ids, **examples.columns}
    rows = {name: column.tolist() for name, column in columns.items()}
    starts = examples.sequence_offsets.tolist()
    for i, (first, last) in enumerate(pairwise(examples.example_offsets.tolist())):
        parts = [slice(*part) for part in pairwise(starts[first : last + 1])]
        yield _Example(
            ids=[examples.input_ids[part] for part in parts],
            supervised=[examples.supervised[part] for part in parts],
            rewards=examples.reward[first:last],
            others={name: row[i] for name, row in rows.items()},
        )


def _as_ids(kind: str, example: _Example) -> dict[str, Any]:
    if kind == "sft":
        return {"input_ids": example.ids[0], "labels": example.labels(0)[0]}
    cut = example.cut
    record = _record(kind, example.ids[0][:cut], [ids[cut:] for ids in example.ids], example)
    if not example.partly:
        return record
    labels = example.labels(cut)
    if kind == "ranked":
        return {**record, "response_labels": labels}
    return {**record, "chosen_labels": labels[0], "rejected_labels": labels[1]}


def _as_text(kind: str, example: _Example, text: _Text) -> dict[str, Any]:
    parts = [text(ids, example.cut) for ids in example.ids]
    return _record(kind, parts[0][0], [response for _, response in parts], example)


def _record(kind: str, prompt: Any, responses: list[Any], example: _Example) -> dict[str, Any]:
    rewards = example.rewards
    if kind == "sft":
        return {"prompt": prompt, "response": responses[0]}
    if kind == "ranked":
        return {"prompt": prompt, "responses": responses, "scores": rewards}
    return {
        "prompt": prompt,
        "chosen": responses[0],
        "rejected": responses[1],
        "chosen_reward": rewards[0],
        "rejected_reward": rewards[1],
    }


def _compression(place: Location) -> str | None:
    """Returns ``gzip``, ``zstd`` or None, by the name of the file."""
    name = place.display.lower()
    for suffix, compression in {"": None, **COMPRESSIONS}.items():
        if name.endswith(f".jsonl{suffix}"):
            return compression
    must = f"must end in .jsonl, or in .jsonl{' or .jsonl'.join(COMPRESSIONS)}"
    raise ConfigError(sentence(place.display, must))


@contextlib.contextmanager
def _compressed(out: OutputFile, compression: str | None) -> Iterator[Callable[[bytes], object]]:
    """Yields a function that writes compressed bytes to `out`."""
    if compression is None:
        yield out.write
        return
    import pyarrow as pa

    with pa.CompressedOutputStream(pa.PythonFile(_Sink(out), mode="w"), compression) as stream:
        yield stream.write


EXPORTER = Exporter(
    help="plain records, a JSON object a line (every kind)",
    out=("FILE.jsonl", "the file to write; .jsonl.gz and .jsonl.zst are compressed"),
    examples="  packstore export jsonl prefs-8k prefs.jsonl.zst\n"
    "  packstore export jsonl prefs-8k prefs.jsonl --text --tokenizer tokenizer.json\n",
    options=JsonlOptions,
    run=_run,
)
