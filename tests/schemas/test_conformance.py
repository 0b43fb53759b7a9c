"""The conformance kit: frozen; packstore and the readers of examples/ read it as they
must.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kit
import kit_reader
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from children import run_python
from node_packages import READERS as NODE
from plain_reader import PATH, READER

from packstore import Dataset
from packstore import open as open_dataset
from packstore.format import FORMAT_VERSION, KINDS, LAYOUTS, RULES
from packstore.io.side import TOKEN_RULES

ROOT = Path(__file__).parents[2]
KIT = kit.KIT
judge, load, main = (kit.COMPARE[name] for name in ("judge", "load", "main"))
DamagedKit = kit.COMPARE["DamagedKit"]
DATASETS = KIT / "datasets"
CASES = {case["name"]: case for case in load(KIT)}
GOLDEN = [
    name for name, case in CASES.items() if case["about"] == "written by packstore"
]
FROZEN = "c80e23e6f8571850193724dcac211bc9f4dc1e1c0f7aee28ad25a924099cd86c"
"""Format version 1 is frozen: sha256 of the names and hashes of its cases but those of
`ADDED`.

If it differs, change the kit back: datasets like these were released.
"""

ADDED: set[str] = set()
"""Names of cases that were added since."""

LEFT_OUT = {"whole-with-point", "keys-more"}
"""Cases that packstore refuses, as readers may."""

BYTE_DEPENDENT = {"path", "bytes", "sha256", "footer_bytes", "footer_sha256"}


def test_the_kit_of_version_1_is_frozen() -> None:
    """`load` compared the hashes with the files."""
    hashes = {name: case["sha256"] for name, case in CASES.items() if name not in ADDED}
    lines = "".join(f"{name} {hashes[name]}\n" for name in sorted(hashes))
    assert hashlib.sha256(lines.encode()).hexdigest() == FROZEN


def judged(answer: Any, name: str) -> tuple[str, str]:
    paths = [
        str(KIT / folder) for folder in (CASES[name]["dataset"], *CASES[name]["sides"])
    ]
    return judge(KIT, CASES[name], answer(*paths))


@pytest.mark.parametrize("name", CASES)
def test_packstore(name: str) -> None:
    verdict, reason = judged(kit_reader.answer, name)
    assert verdict == ("left out" if name in LEFT_OUT else "ok"), reason


def test_the_reader_in_python() -> None:
    assert not re.search(
        r"^\s*(from|import) packstore", PATH.read_text(encoding="utf-8"), re.M
    )
    verdicts = {name: judged(READER["answer"], name) for name in CASES}
    others = {name: v for name, v in verdicts.items() if v != ("ok", "")}
    assert others == {"whole-with-point": ("left out", "")}


@pytest.mark.slow
def test_the_reader_in_javascript(capsys: pytest.CaptureFixture[str]) -> None:
    if not (NODE / "node_modules").exists():
        pytest.skip("node and hyparquet are not installed: `make test-all` does it")
    shutil.copy(PATH.with_suffix(".mjs"), NODE)
    status = main(["--kit", str(KIT), "node", str(NODE / "reader.mjs")])
    assert status == 0, capsys.readouterr().out


def test_answers_are_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kit of three cases, and a reader that gives each dataset the same answer."""
    names = ["empty", "arrow-carried", "ids-repeated"]
    for place in ("datasets", "expected"):
        for name in names:
            for path in (KIT / place).glob(f"{name}*"):
                copy = shutil.copytree if path.is_dir() else shutil.copy
                (tmp_path / place).mkdir(exist_ok=True)
                copy(path, tmp_path / place / path.name)
    kit = json.dumps({"cases": [CASES[name] for name in names]})
    (tmp_path / "kit.json").write_text(kit, encoding="utf-8")

    def run(answer: str) -> tuple[int, list[str]]:
        status = main(
            ["--kit", str(tmp_path), sys.executable, "-c", f"print('''{answer}''')"]
        )
        lines = capsys.readouterr().out.splitlines()
        return status, [line[:8].strip() for line in lines[: len(names)]]

    assert run('{"packs": []}') == (1, ["ok", "WRONG", "WRONG"])
    assert run('{"refused": "unsupported"}') == (1, ["WRONG", "left out", "WRONG"])
    assert run('{"refused": "example-ids"}') == (1, ["WRONG", "WRONG", "ok"])
    assert run('{"refused": ""}') == (1, ["WRONG", "WRONG", "ok"])
    assert run("[]") == run("?") == run("{}") == (1, ["WRONG"] * 3)
    assert main(["--kit", str(tmp_path), "no-such-reader"]) == 2
    (tmp_path / "expected" / "empty.json").write_text("{}", encoding="utf-8")
    with pytest.raises(DamagedKit, match="case empty"):
        load(tmp_path)
    assert main(["--kit", str(tmp_path), sys.executable]) == 2


def reader_that(program: str) -> list[str]:
    """Return the command of a reader in Python."""
    return [sys.executable, "-S", "-c", program]


def test_a_reader_that_always_fails_is_stopped(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Not one that fails in some cases: here, in all but the first."""
    program = "import sys; sys.exit('no module hyparquet')"
    assert main(reader_that(program)) == 2
    output = capfd.readouterr()
    assert "no module hyparquet" in output.err
    assert "exit status 1: no module hyparquet" in output.out
    assert output.out.count("WRONG") < 10

    names = GOLDEN[:7]
    program = f"import sys; sys.exit(not sys.argv[1].endswith({names[0]!r}))"
    program = f"print('{{}}'); {program}"
    cases = [flag for name in names for flag in ("--case", name)]
    assert main([*cases, *reader_that(program)]) == 1
    assert capfd.readouterr().out.count("exit status 1") == len(names) - 1


def test_cases_are_chosen_by_name_and_by_part(
    capfd: pytest.CaptureFixture[str],
) -> None:
    program = "import sys; print('why', file=sys.stderr); sys.exit(len(sys.argv))"
    assert main(["--case", "preference-concat-side", *reader_that(program)]) == 1
    output = capfd.readouterr()
    assert "why" in output.err
    assert "exit status 3" in output.out
    assert output.out.splitlines()[-1].endswith("of 1 cases")
    with pytest.raises(SystemExit):
        main(["--case", "preference-concat-sdie", *reader_that(program)])
    assert "preference-concat-side" in capfd.readouterr().err

    flags = ["--without-sides", "--case", "preference-concat-side"]
    flags += ["--case", "preference-concat"]
    assert main([*flags, *reader_that("print('{}')")]) == 1
    assert "preference-concat-side" not in capfd.readouterr().out


def test_every_variant_is_there(prose: str, annex: Callable[[str], str]) -> None:
    manifests = [open_dataset(str(DATASETS / name)).manifest for name in GOLDEN]
    variants = {(m.kind, m.layout) for m in manifests if m.file_format == "parquet"}
    assert variants == {(kind, layout) for kind in KINDS for layout in LAYOUTS}
    assert {m.file_format for m in manifests} == {"parquet", "arrow"}
    assert any(len(m.shards) > 1 and len(m.shards[0].row_groups) > 1 for m in manifests)
    assert KIT.name == f"v{FORMAT_VERSION}"
    names = prose + annex("e-side-data") + annex("g-conformance")
    refused = {name for case in CASES.values() for name in case["refuse"]}
    assert RULES.keys() | TOKEN_RULES.keys() < refused
    for case in CASES.values():
        assert case["refuse"] or "expected" in case
        assert all(f"| `{name}` |" in names for name in case["refuse"])


@pytest.mark.parametrize("name", GOLDEN)
def test_manifest_fits_the_json_schema(name: str, validator: Any) -> None:
    dataset = open_dataset(str(DATASETS / name))
    validator("manifest").validate(json.loads(dataset.manifest.to_json()))
    for row in rows(dataset):
        validator(f"pack#/$defs/{dataset.manifest.kind}").validate(row)


@pytest.mark.parametrize("name", [n for n in GOLDEN if not n.endswith("arrow")])
def test_physical_form(name: str) -> None:
    """Checks the rules of format.md about Parquet on the files themselves."""
    dataset = open_dataset(str(DATASETS / name))
    for shard in dataset.manifest.shards:
        file = pq.ParquetFile(DATASETS / name / shard.path)
        assert shard.path.endswith(f"-{shard.sha256[:16]}.parquet")
        assert file.schema_arrow.equals(
            dataset.manifest.stored_schema, check_metadata=True
        )
        for group in range(file.num_row_groups):
            metadata = file.metadata.row_group(group)
            columns = [metadata.column(i) for i in range(metadata.num_columns)]
            assert {c.compression for c in columns} == {"ZSTD"}
            assert not any(c.has_dictionary_page or c.is_stats_set for c in columns)


def rows(dataset: Dataset) -> list[dict[str, Any]]:
    return [row for batch in dataset.iter_batches() for row in batch.to_pylist()]


def meaning(dataset: Dataset) -> dict[str, Any]:
    """The manifest without what depends on the release of pyarrow."""
    manifest = json.loads(dataset.manifest.to_json())
    for shard in manifest["shards"]:
        del shard["row_groups"]["crc32"]
        for name in BYTE_DEPENDENT:
            del shard[name]
    del manifest["totals"]["bytes"]
    for name in ("path", "bytes", "sha256"):
        del manifest["pack_index"][name]
    return manifest


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file()
    }


def test_the_script_writes_the_same(tmp_path: Path) -> None:
    """Bytes with the pyarrow that wrote the kit, and what they mean with any other."""
    path = os.pathsep.join(map(str, [ROOT, ROOT / "tests" / "support"]))
    script = ROOT / "schemas" / "conformance" / "make.py"
    done = run_python(script, tmp_path, env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    made = tmp_path / "v1"
    for name in GOLDEN:
        old, new = (
            open_dataset(str(DATASETS / name)),
            open_dataset(str(made / "datasets" / name)),
        )
        assert rows(old) == rows(new)
        assert meaning(old) == meaning(new)
    assert contents(KIT / "expected") == contents(made / "expected")
    (sample, *_) = (DATASETS / "preference-concat").glob("data/*.parquet")
    if pq.read_metadata(sample).created_by.endswith(f"version {pa.__version__}"):
        assert contents(KIT) == contents(made)


def test_a_reader_answers_for_the_rules_that_it_must_check() -> None:
    core = (ROOT / "schemas" / "format.md").read_text(encoding="utf-8")
    must = set(re.findall(r"^\| `([a-z-]+)` \| .* \| MUST \|$", core, flags=re.M))
    for case in CASES.values():
        rules = RULES.keys() & case["refuse"]
        if rules and "arrow" not in case["name"]:
            assert case["reader"] == bool(rules & must), case["name"]
