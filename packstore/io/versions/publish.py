"""Uploads a dataset to the Hugging Face hub, with a card that names the files of its
version.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from yaml import YAMLError

from packstore.errors import FormatError, StorageError, markdown_text, quote, sentence
from packstore.io.dataset.dataset import Dataset, open
from packstore.io.manifest.commit import list_versions, manifest_path
from packstore.io.store.location import Location
from packstore.io.store.storage_errors import is_of_client
from packstore.progress import Progress
from packstore.secrets import client_cause, client_text

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

T = TypeVar("T")

CARD = "README.md"
_BEGIN, _END = "<!-- packstore -->", "<!-- /packstore -->"


class Published(NamedTuple):
    """A dataset on the hub: its URL, its version, the commit, and its files."""

    url: str
    version: int
    commit: str
    files: int


def publish(
    dataset: str,
    repo: str,
    *,
    private: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Published:
    """Uploads the newest version of a dataset to the Hugging Face hub, in one commit.

        >>> packstore.publish("prefs-8k", "me/prefs-8k").url
        'hf://datasets/me/prefs-8k'

    Shards are uploaded first; the commit then adds them, the manifest and the card
    together, so that no reader sees a part. Versions that are there already stay. The
    card names the shards of the new one, so that the hub's viewer and
    ``datasets.load_dataset`` read them alone; what you write into it beside the part of
    packstore stays, too.

    Args:
        dataset: folder or URL of a packed dataset.
        repo: name of the repository, ``OWNER/NAME``; made if it is missing.
        private: make a new repository private.
        storage_options: passed to fsspec's filesystem of `dataset`.
        progress: called with the number of uploaded files.

    Returns:
        Where it is. Reading from that URL, also in training, needs no download
        beforehand.

    Raises:
        StorageError: the hub refuses, for example without a token, or a file cannot be
            read.
        MissingFilesError: the dataset lacks a file of its version.
        FormatError: the card of the repository cannot be read, so that it could not be
            kept.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    source = open(dataset, storage_options)
    source.require_files()
    api = HfApi()

    def prepare() -> tuple[str | None, Any]:
        api.create_repo(
            repo, repo_type="dataset", private=private or None, exist_ok=True
        )
        return api.repo_info(repo, repo_type="dataset").sha, _stored_card(api, repo)

    before, content = _asked(repo, prepare)
    card = _card(content, repo)
    there = Location(f"hf://datasets/{repo}")
    manifest = source.location.read_bytes(manifest_path(source.version))
    newest = max(list_versions(there), default=0)
    if newest and there.read_bytes(manifest_path(newest)) == manifest:
        version = newest
    else:
        version = max(source.version, newest + 1)
    _describe(card, source, repo)
    own = {manifest_path(version): manifest, CARD: str(card).encode()}
    added = [CommitOperationAdd(path, data) for path, data in own.items()]
    files = [_addition(source, path) for path in source.manifest.files]
    for start in range(
        0, len(files), 5
    ):  # as many as the client uploads at the same time
        part = files[start : start + 5]
        _asked(repo, partial(api.preupload_lfs_files, repo, part, repo_type="dataset"))
        if progress is not None:
            progress("upload", start + len(part), len(files), "files")
    text = f"packstore: version {version}, {source.manifest.fingerprint[:16]}"
    commit = _asked(
        repo,
        lambda: api.create_commit(
            repo,
            [*files, *added],
            commit_message=text,
            repo_type="dataset",
            parent_commit=before,
        ),
    )
    return Published(there.url, version, str(commit.oid), len(files) + len(added))


def _asked(repo: str, call: Callable[[], T]) -> T:
    """Returns the answer of the hub, whose refusals become a StorageError."""
    try:
        return call()
    except Exception as error:
        if not is_of_client(error):
            raise
        where = f"hf://datasets/{client_text(repo)}"
        found = client_text(error).strip().partition("\n")[0]
        remedy = "Log in with `hf auth login`, or set HF_TOKEN"
        raise StorageError(
            sentence(where, "the hub must take it", found, remedy)
        ) from client_cause(error)


def _addition(dataset: Dataset, path: str) -> CommitOperationAdd:
    from huggingface_hub import CommitOperationAdd

    place = dataset.location.join(path)
    return CommitOperationAdd(path, place.local_path or place.open_read())


def _stored_card(api: Any, repo: str) -> bytes | None:
    """Return the file of the repository's card; None if it has none."""
    if not api.file_exists(repo, CARD, repo_type="dataset"):
        return None
    return Path(api.hf_hub_download(repo, CARD, repo_type="dataset")).read_bytes()


def _card(content: bytes | None, repo: str) -> Any:
    """Return the card of this content, or a new one."""
    from huggingface_hub import DatasetCard

    if content is None:
        title = repo.rpartition("/")[2]
        return DatasetCard(
            f"---\ntags: [packstore]\n---\n\n# {title}\n\n{_BEGIN}\n{_END}\n"
        )
    try:
        return DatasetCard(content.decode(), ignore_metadata_errors=True)
    except UnicodeDecodeError as error:
        raise _unreadable_card(repo, "it must be UTF-8", str(error)) from error
    except (YAMLError, ValueError, TypeError) as error:
        found = " ".join(str(error).split())
        raise _unreadable_card(
            repo, "its head must be YAML, name: value", found
        ) from error


def _unreadable_card(repo: str, rule: str, found: str) -> FormatError:
    """Return the error for a card that could not be kept as its author wrote it."""
    where = f"hf://datasets/{repo}/{CARD}"
    return FormatError(
        sentence(where, rule, quote(found, 150), "Correct it on the hub")
    )


def _describe(card: Any, dataset: Dataset, repo: str) -> None:
    """Writes the files of this version, and what it is, into the card."""
    m = dataset.manifest
    paths = [shard.path for shard in m.shards]
    files = [{"split": "train", "path": paths}]
    card.data.configs = [{"config_name": "default", "data_files": files}]
    card.data.tags = _with_tags(card, ("packstore", m.kind), repo)
    tokenizer, settings = (
        m.provenance.get("tokenizer") or {},
        m.provenance.get("settings") or {},
    )
    facts = {
        **m.facts,
        "tokenizer sha256": tokenizer.get("sha256") or "unknown",
        "strategy, seed": f"{m.strategy}, {m.seed}",
        "chat template": settings.get("chat_template") or "the tokenizer's",
        "fingerprint": m.fingerprint,
        "packstore": m.provenance.get("package_version", "unknown"),
    }
    rows = [
        f"| {markdown_text(name)} | {_cell(value)} |" for name, value in facts.items()
    ]
    lines = [
        "Packed by packstore. A row is a pack: token ids of several whole examples.",
        *("", "| | |", "|---|---|", *rows, ""),
        *("```python", "import packstore.torch as pt", ""),
        f'loader = pt.PackedDataLoader(pt.PackedDataset("hf://datasets/{repo}"))',
        "```",
    ]
    part = "\n".join([_BEGIN, *lines, _END])
    before = re.search(f"{_BEGIN}(?:(?!{_BEGIN}).)*?{_END}", card.text, re.S)
    if before is None:
        card.text = f"{card.text.rstrip()}\n\n{part}\n"
    else:
        card.text = card.text[: before.start()] + part + card.text[before.end() :]


def _with_tags(card: Any, added: Iterable[str], repo: str) -> list[Any]:
    """Return the tags of the card, and those that it lacks."""
    tags = card.data.get("tags")
    if tags is None:
        tags = []
    if isinstance(tags, str):
        tags = [tags]
    if not isinstance(tags, list):
        raise _unreadable_card(repo, "tags must be a list", type(tags).__name__)
    return [*tags, *(tag for tag in added if tag not in tags)]


def _cell(value: object) -> str:
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return markdown_text(text)
