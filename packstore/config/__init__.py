"""Every setting, with its default: the only home of defaults."""

from packstore.config.checks import fingerprint, setting, validate
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
from packstore.config.loading import BatchConfig, ReadConfig
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
from packstore.config.storage import CHECK_RETRIES, RetryConfig

__all__ = [
    "CHECK_RETRIES",
    "FEEDBACK",
    "FIELD_NAMES",
    "ID_SPELLINGS",
    "LIKELY",
    "MEANINGFUL",
    "NOT_TEXT",
    "PARTITION_BYTES",
    "REWARD_FIELDS",
    "SPELLINGS",
    "BatchConfig",
    "PackConfig",
    "PlanConfig",
    "ReadConfig",
    "RetryConfig",
    "RunConfig",
    "SelectConfig",
    "SizeConfig",
    "TokenizeConfig",
    "WorkConfig",
    "WriteConfig",
    "fingerprint",
    "setting",
    "validate",
]
