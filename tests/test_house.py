"""The house itself: layers, types, style, cheap imports, and a package that is also a
call.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pydoc
import re
from contextlib import suppress
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType

import pytest
from children import run_python

import packstore
from packstore.errors import MissingExtraError
from packstore.registry import Registry

ROOT = Path(__file__).parents[1]
CODE = ("packstore", "tests", "benchmarks", "examples", "schemas")


def python(code: str, cwd: Path | None = None) -> str:
    """Runs `code` in a fresh interpreter; returns its output."""
    done = run_python("-c", code, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def tool(*command: str) -> None:
    done = run_python("-m", *command, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_layers() -> None:
    python(
        "from importlinter.cli import lint_imports_command; lint_imports_command()",
        ROOT,
    )


@pytest.mark.slow
def test_types() -> None:
    tool("mypy")


def test_style() -> None:
    tool("ruff", "check", ".")
    tool("ruff", "format", "--check", ".")


def test_texts_name_their_encoding() -> None:
    """Ruff's PLW1514 sees only paths whose type it infers."""
    bare, positional = [], {"read_text": 0, "write_text": 1}
    for file in (f for folder in CODE for f in (ROOT / folder).rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for call in (
            ast.walk(ast.parse(text)) if any(map(text.__contains__, positional)) else ()
        ):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                name = call.func.attr
                named = any(word.arg == "encoding" for word in call.keywords)
                if (
                    name in positional
                    and not named
                    and len(call.args) <= positional[name]
                ):
                    bare.append(f"{file}:{call.lineno}")
    assert not bare


def test_scripts_import_what_the_package_has() -> None:
    """Most import inside functions, and no test runs them all."""
    pytest.importorskip("torch", reason="scripts that train import it")
    lacking = []
    for file in (
        f
        for folder in ("benchmarks", "examples")
        for f in (ROOT / folder).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "packstore"
            ):
                try:
                    exec(ast.unparse(node), {})
                except MissingExtraError:
                    continue
                except ImportError as error:
                    lacking.append(f"{file.name}: {error}")
    assert not lacking


def test_importing_packstore_is_cheap() -> None:
    heavy = (
        "{'torch', 'numba', 'pyarrow', 'polars', 'numpy', 'tokenizers', 'fsspec', "
        "'rich'}"
    )
    assert (
        python(f"import sys, packstore; print({heavy} & set(sys.modules))") == "set()"
    )


@pytest.mark.parametrize(
    ("command", "found"),
    [([], set()), (["pack", "--help"], {"packstore.cli.pack", "rich"})],
)
def test_the_command_line_loads_the_command_alone(
    command: list[str], found: set[str]
) -> None:
    code = (
        "import contextlib, io, sys, packstore.cli as cli\n"
        "with contextlib.redirect_stdout(io.StringIO()), "
        "contextlib.suppress(SystemExit):\n"
        f"    cli.main({command})\n"
        "heavy = {'torch', 'numba', 'pyarrow', 'polars', 'numpy', 'tokenizers', "
        "'fsspec', 'rich'}\n"
        "commands = {cli.COMMANDS[name].partition(':')[0] for name in cli.COMMANDS}\n"
        "print(sorted((heavy | commands) & set(sys.modules)))"
    )
    assert python(code) == str(sorted(found))


@pytest.mark.parametrize("module", ["packstore.torch", "packstore.io.dataset.dataset"])
def test_training_begins_without_what_it_does_not_need(module: str) -> None:
    heavy = (
        "{'numba', 'pandas', 'polars', 'tokenizers', 'torch._dynamo', 'transformers'}"
    )
    assert python(f"import sys, {module}; print({heavy} & set(sys.modules))") == "set()"


def test_a_small_job_loads_no_compiler(tmp_path: Path) -> None:
    code = (
        "import sys, packstore; sides = {'prompt': [5], 'chosen': [8], 'rejected': "
        "[9]}\n"
        "packstore.pack([sides] * 100, 'ds', pack_size=64, "
        "layout='shared_prefix').verify()\n"
        "print({'numba', 'polars', 'torch', 'tokenizers'} & set(sys.modules))"
    )
    assert python(code, tmp_path) == "set()"


CALL = (
    "print(callable(packstore.pack), packstore.pack.plan.plan([3], "
    "pack_size=4).num_packs)"
)


@pytest.mark.parametrize(
    "imports",
    [
        "import packstore; import packstore.pack.plan",
        "import packstore.pack.plan; import packstore",
        "from packstore.pack.plan import plan; import packstore",
        "from packstore import pack; import packstore.pack.plan",
        "import packstore.etl.pipeline, packstore.pack.plan",
    ],
)
def test_pack_is_a_call_and_a_package(imports: str) -> None:
    assert python(f"{imports}; {CALL}") == "True 1"


def test_help_and_the_signature_of_the_call() -> None:
    from packstore import pack

    assert inspect.signature(packstore.pack) == inspect.signature(pack)
    text = pydoc.plain(pydoc.render_doc(packstore.pack))
    told, _, _ = text.partition("PACKAGE CONTENTS")
    assert "packstore.pack(source, out, tokenizer=None, *, config=None" in told
    assert ">>> dataset = packstore.pack(" in told
    for name in inspect.signature(pack).parameters:
        assert re.search(rf"^ +{name}: ", told, re.M), name


@pytest.mark.slow
def test_mypy_sees_the_signature_of_the_call(tmp_path: Path) -> None:
    script = tmp_path / "use.py"
    script.write_text(
        "import packstore\n"
        "import packstore.pack\n"
        "from packstore.pack.plan import plan\n"
        "reveal_type(packstore.pack('a', 'b', tokenizer='c', pack_size=8))\n"
        "reveal_type(plan)\n"
        "packstore.pack(1)\n"
        "packstore.estimate('a', 'b', layouts=['wide'])\n",
        encoding="utf-8",
    )
    done = run_python(
        "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), str(script), cwd=ROOT
    )
    assert 'Revealed type is "packstore.io.dataset.dataset.Dataset"' in done.stdout, (
        done.stdout
    )
    for error in (
        'Missing positional argument "out" in call to "pack"',
        "List item 0 has incompatible type \"Literal['wide']\"",
    ):
        assert error in done.stdout, done.stdout


def test_public_names() -> None:
    calls = (
        "append check clean concat doctor estimate export open pack plan publish scan"
    )
    classes = (
        "Answers Chat Dataset Drop PackConfig PackstoreError Pair Plan __version__"
    )
    assert sorted(packstore.__all__) == [*classes.split(), *calls.split()]
    for name in packstore.__all__:
        assert getattr(packstore, name) is not None
        assert name == "pack" or not isinstance(getattr(packstore, name), ModuleType)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = packstore.nonsense  # type: ignore[attr-defined]


def test_public_names_of_torch() -> None:
    namespace = importlib.import_module("packstore.torch")
    assert {"train", "evaluate", "write_ref_logps", "open_side"} < set(
        namespace.__all__
    )
    assert dir(namespace) == namespace.__all__
    for name in namespace.__all__:
        assert getattr(namespace, name).__name__ == name
    with pytest.raises(AttributeError, match="nonsense"):
        _ = namespace.nonsense


def plugin_folders() -> list[Path]:
    """Folders whose __init__ holds a registry of the files beside it."""
    return sorted(
        init.parent
        for init in (ROOT / "packstore").rglob("__init__.py")
        if "Registry(" in init.read_text(encoding="utf-8")
    )


@pytest.mark.parametrize("folder", plugin_folders(), ids=lambda folder: folder.name)
def test_every_file_of_a_plugin_folder_is_registered_and_loads(folder: Path) -> None:
    package = ".".join(folder.relative_to(ROOT).parts)
    module = importlib.import_module(package)
    (registry,) = (
        v for v in vars(module).values() if isinstance(v, Registry) and len(v)
    )
    modules = {target.partition(":")[0] for target in registry.values()}
    files = {
        f"{package}.{p.stem}" for p in folder.glob("*.py") if not p.stem.startswith("_")
    }
    assert modules == files
    for name in registry:
        with suppress(MissingExtraError):  # what only a machine with a GPU has
            assert registry.load(name) is not None


def folders() -> list[Path]:
    """The folders of the package with code in them."""
    return sorted(
        {p.parent for p in (ROOT / "packstore").rglob("*.py")} - {ROOT / "packstore"}
    )


@pytest.mark.parametrize(
    "folder", folders(), ids=lambda p: str(p.relative_to(ROOT / "packstore"))
)
def test_the_readme_of_a_folder_is_short_and_names_its_files(folder: Path) -> None:
    text = (folder / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    assert sum(bool(line) for line in prose.splitlines()) <= 10
    for name in re.findall(r"`(\w+\.py)`", text):
        assert (folder / name).exists(), name
    files = {p.name for p in folder.glob("*.py") if not p.stem.startswith("__")}
    if folder not in plugin_folders() and folder.name != "cli":
        assert {name for name in files if name not in text} == set()


def test_no_file_of_the_tests_hides_a_package() -> None:
    """Ray's workers have tests/ on their path, and ranks have tests/support."""
    own = {path.stem for path in (ROOT / "tests").rglob("*.py")}
    assert own & set(packages_distributions()) == set()
