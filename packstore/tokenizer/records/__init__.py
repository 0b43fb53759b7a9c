"""tokenizer.records."""
