"""Mutants of a module: its source with one check removed or negated.

A check decides what the program does; these are the forms it has:

- `guard`: an `if` that ends its function, loop or turn is never taken.
- `part`: one operand of `and` or `or` is left out.
- `negation`: a comparison that is not a guard of its own is turned round.
- `check`: a call of a function that only raises (`check_...`) is left out.

No check: assertions, what only `repr` and type checkers see, what is only logged, counted or recorded, and
`and` or `or` that give a default (`name or ""`).
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import pairwise

CHECKS = re.compile(r"_?check(_|$)|_?(verify|require|ensure|limit|refuse|expect)_")
TELLS = frozenset({"inc", "observe", "debug", "info", "warning", "error", "record", "_record"})
"Methods that tell people what happens."
ENDS = (ast.Raise, ast.Return, ast.Continue, ast.Break)
NEGATED: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: ">=",
    ast.LtE: ">",
    ast.Gt: "<=",
    ast.GtE: "<",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    "Stays the same when other lines of the module change."
    line: int
    place: tuple[str, int]
    "The function, and the line counted from its first one."
    function: str
    "Its text, from which to see whether it has changed."
    refused: tuple[str, int] | None
    "Where tests come by that see the condition of an `if` hold."
    passed: tuple[str, int] | None
    "Where only tests come by that see a call return."
    source: str
    "Of the whole module."


@dataclass(frozen=True, slots=True)
class _Change:
    kind: str
    node: ast.AST
    text: str
    "What stands in the node's place."


class Places:
    """The functions and classes of a module."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._known: list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]] = []
        self._add(ast.parse(source), "")

    def _add(self, node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = outer
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{outer}.{child.name}" if outer else child.name
                self._known.append((inner, child))
            self._add(child, inner)

    def of(self, line: int) -> tuple[str, int]:
        """The innermost one."""
        name, first = "", 0
        for inner, node in self._known:
            if node.lineno <= line <= (node.end_lineno or 0):
                name, first = inner, node.lineno
        return name, line - first

    def text(self, line: int) -> str:
        """Of the innermost function or class; outside of them the line itself."""
        around = [node for _, node in self._known if node.lineno <= line <= (node.end_lineno or 0)]
        return _segment(self._source, around[-1]) if around else self._source.splitlines()[line - 1]


def mutants_of(path: str, source: str) -> list[Mutant]:
    tree, places = ast.parse(source), Places(source)
    refused, passed = _lines_behind(tree)
    seen: Counter[str] = Counter()
    found = []
    for function, change in _changes(tree, "", _decisions(tree)):
        before = _segment(source, change.node)
        name = f"{path}:{function} {change.kind}: {' '.join(before.split())}"
        seen[name] += 1
        if seen[name] > 1:
            name += f" ({seen[name]})"
        line = getattr(change.node, "lineno", 0)
        first, second = refused.get(change.node), passed.get(change.node)
        found.append(
            Mutant(
                name,
                line,
                places.of(line),
                places.text(line),
                None if first is None else places.of(first),
                None if second is None else places.of(second),
                _replaced(source, change),
            )
        )
    return found


def _changes(node: ast.AST, function: str, decisions: Container[ast.AST]) -> Iterator[tuple[str, _Change]]:
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{function}.{child.name}" if function else child.name
        if _is_for_people(child):
            continue
        if not isinstance(child, ast.BoolOp) or child in decisions:
            for change in _changes_at(child):
                yield inner, change
        yield from _changes(child, inner, decisions)


def _lines_behind(tree: ast.AST) -> tuple[dict[ast.AST, int], dict[ast.AST, int]]:
    """For what is in the test of an `if`, where it goes on if that holds; for calls, the statement behind."""
    refused: dict[ast.AST, int] = {}
    passed: dict[ast.AST, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            refused |= dict.fromkeys(ast.walk(node.test), node.body[0].lineno)
        body = getattr(node, "body", ())
        for statement, following in pairwise(body if isinstance(body, list) else ()):
            if isinstance(statement, ast.Expr):
                passed |= dict.fromkeys(ast.walk(statement), following.lineno)
    return refused, passed


def _decisions(tree: ast.AST) -> set[ast.AST]:
    """`and` and `or` that are true or false, not a value or its default."""
    tests: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            tests.add(node.test)
        elif isinstance(node, ast.comprehension):
            tests.update(node.ifs)
        elif isinstance(node, ast.UnaryOp):
            tests.add(node.operand)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "bool":
            tests.update(node.args)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _gives_bool(node):
            tests.update(one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value)
        elif isinstance(node, ast.BoolOp) and (node in tests or any(map(_is_boolean, node.values))):
            tests.add(node)
            tests.update(node.values)
    return {node for node in tests if isinstance(node, ast.BoolOp) and not any(map(_is_literal, node.values))}


def _gives_bool(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return isinstance(node.returns, ast.Name) and node.returns.id == "bool"


def _is_boolean(node: ast.AST) -> bool:
    return isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))


def _is_literal(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant | ast.List | ast.Tuple | ast.Dict)


def _is_for_people(node: ast.AST) -> bool:
    """What only type checkers, operators and `repr` see."""
    if isinstance(node, ast.Assert):
        return True
    if isinstance(node, ast.If):
        only_typed = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return only_typed or all(map(_tells, (*node.body, *node.orelse)))
    return isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "__str__")


def _tells(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and _called(node.value) in TELLS


def _changes_at(node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, ast.If):
        if _is_guard(node):
            yield _Change("guard", node.test, f"(({ast.unparse(node.test)}) and False)")
        elif isinstance(node.test, ast.Compare):
            yield from _negation(node.test)
    elif isinstance(node, ast.BoolOp):
        for index, part in enumerate(node.values):
            others = [value for at, value in enumerate(node.values) if at != index]
            text = ast.unparse(others[0] if len(others) == 1 else ast.BoolOp(node.op, others))
            yield _Change(f"part {ast.unparse(part)} of", node, f"({text})")
    elif isinstance(node, ast.Return | ast.IfExp | ast.While | ast.comprehension):
        for test in _tests_of(node):
            if isinstance(test, ast.Compare):
                yield from _negation(test)
    elif isinstance(node, ast.Expr) and CHECKS.match(_called(node.value)):
        yield _Change("check", node, "pass")


def _is_guard(node: ast.If) -> bool:
    return isinstance(node.body[-1], ENDS) and not node.orelse


def _tests_of(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Return) and node.value is not None:
        yield node.value
    elif isinstance(node, ast.IfExp | ast.While):
        yield node.test
    elif isinstance(node, ast.comprehension):
        yield from node.ifs


def _negation(node: ast.Compare) -> Iterator[_Change]:
    if len(node.ops) == 1:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        yield _Change("negation", node, f"({left} {NEGATED[type(node.ops[0])]} {right})")
    else:
        yield _Change("negation", node, f"(not ({ast.unparse(node)}))")


def _called(node: ast.AST) -> str:
    if isinstance(node, ast.Await):
        node = node.value
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _segment(source: str, node: ast.AST) -> str:
    found = ast.get_source_segment(source, node)
    assert found is not None
    return found


def _replaced(source: str, change: _Change) -> str:
    """The lines before and after stay where they are."""
    lines = source.encode().splitlines(keepends=True)
    place = change.node
    assert isinstance(place, ast.expr | ast.stmt)
    assert place.end_lineno is not None
    assert place.end_col_offset is not None
    first, last = place.lineno - 1, place.end_lineno - 1
    before, after = lines[first][: place.col_offset], lines[last][place.end_col_offset :]
    blank = b"\n" * (last - first)
    lines[first : last + 1] = [before + change.text.encode() + after + blank]
    return b"".join(lines).decode()
