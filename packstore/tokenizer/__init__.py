"""Converts parsed records to examples: token ids and supervision masks."""

from packstore.tokenizer.fastest import FASTER, misread
from packstore.tokenizer.record_tokenizer import RecordTokenizer, agreeing
from packstore.tokenizer.recorded import recorded_tokenizer
from packstore.tokenizer.records.carry import parse_carry, typed_carry
from packstore.tokenizer.records.fields import names_of
from packstore.tokenizer.records.query import Query
from packstore.tokenizer.records.shapes import detect_kind
from packstore.tokenizer.source import load_tokenizer
from packstore.tokenizer.tokenizer import Tokenizer
from packstore.tokenizer.watch import EngineWatch

__all__ = [
    "FASTER",
    "EngineWatch",
    "Query",
    "RecordTokenizer",
    "Tokenizer",
    "agreeing",
    "detect_kind",
    "load_tokenizer",
    "misread",
    "names_of",
    "parse_carry",
    "recorded_tokenizer",
    "typed_carry",
]
