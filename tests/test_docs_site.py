"""The documentation site: it builds, its pictures are current, and its code does what
it says.

Python and console blocks of a page run in order, in a folder of its own that begins as
the quickstart left it, with its variables. What follows a command in a console block
must be its output, and so must a ``text`` block after Python, where an error is its
class and message; ``…`` stands for anything, and white space does not count. A block
under ``<!-- not run: why -->`` is not run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import polars as pl
import pytest
from children import run_python
from hub import folder_files, served

from packstore.cli import build_parser, main
from packstore.errors import PackstoreError, message_with_notes
from packstore.tokenizer.dialogue import BUILTIN

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
QUICKSTART = DOCS / "quickstart.md"
ELSEWHERE = {
    "architecture.md": "tests/test_house.py",
    "attention.md": "tests/torch/models/test_probe.py",
    "losses.md": "tests/torch/test_feedback.py",
    "parallel.md": "tests/torch/parallel/test_parallel.py",
    "training.md": "tests/torch/training/test_train.py",
}
"""Pages whose blocks are fragments, and the tests that run what they show."""

SECTIONS = {"losses.md": "Distillation"}
"""Page of fragments -> a section of it that runs as other pages do."""

PAGES = sorted(
    p for p in DOCS.glob("*.md") if p.name not in ELSEWHERE and p != QUICKSTART
)
FENCE = re.compile(
    r"(?P<skip><!-- not run: [^>]+ -->\n+)?^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """A code block, the line it begins at, and the output that the page shows
    for it.
    """

    language: str
    code: str
    line: int
    output: str | None


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder and the variables that the quickstart leaves behind."""
    pytest.importorskip("transformers", reason="transformers is in the extra train")
    folder, names = tmp_path_factory.mktemp("quickstart"), {}
    with inside(folder):
        run_page(QUICKSTART, names)
    return folder, names


def test_the_quickstart_does_what_it_says(
    quickstart: tuple[Path, dict[str, Any]],
) -> None:
    assert (quickstart[0] / "prefs-packed").is_dir()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_does_what_the_page_says(
    page: Path, quickstart: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, names = quickstart
    shutil.copytree(folder, tmp_path / "here")
    with inside(tmp_path / "here"):
        run_page(page, dict(names))


@pytest.mark.slow
@pytest.mark.parametrize("page", ["own-model.md"])
def test_python_runs_in_a_fresh_interpreter(page: str, tmp_path: Path) -> None:
    """Top to bottom, without the files and variables of the quickstart."""
    pytest.importorskip("torch", reason="torch is in the extra train")
    code = "\n".join(
        block.code
        for block in blocks((DOCS / page).read_text(encoding="utf-8"))
        if block.language == "python"
    )
    done = run_python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "optimizer steps: should hold" not in done.stderr  # it reads as a mistake


@pytest.mark.parametrize("page", SECTIONS)
def test_code_does_what_the_section_says(
    page: str, quickstart: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, names = quickstart
    shutil.copytree(folder, tmp_path / "here")
    with inside(tmp_path / "here"):
        run_page(DOCS / page, dict(names), section=SECTIONS[page])


@pytest.mark.slow
def test_the_readme_runs(
    quickstart: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Its commands as they stand, with a hub on this machine; its Python with what they
    made.
    """
    folder, names = quickstart
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    make, hub, job = (
        [shlex.split(line) for line in block.replace("\\\n", " ").splitlines() if line]
        for block in re.findall(r"^```sh\n(.*?)^```$", readme, re.M | re.S)
    )
    assert make == [["make", "demo"], ["make", "test"]]
    (program, *_), *commands = hub
    assert program == "pip"
    assert [command[1] for command in commands] == ["pack", "show", "train"]
    for _, *arguments in job:
        build_parser().parse_args(arguments)
    shutil.copy(folder / "tokenizer.json", tmp_path)
    with served(public_hub(folder, names["model"])) as (env, _):
        for command in commands:
            env |= {"HF_HOME": str(tmp_path / "cache"), "ACCELERATE_USE_CPU": "true"}
            done = run_python("-m", *command, cwd=tmp_path, env=env)
            assert done.returncode == 0, done.stderr[-3000:]
            assert "HTTP Request" not in done.stderr
    assert (tmp_path / "run" / "model.safetensors").exists()
    with inside(tmp_path):
        run_page(ROOT / "README.md", dict(names))


def public_hub(folder: Path, model: Any) -> dict[str, dict[str, bytes]]:
    """The repositories that the README names: the project's own pairs, and a tiny
    model.
    """
    (dataset,) = re.findall(
        r"hf://(datasets/[\w-]+/\w+)/", (ROOT / "README.md").read_text("utf-8")
    )
    lines = (
        (ROOT / "examples" / "sample" / "pairs.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    rows = []
    for pair in map(json.loads, lines[:50]):
        chats = {
            side: [*pair["prompt"], {"role": "assistant", "content": pair[side]}]
            for side in ("chosen", "rejected")
        }
        rows.append({**chats, "score_chosen": 8.0, "score_rejected": 3.0})
    with io.BytesIO() as file:
        pl.DataFrame(rows).write_parquet(file)
        records = file.getvalue()
    there = folder / "on-the-hub"
    model.save_pretrained(there)
    shutil.copy(folder / "tokenizer.json", there)
    config = {"eos_token": "</s>", "chat_template": BUILTIN["chatml"]}
    (there / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    splits = {
        f"data/{split}-00000-of-00001.parquet": records for split in ("train", "test")
    }
    return {dataset: splits, "models/Qwen/Qwen3-0.6B": folder_files(there)}


def test_a_wrong_output_is_found() -> None:
    assert matches("a … c", "a  b\nc\n")
    assert not matches("a … d", "a b c")


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r": ([\w/-]+\.md)$", text, re.M))
    assert {page.name for page in DOCS.glob("*.md")} <= listed
    made = {*runpy.run_path(str(DOCS / "hooks.py"))["PAGES"].values()}
    made |= {*runpy.run_path(str(DOCS / "made_pages.py"))["pages"]()}
    assert made <= listed
    assert listed <= {page.name for page in DOCS.glob("*.md")} | made


def test_pictures_are_those_of_the_script() -> None:
    pictures = runpy.run_path(str(DOCS / "pictures.py"))["PICTURES"]
    assert {f"{name}.svg" for name in pictures} == {
        p.name for p in (DOCS / "pictures").iterdir()
    }
    for name, draw in pictures.items():
        stored = (DOCS / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
        assert stored == draw(), f"run docs/pictures.py: {name}.svg is not current"


def test_every_benchmark_is_on_its_page() -> None:
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    for script in (ROOT / "benchmarks").glob("*.py"):
        if "__main__" in script.read_text(encoding="utf-8"):
            assert f"`{script.name}`" in page, script.name


@pytest.mark.slow
def test_it_builds(tmp_path: Path) -> None:
    if not all(map(find_spec, ("mkdocs", "material", "mkdocstrings_handlers"))):
        pytest.skip("mkdocs-material and mkdocstrings are in the extra docs")
    # Not --quiet, with which --strict sees no warning.
    command = [
        "-W",
        "ignore",
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        tmp_path / "site",
    ]
    done = run_python(*command, cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    assert "seq_boundaries" in text_of(site / "format")
    for namespace, place in runpy.run_path(str(DOCS / "made_pages.py"))[
        "NAMESPACES"
    ].items():
        page = text_of(site / place.removesuffix(".md"))
        for name in getattr(
            importlib.import_module(namespace), "__all__", ["random_examples"]
        ):
            assert name.startswith("_") or f"<code>{name}</code>" in page, (
                namespace,
                name,
            )
    page = text_of(site / "reference" / "commands")
    (subs,) = (
        a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)
    )
    for name, command in subs.choices.items():
        _, _, section = page.partition(f'id="packstore-{name}"')
        section = section.partition("<h2")[0]
        for action in command._actions:
            for flag in action.option_strings if action.dest != "help" else ():
                assert f"<code>{flag}</code>" in section, (name, flag)
    assert re.search(r"<code>--pack-size</code> N</td>\s*<td><code>8192</code>", page)


def text_of(folder: Path) -> str:
    return (folder / "index.html").read_text(encoding="utf-8")


def run_page(page: Path, names: dict[str, Any], section: str | None = None) -> None:
    """Runs the blocks of a page here, or of one section, with the variables `names`,
    and compares what they print.
    """
    text = page.read_text(encoding="utf-8")
    if section is not None:
        before, _, after = text.partition(f"\n## {section}\n")
        lines_before = before.count("\n") + 2
        text = "\n" * lines_before + after.partition("\n## ")[0]
    for block in blocks(text):
        where = f"{page.relative_to(ROOT)}, line {block.line}"
        if block.language == "python":
            printed = run_code(block, where, names)
            if block.output is not None:
                assert matches(block.output, printed), f"{where} prints:\n{printed}"
        else:
            run_console(block.code, where)


def run_code(block: Block, where: str, names: dict[str, Any]) -> str:
    """Runs the block; returns its output, with a packstore error if output is
    compared.
    """
    code = compile("\n" * block.line + block.code, where, "exec")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            exec(code, names)
        except PackstoreError as error:
            if block.output is None:
                raise
            print(f"{type(error).__name__}: {message_with_notes(error)}")
    return out.getvalue()


def run_console(text: str, where: str) -> None:
    """Runs the commands, and compares what each writes: its output, or its error."""
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        command, _, expected = part.replace("\\\n", " ").partition("\n")
        program, *arguments = shlex.split(command)
        assert program == "packstore", (
            f"{where}: only packstore runs in the tests, not {program}"
        )
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
        _, error, message = err.getvalue().partition("packstore: error: ")
        printed = error + message if code else out.getvalue()
        assert code == int("packstore: error: " in expected), (
            f"{where}: {command}: {printed}"
        )
        if expected.strip():
            assert matches(expected, printed), f"{where}: {command} prints:\n{printed}"


def blocks(text: str) -> Iterator[Block]:
    """The blocks to run, each with its shown output."""
    fences = list(FENCE.finditer(text))
    for i, fence in enumerate(fences):
        if fence["skip"] or fence["language"] not in ("python", "console"):
            continue
        after = fences[i + 1] if i + 1 < len(fences) else None
        output = None
        if (
            after
            and after["language"] == "text"
            and not text[fence.end() : after.start()].strip()
        ):
            output = after["code"]
        line = text.count("\n", 0, fence.start("code"))
        yield Block(fence["language"], fence["code"], line, output)


def matches(expected: str, printed: str) -> bool:
    """Compares `printed` with `expected`, in which ``…`` stands for anything."""
    parts = [re.escape("".join(part.split())) for part in expected.split("…")]
    return re.fullmatch(".*".join(parts), "".join(printed.split()), re.S) is not None


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """A context in `folder`, with a console of a hundred columns and without
    colours.
    """
    with (
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, COLUMNS="100", NO_COLOR="1"),
    ):
        yield
