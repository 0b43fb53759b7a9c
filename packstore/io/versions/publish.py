"""Uploads a dataset to the Hugging Face hub, with a card that names its files.

The *card* of a repository is its ``README.md``: a *head* of YAML fields, then Markdown.
packstore writes the fields ``configs`` and ``tags``, and the Markdown between two
comments; all else is the user's, and stays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from yaml import YAMLError

from packstore.errors import FormatError, StorageError, markdown_text, quote, sentence
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.dataset import open as open_dataset
from packstore.io.manifest.commit import list_versions, manifest_path
from packstore.io.manifest.manifest import Manifest
from packstore.io.store.location import Location
from packstore.io.store.storage_errors import is_of_client
from packstore.progress import Progress
from packstore.secrets import client_cause, client_text

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, DatasetCard, HfApi

T = TypeVar("T")

CARD = "README.md"
_BEGIN = "<!-- packstore -->"
_END = "<!-- /packstore -->"
_FILES_AT_ONCE = 5  # as many as the client uploads at the same time


class Published(NamedTuple):
    """A dataset on the hub.

    Attributes:
        url: ``hf://datasets/OWNER/NAME``.
        version: its number on the hub, which may be higher than the source's.
        commit: hash of the commit.
        files: number of files in the commit.
    """

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
    """Upload the newest version of a dataset to the Hugging Face hub, in one commit.

        >>> packstore.publish("prefs-8k", "me/prefs-8k").url
        'hf://datasets/me/prefs-8k'

    Shards are uploaded first; the commit then adds them, the manifest and the card
    together, so that no reader sees a part. Versions that are there already stay. The
    card names the shards of the new one, so that the hub's viewer and
    ``datasets.load_dataset`` read no others; text of yours in the card, beside the part
    of packstore, stays, too.

    Args:
        dataset: folder or URL of a packed dataset.
        repo: name of the repository, ``OWNER/NAME``; created if it is missing.
        private: make a new repository private.
        storage_options: passed to fsspec's filesystem of `dataset`.
        progress: called with the number of uploaded files.

    Returns:
        The published dataset. Reading from its URL, also in training, needs no download
        beforehand.

    Raises:
        StorageError: the hub refuses, for example without a token, or a file cannot be
            read.
        MissingFilesError: the dataset lacks a file of its version.
        FormatError: the card of the repository is invalid, so that its text cannot be
            preserved.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    source = open_dataset(dataset, storage_options)
    source.require_files()
    api = HfApi()

    prepare = partial(_prepare_repository, api, repo, private)
    parent_commit, card_content = _call_hub(repo, prepare)
    card = _parse_card(card_content, repo)

    target = Location(f"hf://datasets/{repo}")
    manifest = source.location.read_bytes(manifest_path(source.version))
    version = _version_on_hub(target, manifest, source.version)
    _describe_in_card(card, source, repo)

    additions = [_addition(source, path) for path in source.manifest.files]
    _upload(api, repo, additions, progress)
    additions += [
        CommitOperationAdd(manifest_path(version), manifest),
        CommitOperationAdd(CARD, str(card).encode()),
    ]
    fingerprint = source.manifest.fingerprint[:16]
    create_commit = partial(
        api.create_commit,
        repo,
        additions,
        commit_message=f"packstore: version {version}, {fingerprint}",
        repo_type="dataset",
        # The hub refuses the commit if somebody else has committed since.
        parent_commit=parent_commit,
    )
    commit = _call_hub(repo, create_commit)
    return Published(
        url=target.url,
        version=version,
        commit=str(commit.oid),
        files=len(additions),
    )


def _call_hub(repo: str, call: Callable[[], T]) -> T:
    """Return the answer of the hub; raise StorageError if it refuses."""
    try:
        return call()
    except Exception as error:
        if not is_of_client(error):
            raise  # a bug of packstore
        # The client's errors may show a token; client_text and client_cause hide it.
        text = sentence(
            where=f"hf://datasets/{client_text(repo)}",
            rule="the hub must take it",
            found=client_text(error).strip().partition("\n")[0],
            remedy="Log in with `hf auth login`, or set HF_TOKEN",
        )
        raise StorageError(text) from client_cause(error)


def _prepare_repository(
    api: HfApi, repo: str, private: bool
) -> tuple[str | None, bytes | None]:
    """Create the repository if it is missing.

    Returns:
        The hash of its newest commit, and the bytes of its card; None: there is none.
    """
    # private=None leaves the choice to the settings of the owner's organization.
    api.create_repo(repo, repo_type="dataset", private=private or None, exist_ok=True)
    commit = api.repo_info(repo, repo_type="dataset").sha
    if not api.file_exists(repo, CARD, repo_type="dataset"):
        return commit, None
    path = api.hf_hub_download(repo, CARD, repo_type="dataset")
    return commit, Path(path).read_bytes()


def _version_on_hub(target: Location, manifest: bytes, version: int) -> int:
    """Return the number under which a version is published.

    If the newest version on the hub has this manifest, it is the hub's number. Else it
    is the local number `version`, or the hub's next number if that is higher.
    """
    newest = max(list_versions(target), default=0)
    if newest and target.read_bytes(manifest_path(newest)) == manifest:
        return newest  # it was published before
    return max(version, newest + 1)


def _addition(dataset: Dataset, path: str) -> CommitOperationAdd:
    """Return the operation that adds a file of a dataset under the same path."""
    from huggingface_hub import CommitOperationAdd

    place = dataset.location.join(path)
    # The upload reads the stream of a remote file, which therefore stays open here.
    return CommitOperationAdd(path, place.local_path or place.open_read())


def _upload(
    api: HfApi,
    repo: str,
    additions: Sequence[CommitOperationAdd],
    progress: Progress | None,
) -> None:
    """Upload the contents of files, which a later commit adds."""
    for start in range(0, len(additions), _FILES_AT_ONCE):
        part = additions[start : start + _FILES_AT_ONCE]
        upload = partial(api.preupload_lfs_files, repo, part, repo_type="dataset")
        _call_hub(repo, upload)
        if progress is not None:
            progress("upload", start + len(part), len(additions), "files")


# The card


def _parse_card(content: bytes | None, repo: str) -> DatasetCard:
    """Return the card of this content, or a new one if there is none."""
    from huggingface_hub import DatasetCard

    if content is None:
        title = repo.rpartition("/")[2]
        return DatasetCard(
            f"---\ntags: [packstore]\n---\n\n# {title}\n\n{_BEGIN}\n{_END}\n"
        )
    try:
        # The client's rules for the values of fields do not matter here. A head that is
        # no YAML mapping raises all the same.
        return DatasetCard(content.decode(), ignore_metadata_errors=True)
    except UnicodeDecodeError as error:
        raise _unreadable_card(repo, "it must be UTF-8", str(error)) from error
    except (YAMLError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        rule = "its head must be YAML, name: value"
        raise _unreadable_card(repo, rule, reason) from error


def _unreadable_card(repo: str, rule: str, reason: str) -> FormatError:
    """Return the error for a card that could not be kept as its author wrote it."""
    text = sentence(
        where=f"hf://datasets/{repo}/{CARD}",
        rule=rule,
        found=quote(reason, 150),
        remedy="Correct it on the hub",
    )
    return FormatError(text)


def _describe_in_card(card: DatasetCard, dataset: Dataset, repo: str) -> None:
    """Write the files and properties of this version into the card."""
    paths = [shard.path for shard in dataset.manifest.shards]
    data_files = [{"split": "train", "path": paths}]
    head: Any = card.data  # its class allows any fields
    head.configs = [{"config_name": "default", "data_files": data_files}]
    head.tags = _with_tags(head.get("tags"), ("packstore", dataset.manifest.kind), repo)

    part = f"{_BEGIN}\n{_description(dataset.manifest, repo)}\n{_END}"
    # A begin without an end is the user's text: the part has no second begin within.
    text_without_begin = f"(?:(?!{_BEGIN}).)*?"
    old_part = re.search(f"{_BEGIN}{text_without_begin}{_END}", card.text, re.DOTALL)
    if old_part is None:
        card.text = f"{card.text.rstrip()}\n\n{part}\n"
    else:
        before = card.text[: old_part.start()]
        after = card.text[old_part.end() :]
        card.text = before + part + after


def _description(manifest: Manifest, repo: str) -> str:
    """Return a table of properties, and the code to read the dataset, in Markdown."""
    tokenizer = manifest.provenance.get("tokenizer") or {}
    settings = manifest.provenance.get("settings") or {}
    facts = {
        **manifest.facts,
        "tokenizer sha256": tokenizer.get("sha256") or "unknown",
        "strategy, seed": f"{manifest.strategy}, {manifest.seed}",
        "chat template": settings.get("chat_template") or "the tokenizer's",
        "fingerprint": manifest.fingerprint,
        "packstore": manifest.provenance.get("package_version", "unknown"),
    }
    rows = [
        f"| {markdown_text(name)} | {_cell(value)} |" for name, value in facts.items()
    ]
    introduction = (
        "Packed by packstore. A row is a pack: token ids of several examples."
    )
    if manifest.layout == "shared_prefix":
        introduction += (
            " Tokens that several sequences begin with are stored once; "
            "`packstore.scan(url, tokens=True)` returns whole sequences."
        )
    lines = [
        introduction,
        "",
        "| | |",
        "|---|---|",
        *rows,
        "",
        "```python",
        "import packstore.torch as pt",
        "",
        f'loader = pt.PackedDataLoader(pt.PackedDataset("hf://datasets/{repo}"))',
        "```",
    ]
    return "\n".join(lines)


def _with_tags(tags: Any, required: Iterable[str], repo: str) -> list[Any]:
    """Return the tags of a card, and the required ones that it lacks."""
    if tags is None:
        tags = []
    if isinstance(tags, str):
        tags = [tags]
    if not isinstance(tags, list):
        raise _unreadable_card(
            repo, rule="tags must be a list", reason=type(tags).__name__
        )
    return tags + [tag for tag in required if tag not in tags]


def _cell(value: object) -> str:
    """Return a value as the text of a cell of a Markdown table."""
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return markdown_text(text)
