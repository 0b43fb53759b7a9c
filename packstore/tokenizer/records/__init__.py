"""One record of any accepted shape; see ``README.md``."""

from packstore.tokenizer.records.adapters import adapter_of
from packstore.tokenizer.records.judgements import (
    BAD_WORDS,
    GOOD_WORDS,
    HISTORIES,
    IDS_AND_SOURCES,
    JUDGEMENTS,
    LABELS,
    MEDIA,
    SYSTEM_PROMPTS,
    WEIGHTS,
    fold,
    names_of,
)
from packstore.tokenizer.records.reading import Answers, Chat, Drop, Pair
from packstore.tokenizer.records.siblings import advise_siblings, find_siblings
from packstore.tokenizer.records.unread import first_values

__all__ = [
    "BAD_WORDS",
    "GOOD_WORDS",
    "HISTORIES",
    "IDS_AND_SOURCES",
    "JUDGEMENTS",
    "LABELS",
    "MEDIA",
    "SYSTEM_PROMPTS",
    "WEIGHTS",
    "Answers",
    "Chat",
    "Drop",
    "Pair",
    "adapter_of",
    "advise_siblings",
    "find_siblings",
    "first_values",
    "fold",
    "names_of",
]
