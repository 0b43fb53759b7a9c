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
from packstore.config.record_fields import SPELLINGS
from packstore.config.remedies import from_shell, spell
from packstore.config.settings import Settings, fingerprint, setting
from packstore.config.training import TrainConfig

__all__ = [
    "CHECK_RETRIES",
    "PARTITION_BYTES",
    "REASONS",
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
    "TrainConfig",
    "WorkConfig",
    "WriteConfig",
    "fingerprint",
    "from_shell",
    "setting",
    "spell",
]
