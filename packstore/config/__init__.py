"""Every setting, with its default: the only home of defaults."""

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
    "PARTITION_BYTES",
    "REASONS",
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
