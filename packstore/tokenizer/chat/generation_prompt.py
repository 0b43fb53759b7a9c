"""Finds the generation prompt of templates that always write it.

Such a template (Llama 3's first ones) ends every dialogue with the header of the next answer. A
mark before each output expression of the template shows which of them wrote the end of a dialogue,
and whether it wrote anything else.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from packstore.tokenizer.control import free_characters


class _Marks(NodeTransformer):
    """Inserts a character before every output that is written directly to the text."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._left = list(marks)

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        node.nodes.insert(0, nodes.TemplateData(self._left.pop(), lineno=node.lineno))
        return node

    def visit_Macro(self, node: nodes.Node) -> nodes.Node:
        return node  # captured text may be changed before it is written

    visit_CallBlock = visit_FilterBlock = visit_AssignBlock = visit_Macro


def mark_outputs(tree: nodes.Template, taken: str) -> list[str]:
    """Marks the outputs of a template, in place.

    Args:
        tree: the parsed template.
        taken: characters that must not be used as marks.

    Returns:
        The marks: at least one private-use character per output.
    """
    marks = free_characters(taken, sum(1 for _ in tree.find_all(nodes.Output)))
    _Marks(marks).visit(tree)
    return marks


def written_last(text: str, marks: Sequence[str]) -> tuple[str, str]:
    """Returns the text without marks, and its end as written by outputs used only once."""
    if not marks:
        return text, ""
    _, *parts = re.split(f"(?=[{''.join(marks)}])", text)
    times = Counter(part[0] for part in parts)
    end = ""
    for part in reversed(parts):
        if times[part[0]] > 1:
            break
        end = part[1:] + end
    return text.translate(dict.fromkeys(map(ord, marks))), end
