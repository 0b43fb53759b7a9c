"""Converts records to examples: token ids and supervision masks."""

from packstore.tokenizer.record_tokenizer import RecordTokenizer
from packstore.tokenizer.records.carry import parse_carry, typed_carry
from packstore.tokenizer.records.describe import detect_kind
from packstore.tokenizer.records.token_values import check_token_values, find_value
from packstore.tokenizer.refusals import Refused
from packstore.tokenizer.source import load_tokenizer, recorded_tokenizer
from packstore.tokenizer.tokenizer import Tokenizer

__all__ = [
    "RecordTokenizer",
    "Refused",
    "Tokenizer",
    "check_token_values",
    "detect_kind",
    "find_value",
    "load_tokenizer",
    "parse_carry",
    "recorded_tokenizer",
    "typed_carry",
]
