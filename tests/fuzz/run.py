"""Feeds changed files and datasets to all that reads them; run in a process that a
crash may end.

    python tests/fuzz/run.py files COUNT TARGET...   so many inputs of each parser, and those kept
    python tests/fuzz/run.py datasets FIRST COUNT    so many hostile datasets, by every reader
    python tests/fuzz/run.py sound                   the datasets before they are changed

An input that ends the process or raises what is no PackstoreError belongs into
tests/fuzz/corpus, where the tests run it from then on. The last number printed before a
crash is that of the input.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import re
import resource
import runpy
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import hostile_values  # noqa: E402
import kit_reader  # noqa: E402
from fuzz_targets import CORPUS, TARGETS, make_input  # noqa: E402

import packstore  # noqa: E402
import packstore.torch as pt  # noqa: E402
from packstore import export  # noqa: E402
from packstore.cli import main as cli  # noqa: E402
from packstore.errors import PackstoreError  # noqa: E402
from packstore.torch import open_side  # noqa: E402

MEMORY = 1 << 30
"""Bytes that reading may take."""


def files(count: int, names: list[str]) -> None:
    for name in names:
        made = (make_input(name, 10**9 + number) for number in range(count))
        kept = (path.read_bytes() for path in sorted(CORPUS.glob(f"{name}/*")))
        for data in itertools.chain(made, kept):
            try:
                TARGETS[name].run(data)
            except PackstoreError as error:
                assert "\n" not in str(error), error  # noqa: PT017
        print(name, flush=True)


def datasets(first: int, count: int) -> None:
    refused = 0
    for number in range(len(hostile_values.COMBINATIONS)):
        hostile_values.seed(number)
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    limit = (int(status.split("VmData:")[1].split()[0]) << 10) + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    for number in range(first, first + count):
        print(number, flush=True)
        with tempfile.TemporaryDirectory(prefix="hostile-") as parent:
            done = hostile_values.make(number, Path(parent, "ds"))
            for name, read in readers(f"{parent}/ds", number):
                try:
                    read()
                except PackstoreError:
                    refused += 1
                except Exception as error:
                    raise AssertionError(f"dataset {number}, {name}: {done}") from error
    print("refused", refused)


def sound() -> None:
    for number in range(len(hostile_values.COMBINATIONS)):
        name, stored = hostile_values.seed(number)
        with tempfile.TemporaryDirectory(prefix="hostile-") as parent:
            hostile_values.write(stored, Path(parent, "ds"))
            for reader, read in readers(f"{parent}/ds", number):
                # Not every format holds every kind, and what is appended are pairs.
                expected = (
                    PackstoreError if reader in ("nemo", "megatron", "append") else ()
                )
                with contextlib.suppress(expected):
                    read()
        print(name, flush=True)


def readers(url: str, number: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """All that reads packs; what is written goes beside the dataset."""

    def opened() -> Any:
        return packstore.open(url)

    def epoch(**how: Any) -> None:
        batching = {"tokens_per_batch": how.pop("tokens")} if "tokens" in how else {}
        data = pt.PackedDataset(url, **how)
        for place, batch in enumerate(pt.PackedDataLoader(data, **batching)):
            _ = batch.weights, batch.target_index, batch.segment_ids, batch.layout
            with contextlib.suppress(PackstoreError):
                batch.model_inputs(("hf", "flash", "padded")[(number + place) % 3])

    def command(*words: str) -> None:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            status = cli(list(words))
        assert status in (0, 1, 2), f"status {status}"
        assert not re.search(r"Traceback|[\x00-\x08\x0b-\x1f\x7f-\x9f]", out.getvalue())

    more = [{"prompt": [5], "chosen": [8, 9], "rejected": [7]}]
    again = {"pack_size": 48, "max_drop_rate": 1.0, "num_workers": 0}
    yield "page", lambda: agree(url, f"{url}/side")
    yield "packs", lambda: list(opened().iter_packs())
    yield "batches", lambda: [b.validate(full=True) for b in opened().iter_batches()]
    yield "sizes", lambda: opened().pack_index
    yield "scan", lambda: packstore.scan(url, tokens=True).collect()
    yield "verify", lambda: opened().verify(jobs=1)
    yield "epoch", epoch
    yield "budget", lambda: epoch(shuffle=False, tokens=80)
    yield "join", lambda: epoch(side=[f"{url}/side"])
    yield (
        "side",
        lambda: [b.to_pydict() for b in open_side(f"{url}/side").iter_batches()],
    )
    yield "nemo", lambda: export("nemo", url, f"{url}-nemo")
    yield "megatron", lambda: export("megatron", url, f"{url}-megatron")
    yield "pack", lambda: packstore.pack(url, f"{url}-anew", **again)
    yield "concat", lambda: packstore.concat([url, url], f"{url}-twice").verify(jobs=1)
    yield "show", lambda: command("show", url, "--pack", "0", "--count", "2", "--ids")
    yield "stats", lambda: command("inspect" if number % 2 else "stats", url)
    yield "append", lambda: packstore.append(url, more, num_workers=0).verify(jobs=1)


def agree(*folders: str) -> None:
    """The reader that was written from format.md reads the same; it may refuse less."""
    answer = kit_reader.answer(*folders)
    assert "refused" in answer or answer == BY_THE_PAGE(*folders)


BY_THE_PAGE = runpy.run_path(str(ROOT / "examples" / "readers" / "reader.py"))["answer"]


if __name__ == "__main__":
    logging.disable()
    warnings.simplefilter("ignore")
    what, *arguments = sys.argv[1:]
    if what == "files":
        files(int(arguments[0]), arguments[1:])
    elif what == "datasets":
        datasets(int(arguments[0]), int(arguments[1]))
    else:
        sound()
