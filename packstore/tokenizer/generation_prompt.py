"""The generation prompt of templates that write it whether it is asked for or not.

Such a template (the first ones of Llama 3 are) ends every dialogue with the header of the next
answer. It is found by the outputs of the template: one mark before each tells which of them wrote
the end of a dialogue, and whether it wrote anything else.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from packstore.tokenizer.control import free_characters


class _Marks(NodeTransformer):
    """Puts a character before every output that goes straight to the text."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._left = list(marks)

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        node.nodes.insert(0, nodes.TemplateData(self._left.pop(), lineno=node.lineno))
        return node

    def visit_Macro(self, node: nodes.Node) -> nodes.Node:
        return node  # text that is caught may be changed before it is written

    visit_CallBlock = visit_FilterBlock = visit_AssignBlock = visit_Macro


def mark_outputs(tree: nodes.Template, taken: str) -> list[str]:
    """Marks the outputs of a template, in place.

    Args:
        tree: the parsed template.
        taken: characters that are no marks.

    Returns:
        The marks: a private-use character for each output, at least.
    """
    marks = free_characters(taken, sum(1 for _ in tree.find_all(nodes.Output)))
    _Marks(marks).visit(tree)
    return marks


def written_last(text: str, marks: Sequence[str]) -> tuple[str, str]:
    """The text without its marks, and the end of it by outputs that wrote nothing before."""
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
