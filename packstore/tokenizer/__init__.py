"""Converts parsed records to examples: token ids and supervision masks."""

from packstore.tokenizer.fastest import FASTER, misread
from packstore.tokenizer.record_tokenizer import RecordTokenizer, agreeing
from packstore.tokenizer.recorded import recorded_tokenizer
from packstore.tokenizer.records.carry import parse_carry, typed_carry
from packstore.tokenizer.records.shapes import detect_kind
from packstore.tokenizer.source import load_tokenizer
from packstore.tokenizer.tokenizer import Tokenizer
from packstore.tokenizer.watch import EngineWatch

__all__ = [
    "FASTER",
    "EngineWatch",
    "RecordTokenizer",
    "Tokenizer",
    "agreeing",
    "detect_kind",
    "load_tokenizer",
    "misread",
    "parse_carry",
    "recorded_tokenizer",
    "typed_carry",
]
