"""Every setting, with its default: the only home of defaults."""

from packstore.config.fields import (
    FEEDBACK,
    FIELD_NAMES,
    ID_SPELLINGS,
    LIKELY,
    MEANINGFUL,
    NOT_TEXT,
    REWARD_FIELDS,
    SPELLINGS,
)
from packstore.config.packing import (
    PARTITION_BYTES,
    PackConfig,
    PlanConfig,
    RunConfig,
    SelectConfig,
    SizeConfig,
    TokenizeConfig,
    WorkConfig,
    WriteConfig,
)
from packstore.config.reading import CHECK_RETRIES, BatchConfig, ReadConfig, RetryConfig
from packstore.config.reasons import REASONS
from packstore.config.settings import Settings, fingerprint, setting

__all__ = [
    "CHECK_RETRIES",
    "FEEDBACK",
    "FIELD_NAMES",
    "ID_SPELLINGS",
    "LIKELY",
    "MEANINGFUL",
    "NOT_TEXT",
    "PARTITION_BYTES",
    "REASONS",
    "REWARD_FIELDS",
    "SPELLINGS",
    "BatchConfig",
    "PackConfig",
    "PlanConfig",
    "ReadConfig",
    "RetryConfig",
    "RunConfig",
    "SelectConfig",
    "Settings",
    "SizeConfig",
    "TokenizeConfig",
    "WorkConfig",
    "WriteConfig",
    "fingerprint",
    "setting",
]
