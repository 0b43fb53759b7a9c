"""Appends records to a dataset, packed like the records that it has.

Existing shards are not rewritten: a new manifest names them. :func:`append` packs with
the settings that the manifest of the dataset records. To the two splits of a job with
`validation_fraction`, it appends what that job would have put into each. An *answer* is
the value of the setting `on` for one reason to refuse a record, e.g. ``drop`` for
``overlong``.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from packstore.config import PackConfig, RunConfig
from packstore.config.remedies import current_door, spell
from packstore.errors import (
    ConfigError,
    PackstoreError,
    TokenizerError,
    display,
    quote,
    sentence,
)
from packstore.etl.pipeline import pack_into, require_path, with_adapter
from packstore.etl.sources import find_dataset_source, open_examples, packing_settings
from packstore.etl.splits import find_ahead, find_splits, refuse_lone_split, split_of
from packstore.format.arrays import SOURCE_SHIFT
from packstore.io.dataset.dataset import Dataset, find_dataset
from packstore.io.dataset.dataset import open as open_dataset
from packstore.io.inputs.files import NoRecordsError
from packstore.io.versions.write_job import AppendedBefore, WriteJob, writing
from packstore.progress import Progress
from packstore.tokenizer.records.adapters import Adapter
from packstore.tokenizer.records.forms import load as load_forms

log = logging.getLogger("packstore")

_ADJUSTABLE = {*RunConfig.names(), "dedup", "fields", "on", "partitions"}
"""Settings of :func:`append`; the dataset decides all others."""


def append(
    dataset: str | Dataset,
    more: Any,
    tokenizer: Any = None,
    *,
    allow_empty: bool = False,
    adapter: Callable[[dict[str, Any]], Any] | str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    source_storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Dataset:
    """Pack more records with the settings of a dataset, and commit its next version.

    Existing packs do not change, and readers of older versions continue. New examples
    get ids above all existing ones.

    Args:
        dataset: the dataset, or its path or URL; or the folder of a job with
            `validation_fraction`, where each record goes to ``train`` or
            ``validation`` as it would in that job. Each gets one new version.
        more: any source of :func:`packstore.pack`; a packed dataset is repacked.
        tokenizer: the tokenizer of the dataset; None: loaded from the path in its
            manifest.
        allow_empty: return the dataset as it is if there is no record: patterns match
            no file, folders hold none, or files hold no record.
        adapter: the function that read the dataset's records, or its name; never taken
            from the manifest, as whoever made that could name any function.
        storage_options, source_storage_options, progress: see :func:`packstore.pack`.
        settings: fields of ``RunConfig``, `partitions` (of the new records), `fields`,
            `dedup` and `on`; the dataset decides all others. Answers of `on` are added
            to the dataset's answers. ``dedup="pair"`` reads the packs of the dataset,
            and leaves out records that it has.

    Returns:
        The newest version of the dataset. With `validation_fraction` it is that of
        ``train``.

    Raises:
        CompatibilityError: another tokenizer, template or kind.
        ConfigError: a setting that the dataset decides; a dataset that is not the
            newest version; one of the two datasets of a job with `validation_fraction`.
        InputError: there is no record, and `allow_empty` is False.
        DatasetExistsError: the dataset already has these records. If they were appended
            last, the dataset is returned as it is, so that a finished call may be
            repeated.
        PackstoreError: as :func:`packstore.pack`; the dataset keeps its versions.
    """
    result = append_records(
        dataset,
        more,
        tokenizer,
        allow_empty=allow_empty,
        adapter=adapter,
        storage_options=storage_options,
        source_storage_options=source_storage_options,
        progress=progress,
        **settings,
    )
    return result.dataset


@dataclass(frozen=True, eq=False)
class AppendResult:
    """The result of an append.

    Attributes:
        datasets: split -> newest version of its dataset; None: there are no splits.
        records_by_split: split -> number of records that were appended to it; all 0:
            nothing was new, and there is no new version.
    """

    datasets: Mapping[str | None, Dataset]
    records_by_split: Mapping[str | None, int]

    @property
    def dataset(self) -> Dataset:
        """The dataset; of two splits, ``train``."""
        return next(iter(self.datasets.values()))


def append_records(
    dataset: str | Dataset,
    more: Any,
    tokenizer: Any = None,
    *,
    allow_empty: bool = False,
    progress: Progress | None = None,
    **arguments: Any,
) -> AppendResult:
    """Do :func:`append`; return all datasets, and the numbers of records.

    Further arguments are those of :func:`plan_append`.
    """
    plan = plan_append(dataset, more, tokenizer, **arguments)
    bases = plan.bases
    place = next(iter(bases.values())).url
    open_source = partial(
        open_examples,
        plan.source,
        plan.tokenizer,
        plan.config,
        plan.source_options,
        adapter=plan.adapter,
        skip_empty=allow_empty,
    )
    with contextlib.ExitStack() as stack:
        jobs = _start_jobs(bases, plan.ahead, stack)
        try:
            pack_into(jobs, plan.source, open_source, plan.config, progress)
        except AppendedBefore as reason:
            _refuse_incomplete(jobs)
            log.info("%s: already there, %s", place, reason)
            return AppendResult(bases, dict.fromkeys(bases, 0))
        except NoRecordsError as error:
            if not allow_empty:
                remedy = "If that is no mistake, allow it (allow_empty=True, "
                remedy += "--allow-empty)."
                raise NoRecordsError(f"{error} {remedy}") from None
            _refuse_incomplete(jobs)
            log.info("%s: nothing to append: %s", place, error)
            return AppendResult(bases, dict.fromkeys(bases, 0))

    datasets = {split: job.committed for split, job in jobs.items()}
    num_earlier_sources = min(_count_sources(base) for base in bases.values())
    records_by_split = {
        split: _log_appended(extended, num_earlier_sources)
        for split, extended in datasets.items()
    }
    return AppendResult(datasets, records_by_split)


@dataclass(frozen=True, eq=False)
class AppendPlan:
    """An append that can begin.

    Attributes:
        bases: split -> newest version of its dataset; None: there are no splits.
        ahead: the split that an interrupted append has extended, if there is one.
        source: the records, or the packed dataset to append.
        config: settings of the dataset and of this append.
        adapter: the function that reads records, if there is one.
        tokenizer: as passed, or the path that the dataset records.
        source_options: storage options of the records.
    """

    bases: Mapping[str | None, Dataset]
    ahead: str | None
    source: Any
    config: PackConfig
    adapter: Adapter | None
    tokenizer: Any
    source_options: dict[str, Any]


def plan_append(
    dataset: str | Dataset,
    more: Any,
    tokenizer: Any = None,
    *,
    adapter: Callable[[dict[str, Any]], Any] | str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    source_storage_options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> AppendPlan:
    """Open the dataset of :func:`append`, and check the arguments against it."""
    bases = _open_bases(dataset, more, storage_options)
    for base in bases.values():
        base.require_whole("records are appended to a whole dataset")
        base.manifest.require_writable(base.url)
        base.manifest.require_readable(base.url)
    first_base = next(iter(bases.values()))
    source_options = first_base.location.storage_options
    if source_storage_options is not None:
        source_options = source_storage_options
    packed_source = find_dataset_source(more, source_options)
    if packed_source is not None and len(bases) > 1:
        raise _packed_source_error(first_base, packed_source)

    is_packed = packed_source is not None
    config = _settings_for_append(bases, settings, is_packed)
    loaded_adapter = None
    if not is_packed:
        config, loaded_adapter = with_adapter(config, adapter)
        _check_reading(first_base, loaded_adapter)
    if tokenizer is None and not is_packed:
        tokenizer = _recorded_tokenizer(first_base)
    return AppendPlan(
        bases=bases,
        ahead=find_ahead(bases) if len(bases) > 1 else None,
        source=more if packed_source is None else packed_source,
        config=config,
        adapter=loaded_adapter,
        tokenizer=tokenizer,
        source_options=dict(source_options),
    )


# The dataset, or both splits


def _open_bases(
    dataset: str | Dataset, more: Any, storage_options: Mapping[str, Any] | None
) -> dict[str | None, Dataset]:
    """Open the dataset of :func:`append`, or both splits in a folder.

    Raises:
        ConfigError: the dataset is one split; or the arguments are swapped: `more` is a
            dataset, or a list that ends with one, as in ``packstore append a.jsonl
            b.jsonl DATASET``.
    """
    if isinstance(dataset, Dataset):
        refuse_lone_split(dataset)
        return {None: dataset}

    rule = "must be the dataset, which comes before the records"
    require_path(dataset, "dataset", rule)
    base = find_dataset(dataset, storage_options)
    if base is not None:
        refuse_lone_split(base)
        return {None: base}

    splits = find_splits(os.fspath(dataset), storage_options)
    if splits:
        return splits
    swapped = _find_swapped(more, storage_options)
    if swapped is not None:
        raise ConfigError(
            sentence(
                where=display(os.fspath(dataset)),
                rule=rule,
                found=f"one in {swapped.url}",
                remedy="Swap them",
            )
        )
    # There is none: its error says what the place has instead.
    return {None: open_dataset(dataset, storage_options)}


def _find_swapped(
    more: Any, storage_options: Mapping[str, Any] | None
) -> Dataset | None:
    """Return the dataset that was passed in place of records, if there is one."""
    last_source = more[-1] if isinstance(more, list | tuple) and more else more
    if isinstance(last_source, Dataset):
        return last_source
    with contextlib.suppress(PackstoreError):
        return find_dataset(last_source, storage_options)
    return None


def _start_jobs(
    bases: Mapping[str | None, Dataset], ahead: str | None, stack: contextlib.ExitStack
) -> dict[str | None, WriteJob]:
    """Return the job that writes the next version of each dataset.

    The split `ahead` has it already, by an interrupted append.
    """
    jobs: dict[str | None, WriteJob] = {}
    for split, base in bases.items():
        if split is not None and split == ahead:
            jobs[split] = WriteJob.of_committed(base)
            # It has the new records, too: they are left out by the number of sources
            # when duplicates are looked for (`stored_keys`).
            jobs[split].extends = base
            continue
        job = stack.enter_context(writing(base.location, overwrite=True, call="append"))
        if job.version != base.version + 1:
            raise ConfigError(
                sentence(
                    where=base.url,
                    rule=f"only its newest version, {job.version - 1}, can be extended",
                    found=f"version {base.version}",
                    remedy="Open it again",
                )
            )
        base.require_files()
        job.extends = base
        jobs[split] = job
    return jobs


def _refuse_incomplete(jobs: Mapping[str | None, WriteJob]) -> None:
    """Raise DatasetExistsError if an interrupted append has extended one split, and
    this one has no records that complete it.
    """
    for job in jobs.values():
        if job.has_committed:
            job.require_same_append(provenance={})


def _packed_source_error(base: Dataset, source: Dataset) -> ConfigError:
    """Return the error of a packed dataset, which has no prompts to split it by."""
    return ConfigError(
        sentence(
            where=source.url,
            rule=f"records must be given to append to {base.url} and its other split",
            found="a packed dataset, which cannot be split",
            remedy="Pack both with the same validation_fraction and seed, and join "
            "train with train, validation with validation (concat)",
        )
    )


# Settings


def _recorded_tokenizer(base: Dataset) -> str | None:
    """Return the path of the tokenizer that a dataset records, if it had one.

    Raises:
        TokenizerError: the path does not exist.
    """
    recorded = base.manifest.provenance.get("tokenizer")
    if recorded is None:
        return None
    path = recorded.get("path")
    if not path or not os.path.exists(path):
        rule = "its tokenizer must be named: its manifest has no path that exists here"
        remedy = "Give the tokenizer (--tokenizer PATH)"
        raise TokenizerError(sentence(base.url, rule, remedy=remedy))
    return str(path)


def _settings_for_append(
    bases: Mapping[str | None, Dataset], settings: Mapping[str, Any], is_packed: bool
) -> PackConfig:
    """Return the settings of a dataset, with `settings` for this run.

    Args:
        bases: the dataset, or both splits.
        settings: arguments of :func:`append`.
        is_packed: True if a packed dataset is appended, which needs fewer settings.

    Raises:
        ConfigError: a setting that the dataset decides, or of another release.
    """
    base = next(iter(bases.values()))
    _check_adjustable(base, settings)
    values = _recorded_settings(base)
    if len(bases) > 1:
        _require_same_settings(*bases.values())
    answers = dict(base.manifest.provenance["settings"].get("on", {}))
    if is_packed:
        # All other reasons to refuse were applied when its records were packed, and
        # examples without their texts cannot be truncated.
        stops_at_overlong = answers.get("overlong") == "error"
        answers = {"overlong": "error"} if stops_at_overlong else {}
        for name in PackConfig.of(**values, on=answers).needing_records:
            del values[name]
    answers |= settings.get("on", {})

    config = PackConfig.of(**{**values, **settings, "on": answers})
    if config.dedup == "prompt":
        raise ConfigError(
            sentence(
                where=base.url,
                rule="dedup must be pair or none on append: the words of prompts are "
                "not stored",
                found="prompt",
                remedy="Set it, or pack all records again",
            )
        )
    return config


def _require_same_settings(train: Dataset, validation: Dataset) -> None:
    """Raise ConfigError if one of the splits was packed again with other settings."""
    validation_settings = _recorded_settings(validation)
    for name, train_value in _recorded_settings(train).items():
        validation_value = validation_settings.get(name)
        if train_value != validation_value:
            values = f"{quote(train_value, 24)} and {quote(validation_value, 24)}"
            raise ConfigError(
                sentence(
                    where=f"{train.url} and {validation.url}",
                    rule="both must have been packed with the same settings",
                    found=f"{name} {values}",
                    remedy="Pack one of them again like the other",
                )
            )


def _check_adjustable(base: Dataset, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting that the dataset decides."""
    for name in settings:
        if name in PackConfig.names() and name not in _ADJUSTABLE:
            rule = "append packs with the settings of the dataset, "
            rule += f"so {name} must be left out"
            raise ConfigError(sentence(base.url, rule))
    # Any other answer, e.g. to truncate, packs records unlike the dataset's.
    for reason, answer in settings.get("on", {}).items():
        if answer not in ("drop", "error"):
            rule = "append packs as the dataset does: "
            rule += f"on, {reason}, may be drop or error"
            raise ConfigError(sentence(where=base.url, rule=rule, found=quote(answer)))


def _recorded_settings(base: Dataset) -> dict[str, Any]:
    """Return the settings that a dataset records and decides, except `on`.

    Raises:
        ConfigError: another release recorded a setting that this one does not have.
    """
    manifest = base.manifest
    recorded = manifest.provenance["settings"]
    unknown_names = sorted(recorded.keys() - set(PackConfig.names()))
    if unknown_names:
        rule = "append packs with the settings of the dataset, so all must be known"
        names = ", ".join(repr(name) for name in unknown_names)
        remedy = "Append with the version of packstore that made it"
        raise ConfigError(
            sentence(where=base.url, rule=rule, found=names, remedy=remedy)
        )

    # The number of partitions follows from the bytes of the new records. The name of an
    # adapter is not taken from a manifest, because a forged one would make append run
    # code.
    undecided = {*RunConfig.names(), "partitions", "adapter", "on"}
    values: dict[str, Any] = {}
    for name, value in recorded.items():
        if name not in undecided:
            # Settings hold tuples, which JSON has as lists.
            values[name] = tuple(value) if isinstance(value, list) else value
    if values.get("chat_template") not in (None, "chatml", "plain"):
        # The path of a template may have changed: the manifest has its text.
        tokenizer = manifest.provenance.get("tokenizer") or {}
        values["chat_template"] = tokenizer.get("chat_template")
    values |= {
        **packing_settings(manifest),
        "kind": manifest.kind,
        "carry": tuple(f"{name}:{type_}" for name, type_ in manifest.carry.items()),
    }
    if split_of(base) is None:  # or both splits were joined by concat
        values["validation_fraction"] = 0.0
    return values


def _check_reading(base: Dataset, adapter: Adapter | None) -> None:
    """Raise ConfigError if the form or adapter that read a dataset's records has
    changed, so that new records would be read in another way.
    """
    recorded = base.manifest.provenance.get("reading", {})
    if "form" in recorded:
        _check_form(base, recorded["form"], recorded.get("form_version"))
    if "adapter" in recorded:
        sha256 = recorded.get("adapter_sha256")
        _check_adapter(base, recorded["adapter"], sha256, adapter)


_READING_RULE = "append reads records as the dataset was read"


def _check_form(base: Dataset, name: str, recorded_version: int | None) -> None:
    """Raise ConfigError if this release has another version of a form."""
    form = load_forms().get(name)
    version = form.version if form is not None else None
    if version != recorded_version:
        raise ConfigError(
            sentence(
                where=base.url,
                rule=_READING_RULE,
                found=f"the form {name} of version {recorded_version}, now {version}",
                remedy="Append with the version of packstore that made it, or pack "
                "anew",
            )
        )


def _check_adapter(
    base: Dataset, name: str, sha256: str | None, adapter: Adapter | None
) -> None:
    """Raise ConfigError if the adapter that read a dataset is not passed, or has
    changed.
    """
    if adapter is None:
        argument = "adapter=FUNCTION"
        if ":" in name:  # it can be loaded by its name
            argument = spell(current_door(), {"adapter": name})
        raise ConfigError(
            sentence(
                where=base.url,
                rule=_READING_RULE,
                found=f"no adapter {quote(name)}",
                remedy="Give the function that reads them, if you trust it "
                f"({argument})",
            )
        )
    if adapter.sha256 != sha256:
        raise ConfigError(
            sentence(
                where=base.url,
                rule=_READING_RULE,
                found=f"{adapter.name}, whose file has changed",
                remedy="Restore it, or pack anew",
            )
        )


def _count_sources(dataset: Dataset) -> int:
    return len(dataset.manifest.provenance["sources"])


def _log_appended(extended: Dataset, num_earlier_sources: int) -> int:
    """Log and return the number of records that were appended, also if an interrupted
    call had committed them.

    Args:
        extended: the new version.
        num_earlier_sources: number of its sources before the append.
    """
    first_id = num_earlier_sources << SOURCE_SHIFT
    num_records = 0
    for shard in extended.manifest.shards:
        if shard.example_id_base >= first_id:
            num_records += shard.examples
    log.info(
        "appended %s records: version %d of %s",
        f"{num_records:,}",
        extended.version,
        extended.url,
    )
    return num_records
