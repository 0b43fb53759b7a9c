"""Log-probs of the reference model, and their provenance; see ``README.md``."""

from packstore.torch.reference.provenance import (
    REMEDIES,
    check_arithmetic,
    check_reference,
    choose_autocast,
    choose_precision,
    log_choice,
)
from packstore.torch.reference.reference import run_on_rank_zero, write_ref_logps

__all__ = [
    "REMEDIES",
    "check_arithmetic",
    "check_reference",
    "choose_autocast",
    "choose_precision",
    "log_choice",
    "run_on_rank_zero",
    "write_ref_logps",
]
