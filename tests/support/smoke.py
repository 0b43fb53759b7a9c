"""Tries an installed packstore, with or without extras; run by
``tests/try_release.py``.

    python -I tests/support/smoke.py core torch     in the environment to try, in an empty folder

A part packs or reads a few made-up records. ``core`` needs the core dependencies alone:
it packs token ids and texts, reads them back, verifies them, and calls every command
that reads a dataset. The other parts are named like the extras of ``pyproject.toml``; ``lean`` tries the
install of docs/install.md for training images, without ``core``.
"""

from __future__ import annotations

import functools
import http.server
import json
import re
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import packstore

PAIRS = 40
SIDES = tuple(enumerate(("prompt", "chosen", "rejected")))


IDS = [
    {
        side: [3 + (7 * i + 5 * n + m) % 87 for m in range(2 + (i + n) % 7)]
        for n, side in SIDES
    }
    for i in range(PAIRS)
]


def text_file(name: str = "pairs.jsonl", first: int = 0) -> str:
    """Pairs of text, each with a text of its own, as a file."""
    with open(name, "w", encoding="utf-8") as file:
        for i in range(first, first + PAIRS):
            sides = (f"What is {i} and one?", f"It is {i + 1}.", f"Not {i}.")
            record = {side: text for (_, side), text in zip(SIDES, sides, strict=True)}
            file.write(json.dumps(record) + "\n")
    return name


def tokenizer() -> str:
    """A byte-level tokenizer without merges."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.add_special_tokens(["</s>"])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.save("tokenizer.json")
    return "tokenizer.json"


def command(*arguments: str) -> str:
    """Calls the installed command; returns its output."""
    program = Path(sysconfig.get_path("scripts")) / "packstore"
    call = [str(program), *arguments]
    done = subprocess.run(call, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, f"{' '.join(call)}: {done.stderr}"
    return done.stdout


def sequences(dataset: packstore.Dataset) -> list[list[int]]:
    """The ids of all sequences of a dataset, sorted."""
    frame = packstore.scan(dataset, tokens=True).collect()
    return sorted(ids for sides in frame["input_ids"].to_list() for ids in sides)


def core() -> str:
    """Packs, reads and verifies without any extra."""
    heavy = [name for name in ("torch", "transformers") if find_spec(name)]
    made = packstore.pack(IDS, "ids", pack_size=64)
    dataset = packstore.open("ids")
    assert dataset.manifest.fingerprint == made.manifest.fingerprint
    expected = [r["prompt"] + r[side] for r in IDS for side in ("chosen", "rejected")]
    assert sequences(dataset) == sorted(expected)
    assert dataset.verify().ok
    assert packstore.plan([3, 4, 5], pack_size=8).num_packs == 2
    command(
        "pack", text_file(), "texts", "--tokenizer", tokenizer(), "--pack-size", "128"
    )
    assert f"{PAIRS} examples" in command("verify", "texts")
    assert "pairs.jsonl" in command("inspect", "texts")
    assert "supervised" in command("show", "texts", "--pack", "0")
    command("stats", "texts")
    command("pack", "pairs.jsonl", "dry", "--tokenizer", "tokenizer.json", "--dry-run")
    assert "examples_per_step:" in command(
        "train", "--example", "dpo"
    )  # a file of the wheel
    command("append", "texts", text_file("more.jsonl", PAIRS))
    assert packstore.open("texts").manifest.pairs == 2 * PAIRS
    beside = f"beside {', '.join(heavy)}" if heavy else "without torch"
    return (
        f"{PAIRS} pairs of ids and {PAIRS} of text packed, read back, verified, "
        f"{beside}"
    )


def torch() -> str:
    """Streams packs into batches, and takes a loss and its gradient."""
    import torch

    import packstore.torch as pt

    packstore.pack(IDS, "for-torch", pack_size=64)
    loader = pt.PackedDataLoader(
        pt.PackedDataset("for-torch", seed=0), packs_per_batch=2
    )
    loss_fn, pairs = pt.PreferenceLoss("dpo", beta=0.1), 0
    for batch in loader:
        logps = torch.zeros(2 * batch.num_examples, requires_grad=True)
        out = loss_fn(logps, batch, ref_logps=torch.zeros(2 * batch.num_examples))
        out.loss.backward()
        assert torch.isfinite(logps.grad).all()
        pairs += batch.num_examples
    assert pairs == PAIRS
    return f"{PAIRS} pairs in batches, with a loss and its gradient"


def lean() -> str:
    """Loads and takes a loss with the packages of a lean install alone."""
    import packstore.torch as pt
    from packstore.errors import MissingExtraError
    from packstore.registry import LEFT_OUT_OF_LEAN

    present = {name for name in LEFT_OUT_OF_LEAN if find_spec(name)}
    assert present <= {"jinja2"}, f"not lean: {present}"  # torch needs jinja2
    report = torch()
    dataset = packstore.open("for-torch")
    assert dataset.verify().ok
    loader = pt.PackedDataLoader(
        pt.PackedDataset("for-torch", seed=0), packs_per_batch=1, num_workers=1
    )
    assert sum(batch.num_examples for batch in loader) == PAIRS
    message = ""
    try:
        packstore.scan(dataset)
    except MissingExtraError as error:
        message = str(error)
    assert "'polars'" in message
    assert "pip install packstore" in message
    call = [sys.executable, "-I", "-m", "packstore", "verify", "for-torch"]
    done = subprocess.run(call, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "'rich'" in line
    assert "pip install packstore" in line
    return f"{report}, without {', '.join(sorted(LEFT_OUT_OF_LEAN - present))}"


def train() -> str:
    """Trains a tiny model by ``packstore train``."""
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    command(
        "pack",
        text_file(),
        "for-train",
        "--tokenizer",
        tokenizer(),
        "--pack-size",
        "128",
    )
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained("model")
    made = Tokenizer.from_file("tokenizer.json")
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>").save_pretrained(
        "model"
    )
    where = ("--model", "model", "--train-dataset", "for-train", "--output-dir", "run")
    command("train", *where, "--examples-per-step", "8", "--num-train-epochs", "1")
    models = ("--model", "run", "--reference-model", "model")
    assert "accurac" in command("evaluate", "for-train", *models)
    return "a tiny model trained and evaluated from the command line"


def trl() -> str:
    """Imports TRL's trainer on packs, which needs a model and a config to do more."""
    import trl

    import packstore.torch as pt

    assert issubclass(pt.PackedDPOTrainer, trl.DPOTrainer)
    return f"PackedDPOTrainer on TRL {trl.__version__}"


def sentencepiece() -> str:
    """Packs texts with a SentencePiece model."""
    import sentencepiece

    lines = Path(text_file()).read_text(encoding="utf-8").splitlines()
    how = {"vocab_size": 60, "hard_vocab_limit": False, "minloglevel": 2}
    train = sentencepiece.SentencePieceTrainer.Train
    train(sentence_iterator=iter(lines), model_prefix="pieces", **how)
    made = packstore.pack(
        "pairs.jsonl", "pieces", tokenizer="pieces.model", pack_size=128
    )
    return f"{made.manifest.pairs} pairs packed with a SentencePiece model"


def ray() -> str:
    """Packs on a local Ray cluster, and finds the bytes of local workers."""
    source, by = text_file(), tokenizer()
    here = packstore.pack(source, "here", by, pack_size=128)
    there = packstore.pack(source, "there", by, pack_size=128, engine="ray")
    assert there.manifest.fingerprint == here.manifest.fingerprint
    return "the same bytes on a local Ray cluster"


def http_() -> str:
    """Reads a dataset from a web server on this machine."""
    packstore.pack(IDS, "on-web", pack_size=64)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ranges) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        report = packstore.open(
            f"http://127.0.0.1:{server.server_port}/on-web"
        ).verify()
        server.shutdown()
    assert report.ok, report.problems
    return "a dataset read and verified over HTTP"


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Serves the current folder, with requests for ranges, which the base class
    ignores.
    """

    def do_GET(self) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not found:
            super().do_GET()
            return
        data = Path(self.translate_path(self.path)).read_bytes()
        start, end = int(found[1]), min(int(found[2]) + 1, len(data))
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        self.wfile.write(data[start:end])

    def log_message(self, *_: object) -> None: ...


def filesystem(protocol: str) -> str:
    """Finds the filesystem of an object store, which the whole suite tries on real
    servers.
    """
    import fsspec

    found = fsspec.get_filesystem_class(protocol)
    return f"{protocol}:// is {found.__module__}.{found.__name__}; nothing was sent"


PARTS: dict[str, Callable[[], str]] = {
    f.__name__.strip("_"): f
    for f in (core, lean, torch, train, trl, sentencepiece, ray, http_)
}
for extra, scheme in {"s3": "s3", "gcs": "gs", "azure": "az"}.items():
    PARTS[extra] = functools.partial(filesystem, scheme)


if __name__ == "__main__":
    where = Path(packstore.__file__)
    assert where.is_relative_to(sys.prefix), (
        f"packstore is not the installed one: {where}"
    )
    for name in sys.argv[1:]:
        print(f"  {name}: {PARTS[name]()}", flush=True)
