"""Messages to text; see ``README.md``."""

from packstore.tokenizer.dialogue.template import BUILTIN

__all__ = [
    "BUILTIN",
]
