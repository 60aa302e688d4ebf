"""Python functions over integers as z3 terms, read from their own source.

What is proved is then proved of the code that runs, not of a copy of it. Only
what `reference_impl.budget` needs is understood: assignments, ``if`` on
``is not None``, ``return``, + and -, ``min`` and ``max``. Anything else raises.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import z3


class NotUnderstood(Exception):
    """The function uses a construct that has no translation here."""


def symbolic(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` on z3 integers (or None where it tests for None); its value is a z3 term."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise NotUnderstood(ast.dump(tree)[:80])
    names = [argument.arg for argument in tree.args.args]

    def call(*values: Any) -> Any:
        result = _run(tree.body, dict(zip(names, values, strict=True)))
        if result is None:
            raise NotUnderstood("a path without return")
        return result

    return call


def _run(body: list[ast.stmt], scope: dict[str, Any]) -> Any:
    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # the docstring
        if isinstance(statement, ast.Return) and statement.value is not None:
            return _value(statement.value, scope)
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            scope[statement.targets[0].id] = _value(statement.value, scope)
        elif isinstance(statement, ast.If):
            result = _run(statement.body if _condition(statement.test, scope) else statement.orelse, scope)
            if result is not None:
                return result
        else:
            raise NotUnderstood(ast.unparse(statement))
    return None


def _condition(test: ast.expr, scope: dict[str, Any]) -> bool:
    """``x is not None``, decided now: a limit is either known or not."""
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot):
        return _value(test.left, scope) is not None
    raise NotUnderstood(ast.unparse(test))


def _value(node: ast.expr, scope: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return scope[node.id]
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return z3.IntVal(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        left, right = _value(node.left, scope), _value(node.right, scope)
        return left + right if isinstance(node.op, ast.Add) else left - right
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        first, *rest = (_value(argument, scope) for argument in node.args)
        for other in rest:
            first = z3.If(first <= other if node.func.id == "min" else first >= other, first, other)
        return first
    raise NotUnderstood(ast.unparse(node))
