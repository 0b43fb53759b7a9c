"""Hooks of mkdocs: pages that lie outside of docs/, and links that leave it.

Links are written for the repository, so that the pages read well there too. On the
site, one to a file that is a page leads to it, and one to any other file is its text
alone. One to nothing stays, for mkdocs to complain of.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {
    "schemas/format.md": "format.md",
    "schemas/annex-a-shard-files.md": "annex-a-shard-files.md",
    "schemas/annex-b-writing.md": "annex-b-writing.md",
    "schemas/annex-c-many-writers.md": "annex-c-many-writers.md",
    "schemas/annex-d-pack-index.md": "annex-d-pack-index.md",
    "schemas/annex-e-side-data.md": "annex-e-side-data.md",
    "schemas/annex-f-growth.md": "annex-f-growth.md",
    "schemas/annex-g-conformance.md": "annex-g-conformance.md",
    "packstore/tokenizer/README.md": "stages/tokenizer.md",
    "packstore/pack/README.md": "stages/pack.md",
    "packstore/io/README.md": "stages/io.md",
    "packstore/torch/README.md": "stages/torch.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
}
"""A file of the repository -> its place on the site."""

_LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\(([^)#\s]*)(#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Set the address of the repository, once pyproject.toml has one."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    urls = tomllib.loads(text)["project"].get("urls", {})
    config.repo_url = urls.get("Source")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages from outside."""
    from mkdocs.structure.files import File

    for source, place in PAGES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns the links of the repository into those of the site."""
    place = page.file.src_uri
    source = {page: file for file, page in PAGES.items()}.get(place, f"docs/{place}")
    return _LINK.sub(lambda link: _rewritten(link, place, source), markdown)


def _rewritten(link: re.Match[str], place: str, source: str) -> str:
    text, target, anchor = link[1], link[2], link[3] or ""
    if not target or "://" in target:
        return link[0]
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if file in PAGES:
        goal = PAGES[file]
    elif file.startswith("docs/") and (ROOT / file).is_file():
        goal = file.removeprefix("docs/")
    elif (ROOT / file).exists() and not file.startswith("docs/"):
        return text
    else:
        return link[0]
    return (
        f"[{text}]({posixpath.relpath(goal, posixpath.dirname(place) or '.')}{anchor})"
    )
