"""Converts parsed records to examples: token ids and supervision masks."""

from packstore.tokenizer.record_tokenizer import RecordTokenizer
from packstore.tokenizer.records.fields import parse_carry, typed_carry
from packstore.tokenizer.records.shapes import detect_kind
from packstore.tokenizer.source import load_tokenizer, recorded_tokenizer
from packstore.tokenizer.tokenizer import Tokenizer

__all__ = [
    "RecordTokenizer",
    "Tokenizer",
    "detect_kind",
    "load_tokenizer",
    "parse_carry",
    "recorded_tokenizer",
    "typed_carry",
]
