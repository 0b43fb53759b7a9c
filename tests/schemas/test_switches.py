"""Every check of the reader in ``examples/`` is needed for a case: without it, the
reader reads what it must refuse, or refuses it under a name that is not the case's.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import kit
from json_patch import patched
from switches import SwitchedReader

Case = dict[str, Any]
Load = Callable[[str], Any]
IsRight = Callable[[SwitchedReader], bool]
"""Asks a reader about a case; returns whether its answer is right."""

SHADOWED: dict[str, str] = {
    "stored: path.stat().st_size == file['bytes']": "another size has another hash",
    "check_chunks: not any((c.has_dictionary_page for c in read))": (
        "the encodings of such a column name the dictionary as well"
    ),
    "row_groups: n == len(shard['row_groups']['rows'])": (
        "the checksums of the row groups are those of others"
    ),
    "row_groups: group.num_rows == shard['row_groups']['rows'][g]": (
        "the rows are counted once they are read"
    ),
    "check_pack: all((0 <= edge <= tokens for edge in b))": (
        "edges that increase stay between the first and the last"
    ),
    "check_pack: sum(lengths) <= m['statistics']['most_keys']": (
        "the most keys of a pack are counted, too; a reader of some packs cannot"
    ),
    "check_index: file.metadata.row_group(g).num_rows == len(packs)": (
        "the figures are compared with those of each pack"
    ),
}
"""Checks that no case needs -> why another check refuses theirs."""


def is_dataset_right(case: Case, reader: SwitchedReader) -> bool:
    paths = [str(kit.KIT / name) for name in (case["dataset"], *case["sides"])]
    verdict, _ = kit.COMPARE["judge"](kit.KIT, case, reader.names["answer"](*paths))
    return bool(verdict != "WRONG")


def is_manifest_right(
    prefix: str, document: Any, names: set[str], folder: Path, reader: SwitchedReader
) -> bool:
    path = folder / "_packstore" / f"{prefix}-000001.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    try:
        reader.names["checked"](folder, prefix, reader.names[f"check_{prefix}"])
    except reader.names["Refused"] as refusal:
        return str(refusal) in names
    return False


def cases(load: Load, folder: Path) -> Iterator[IsRight]:
    """Those of the kit, and the manifests that must be refused."""
    for case in kit.COMPARE["load"](kit.KIT):
        yield partial(is_dataset_right, case)
    (folder / "_packstore").mkdir()
    for prefix in ("manifest", "side"):
        valid = load(f"cases/{prefix}s_valid.json")["cases"]
        manifests = {case["name"]: case["manifest"] for case in valid}
        for case in load(f"cases/{prefix}s_invalid.json")["cases"]:
            document = patched(manifests[case["base"]], case["patch"])
            is_later = case["error"] == "UnsupportedFormatError"
            names = {"unsupported"} if is_later else {"manifest", "side"}
            yield partial(is_manifest_right, prefix, document, names, folder)


def is_noticed(is_right: IsRight, reader: SwitchedReader) -> bool:
    try:
        return not is_right(reader)
    except Exception:  # whatever a reader meets in a file that it does not check
        return True


def test_every_check_is_needed_for_a_case(load: Load, tmp_path: Path) -> None:
    reader = SwitchedReader()
    refused_by = defaultdict[str, list[IsRight]](list)
    for is_right in cases(load, tmp_path):
        reader.refusing = ""
        assert is_right(reader)
        refused_by[reader.refusing].append(is_right)

    unneeded = []
    for check in reader.checks:
        reader.switched_off = check
        if not any(is_noticed(is_right, reader) for is_right in refused_by[check]):
            unneeded.append(check)
    assert unneeded == list(SHADOWED)
