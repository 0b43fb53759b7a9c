"""What becomes of records: packs them, and gives their sequences, events and
refusals.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import itertools
import json
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sentencepiece
import tokenizers
import transformers

import packstore
from packstore.errors import DropRateError
from packstore.tokenizer.dialogue import template

FILES = {
    "qwen3": ("qwen3/tokenizer.json", None),
    "few_merges": ("qwen3/tokenizer.json", None),
    "mistral": ("mistral_v1/tokenizer.json", "plain"),
    "mistral_model": ("mistral_v1/tokenizer.model", "chatml"),
    "t5": ("t5_unigram/tokenizer.json", "plain"),
    "small": ("small_bpe/tokenizer.json", "chatml"),
}


TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}[{{ m.role[0] }}]"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content or "
    "'' }}"
    "{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
    "!{{ c.function.name }}{{ a if a is string else a | tojson }}{% endfor %}"
    "<e>{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
"""A chat template that shows roles by their first letter, reasoning, tools and calls.
"""


class Source(NamedTuple):
    """A tokenizer as ``packstore.pack`` takes it, its template, and the object of its
    library.
    """

    file: Any
    template: str | None
    library: Any


class Packed:
    """What became of some records.

    Attributes:
        dataset: the dataset; None if every record was dropped.
        rejects: place, reason and detail of each dropped record.
        dropped: number of dropped records by reason.
        noted: number of records by event.
    """

    def __init__(
        self, dataset: Any, rejects: list[dict[str, str]], source: Source
    ) -> None:
        self.dataset, self.rejects, self._source = dataset, rejects, source
        self.dropped = Counter(reject["reason"] for reject in rejects)
        self.noted = dict(dataset.manifest.records.noted) if dataset else {}

    @cached_property
    def examples(self) -> dict[int, list[tuple[list[int], list[bool]]]]:
        """Number of each packed record -> ids and supervision of its sequences."""
        if self.dataset is None:
            return {}
        frame = packstore.scan(self.dataset, tokens=True).collect().sort("example_id")
        return {
            number: [
                (a, [i != -100 for i in b]) for a, b in zip(ids, labels, strict=True)
            ]
            for number, ids, labels in frame[
                "example_id", "input_ids", "labels"
            ].iter_rows()
        }

    @property
    def sequences(self) -> list[tuple[list[int], list[bool]]]:
        """Ids and supervision of all sequences, in the order of the input."""
        return [*itertools.chain.from_iterable(self.examples.values())]

    def decode(self, ids: list[int]) -> str:
        text: str = self._source.library.decode(ids, skip_special_tokens=False)
        return text

    @cached_property
    def marked(self) -> list[str]:
        """The text of each sequence, with supervised parts in «»."""
        texts = []
        for row in self.sequences:
            text = ""
            for learned, run in itertools.groupby(
                zip(*row, strict=True), lambda pair: pair[1]
            ):
                part = self.decode([i for i, _ in run])
                text += f"«{part}»" if learned else part
            texts.append(text)
        return texts

    @property
    def texts(self) -> list[str]:
        """The text of each sequence."""
        return [re.sub("[«»]", "", text) for text in self.marked]

    @property
    def learned(self) -> list[str]:
        """The supervised text of each sequence."""
        return ["".join(re.findall("«(.*?)»", text, re.DOTALL)) for text in self.marked]


@pytest.fixture(autouse=True)
def render_here() -> Iterator[None]:
    """Renders in this process: a worker for each job takes longer than the job."""
    template.allow_rendering(template.RENDER_SECONDS, template.RENDER_MEMORY)
    yield
    template.allow_rendering(0, 0)


@pytest.fixture(scope="session")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Packed]:
    """Packs records with settings and a tokenizer; None: they are ids."""
    rejects = tmp_path_factory.mktemp("rejects") / "rejects.jsonl"

    def go(tokenizer: Any, *records: object, **settings: Any) -> Packed:
        source = (
            tokenizer
            if isinstance(tokenizer, Source)
            else Source(tokenizer, None, tokenizer)
        )
        file, template, _ = source
        usual = {"pack_size": 65536, "chat_template": template, "max_drop_rate": 1}
        settings = {**usual, "num_workers": 0, "rejects": str(rejects), **settings}
        dataset, out = None, f"memory://{uuid.uuid4().hex}"
        with contextlib.suppress(DropRateError):
            dataset = packstore.pack([*records], out, file, **settings)
        return Packed(
            dataset,
            [*map(json.loads, rejects.read_text(encoding="utf-8").splitlines())],
            source,
        )

    return go


@pytest.fixture(scope="session")
def tokenizer(
    shared_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Source]:
    """A real tokenizer by its short name; ``few_merges`` is Qwen3's, which
    loads fast.
    """

    @functools.cache
    def load(name: str, chat_template: str | None = None) -> Source:
        file, template = FILES[name]
        path = shared_data / "tokenizers" / file
        if name == "few_merges":
            path = with_few_merges(path, tmp_path_factory.mktemp(name))
        if path.suffix == ".model":
            library: Any = sentencepiece.SentencePieceProcessor(model_file=str(path))
        else:
            library = tokenizers.Tokenizer.from_file(str(path))
        return Source(
            path.parent if template is None else path,
            chat_template or template,
            library,
        )

    return load


@pytest.fixture(scope="session")
def records(shared_data: Path) -> Callable[[str], list[dict[str, Any]]]:
    """The records of a file of real data."""

    @functools.cache
    def load(name: str) -> list[dict[str, Any]]:
        opened = gzip.open if name.endswith(".gz") else open
        with opened(shared_data / name, "rt", encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    return load


def with_few_merges(path: Path, folder: Path) -> Path:
    """A copy of a byte-level tokenizer and the files beside it, with its first merges
    alone.
    """
    shutil.copytree(
        path.parent, folder, dirs_exist_ok=True, copy_function=shutil.copyfile
    )
    stored = json.loads(path.read_text(encoding="utf-8"))
    model, size = stored["model"], len(BYTES) + 1000
    model["merges"] = model["merges"][: size - len(BYTES)]
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < size}
    for i, token in enumerate(stored["added_tokens"], size):
        token["id"] = i
    (folder / path.name).write_text(json.dumps(stored), encoding="utf-8")
    return folder / path.name


BYTES = tokenizers.pre_tokenizers.ByteLevel.alphabet()


@pytest.fixture(scope="session")
def byte_level() -> Callable[..., Source]:
    """Makes a byte-level tokenizer with the merges given; each character one token
    otherwise.
    """

    def make(
        merges=(),
        special=("<s>", "</s>", "<e>"),
        template=None,
        bos=False,
        **token_options,
    ):
        vocab = {c: i for i, c in enumerate(sorted(BYTES))}
        for a, b in merges:
            vocab[a + b] = len(vocab)
        made = tokenizers.Tokenizer(
            tokenizers.models.BPE(vocab=vocab, merges=list(merges))
        )
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        )
        made.decoder = tokenizers.decoders.ByteLevel()
        made.add_special_tokens(
            [tokenizers.AddedToken(s, **token_options) for s in special]
        )
        if bos:
            made.post_processor = tokenizers.processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
            )
        return Source(made, template, made)

    return make


@pytest.fixture(scope="session")
def rendered(shared_data: Path) -> Callable[..., str]:
    """Hugging Face's own rendering."""
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(shared_data / "tokenizers/small_bpe/tokenizer.json"),
        eos_token="</s>",
        bos_token="<s>",
    )

    def render(
        template: Any, messages: Any, tools: Any = None, prompt: bool = False
    ) -> str:
        return fast.apply_chat_template(
            [
                {**m, "content": m["content"] or ""} for m in messages
            ],  # null would be left out
            tools=tools,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=prompt,
        )

    return render
