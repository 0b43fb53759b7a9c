"""Export to text: the lines are what was packed, and pack again to the same tokens."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from stores import Store

import packstore
from packstore import Dataset, export
from packstore.cli import main
from packstore.errors import ConfigError, DatasetExistsError, TokenizerError

Pack = Callable[..., Dataset]

SAMPLE = Path(__file__).parents[2] / "examples" / "sample" / "pairs.jsonl"

PIECES = [
    "a",
    "b",
    " ",
    "  ",
    "\n",
    "\t",
    "the",
    " quick",
    "好",
    "的",
    "😀",
    "é",
    "e\u0301",
]
PIECES += [".", "!?", "123", "\u200b", "\x00", "\r\n", "ﬁ", "'s", "Human:", "\ufffd"]
"""Pieces of random texts, for which tokens join neighbours or are parts of characters."""

CONTROLS = ["</s>", "<s>", "<|im_end|>", "<|im_start|>user\n"]
"""Control strings inside a record's own words: they are plain text, unless all answers
end with EOS, which makes the record a rendered one.
"""

SHARED_TOKENIZERS = ["qwen3", "small_bpe", "mistral_v1/tokenizer.json"]
SHARED_TOKENIZERS += ["mistral_v1/tokenizer.model", "t5_unigram/tokenizer.json"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Byte-level tokenizers of a few merges: one adds EOS, one BOS and EOS, one has a
    chat template.
    """
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = SAMPLE.read_text(encoding="utf-8").splitlines()
    tokenizer.train_from_iterator(lines + ["好的 😀 é ab the quick"] * 9, trainer)

    folder = tmp_path_factory.mktemp("tokenizers")
    tokenizer.save(str(folder / "plain.json"))
    (folder / "chat").mkdir()
    tokenizer.save(str(folder / "chat" / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "chat" / "tokenizer_config.json").write_text(
        json.dumps(config), encoding="utf-8"
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.save(str(folder / "bos.json"))
    return {
        "eos": str(folder / "plain.json"),
        "bos": str(folder / "bos.json"),
        "chat": str(folder / "chat"),
    }


def random_text(rng: random.Random, pieces: list[str]) -> str:
    """Return a text of some pieces that begins with a plain one: text that begins with a
    control string is taken as rendered.
    """
    first = rng.choice([piece for piece in pieces if piece not in CONTROLS])
    return first + "".join(rng.choices(pieces, k=rng.randint(0, 8)))


def random_records(kind: str, n: int, seed: int, pieces: list[str]) -> list[Any]:
    rng = random.Random(seed)
    records: list[dict[str, Any]] = []
    for _ in range(n):
        texts = [random_text(rng, pieces) for _ in range(5)]
        record: dict[str, Any] = {"prompt": texts[0]}
        if kind == "preference":
            record |= {"chosen": texts[1], "rejected": texts[2]}
            record |= {"chosen_reward": rng.random(), "rejected_reward": -rng.random()}
        elif kind == "sft":
            record |= {"response": texts[1]}
        else:
            k = rng.randint(1, 4)
            record |= {"responses": texts[1 : 1 + k]}
            record |= {"scores": [rng.random() for _ in range(k)]}
        records.append(record)
    return records


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def examples_by_id(dataset: Dataset) -> dict[int, dict[str, Any]]:
    rows = packstore.scan(dataset, tokens=True).collect().to_dicts()
    return {row["example_id"]: row for row in rows}


def assert_packs_again(dataset: Dataset, tmp_path: Path, **settings: Any) -> None:
    """Assert that the exported lines have the tokens, labels and rewards of the
    dataset.
    """
    out = tmp_path / "text.jsonl"
    export("text", dataset, out, overwrite=True)
    lines = read_lines(out)
    before = examples_by_id(dataset)
    assert [line["example_id"] for line in lines] == list(before)

    again = packstore.pack(
        str(out),
        tmp_path / "again",
        kind=dataset.manifest.kind,
        overwrite=True,
        **settings,
    )
    after = examples_by_id(again)
    assert len(after) == len(before)
    for ordinal, line in enumerate(lines):
        expected = before[line["example_id"]]
        for name in ("input_ids", "labels", "rewards"):
            assert after[ordinal][name] == expected[name], (line, name)


def head_of(path: Path, n: int) -> list[dict[str, Any]]:
    """Return the first records of a file of JSON lines."""
    with fsspec.open(str(path), "rt", compression="infer", encoding="utf-8") as file:
        return [json.loads(line) for line in itertools.islice(file, n)]


def settings_for(tokenizer: str, **settings: Any) -> dict[str, Any]:
    return {
        "tokenizer": tokenizer,
        "pack_size": 2048,
        "max_drop_rate": 1,
        "num_workers": 0,
        "as_chat": False,
        **settings,
    }


@pytest.mark.parametrize(
    ("name", "kind", "share"),
    [
        ("eos", "preference", "example"),
        ("bos", "preference", "pack"),
        ("chat", "scored", "pack"),
        ("bos", "scored", "example"),
        ("eos", "sft", None),
        ("bos", "sft", "pack"),
        ("chat", "sft", "example"),
    ],
)
def test_text_packs_again_to_the_same_tokens(
    tmp_path: Path, tokenizers: dict[str, str], name: str, kind: str, share: str | None
) -> None:
    """In each layout (share None: concat), with control strings among the words."""
    layout = {"layout": "concat"} if share is None else {"share_prefixes": share}
    settings = settings_for(tokenizers[name], **layout)
    records = random_records(kind, 120, 0, PIECES + CONTROLS)
    dataset = packstore.pack(records, tmp_path / "ds", kind=kind, **settings)
    assert dataset.manifest.totals.examples > 80
    assert_packs_again(dataset, tmp_path, **settings)


def test_a_prompt_that_ends_inside_a_character(tmp_path: Path) -> None:
    """A token joins the last byte of the prompt and the first of each response."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((symbols, _),) = byte_level.pre_tokenize_str("好的")
    last_byte, first_byte = symbols[2:4]
    tokens = [*sorted(byte_level.alphabet()), last_byte + first_byte]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(vocab=vocabulary, merges=[(last_byte, first_byte)])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "bytes.json"))

    settings = settings_for(str(tmp_path / "bytes.json"))
    records = [{"prompt": "a好", "chosen": "的", "rejected": "的!"}]
    dataset = packstore.pack(records, tmp_path / "ds", **settings)
    assert dataset.manifest.records.noted["boundary_merged"] == 1
    assert_packs_again(dataset, tmp_path, **settings)
    (line,) = read_lines(tmp_path / "text.jsonl")
    assert (line["prompt"], line["chosen"]) == ("a好", "的")


@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("bos", [True, False])
def test_bos_and_eos_by_the_settings(
    tmp_path: Path, tokenizers: dict[str, str], bos: bool, eos: bool
) -> None:
    settings = settings_for(tokenizers["bos"], add_bos=bos, append_eos=eos)
    records = random_records("preference", 60, 1, PIECES)
    dataset = packstore.pack(records, tmp_path / "ds", **settings)
    assert_packs_again(dataset, tmp_path, **settings)
    for line in read_lines(tmp_path / "text.jsonl"):
        assert "<s>" not in line["prompt"]
        assert "</s>" not in line["chosen"]

    # Records with BOS and EOS of their own, which are taken as rendered.
    rendered = [
        {"prompt": "<s>a b", "chosen": "c</s>", "rejected": "d</s>"},
        {"prompt": "<s>a b", "chosen": "c", "rejected": "d"},
        {"prompt": "a b", "chosen": "c</s>", "rejected": "d</s>"},
    ]
    dataset = packstore.pack(rendered, tmp_path / "ds", overwrite=True, **settings)
    assert dataset.manifest.records.noted["rendered_text"] == 3
    assert_packs_again(dataset, tmp_path, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED_TOKENIZERS)
def test_real_tokenizers(tmp_path: Path, shared_data: Path, name: str) -> None:
    """Random texts, and real pairs. Unigram vocabularies have unknown characters, and
    SentencePiece takes ▁ for a space: their texts are plain.
    """
    settings = settings_for(str(shared_data / "tokenizers" / name), pack_size=8192)
    pieces = PIECES if "t5" not in name else ["a", " the", "123", ".", "é", "Human:"]
    records = random_records("preference", 500, 2, pieces)
    dataset = packstore.pack(records, tmp_path / "ds", **settings)
    assert_packs_again(dataset, tmp_path, **settings)

    for file in ("pairs/hh_harmless.jsonl.gz", "ranked/qa_k4.jsonl"):
        records = head_of(shared_data / file, 250)
        dataset = packstore.pack(records, tmp_path / "ds", overwrite=True, **settings)
        assert_packs_again(dataset, tmp_path, **settings)


def test_the_lines_are_the_records(tmp_path: Path, tokenizers: dict[str, str]) -> None:
    """Text, rewards, carried columns, and the file and line of each."""
    file = tmp_path / "pairs.jsonl"
    records = random_records("preference", 80, 3, PIECES)
    for i, record in enumerate(records):
        record |= {"lang": ["en", "ü"][i % 2], "x": i / 3, "response": i, "ok": i > 9}
    text = "".join(json.dumps(record) + "\n" for record in records)
    file.write_text(text, encoding="utf-8")
    carry = ["lang", "x:float64", "response:int64", "ok:bool"]
    settings = settings_for(tokenizers["bos"], carry=carry)
    dataset = packstore.pack(str(file), tmp_path / "ds", kind="preference", **settings)
    export("text", dataset, tmp_path / "out.jsonl")
    lines = read_lines(tmp_path / "out.jsonl")
    assert len(lines) > 70
    for line in lines:
        assert line["source_file"] == str(file)
        record = records[line["source_record"] - 1]
        for side in ("chosen", "rejected"):
            # A token that joins both sides belongs to the response.
            assert line["prompt"] + line[side] == record["prompt"] + record[side]
            reward = pytest.approx(record[f"{side}_reward"], rel=1e-6)
            assert line[f"{side}_reward"] == reward
        assert line["response_carried"] == record["response"]
        for name in ("lang", "x", "ok"):
            assert line[name] == record[name]
    at_boundary = [
        line["prompt"] == records[line["source_record"] - 1]["prompt"] for line in lines
    ]
    assert sum(at_boundary) > 0.9 * len(lines)


def test_rewards_have_the_digits_that_were_given(
    tmp_path: Path, tokenizers: dict[str, str]
) -> None:
    record = {"prompt": "a", "responses": ["b", "c"], "scores": [0.1, -2.5]}
    settings = settings_for(tokenizers["eos"])
    dataset = packstore.pack([record], tmp_path / "ds", **settings)
    export("text", dataset, tmp_path / "out.jsonl")
    (line,) = read_lines(tmp_path / "out.jsonl")
    assert line["responses"] == ["b", "c"]
    assert line["scores"] == [0.1, -2.5]


def test_chats_come_back_rendered(tmp_path: Path, tokenizers: dict[str, str]) -> None:
    """With the control strings of the template, and pack again to the same tokens."""
    settings = settings_for(tokenizers["chat"], as_chat=None)
    dataset = packstore.pack(str(SAMPLE), tmp_path / "ds", **settings)
    assert_packs_again(dataset, tmp_path, **settings)
    for line in read_lines(tmp_path / "text.jsonl"):
        assert line["prompt"].startswith("<|im_start|>")
        assert line["prompt"].endswith("<|im_start|>assistant\n")
        assert line["chosen"].endswith("<|im_end|>\n")


def test_responses_that_are_partly_learned_are_counted(
    tmp_path: Path, tokenizers: dict[str, str]
) -> None:
    """Turns of the user between those of the assistant: text does not show them."""
    question, answer = ({"role": r, "content": "2+2?"} for r in ("user", "assistant"))
    chats = [{"messages": [question, answer]}] * 2
    chats += [{"messages": [question, answer, question, answer]}] * 3
    settings = settings_for(tokenizers["chat"], as_chat=None)
    dataset = packstore.pack(chats, tmp_path / "ds", **settings)
    exported = export("text", dataset, tmp_path / "out.jsonl")
    assert exported.facts["examples"] == 5
    assert exported.facts["partly learned responses"] == 3


def test_tokens_that_join_prompt_and_response_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The prompt of such a line ends before the token, unless another response shows
    its end.
    """
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {token: i for i, token in enumerate("k.IU")} | {".I": 4, ".U": 5}
    model = models.BPE(vocab=vocabulary, merges=[(".", "I"), (".", "U")])
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "joins.json"))
    settings = settings_for(str(tmp_path / "joins.json"), append_eos=False)
    responses = [("I", "U"), ("I", "k"), ("k", "kk")]
    records = [{"prompt": "k.", "chosen": a, "rejected": b} for a, b in responses]
    dataset = packstore.pack(records, tmp_path / "ds", **settings)
    assert_packs_again(dataset, tmp_path, **settings)
    lines = sorted(
        (line["example_id"], line["prompt"], line["chosen"], line["rejected"])
        for line in read_lines(tmp_path / "text.jsonl")
    )
    expected = [("k", ".I", ".U"), ("k.", "I", "k"), ("k.", "k", "kk")]
    assert lines == [(i, *texts) for i, texts in enumerate(expected)]

    def merged_boundaries(dataset: Dataset) -> Any:
        capsys.readouterr()
        out = str(tmp_path / "out.jsonl")
        assert main(["export", "text", dataset.url, out, "--overwrite", "--json"]) == 0
        return json.loads(capsys.readouterr().out)["merged boundaries"]

    assert merged_boundaries(dataset) == 2
    dataset = packstore.append(dataset, records[:1] * 2)
    assert merged_boundaries(dataset) == 4
    repacked = packstore.pack(dataset, tmp_path / "repacked")
    assert merged_boundaries(repacked) is None


def test_token_ids_need_a_tokenizer(
    tmp_path: Path, packed: Pack, tokenizers: dict[str, str]
) -> None:
    dataset = packed([{"prompt": [70, 71], "chosen": [72], "rejected": [73]}])
    with pytest.raises(TokenizerError, match="tokenizer"):
        export("text", dataset, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
    export("text", dataset, tmp_path / "out.jsonl", tokenizer=tokenizers["eos"])
    (line,) = read_lines(tmp_path / "out.jsonl")
    assert len(line["prompt"]) == 2


@pytest.fixture
def small(tmp_path: Path, tokenizers: dict[str, str]) -> Dataset:
    records = random_records("sft", 40, 4, PIECES)
    settings = settings_for(tokenizers["eos"], pack_size=64, row_group_tokens=128)
    return packstore.pack(records, tmp_path / "small", **settings)


def test_files_are_compressed_by_their_suffix(small: Dataset, tmp_path: Path) -> None:
    export("text", small, tmp_path / "x.jsonl")
    expected = (tmp_path / "x.jsonl").read_bytes()
    for suffix in ("gz", "bz2", "xz", "zst"):
        export("text", small, tmp_path / f"x.jsonl.{suffix}")
    assert gzip.decompress((tmp_path / "x.jsonl.gz").read_bytes()) == expected
    assert bz2.decompress((tmp_path / "x.jsonl.bz2").read_bytes()) == expected
    assert lzma.decompress((tmp_path / "x.jsonl.xz").read_bytes()) == expected
    compressed = pa.CompressedInputStream(str(tmp_path / "x.jsonl.zst"), "zstd")
    assert compressed.read() == expected


@pytest.mark.parametrize("name", ["pairs.csv", "pairs.parquet", "pairs.arrow.zst"])
def test_a_suffix_of_another_format_is_refused(
    small: Dataset, tmp_path: Path, name: str
) -> None:
    """`pack` would read the lines as that format."""
    with pytest.raises(ConfigError, match=name):
        export("text", small, tmp_path / name)
    assert not (tmp_path / name).exists()


def test_standard_output_has_the_lines_alone(
    tmp_path: Path, tokenizers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Control characters that JSON allows, which a terminal would execute, are escaped."""
    records = random_records("sft", 40, 4, [*PIECES, "\x9b31m"])
    settings = settings_for(tokenizers["eos"])
    dataset = packstore.pack(records, tmp_path / "ds", **settings)
    export("text", dataset, tmp_path / "x.jsonl")
    capsys.readouterr()
    assert main(["export", "text", dataset.url, "-"]) == 0
    printed = capsys.readouterr().out
    assert "\x9b" not in printed
    lines = [json.loads(line) for line in printed.split("\n")[:-1]]
    assert lines == read_lines(tmp_path / "x.jsonl")
    assert any("\x9b" in line["response"] for line in lines)


def test_a_store_and_an_existing_file(small: Dataset, tmp_path: Path) -> None:
    url = "memory://text-export/x.jsonl"
    exported = export("text", small, url)
    assert exported.files == [url]
    with pytest.raises(DatasetExistsError, match=r"x\.jsonl"):
        export("text", small, url)
    export("text", small, tmp_path / "x.jsonl")
    with fsspec.open(url, "rb") as file:
        assert file.read() == (tmp_path / "x.jsonl").read_bytes()
    with pytest.raises(DatasetExistsError, match="folder"):
        export("text", small, tmp_path)


def test_from_an_object_store_to_it(
    tmp_path: Path,
    tokenizers: dict[str, str],
    s3: Store,
    capsys: pytest.CaptureFixture[str],
) -> None:
    records = random_records("sft", 40, 4, PIECES)
    settings = settings_for(tokenizers["eos"], storage_options=s3.options)
    dataset = packstore.pack(records, f"{s3.url}/ds", **settings)
    words = ["export", "text", dataset.url, f"{s3.url}/x.jsonl.gz", "--json"]
    for name, value in s3.options.items():
        words += ["--storage-option", f"{name}={value}"]
    capsys.readouterr()
    assert main(words) == 0
    num_examples = dataset.manifest.totals.examples
    assert json.loads(capsys.readouterr().out)["examples"] == num_examples

    with fsspec.open(f"{s3.url}/x.jsonl.gz", "rb", **s3.options) as file:
        lines = gzip.decompress(file.read())
    export("text", dataset, tmp_path / "x.jsonl")
    assert lines == (tmp_path / "x.jsonl").read_bytes()
