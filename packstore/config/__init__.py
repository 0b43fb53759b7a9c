"""Every setting, with its default: the only home of defaults."""

from packstore.config.checks import fingerprint, setting, validate
from packstore.config.loading import BatchConfig, ReadConfig
from packstore.config.packing import (
    FIELD_NAMES,
    PackConfig,
    PlanConfig,
    RunConfig,
    SelectConfig,
    SizeConfig,
    TokenizeConfig,
    WorkConfig,
    WriteConfig,
)
from packstore.config.storage import RetryConfig

__all__ = [
    "FIELD_NAMES",
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
