"""Real files, real tokenizers, and rows made in a test."""

from __future__ import annotations

import functools
import gzip
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from packstore.config import TokenizeConfig
from packstore.format import Examples, Rows
from packstore.tokenizer import RecordTokenizer, Tokenizer, load_tokenizer
from packstore.tokenizer.fastest import fastest

FILES = {
    "qwen3": ("qwen3", None),
    "mistral": ("mistral_v1/tokenizer.json", "plain"),
    "mistral_model": ("mistral_v1/tokenizer.model", "chatml"),
    "t5": ("t5_unigram/tokenizer.json", "plain"),
    "small": ("small_bpe/tokenizer.json", "chatml"),
}


@pytest.fixture(scope="session")
def tokenizer(shared_data: Path) -> Callable[..., Tokenizer]:
    """A tokenizer by its short name, with the engine that `auto` chooses for a large input."""

    @functools.cache
    def load(name: str, chat_template: str | None = None, engine: str = "auto") -> Tokenizer:
        path, template = FILES[name]
        source = shared_data / "tokenizers" / path
        made = load_tokenizer(source, chat_template=chat_template or template)
        return fastest(made) if engine == "auto" else made.with_engine(engine)

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


@pytest.fixture(scope="session")
def rows() -> Callable[[Sequence[object]], Rows]:
    """Values as the rows of a file."""
    return lambda values: Rows(
        source=0, path="data.jsonl", unit="line", ordinals=range(len(values)), values=values
    )


@pytest.fixture(scope="session")
def sequences() -> Callable[[Examples], list[tuple[list[int], list[bool]]]]:
    """Ids and supervision of each sequence, as lists."""

    def split(examples: Examples) -> list[tuple[list[int], list[bool]]]:
        bounds = examples.sequence_offsets
        return [
            (examples.input_ids[a:b].tolist(), examples.supervised[a:b].tolist())
            for a, b in itertools.pairwise(bounds)
        ]

    return split


BYTES = tokenizers.pre_tokenizers.ByteLevel.alphabet()


def make_byte_level(
    merges=(), special=("<s>", "</s>", "<|end|>"), template=None, bos=False, **token_options
):
    """A byte-level tokenizer with the merges given, every character one token otherwise."""
    vocab = {c: i for i, c in enumerate(sorted(BYTES))}
    for a, b in merges:
        vocab[a + b] = len(vocab)
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=list(merges)))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(s, **token_options) for s in special])
    if bos:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
        )
    return fastest(load_tokenizer(made, chat_template=template))


@pytest.fixture(scope="session")
def byte_level() -> Callable[..., Tokenizer]:
    """Makes a byte-level tokenizer with the merges given; each character one token otherwise."""
    return make_byte_level


@pytest.fixture
def run(rows, sequences):
    """Tokenizes records; gives decoded (text, supervised text) of each sequence, and the tally."""

    def go(tokenizer, *values, kind="preference", **settings):
        config = TokenizeConfig(**{"pack_size": 4096, **settings})
        examples, tally = RecordTokenizer(tokenizer, config, kind)(rows(values))
        texts = []
        for ids, on in sequences(examples):
            said = [t for t, s in zip(ids, on, strict=True) if s]
            texts.append((tokenizer.decode(ids), tokenizer.decode(said)))
        return texts, tally

    return go


@pytest.fixture(scope="session")
def rendered(shared_data: Path) -> Callable[..., str]:
    """Hugging Face's own rendering."""
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(shared_data / "tokenizers/small_bpe/tokenizer.json"),
        eos_token="</s>",
        bos_token="<s>",
    )

    def render(template: Any, messages: Any, tools: Any = None, prompt: bool = False) -> str:
        return fast.apply_chat_template(
            [{**m, "content": m["content"] or ""} for m in messages],  # null would be left out
            tools=tools,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=prompt,
        )

    return render
