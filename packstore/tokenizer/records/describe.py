"""Describes how records are read: before the work begins, and for the manifest."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from packstore.config import TokenizeConfig
from packstore.config.remedies import current_door, spell
from packstore.errors import RecordError, quote, sentence
from packstore.tokenizer.dialogue.messages import is_empty
from packstore.tokenizer.records.adapters import Adapter
from packstore.tokenizer.records.carry import parse_carry
from packstore.tokenizer.records.forms import load
from packstore.tokenizer.records.read import ReadRecord, kind_of_record, without_columns
from packstore.tokenizer.records.reading import Answers
from packstore.tokenizer.records.unread import (
    first_values,
    judgements_to_ignore,
    sibling_remedy,
)
from packstore.tokenizer.refusals import ADAPTER, Refused


def describe(
    read: ReadRecord,
    record: dict[str, Any],
    kind: str,
    adapter: Adapter | None,
    config: TokenizeConfig,
    carry: Container[str],
) -> list[str]:
    """Return lines on how the first record is read, and on columns that are not read.

    Args:
        read: the record as it was read.
        record: its columns; the values of those that nothing reads are shown, cut at
            200 characters.
        kind: of the dataset.
        config: `ignore` has names and paths that count as absent, and `token_values`
            fields that are read apart.
        carry: names of columns that are copied into the packs.
    """
    values = config.token_values
    if adapter is not None:
        title = f"by the adapter {adapter.name} ({kind}): {adapter.summary}"
        fields = sorted(read.further_columns) or ["none"]
    elif read.source:
        form = load()[read.source]
        title = f"as the form {form.name} ({kind}): {form.summary}"
        fields = list(read.columns.values())
    else:
        title = f"by packstore's own field names ({kind})"
        fields = _describe_own_fields(read.columns)
    lines = [f"reading records {title}", f"  fields: {', '.join(fields)}"]
    lines += _describe_judgement(read, record, adapter, config)
    for column, name in values.items():
        lines.append(f"  values of tokens: {column} <- {name}")
    remaining = without_columns(record, (*config.ignore, *values.values()))
    for name, text in first_values(remaining, unread_columns(read, remaining)).items():
        verb = "carried" if name in carry else "not read"
        lines.append(f"  {verb}: {name} = {text}")
    for name in config.ignore:
        line = f"  ignored: {name}"
        is_absent = without_columns(record, [name]) == record
        if is_absent:
            line += " (the first record has none)"
        lines.append(line)
    lines.append("  the job stops at a record without these fields")
    # A name or a value may hold a surrogate, which no file or terminal accepts.
    return [line.encode(errors="backslashreplace").decode() for line in lines]


def _describe_judgement(
    read: ReadRecord,
    record: dict[str, Any],
    adapter: Adapter | None,
    config: TokenizeConfig,
) -> list[str]:
    """Return a line on what judges a single answer, and how to learn all answers
    instead; no line for other records.
    """
    if not isinstance(read.reading, Answers) or adapter is not None:
        return []
    remaining = without_columns(record, config.ignore)
    names = judgements_to_ignore(remaining, config, parse_carry(config))
    if not names:
        return []
    ignores = spell(current_door(), {"ignore": names})
    shown_names = ", ".join(quote(name, 40) for name in names)
    return [
        f"  {shown_names}: judges each answer, for losses such as kto; to learn all "
        f"answers with loss sft, pack with {ignores}"
    ]


def _describe_own_fields(columns: Mapping[str, str]) -> list[str]:
    """Return the roles that are read, with their columns unless all have the roles'
    names.
    """
    if all(role == column for role, column in columns.items()):
        return list(columns)
    return [f"{role} <- {column}" for role, column in columns.items()]


def unread_columns(read: ReadRecord, record: Mapping[str, Any]) -> list[str]:
    """Return the names of a record's columns with a value that nothing reads, in its
    order.
    """
    names = []
    for name, value in record.items():
        if not is_empty(value) and name not in read.column_names:
            names.append(name)
    return names


def reading_provenance(
    read: ReadRecord | None, adapter: Adapter | None
) -> dict[str, Any]:
    """Return how records are read for the manifest, without any text of a record.

    Args:
        read: the first record that can be read, if there is one.
    """
    if adapter is not None:
        return adapter.provenance()
    if read is None:
        return {}
    if read.source:
        form = load()[read.source]
        return {
            "form": form.name,
            "form_version": form.version,
            "fields": sorted(read.columns.values()),
        }
    return {"fields": dict(sorted(read.columns.items()))}


def detect_kind(record: dict[str, Any], config: TokenizeConfig, where: str) -> str:
    """Return the kind that the settings name, else that of a record. If this has text
    and token ids, the ids count.

    Raises:
        RecordError: it has no form, and none of packstore's own fields.
    """
    if config.kind != "auto":
        return config.kind
    try:
        kind = kind_of_record(record, config, prefers_ids=True)
    except Refused as refused:
        raise refused.as_error(where, current_door(), config) from None
    if kind is None:
        raise without_a_kind(record, where)
    return kind


def without_a_kind(record: Mapping[str, Any], where: str) -> RecordError:
    """Return the error of a record that has no form, and none of packstore's own
    fields.
    """
    columns = quote(record)
    if record:
        columns = f"fields {', '.join(repr(name) for name in record)}"
    rule = (
        "a record must have a form, or chosen and rejected, or messages, or prompt and "
        "response, or responses and scores, or input_ids"
    )
    remedy = sibling_remedy(record)
    if not remedy:
        door = current_door()
        answers = (
            ("prompt", "response"),
            ("prompt", "chosen", "rejected"),
            ("prompt", "responses", "scores"),
            ("messages",),
        )
        choices = [
            spell(door, {"fields": dict.fromkeys(roles, "NAME")}) for roles in answers
        ]
        remedy = (
            f"Say which field holds what ({', or '.join(choices)}; a NAME may be a "
            "path, such as answers[].text), or write an adapter "
            f"({spell(door, ADAPTER)})"
        )
    return RecordError(sentence(where, rule, columns, remedy))
