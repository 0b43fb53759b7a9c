"""tokenizer.chat."""
