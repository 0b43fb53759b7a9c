"""The reader of ``examples/``, whose checks can be switched off.

A check is a condition of a call of ``need``; conditions that ``and`` joins are several.
"""

from __future__ import annotations

import ast
from typing import Any

from plain_reader import PATH


class SwitchedReader:
    """The reader in Python.

    Attributes:
        checks: the conditions in the order of the code, as ``function: condition``.
        switched_off: the check that accepts anything; None: every check counts.
        refusing: the check that refused a dataset last.
    """

    def __init__(self) -> None:
        self.checks: list[str] = []
        self.switched_off: str | None = None
        self.refusing = ""
        tree = ast.parse(PATH.read_text(encoding="utf-8"))
        _Numbered(self.checks).visit(tree)
        ast.fix_missing_locations(tree)
        self.names: dict[str, Any] = {"__name__": "reader"}
        exec(compile(tree, str(PATH), "exec"), self.names)
        self.names["need"] = self._need

    def _need(self, ok: Any, name: str, check: int) -> None:
        if ok or self.checks[check] == self.switched_off:
            return
        self.refusing = self.checks[check]
        raise self.names["Refused"](name)


class _Numbered(ast.NodeTransformer):
    """Gives each call of ``need`` the number of its check, and splits conditions."""

    def __init__(self, checks: list[str]) -> None:
        self._checks = checks
        self._function = ""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._function = node.name
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | list[ast.AST]:
        match node.value:
            case ast.Call(func=ast.Name(id="need"), args=[condition, name]):
                return [self._call(part, name) for part in _parts(condition)]
        return self.generic_visit(node)

    def _call(self, condition: ast.expr, name: ast.expr) -> ast.Expr:
        text = f"{self._function}: {ast.unparse(condition)}"
        number = len(self._checks)
        while text in self._checks:  # the same condition at another place
            text += ", again"
        self._checks.append(text)
        arguments = [condition, name, ast.Constant(number)]
        call = ast.Call(func=ast.Name("need", ast.Load()), args=arguments, keywords=[])
        return ast.Expr(call)


def _parts(condition: ast.expr) -> list[ast.expr]:
    if isinstance(condition, ast.BoolOp) and isinstance(condition.op, ast.And):
        return condition.values
    return [condition]
